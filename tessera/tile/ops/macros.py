"""Names of kernels that become other ops: ranges, loads and stores, Python's builtins."""

from __future__ import annotations

from typing import Any

from tessera.numerics import i32
from tessera.tile.builder.edge_masks import mask_edge, refuse
from tessera.tile.builder.op_tracer import OpTracer
from tessera.tile.ir.edges import WHOLE, Edge, Mixed, TileEdges, open_
from tessera.tile.ir.handles import AxisSlice, Handle, LoopRange, TensorRow, describe, is_number
from tessera.tile.ir.op_record import OPS, macro
from tessera.tile.ir.types import Buffer, GlobalTensor, Scalar, TileType, View, space_of
from tessera.tile.ops.elementwise import power

OVER = (None, "serial", "lanes", "groups")
VECTORS = (1, 2, 4, 8, 16)
ACCESS_BITS = 128  # of one lane at once


def _hidden(name: str, lower: Any) -> None:
    """A macro that only stands for a builtin of Python."""
    lower.__doc__ = f"{name.removeprefix('python_')} of Python."
    macro(name=name, public=False)(lower)


@macro(name="range")
def range_(t: OpTracer, start: Any, stop: Any = None, step: Any = None, *, over: Any = None) -> Any:
    """The group performs these iterations, as if in order, each once.

    A range that depends on the lane is run by each lane for itself. A range without a step may be
    shared by the lanes, and an outermost range(0, <extent>, step) by the groups, when its
    iterations are independent; over='lanes' | 'groups' | 'serial' says it, and is checked.
    """
    if over not in OVER:
        t.fail(f"over={over!r} is not known", "'serial', 'lanes' or 'groups'")
    lo, hi = (0, start) if stop is None else (start, stop)
    return LoopRange(lo, hi, 1 if step is None else step, step is not None, over)


@macro()
def range_n(t: OpTracer, shape: Any, n: Any, prefetch: Any = 1) -> Any:
    """Block numbers 0 .. ceil(shape[-2] / n) - 1, in order, with `prefetch` loads under way."""
    if not isinstance(shape, tuple | list) or len(shape) < 2:
        t.fail(f"range_n needs the shape of a matrix, got {describe(shape)}", "range_n(K.shape, n)")
    size = t.ir.constant_int(n, "the block size of range_n")
    extent = t.grid.key_extent = shape[-2]
    count = t.ir.arithmetic("floordiv", (t.ir.arithmetic("add", (extent, size - 1)), size))
    return LoopRange(0, count, 1, True, "serial", prefetch)


def _python_range(t: OpTracer, start: Any, stop: Any = None, step: Any = 1) -> Any:
    lo, hi = (0, start) if stop is None else (start, stop)
    if all(isinstance(x, int) and not isinstance(x, bool) for x in (lo, hi, step)) and (
            t.comprehensions):
        return range(lo, hi, step)
    return LoopRange(lo, hi, step, True, "serial")


_hidden("python_range", _python_range)


@macro()
def context(t: OpTracer) -> Any:
    """Tuned parameters under all their names (m = BM = BLOCK_M, ...) and the named extents."""
    return t.grid.context()


# --- loads and stores -------------------------------------------------------------------------
def _hints(t: OpTracer, x: Any, vector: Any, prefetch: Any) -> dict[str, Any]:
    if vector is not None:
        vector = t.ir.constant_int(vector, "vector")
        if vector not in VECTORS:
            t.fail(f"vector={vector}: an access has 1, 2, 4, 8 or 16 elements")
        if isinstance(x, Handle) and vector * x.type.dtype.bits > ACCESS_BITS:
            t.fail(f"vector={vector} of {describe(x)}: {vector} elements are "
                   f"{vector * x.type.dtype.bits // 8} bytes, an access has at most 16",
                   f"vector={ACCESS_BITS // x.type.dtype.bits}, or none: then it is as wide as it "
                   "gets")
    if prefetch is not None:
        prefetch = t.ir.constant_int(prefetch, "prefetch")
        if prefetch < 1:
            t.fail(f"prefetch={prefetch}: at least 1, the box that is read")
    return {"vector": vector, "prefetch": prefetch}


