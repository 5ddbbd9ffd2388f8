"""Axes that are cut otherwise: long columns that few groups would have in parts, and several axes
that are reduced as one, the last ones also in what is computed with the numbers that come of it.

    max(x, 0)        of [65536, 512]       ->  max(max(x as [64, 1024, 512], 1), 0)
    sum(sum(x, 2), (0, 1))  of [64, 56, 56, 64]  ->  sum(x, (0, 1, 2))
    x - sum(x, (2, 3))  of [64, 64, 56, 56]  ->  x - sum(x, 2), of x as [64, 64, 3136]

Elementwise ops that nothing else reads make the elements in those extents.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

from ...ir import Graph, Node, Value, producers_of, readers_of
from ...schedule.loop_axes import extents_of
from ...simplify import Rewriter, rebuild, remove_dead
from ..choose_schedule import blocks
from ..kernels.column_passes import GROUPS, SMALL
from ..kernels.spell import COMBINE
from .data_movement import is_plain_loop

Shape = tuple[int, ...]
Cut = Callable[[Shape], Shape | None]  # the extents of an operand of a loop; None: it has none
# Groups of columns that are few: 128 read [16384, 4096] of bf16 at 3.3 TB/s (H200, 2026-11-27). And
# rows of a part at least.
FEW, LEAST = GROUPS // 4, 64


def cut_columns(graph: Graph) -> Graph:
    """Behind what makes sums of strips of a loop's rows."""
    again = Rebuilder(graph)

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        parts = _split_count(node)
        if not parts:
            return None
        axis, first = node.attrs["axis"], node.attrs["axis"][0]

        def cut(shape: Shape) -> Shape | None:
            mine = (1, 1) if shape[first] == 1 else (parts, shape[first] // parts)
            return *shape[:first], *mine, *shape[first + 1:]

        rest = _rest(node)
        x = again.emit(rw, node.inputs[0], cut)
        inner = rw.emit(node.op.name, x, axis=tuple(a + 1 for a in axis), keepdims=True, **rest)
        out = rw.emit(node.op.name, inner, axis=(first,), keepdims=True, **rest)
        return rw.emit("reshape", out, shape=node.outputs[0].aval.shape)

    return remove_dead(rebuild(graph, visit))


def _split_count(node: Node) -> int:
    """Of the rows of columns, where these would be those of few groups; 0 else."""
    if node.op.reduction not in COMBINE or not node.attrs.get("keepdims"):
        return 0
    x, axis = node.inputs[0], node.attrs["axis"]
    if not all(isinstance(n, int) for n in x.aval.shape) or x.aval.dtype.kind == "bool":
        return 0
    shape, first = extents_of(x), axis[0]
    A, R, C = (prod(shape[:first]), prod(shape[first:axis[-1] + 1]), prod(shape[axis[-1] + 1:]))
    groups, most = A * blocks(C, 32), R // LEAST
    if C == 1 or groups > FEW or A * R * C <= SMALL:
        return 0
    fit = [n for n in range(2, min(shape[first], most) + 1) if shape[first] % n == 0]
    return next((n for n in fit if n * groups >= 2 * GROUPS), fit[-1] if fit else 0)


def join_reductions(graph: Graph) -> Graph:
    """Reductions of what was reduced over axes beside theirs, which nothing else reads, as one over
    all of these where the last axis stays: a batch norm's over rows, columns and images."""
    readers, results = readers_of(graph), set(graph.outputs)

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if node.op.reduction not in COMBINE:
            return None
        (x,), inner = node.inputs, rw.producer.get(inputs[0])
        if inner is None or inner.op is not node.op or x in results or len(readers[x]) > 1 or (
                not inner.attrs["keepdims"] or _rest(inner) != _rest(node)):
            return None
        axis = tuple(sorted({*node.attrs["axis"], *inner.attrs["axis"]}))
        if axis != tuple(range(axis[0], x.aval.ndim - 1))[:len(axis)]:
            return None
        out = rw.emit(node.op.name, *inner.inputs, axis=axis, keepdims=True, **_rest(node))
        same = node.attrs["keepdims"]
        return out if same else rw.emit("reshape", out, shape=node.outputs[0].aval.shape)

    return remove_dead(rebuild(graph, visit))


def _rest(node: Node) -> dict[str, Any]:
    """What a reduction says beside its axes."""
    return {k: v for k, v in node.attrs.items() if k not in ("axis", "keepdims")}


def merge_last_axes(graph: Graph) -> Graph:
    """Reductions over the last axes, which stand one after another, from the last on."""
    again = Rebuilder(graph)

    def kept(rw: Rewriter, node: Node, made: Value, axes: int) -> Value:
        out = rw.emit("reshape", made, shape=node.outputs[0].aval.shape)
        again.merged[out] = made, axes
        return out

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        x, axes = again.reduced_last(node)
        if x is not None and axes > 1 and _has_rows(x, axes) and again.reads_memory(
                x, cut := _merge(axes)):
            rest = {k: v for k, v in node.attrs.items() if k != "axis"}
            merged = again.emit(rw, x, cut, freely=True)
            return kept(rw, node, rw.emit(node.op.name, merged, axis=(merged.aval.ndim - 1,),
                                          **rest), axes)
        axes = max((again.merged[v][1] for v in inputs if v in again.merged), default=0)
        if not axes or len(node.outputs) > 1 or not again.may_be_made(node, cut := _merge(axes)):
            return None
        if not again.reads_memory(node.outputs[0], cut):
            return None
        return kept(rw, node, again.emit(rw, node.outputs[0], cut, freely=True), axes)

    return remove_dead(rebuild(graph, visit))


def _has_rows(x: Value, axes: int) -> bool:
    """Whether what is left without the last axes are rows enough for a group each."""
    shape = x.aval.shape
    return all(isinstance(n, int) for n in shape) and prod(extents_of(x)[:-axes]) >= GROUPS


@cache
def _merge(axes: int) -> Cut:
    def cut(shape: Shape) -> Shape | None:
        last = shape[len(shape) - axes:]
        whole = all(n == 1 for n in last) or all(n > 1 for n in last)
        return (*shape[:len(shape) - axes], prod(last)) if len(shape) >= axes and whole else None

    return cut


class Rebuilder:
    """Makes values of a graph anew in other extents: by ops that nothing else reads, and by others
    too where one value of the whole space is all that they read.

    merged: reshapes of what has been made so, with how many last axes are one.
    """

    def __init__(self, graph: Graph):
        self.readers, self.results = readers_of(graph), set(graph.outputs)
        self.maker = producers_of(graph)
        self.merged: dict[Value, tuple[Value, int]] = {}
        self.made: dict[tuple[Value, Shape], Value] = {}
        self.sources: dict[tuple[Value, Cut], set[Value]] = {}

    def emit(self, rw: Rewriter, old: Value, cut: Cut, freely: bool = False) -> Value:
        """old: of the graph, of which `cut` has extents. freely: whatever else reads it."""
        return self._emit(rw, old, cut, freely or len(self.whole(old, cut)) == 1)

    def whole(self, v: Value, cut: Cut) -> set[Value]:
        """The values of as many elements that it is made of."""
        if (v, cut) not in self.sources:
            node, found = self.maker.get(v), {v}
            if node is not None and self.may_be_made(node, cut) and not self.leaves_a_matmul(node):
                found = {x for of in node.inputs if of.aval.shape == v.aval.shape
                         for x in self.whole(of, cut)}
            self.sources[v, cut] = found
        return self.sources[v, cut]

    def reads_memory(self, v: Value, cut: Cut) -> bool:
        """Whether it is made of values that lie densely in memory: of no loop's, and of no parts
        and transposes, which would be copied."""
        if not all(isinstance(n, int) for n in v.aval.shape) or cut(extents_of(v)) is None:
            return False
        made = [n for x in self.whole(v, cut) if (n := self.maker.get(x)) is not None
                and not self.leaves_a_matmul(n)]
        return not any(is_plain_loop(n) or n.op.beside or not (lies := n.op.lies(n.attrs)).flat
                       and lies.kind == "view" for n in made)

    def _emit(self, rw: Rewriter, old: Value, cut: Cut, freely: bool) -> Value:
        shape, here = cut(extents_of(old)), rw.env.get(old)
        assert shape is not None
        if here in self.merged and self.merged[here][0].aval.shape == shape:
            return self.merged[here][0]
        if (old, shape) not in self.made:
            self.made[old, shape] = self._anew(rw, old, cut, shape, freely)
        return self.made[old, shape]

    def _anew(self, rw: Rewriter, old: Value, cut: Cut, shape: Shape, freely: bool) -> Value:
        node = self.maker.get(old)
        alone = old not in self.results and len(self.readers.get(old, ())) == 1
        if node is None or not (alone or freely) or not self.may_be_made(node, cut) or (
                self.leaves_a_matmul(node)):
            return self.lay(rw, rw.env[old], cut, shape)
        return rw.again(node, *(self._emit(rw, v, cut, freely) if v.aval.ndim else rw.env[v]
                                for v in node.inputs))

    def lay(self, rw: Rewriter, v: Value, cut: Cut, shape: Shape) -> Value:
        """A value that is read as it is, in the extents that `cut` has for it."""
        return rw.emit("reshape", v, shape=shape)

    def leaves_a_matmul(self, node: Node) -> bool:
        """Whether it rounds the sums of a matmul: by its kernel, which nothing else makes wait."""
        x = node.inputs[0] if node.op.name == "cast" else None
        made = self.maker.get(x) if x is not None else None
        while made is not None and made.op.name == "reshape":
            made = self.maker.get(made.inputs[0])
        return x is not None and made is not None and made.op.matmul and (
            node.outputs[0].aval.dtype.bits < x.aval.dtype.bits)

    def may_be_made(self, node: Node, cut: Cut) -> bool:
        (y,) = node.outputs[:1] or (None,)
        return y is not None and is_plain_loop(node) and all(
            not v.aval.ndim or v.aval.ndim == y.aval.ndim and cut(extents_of(v)) is not None
            for v in node.inputs)

    def reduced_last(self, node: Node) -> tuple[Value | None, int]:
        """What a node reduces over the last axes, with those that it reads the result of, and how
        many these are."""
        if node.op.reduction not in COMBINE or not node.attrs.get("keepdims"):
            return None, 0
        x = node.inputs[0]
        if node.attrs["axis"] == (x.aval.ndim - 1,):
            return x, 1
        inner, mine = self.maker.get(x), node.attrs["axis"]
        if inner is None or inner.op is not node.op or {**inner.attrs, "axis": mine} != node.attrs:
            return x, 0
        of, axes = self.reduced_last(inner)
        end = x.aval.ndim - axes
        fit = axes and mine == tuple(range(end - len(mine), end))
        return (of, axes + len(mine)) if fit else (x, 0)


__all__ = ["Cut", "Rebuilder", "Shape", "cut_columns", "join_reductions", "merge_last_axes"]
