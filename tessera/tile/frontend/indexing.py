"""Subscripts: elements, views, rows, stages, and [:, None] on tiles."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

from tessera.tile.frontend.build_ir import IRBuilder
from tessera.tile.ir import affine
from tessera.tile.ir.edges import Axis, Edge, TileEdges
from tessera.tile.ir.handles import AxisSlice, Handle, TensorRow, TensorSlice, describe
from tessera.tile.ir.ir import Def, Op, SSAValue
from tessera.tile.ir.types import Buffer, GlobalTensor, Scalar, TileType, View


class Indexing(IRBuilder, ABC):
    """Subscript expressions."""

    axis_names: list[Any]  # axes of the launch grid so far

    @abstractmethod
    def expr(self, e: ast.expr) -> Any:
        """Walk an expression: the next class does."""

    def get_Slice(self, e: ast.Slice) -> Any:
        if e.step is not None:
            self.fail("a slice with a step", "views are boxes without gaps: x[a:a+64]")
        return AxisSlice(self.expr(e.lower) if e.lower else None,
                         self.expr(e.upper) if e.upper else None, ast.unparse(e))

    def get_Subscript(self, e: ast.Subscript) -> Any:
        return self.subscript(self.expr(e.value), self.parts(e))

    def part_of(self, e: ast.Subscript) -> Any:
        """x[a, lo:hi] of a tensor or buffer as it is written; anything else as usual."""
        base, parts = self.expr(e.value), self.parts(e)
        plain = isinstance(base, Handle) and (isinstance(base.type, GlobalTensor) or isinstance(
            base.type, Buffer) and base.type.stages == 1)
        if not plain or not any(isinstance(p, AxisSlice) for p in parts):
            return self.subscript(base, parts)
        return TensorSlice(base, tuple(self.expand_ellipsis(base, parts)))

    def parts(self, e: ast.Subscript) -> list[Any]:
        items = e.slice.elts if isinstance(e.slice, ast.Tuple) else [e.slice]
        return [self.expr(i) for i in items]

    def subscript(self, base: Any, parts: list[Any]) -> Any:
        if isinstance(base, tuple | list | str | dict):
            return self.pick(base, parts)
        if isinstance(base, TensorRow):
            return self.subscript(base.base, [*base.index, *parts])
        if not isinstance(base, Handle):
            self.fail(f"{describe(base)} cannot be indexed")
        if isinstance(base.type, Scalar):
            self.fail(f"{describe(base)} is a number and cannot be indexed")
        if isinstance(base.type, TileType):
            return self.index_tile(base, parts)
        if isinstance(base.type, Buffer) and base.type.stages > 1:
            staged = self.pick_stage(base, parts[0])
            return self.subscript(staged, parts[1:]) if parts[1:] else staged
        return self.index_place(base, self.expand_ellipsis(base, parts))

    def pick(self, base: Any, parts: list[Any]) -> Any:
        """An item of a compile-time tuple, list or dict."""
        (index,) = parts if len(parts) == 1 else (tuple(parts),)
        if isinstance(index, AxisSlice):
            index = slice(index.lo, index.hi)
        if isinstance(index, Handle):
            self.fail("a tuple or list indexed by a run-time number",
                      "only lists of equal shared buffers can be: [alloc_shared(s, d), "
                      "alloc_shared(s, d)][stage]")
        try:
            return base[index]
        except (IndexError, KeyError, TypeError) as err:
            self.fail(f"index {index!r}: {err}")

    def expand_ellipsis(self, base: Handle, parts: list[Any]) -> list[Any]:
        if parts.count(...) > 1:
            self.fail("more than one ... in an index")
        if ... in parts:
            at = parts.index(...)
            missing = self.rank(base) - len(parts) + 1
            parts = parts[:at] + [AxisSlice(None, None, ":")] * missing + parts[at + 1:]
        if len(parts) > self.rank(base):
            self.fail(f"{len(parts)} indices for {describe(base)}, which has {self.rank(base)} "
                      "axes")
        return parts

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
        return self.dim_value(x.type.dims[axis + len(x.hidden)])

    @abstractmethod
    def dim_value(self, dim: Any) -> Any:
        """The value of a named extent."""

    @abstractmethod
    def group_coordinate(self, axis: int) -> Handle:
        """The number of the group along a grid axis."""

    # --- places -------------------------------------------------------------------------------
    def index_place(self, base: Handle, parts: list[Any]) -> Any:
        if any(p is None for p in parts):
            self.fail("None in the index of a place in memory", "load it first, then [:, None]")
        if picked := self.picked(parts):
            return self.gather(base, parts, picked)
        for p in parts:
            if not isinstance(p, AxisSlice):
                self.require_index(p)
        if all(not isinstance(p, AxisSlice) for p in parts):
            if len(parts) < self.rank(base):
                return TensorRow(base, tuple(parts))
            return self.load_element(base, parts)
        return self.make_view(base, parts)

    def picked(self, parts: list[Any]) -> int | None:
        """The axis at which an index is a tile of positions, plus one; None without one."""
        at = [i for i, p in enumerate(parts) if isinstance(p, TensorRow) or isinstance(p, Handle)
              and not isinstance(p.type, Scalar)]
        if len(at) > 1:
            self.fail("two tiles in one index", "gather along one axis; the others are slices and "
                      "numbers")
        return at[0] + 1 if at else None

    def chosen_along(self, base: Handle, parts: list[Any], picked: int) -> tuple[TensorSlice, int]:
        """The place without the index, and the axis (among those that stay) it runs along."""
        free = [*parts[:picked - 1], AxisSlice(None, None, ":"), *parts[picked:]]
        axis = sum(isinstance(p, AxisSlice) for p in parts[:picked - 1])
        return TensorSlice(base, tuple(free)), axis

    def gather(self, base: Handle, parts: list[Any], picked: int) -> Any:
        """x[index] where the index is a tile: ts.tile.gather."""
        from tessera.tile.ops.indexed import gather_of

        region, axis = self.chosen_along(base, parts, picked)
        return gather_of(self, region, parts[picked - 1], axis)

    def require_index(self, x: Any) -> None:
        if isinstance(x, bool) or isinstance(x, float):
            self.fail(f"{x!r} is no index")
        if isinstance(x, int):
            return
        if not isinstance(x, Handle) or not isinstance(x.type, Scalar) or x.type.dtype.kind not in (
                "int", "uint"):
            self.fail(f"{describe(x)} is no index: an index is an integer",
                      "an element for each lane: x[i], also where i was read: x[p[i]]")

    def leading(self, base: Handle) -> list[Any]:
        """Indices of the axes that stand for the grid."""
        return [self.group_coordinate(a) for a in base.hidden]

    def load_element(self, base: Handle, index: list[Any]) -> Handle:
        if isinstance(base.type, View):
            self.fail("one element of a view", "index the tensor or buffer itself")
        return self.emit("load_element", [base, *self.leading(base), *index], self.hint(base))

    def store_element(self, base: Handle, index: list[Any], value: Any) -> None:
        if isinstance(base.type, View):
            self.fail("one element of a view", "index the tensor or buffer itself")
        value = self.stored(value, base)
        self.emit("store_element", [base, value, *self.leading(base), *index])

    def stored(self, value: Any, base: Handle) -> Any:
        """A scalar as a value that this place takes: numbers convert, rounding once on storing."""
        value = self.value_of(value)
        dtype = base.type.dtype
        if not isinstance(value, Handle):
            if isinstance(value, float) and dtype.kind in ("int", "uint"):
                self.fail(f"the float {value!r} stored to {describe(base)}",
                          "write an integer, or ts.tile.cast(x, ts.i32)")
            return self.to(value, dtype if dtype.kind != "float" else dtype.compute)
        if not isinstance(value.type, Scalar):
            self.fail(f"{describe(value)} stored to one element of {describe(base)}",
                      "store it to a slice: x[a:a+64] = tile, or reduce it to a number")
        return self.storable(value, dtype, base)

    def storable(self, value: Handle, dtype: Any, base: Handle) -> Handle:
        """Floats are rounded by the store itself; integers to other types are said explicitly."""
        got = value.type.dtype
        if got is dtype or (got.kind == "float" and dtype.kind == "float"):
            exact = got is dtype or dtype.compute is got
            return value if exact else self.cast(value, dtype.compute)
        if got.kind == "float":
            self.fail(f"{describe(value)} stored to {describe(base)}: a float into {dtype}",
                      f"say how: int(x), or ts.tile.cast(x, ts.{dtype})")
        return self.cast(value, dtype if dtype.kind != "float" else dtype.compute)

    def view_of_row(self, row: TensorRow) -> Handle:
        rest = [AxisSlice(None, None, ":")] * (self.rank(row.base) - len(row.index))
        return self.make_view(row.base, [*row.index, *rest])

    def make_view(self, base: Handle, parts: list[Any]) -> Handle:
        """A box with static extents. Omitted trailing axes are whole."""
        if isinstance(base.type, View):
            self.fail("a slice of a slice", "slice the tensor or buffer itself once")
        parts = parts + [AxisSlice(None, None, ":")] * (self.rank(base) - len(parts))
        offsets: list[Any] = []
        box: list[int] = []
        edges: list[Edge | None] = []
        for axis, p in enumerate(parts):
            if not isinstance(p, AxisSlice):
                if not self.is_uniform(p):
                    self.fail("a view at a place that depends on the lane",
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
        made = self.emit("view", [base, *hidden, *offsets], self.hint(base),
                         box=(1,) * len(hidden) + tuple(box), kept=kept)
        if isinstance(base.type, GlobalTensor):
            self.state(made.value, TileEdges.of(edges))
        return made

    def slice_box(self, base: Handle, axis: int, p: AxisSlice) -> tuple[Any, int]:
        """(offset, static extent) of lo:hi."""
        size = self.extent(base, axis)
        lo = 0 if p.lo is None else p.lo
        hi = size if p.hi is None else p.hi
        for x in (lo, hi):
            self.require_index(x)
            if not self.is_uniform(x):
                self.fail(f"the slice {p.text} depends on the lane", "a view belongs to the group")
        form = affine.add(self.forms.form(self.operand(hi)), self.forms.form(self.operand(lo)), -1)
        if set(form) - {None}:
            self.need_dims({k: v for k, v in form.items() if v})
            self.fail(f"the extent of the slice {p.text} is not a compile-time constant",
                      "write x[a:a+64]; elements outside of it read as 0 and are not written")
        extent = form.get(None, 0)
        if extent <= 0:
            self.fail(f"the slice {p.text} has extent {extent}", "extents are positive")
        if isinstance(size, int) and isinstance(lo, int) and isinstance(base.type, Buffer) and (
                lo < 0 or lo + extent > size):
            self.fail(f"the slice {p.text} lies outside of {describe(base)}, extent {size}",
                      code="E_BOUNDS")
        return lo, extent

    def edge_in(self, base: Handle, axis: int, lo: Any, extent: int) -> Axis:
        """Of a box of a tensor, or of what a shared buffer holds."""
        if isinstance(base.type, GlobalTensor):
            return self.edge(base, axis, lo, extent)
        return self.shifted(self.facts_of(base).at(axis), self.forms.form(self.operand(lo)), 1)

    def edge(self, base: Handle, axis: int, lo: Any, extent: int) -> Edge | None:
        """Where the box lies in a tensor, and whether it surely lies inside."""
        if not isinstance(base.type, GlobalTensor):
            return None
        size = self.extent(base, axis)
        span = self.span(self.forms.form(self.operand(lo)))
        inside = (isinstance(size, int) and span is not None and span[0] >= 0
                  and span[1] + extent <= size)
        return self.make_edge(lo, size, inside)

    def span(self, form: dict) -> tuple[int, int] | None:
        """The least and the greatest value of a form, when loops and grid bound it."""
        low = high = form.get(None, 0)
        for value, c in form.items():
            if value is None:
                continue
            reach = self.reach(value)
            if reach is None:
                return None
            low += c * reach[0 if c > 0 else 1]
            high += c * reach[1 if c > 0 else 0]
        return low, high

    @abstractmethod
    def reach(self, value: SSAValue) -> tuple[int, int] | None:
        """The smallest and largest number that a value may be, where they are known."""

    # --- tiles --------------------------------------------------------------------------------
    def index_tile(self, x: Handle, parts: list[Any]) -> Handle:
        """Only new axes: m[:, None], m[None, :]."""
        whole = [p for p in parts if p is not None]
        plain = all(isinstance(p, AxisSlice) and p.lo is None and p.hi is None for p in whole)
        if not plain or len(whole) != len(x.type.shape):  # type: ignore[union-attr]
            self.fail(f"an element or part of {describe(x)}",
                      "a tile lives in registers: only t[:, None] and t[None, :]; store it to a "
                      "shared buffer to index it, or use a reduction")
        for axis, p in enumerate(parts):
            if p is None:
                x = self.expand(x, axis)
        return x

    # --- stages -------------------------------------------------------------------------------
    def stack_buffers(self, items: list[Any]) -> Any:
        """A list of equal shared buffers, just allocated, becomes one with stages."""
        if len(items) < 2 or not all(isinstance(i, Handle) and isinstance(i.type, Buffer)
                                     for i in items):
            return items
        ops = self.block[-len(items):]
        fresh = all(isinstance(op, Op) and op.name == "allocate" and op.outs[0].value == i.value
                    for op, i in zip(ops, items, strict=False)) and len(ops) == len(items)
        if not fresh or len({i.type for i in items}) != 1:
            return items
        first = ops[0]
        assert isinstance(first, Op)
        made = replace(items[0].type, stages=len(items))
        attrs = tuple(sorted((first.attr | {"stages": len(items)}).items()))
        del self.block[-len(items):]
        op = replace(first, outs=(Def(first.outs[0].value, made),), attrs=attrs)
        for gone in ops[1:]:
            assert isinstance(gone, Op)
            self.names.taken.discard(gone.outs[0].value.name)
        self.block.append(op)
        self.defined_by[op.outs[0].value] = op
        return Handle(op.outs[0].value, made)

    def pick_stage(self, base: Handle, index: Any) -> Handle:
        assert isinstance(base.type, Buffer)
        if isinstance(index, AxisSlice):
            self.fail("a slice of the stages of a buffer", "choose one: buffers[stage]")
        self.require_index(index)
        if isinstance(index, int) and not 0 <= index < base.type.stages:
            self.fail(f"stage {index} of {base.type.stages}", code="E_BOUNDS")
        return self.emit("stage", [base, index], self.hint(base))


def root(value: SSAValue) -> str:
    return value.name