@macro()
def load(t: OpTracer, x: Any, index: Any = None, *, rows: Any = None, cols: Any = None,
         vector: Any = None, prefetch: Any = None, fill: Any = None) -> Any:
    """A view, a shared buffer, or a block of a tensor as a tile; elements outside are 0, and
    reductions leave them out. With `fill` they are that number, and count as any other.

    load(A[m:m+64, k:k+32])                 the box
    load(x, rows=T.m, cols=T.d)             this group's own block of rows
    load(x, i, cols=T.d)                    rows i*n .. i*n + n, with n the schedule's block

    vector: elements that a lane reads at once, at most 16 bytes.  prefetch: in a loop over boxes,
    how many of them are under way: the box of prefetch - 1 iterations ahead is asked for meanwhile.
    """
    if isinstance(x, TensorRow):
        x = t.memory.view_of_row(x)
    if isinstance(x, Handle) and isinstance(x.type, GlobalTensor):
        x = _block_of(t, x, index, rows, cols)
    elif index is not None or rows is not None or cols is not None:
        t.fail("an index, rows= or cols= with a view", "they choose a block of a whole tensor")
    if fill is not None and not is_number(fill):
        t.fail("fill must be a compile-time number")
    if isinstance(x, Handle) and isinstance(x.type, Scalar | TileType):
        t.fail(f"load of {describe(x)}, which is a value already", "use it as it is")
    out = t.ir.emit("load_tile", [x], fill=0 if fill is None else fill,
                    **_hints(t, x, vector, prefetch))
    if fill is None:
        return out
    return t.facts.fill(x, out) if space_of(x.type) == "global" else _filled(t, out, fill)


def _filled(t: OpTracer, x: Handle, fill: Any) -> Handle:
    """What shared memory holds from beyond an edge becomes a number, and counts."""
    facts = t.facts.of(x)
    for i, axis in enumerate(facts.axes):
        if isinstance(axis, Mixed) and not (axis.zero and fill == 0):
            refuse(t.ir, "fill=", axis)
        if isinstance(axis, Edge) and not axis.inside:  # none is listed in shared memory
            x = mask_edge(t.ir, x, i, axis, fill)
    t.facts.declare(x.value, TileEdges(tuple(WHOLE if open_(a) else a for a in t.facts.of(x).axes)))
    return x


def _block_of(t: OpTracer, x: Handle, index: Any, rows: Any, cols: Any) -> Handle:
    if t.memory.rank(x) != 2:
        t.fail(f"load of a block of {describe(x)}: the kernel sees {t.memory.rank(x)} axes, not 2",
               "slice it: x[a:a+64]")
    assert isinstance(x.type, GlobalTensor)
    row_dim, col_dim = x.type.dims[len(x.hidden):]
    size = t.grid.context().n if rows is None and index is not None else rows
    if size is None:
        t.fail("load of a whole tensor: which block of it?",
               "slice it, ts.tile.load(x[m:m+64, 0:N]), or give rows= and cols=")
    size = t.ir.constant_int(size, "rows")
    lo = (t.grid.own_origin(row_dim, size) if index is None else
          t.ir.arithmetic("mul", (index, size)))
    width = t.ir.constant_int(t.grid.dim_value(col_dim) if cols is None else cols, "cols")
    return t.memory.make_view(x, [AxisSlice(lo, t.ir.arithmetic("add", (lo, size)), "rows"),
                                  AxisSlice(0, width, "cols")])


@macro()
def store(t: OpTracer, target: Any, value: Any) -> None:
    """Writes a tile, or one number everywhere, to a view; elements outside are not written.

    A whole tensor as the target means the group's own block of it.
    """
    if isinstance(target, TensorRow):
        target = t.memory.view_of_row(target)
    if not isinstance(target, Handle):
        t.fail(f"store to {describe(target)}", "ts.tile.store(C[m:m+64, n:n+64], tile)")
    if isinstance(target.type, GlobalTensor):
        if not isinstance(value, Handle) or not isinstance(value.type, TileType):
            t.fail(f"store of {describe(value)} to the whole of {describe(target)}",
                   "slice it: ts.tile.store(C[m:m+64, n:n+64], tile)")
        target = t.memory.own_block(target, value.type.shape)
    if isinstance(target.type, Scalar | TileType):
        t.fail(f"store to {describe(target)}, a value in registers",
               "the target comes first: ts.tile.store(C[m:m+64, n:n+64], tile)")
    store_tile(t, target, value)


