"""Subscripts: elements, views, rows, stages, and [:, None] and [:, 0] on tiles."""

from __future__ import annotations

import ast
import copy
from typing import Any

from tessera.numerics import bool_, i32
from tessera.tile.builder.kernel_spec import Kernel_
from tessera.tile.frontend.tracer import KernelTracer, expression
from tessera.tile.ir.edges import open_
from tessera.tile.ir.handles import AxisSlice, Handle, TensorRow, TensorSlice, describe
from tessera.tile.ir.types import Buffer, GlobalTensor, Scalar, TileType
from tessera.tile.ops.indexed import gather_of


@expression(ast.Slice)
def axis_slice(t: KernelTracer, e: ast.Slice) -> Any:
    if e.step is not None:
        t.fail("a slice with a step", "views are boxes without gaps: x[a:a+64]; of "
               "elements apart, the ones at positions: x[2 * ts.tile.arange(64)]")
    lower, upper, read = _read_once(t, e)
    t.env.update(read)
    made = AxisSlice(t.expr(lower) if lower else None, t.expr(upper) if upper else None,
                     ast.unparse(e))
    for name in read:
        del t.env[name]
    return made


def _read_once(t: KernelTracer, e: ast.Slice) -> tuple[ast.expr | None, ast.expr | None,
                                                       dict[str, Any]]:
    """The ends of a slice, and under new names the elements that both ask for, which are read
    once: of starts[i]:starts[i] + 64 the extent is then known. What a call gives is no such."""
    if e.lower is None or e.upper is None:
        return e.lower, e.upper, {}
    below, above = ({ast.dump(n): n for n in ast.walk(end) if isinstance(n, ast.Subscript)
                     and not any(isinstance(c, ast.Call) for c in ast.walk(n))}
                    for end in (e.lower, e.upper))
    names = {text: f"__read_{text}" for text in below if text in above}
    if not names:
        return e.lower, e.upper, {}

    class Named(ast.NodeTransformer):
        def __init__(self) -> None:
            self.read: dict[str, Any] = {}

        def visit_Subscript(self, n: ast.Subscript) -> ast.expr:
            name = names.get(ast.dump(n))
            if name is None:
                return n
            if name not in self.read:
                self.read[name] = t.expr(n)
            return ast.copy_location(ast.Name(name, ast.Load()), n)

    ends = Named()
    lower, upper = (ends.visit(copy.deepcopy(end)) for end in (e.lower, e.upper))
    return lower, upper, ends.read


@expression(ast.Subscript)
def subscript_expression(t: KernelTracer, e: ast.Subscript) -> Any:
    return subscript(t, t.expr(e.value), index_parts(t, e))


def region_of(t: KernelTracer, e: ast.Subscript) -> Any:
    """x[a, lo:hi] of a tensor or buffer as it is written; anything else as usual."""
    base, parts = t.expr(e.value), index_parts(t, e)
    plain = isinstance(base, Handle) and (isinstance(base.type, GlobalTensor) or isinstance(
        base.type, Buffer) and base.type.stages == 1)
    if not plain or not any(isinstance(p, AxisSlice) for p in parts):
        return subscript(t, base, parts)
    return TensorSlice(base, tuple(t.memory.expand_ellipsis(base, parts)))


def index_parts(t: KernelTracer, e: ast.Subscript) -> list[Any]:
    items = e.slice.elts if isinstance(e.slice, ast.Tuple) else [e.slice]
    return [t.expr(i) for i in items]


def subscript(t: KernelTracer, base: Any, parts: list[Any]) -> Any:
    if isinstance(base, tuple | list | str | dict):
        return pick(t, base, parts)
    if isinstance(base, TensorRow):
        return subscript(t, base.base, [*base.index, *parts])
    if not isinstance(base, Handle):
        array = hasattr(base, "__array__") or hasattr(base, "__dlpack__")
        t.fail(f"{describe(base)} cannot be indexed", hint="arrays are arguments of the kernel, "
               "and so is this one: x: ts.Tensor[...]" if array else "a kernel that is called in "
               "one is a part of its launch: k(x)" if isinstance(base, Kernel_) else None)
    if isinstance(base.type, Scalar):
        t.fail(f"{describe(base)} is a number and cannot be indexed")
    if isinstance(base.type, TileType):
        return index_tile(t, base, parts)
    if isinstance(base.type, Buffer) and base.type.stages > 1:
        staged = t.memory.pick_stage(base, parts[0])
        return subscript(t, staged, parts[1:]) if parts[1:] else staged
    return index_memory(t, base, t.memory.expand_ellipsis(base, parts))


def pick(t: KernelTracer, base: Any, parts: list[Any]) -> Any:
    """An item of a compile-time tuple, list or dict."""
    (index,) = parts if len(parts) == 1 else (tuple(parts),)
    if isinstance(index, AxisSlice):
        index = slice(index.lo, index.hi)
    if isinstance(index, Handle):
        t.fail("a tuple or list indexed by a run-time number",
               "loop over the items, for i, item in enumerate(items), or over a tuple of numbers, "
               "for i in tuple(range(4)): such iterations are written out; only lists of equal "
               "shared buffers have a run-time index: [alloc_shared(s, d), alloc_shared(s, "
               "d)][stage]")
    try:
        return base[index]
    except (IndexError, KeyError, TypeError) as err:
        t.fail(f"index {index!r}: {err}")


