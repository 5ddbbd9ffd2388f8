"""Elements and boxes of tensors and shared buffers: extents, views, reads and writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tessera.tile.builder.ir_builder import IRBuilder
from tessera.tile.builder.launch_grid import LaunchGrid
from tessera.tile.ir.affine import Form
from tessera.tile.ir.edges import Axis, Edge, TileEdges
from tessera.tile.ir.handles import AxisSlice, Handle, TensorRow, describe
from tessera.tile.ir.ir import Def, Op
from tessera.tile.ir.numpy_values import cast_attrs
from tessera.tile.ir.types import Buffer, GlobalTensor, Scalar, View


class MemoryIndexing:
    """Places in memory: what an index or a slice of one becomes."""

    def __init__(self, ir: IRBuilder, grid: LaunchGrid):
        self.ir, self.grid = ir, grid

    def rank(self, x: Handle) -> int:
        """Axes that the kernel sees; leading composite extents are grid axes."""
        t = x.type
        if isinstance(t, GlobalTensor):
            return len(t.dims) - len(x.hidden)
        return len(t.shape)  # type: ignore[union-attr]

    def extent(self, x: Handle, axis: int) -> Any:
        """Extent of a visible axis: an int, or the Handle of a named extent."""
        if not isinstance(x.type, GlobalTensor):
            return x.type.shape[axis]  # type: ignore[union-attr]
        return self.grid.dim_value(x.type.dims[axis + len(x.hidden)])

    def shape_of(self, x: Handle) -> tuple:
        if isinstance(x.type, GlobalTensor):
            return tuple(self.extent(x, i) for i in range(self.rank(x)))
        return x.type.shape  # type: ignore[union-attr]

    def expand_ellipsis(self, base: Handle, parts: list[Any]) -> list[Any]:
        if parts.count(...) > 1:
            self.ir.fail("more than one ... in an index")
        if ... in parts:
            at = parts.index(...)
            missing = self.rank(base) - len(parts) + 1
            parts = parts[:at] + [AxisSlice(None, None, ":")] * missing + parts[at + 1:]
        if len(parts) > self.rank(base):
            own = len(parts) == self.rank(base) + len(base.hidden) and base.hidden
            self.ir.fail(f"{len(parts)} indices for {describe(base)}, which has {self.rank(base)} "
                         f"axes{' of a group' if own else ''}",
                         f"a group has its own part along {base.type.dims[0]}: leave that index out"
                         if own and isinstance(base.type, GlobalTensor) else None)
        return parts

    def require_index(self, x: Any) -> None:
        if isinstance(x, bool) or isinstance(x, float):
            self.ir.fail(f"{x!r} is no index: an index is an integer",
                         "i // 2 divides integers, and int(x) cuts a fraction off")
        if isinstance(x, int):
            return
        if not isinstance(x, Handle) or not isinstance(x.type, Scalar) or x.type.dtype.kind not in (
                "int", "uint"):
            whole = isinstance(x, Handle) and isinstance(x.type, Scalar)
            self.ir.fail(f"{describe(x)} is no index: an index is an integer",
                         "i // 2 divides integers, and int(x) cuts a fraction off" if whole else
                         "an element for each lane: x[i], also where i was read: x[p[i]]")

    def form(self, index: Any) -> Form:
        """An index as an affine form."""
        return self.ir.values.forms.form(self.ir.operand(index))

    def leading(self, base: Handle) -> list[Any]:
        """Indices of the axes that stand for the grid."""
        return [self.grid.group_coordinate(a) for a in base.hidden]

    # --- elements -----------------------------------------------------------------------------
    def load_element(self, base: Handle, index: list[Any]) -> Handle:
        if isinstance(base.type, View):
            self.ir.fail("one element of a view", "index the tensor or buffer itself")
        return self.ir.emit("load_element", [base, *self.leading(base), *index], self.ir.hint(base))

    def store_element(self, base: Handle, index: list[Any], value: Any) -> None:
        if isinstance(base.type, View):
            self.ir.fail("one element of a view", "index the tensor or buffer itself")
        value = self.stored(value, base)
        self.ir.emit("store_element", [base, value, *self.leading(base), *index])

    def stored(self, value: Any, base: Handle, added: bool = False) -> Any:
        """A scalar as a value that this place takes: numbers convert, rounding once on storing."""
        value = self.ir.value_of(value)
        dtype = base.type.dtype
        if not isinstance(value, Handle):
            if isinstance(value, float) and dtype.kind in ("int", "uint"):
                self.ir.fail(f"the float {value!r} stored to {describe(base)}",
                             "write an integer, or ts.tile.cast(x, ts.i32)")
            return self.ir.to(value, dtype if dtype.kind != "float" else dtype.compute)
        if not isinstance(value.type, Scalar):
            self.ir.fail(f"{describe(value)} stored to one element of {describe(base)}",
                         "store it to a slice: x[a:a+64] = tile, or reduce it to a number")
        return self.storable(value, dtype, base, added)

    def storable(self, value: Handle, dtype: Any, base: Handle, added: bool = False) -> Handle:
        """Floats are rounded by the store itself, once: what no f32 holds is cast here, as the
        policy of the place says. Integers to other types are said explicitly.

        added: it meets what is there, and what comes of it is rounded.
        """
        got = value.type.dtype
        if got is dtype:
            return value
        if dtype.kind != "float":
            if got.kind == "float":
                self.ir.fail(f"{describe(value)} stored to {describe(base)}: a float into {dtype}",
                             f"say how: int(x), or ts.tile.cast(x, ts.{dtype})")
            return self.ir.cast(value, dtype)
        if got.kind == "float" and got.bits <= 32 and dtype.bits < 32:
            return self.ir.cast(value, dtype.compute)
        assert isinstance(base.type, GlobalTensor | Buffer | View)
        policy = base.type.numeric.policy
        if added or policy.rounding == "stochastic":  # which draws by the place of the element
            return self.ir.cast(value, dtype.compute)
        return self.ir.cast(value, dtype, **cast_attrs(policy))

    # --- views --------------------------------------------------------------------------------
    def view_of_row(self, row: TensorRow) -> Handle:
        rest = [AxisSlice(None, None, ":")] * (self.rank(row.base) - len(row.index))
        return self.make_view(row.base, [*row.index, *rest])

    def make_view(self, base: Handle, parts: list[Any]) -> Handle:
        """A box with static extents. Omitted trailing axes are whole."""
        if isinstance(base.type, View):
            self.ir.fail("a slice of a slice", "slice the tensor or buffer itself once")
        parts = parts + [AxisSlice(None, None, ":")] * (self.rank(base) - len(parts))
        offsets: list[Any] = []
        box: list[int] = []
        edges: list[Edge | None] = []
        for axis, p in enumerate(parts):
            if not isinstance(p, AxisSlice):
                if not self.ir.is_uniform(p):
                    self.ir.fail("a view at a place that depends on the lane",
                                 "a view belongs to the group; index all axes for one element each")
                offsets.append(p)
                box.append(1)
                continue
            lo, extent = self.slice_box(base, axis, p)
            offsets.append(lo)
            box.append(extent)
            edges.append(self.edge(base, axis, lo, extent))
        hidden = self.leading(base)
        kept = tuple(len(hidden) + i for i, p in enumerate(parts) if isinstance(p, AxisSlice))
        made = self.ir.emit("view", [base, *hidden, *offsets], self.ir.hint(base),
                            box=(1,) * len(hidden) + tuple(box), kept=kept)
        if isinstance(base.type, GlobalTensor):
            self.ir.facts.state(made.value, TileEdges.of(edges))
        return made

    def slice_box(self, base: Handle, axis: int, p: AxisSlice) -> tuple[Any, int]:
        """(offset, static extent) of lo:hi."""
        size = self.extent(base, axis)
        lo = 0 if p.lo is None else p.lo
        if isinstance(lo, int) and lo < 0 and p.hi is None:
            self.ir.fail(f"the slice {p.text} begins {-lo} elements before {describe(base)}",
                         "numbers below 0 do not count from the end: x[N - 4:N] has the last four "
                         "elements; what begins before a tensor says where it ends, x[-1:N]")
        hi = size if p.hi is None else p.hi
        for x in (lo, hi):
            self.require_index(x)
            if not self.ir.is_uniform(x):
                self.ir.fail(f"the slice {p.text} depends on the lane",
                             "a view belongs to the group")
        form = self.ir.values.forms.difference(self.ir.operand(hi), self.ir.operand(lo))
        if set(form) - {None}:
            self.ir.need_dims({k: v for k, v in form.items() if v})
            self.ir.fail(f"the extent of the slice {p.text} is not a compile-time constant",
                         "write x[a:a+64], or x[a:a+B] with a constant, B: int or B=64 in the "
                         "signature; elements outside of it read as 0 and are not written")
        extent = form.get(None, 0)
        if extent <= 0:
            self.ir.fail(f"the slice {p.text} has extent {extent}", "extents are positive, and "
                         "numbers below 0 do not count from the end: x[0:N - 1]" if extent else
                         "no tile is empty: leave the call out where the tensor has no "
                         "elements, or read it by a fixed width in a loop, "
                         "for j in range(0, N, 64), which does nothing where N is 0")
        if isinstance(size, int) and isinstance(lo, int) and isinstance(base.type, Buffer) and (
                lo < 0 or lo + extent > size):
            self.ir.fail(f"the slice {p.text} lies outside of {describe(base)}, extent {size}",
                         code="E_BOUNDS")
        return lo, extent

    def own_block(self, tensor: Handle, shape: tuple[int, ...]) -> Handle:
        """The block of a tensor that belongs to this group, for a tile of that shape."""
        if self.rank(tensor) != len(shape):
            self.ir.fail(f"a tile of shape {list(shape)} for {describe(tensor)}: "
                         f"the kernel sees {self.rank(tensor)} axes of it")
        parts = []
        assert isinstance(tensor.type, GlobalTensor)
        for axis, size in enumerate(shape):
            dim = tensor.type.dims[axis + len(tensor.hidden)]
            lo = self.grid.own_origin(dim, size)
            parts.append(AxisSlice(lo, self.ir.arithmetic("add", (lo, size)), ":"))
        return self.make_view(tensor, parts)

    def edge_in(self, base: Handle, axis: int, lo: Any, extent: int) -> Axis:
        """Of a box of a tensor, or of what a shared buffer holds."""
        if isinstance(base.type, GlobalTensor):
            return self.edge(base, axis, lo, extent)
        return self.ir.facts.shifted(self.ir.facts.of(base).at(axis), self.form(lo), 1)

    def edge(self, base: Handle, axis: int, lo: Any, extent: int) -> Edge | None:
        """Where the box lies in a tensor, and whether it surely lies inside."""
        if not isinstance(base.type, GlobalTensor):
            return None
        return self.edge_of(lo, extent, self.extent(base, axis))

    def edge_of(self, lo: Any, extent: int, size: Any) -> Edge:
        """Of an axis of `size` elements, of which a box has `extent` from `lo` on."""
        span = self.ir.values.span(self.form(lo))
        inside = (isinstance(size, int) and span is not None and span[0] >= 0
                  and span[1] + extent <= size)
        return self.ir.facts.make_edge(lo, size, inside)

    # --- stages -------------------------------------------------------------------------------
    def stack_buffers(self, items: list[Any]) -> Any:
        """A list of equal shared buffers, just allocated, becomes one with stages."""
        if len(items) < 2 or not all(isinstance(i, Handle) and isinstance(i.type, Buffer)
                                     for i in items):
            return items
        ops = self.ir.block[-len(items):]
        fresh = all(isinstance(op, Op) and op.name == "allocate" and op.outs[0].value == i.value
                    for op, i in zip(ops, items, strict=False)) and len(ops) == len(items)
        if not fresh or len({i.type for i in items}) != 1:
            return items
        first = ops[0]
        assert isinstance(first, Op)
        made = replace(items[0].type, stages=len(items))
        attrs = tuple(sorted((first.attr | {"stages": len(items)}).items()))
        del self.ir.block[-len(items):]
        op = replace(first, outs=(Def(first.outs[0].value, made),), attrs=attrs)
        for gone in ops[1:]:
            assert isinstance(gone, Op)
            self.ir.names.taken.discard(gone.outs[0].value.name)
        self.ir.block.append(op)
        self.ir.values.defined_by[op.outs[0].value] = op
        return Handle(op.outs[0].value, made)

    def pick_stage(self, base: Handle, index: Any) -> Handle:
        assert isinstance(base.type, Buffer)
        if isinstance(index, AxisSlice):
            self.ir.fail("a slice of the stages of a buffer", "choose one: buffers[stage]")
        self.require_index(index)
        if isinstance(index, int) and not 0 <= index < base.type.stages:
            self.ir.fail(f"stage {index} of {base.type.stages}", code="E_BOUNDS")
        return self.ir.emit("stage", [base, index], self.ir.hint(base))