def store_tile(t: OpTracer, view: Handle, value: Any) -> None:
    """A tile, a number, or another place (loaded) into a box."""
    if isinstance(value, TensorRow):
        value = t.memory.view_of_row(value)
    if isinstance(value, Handle) and isinstance(value.type, View | Buffer):
        value = t.call_op(OPS["load"], [value], {})
    value = t.ir.value_of(value)
    if not isinstance(value, Handle):
        dtype = view.type.dtype
        value = t.ir.to(value, dtype if dtype.kind != "float" else dtype.compute)
    else:
        value = t.memory.storable(value, view.type.dtype, view)
    t.ir.emit("store_tile", [view, value])


# --- builtins ---------------------------------------------------------------------------------
def _reduce_many(name: str) -> Any:
    def lower(t: OpTracer, *xs: Any) -> Any:
        items = xs[0] if len(xs) == 1 and isinstance(xs[0], tuple | list) else xs
        if len(items) < 1 or (len(xs) == 1 and not isinstance(xs[0], tuple | list)):
            t.fail("min and max need two numbers or more",
                   f"of a tile: ts.tile.reduce_{name[:3]}(x), or of each row ts.tile.row_"
                   f"{name[:3]}(x)")
        out = items[0]
        for x in items[1:]:
            out = t.ir.arithmetic(name, (out, x))
        return out

    return lower


_hidden("minimum_of", _reduce_many("minimum"))
_hidden("maximum_of", _reduce_many("maximum"))


def _length(t: OpTracer, x: Any) -> Any:
    if isinstance(x, tuple | list | str | dict):
        return len(x)
    if isinstance(x, Handle) and isinstance(x.type, Buffer) and x.type.stages > 1:
        return x.type.stages
    if isinstance(x, Handle) and not isinstance(x.type, Scalar):
        return t.memory.shape_of(x)[0]
    t.fail(f"len of {describe(x)}")


def _total(t: OpTracer, xs: Any, start: Any = 0) -> Any:
    if not isinstance(xs, tuple | list):
        t.fail(f"sum of {describe(xs)}", "of a tile: ts.tile.reduce_sum(x)")
    for x in xs:
        start = t.ir.arithmetic("add", (start, x))
    return start


_hidden("length", _length)
_hidden("total", _total)
_hidden("power", lambda t, x, n: power(t.ir, x, n))


@macro()
def cdiv(t: OpTracer, a: Any, b: Any) -> Any:
    """ceil(a / b) of integers."""
    up = t.ir.arithmetic("sub", (t.ir.arithmetic("add", (a, b)), 1))
    return t.ir.arithmetic("floordiv", (up, b))


def _arange(t: OpTracer, size: int) -> Handle:
    return t.ir.emit("arange", [], size=size, start=0, dtype=i32)


@macro()
def row_index(t: OpTracer) -> Any:
    """Positions of this group's rows as a tile (m,): in key coordinates, when the keys are more
    than the queries, the last query sees all of them.

    The keys are what the last range_n runs over; without one, rows count from the first.
    """
    block = t.grid.context().m
    dim = t.grid.row_dim()
    at = t.ir.arithmetic("add", (_arange(t, block), t.grid.own_origin(dim, block)))
    keys, rows = t.grid.key_extent, t.grid.dim_value(dim)
    if keys is None or keys == rows:
        return at
    return t.ir.arithmetic("add", (at, t.ir.arithmetic("sub", (keys, rows))))


@macro()
def col_index(t: OpTracer, block: Any) -> Any:
    """Positions of the keys of a block as a tile (n,)."""
    size = t.grid.context().n
    return t.ir.arithmetic("add", (_arange(t, size), t.ir.arithmetic("mul", (block, size))))