def index_memory(t: KernelTracer, base: Handle, parts: list[Any]) -> Any:
    if any(p is None for p in parts):
        t.fail("None in the index of a place in memory", "load it first, then [:, None]")
    if picked := tile_index(t, parts):
        return gather(t, base, parts, picked)
    for p in parts:
        if not isinstance(p, AxisSlice):
            t.memory.require_index(p)
    if all(not isinstance(p, AxisSlice) for p in parts):
        if len(parts) < t.memory.rank(base):
            return TensorRow(base, tuple(parts))
        return t.memory.load_element(base, parts)
    return t.memory.make_view(base, parts)


def tile_index(t: KernelTracer, parts: list[Any]) -> tuple[int, int] | None:
    """The axes, first and behind the last, at which an index has tiles of positions, with numbers
    among them; None without one."""
    at = [i for i, p in enumerate(parts) if isinstance(p, TensorRow) or isinstance(p, Handle)
          and not isinstance(p.type, Scalar)]
    if not at:
        return None
    first, end = at[0], at[-1] + 1
    if any(isinstance(p, AxisSlice) for p in parts[first:end]):
        t.fail("a slice between two tiles of positions", "positions are of axes that follow each "
               "other; transpose the array, or make the slice a tile: a + ts.tile.arange(0, n)")
    return first, end


def indexed_region(base: Handle, parts: list[Any], picked: tuple[int, int]
                   ) -> tuple[TensorSlice, Any, int]:
    """The place without positions, these, and the first axis (among those that stay) they run
    along."""
    first, end = picked
    free = [*parts[:first], *[AxisSlice(None, None, ":")] * (end - first), *parts[end:]]
    axis = sum(isinstance(p, AxisSlice) for p in parts[:first])
    index = parts[first] if end == first + 1 else tuple(parts[first:end])
    return TensorSlice(base, tuple(free)), index, axis


def gather(t: KernelTracer, base: Handle, parts: list[Any], picked: tuple[int, int]) -> Any:
    """x[index] where the index is a tile: ts.tile.gather."""
    return gather_of(t, *indexed_region(base, parts, picked))


def index_tile(t: KernelTracer, x: Handle, parts: list[Any]) -> Handle:
    """New axes, m[:, None], m[None, :], and one element along an axis at a known place, m[:, 0].
    Axes behind the last that is named stay, as in NumPy."""
    rank = len(x.type.shape)  # type: ignore[union-attr]
    if parts.count(...) == 1:
        at, named = parts.index(...), sum(p is not None for p in parts) - 1
        parts = [*parts[:at], *[AxisSlice(None, None, ":")] * (rank - named), *parts[at + 1:]]
    left = rank - sum(p is not None for p in parts)
    parts = [*parts, *[AxisSlice(None, None, ":")] * left]
    whole = [p for p in parts if p is not None]
    plain = all(_is_constant_index(p) or isinstance(p, AxisSlice) and p.lo is None and p.hi is None
                for p in whole)
    if any(isinstance(p, Handle) and p.type.dtype is bool_ for p in whole):
        t.fail(f"the part of {describe(x)} where a condition holds", "its size would not be known: "
               "choose element by element, ts.tile.where(c, t, 0.0)")
    if not plain or len(whole) != rank:
        t.fail(f"an element or part of {describe(x)}",
               "a tile lives in registers: t[:, None], t[None, :], and t[:, 0] at a place that is "
               "known when the kernel is compiled; store it to a shared buffer to index it "
               "otherwise, or use a reduction")
    for axis, p in reversed([*enumerate(whole)]):
        if _is_constant_index(p):
            x = _one_element(t, x, axis, p)
    for axis, p in enumerate(p for p in parts if not _is_constant_index(p)):
        if p is None:
            x = t.ir.expand(x, axis)
    return x


def _is_constant_index(p: Any) -> bool:
    return isinstance(p, int) and not isinstance(p, bool)


def _one_element(t: KernelTracer, x: Handle, axis: int, at: int) -> Handle:
    extent = x.type.shape[axis]  # type: ignore[union-attr]
    if not -extent <= at < extent:
        t.fail(f"element {at} along axis {axis} of {describe(x)}", f"-{extent} to {extent - 1}")
    if open_(t.facts.of(x).at(axis)):
        t.fail(f"one element along axis {axis} of {describe(x)}, which goes over the edge of a "
               "tensor there", "load a part that does not, x[:, 0:2], or say what counts beyond "
               "it: ts.tile.load(view, fill=0)", code="E_EDGE")
    flags = x.type.dtype is bool_
    one = t.ir.emit("one_along", [t.ir.cast(x, i32) if flags else x], axis=axis, at=at % extent)
    return t.ir.arithmetic("ne", (one, 0)) if flags else one
