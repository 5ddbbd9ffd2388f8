"""Loops over what is joined, or of which parts are read, as loops over the parts.

    x c + concatenate([-b, a]) s      # is concatenate([a c0 - b s0, b c1 + a s1])
    (g s)[:n], (g s)[n:]              # are g[:n] s[:n], g[n:] s[n:]

Parts of what is given are views and parts of what is joined are written where they belong, so
nothing is in memory between. What a matmul or a row's statistics would take along stays whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from ....lazy_dataclass import dataclass
from ...ir import Graph, Node, Value, readers_of, uses
from ...schedule.groups import MAX_OPS
from ...schedule.loop_axes import extents_of
from ...schedule.loop_ops import loop_space
from ...schedule.region_copies import MOVES
from ...simplify import Rewriter, rebuild, remove_dead
from .data_movement import is_plain_loop
from .followed_values import PICKS

PARTS = 4  # more loops than these are not worth what they save
WORD = 128  # bits of an access
Span = tuple[int, int]


def _spans(join: Node) -> list[Span]:
    """Where the parts of a joined value lie."""
    ends, at = list[Span](), 0
    for v in join.inputs:
        n = extents_of(v)[join.attrs["axis"]]
        ends.append((at, at + n))
        at += n
    return ends


@dataclass
class _Cutter:
    """Cuts values of one shape along an axis: those that loops make of given ones.

    count: how often values are read.
    """

    rw: Rewriter
    count: Counter
    shape: tuple[int, ...]
    axis: int

    def made(self, v: Value) -> Node | None:
        """The node of a loop whose elements can be made part by part, for this reader alone."""
        node = self.rw.producer.get(v)
        if node is None or not is_plain_loop(node):
            return None
        return node if node.op.name == "cast" or self.count.get(v, 1) == 1 else None

    def is_whole(self, v: Value) -> bool:
        """Whether it lies along the axis."""
        at = self.axis - len(self.shape) + v.aval.ndim
        return at >= 0 and v.aval.shape[at] != 1

    def joins(self, v: Value) -> list[Node]:
        """The joined values from which it is made."""
        join = self.join(v)
        if join is not None:
            return [join]
        node = self.made(v)
        return [] if node is None else [j for x in node.inputs if self.is_whole(x)
                                        for j in self.joins(x)]

    def join(self, v: Value) -> Node | None:
        node = self.rw.made_by(v, "concatenate")
        fits = node is not None and node.attrs["axis"] == self.axis and (
            extents_of(v) == self.shape and self.count.get(v, 1) == 1)
        return node if fits else None

    def may_cut(self, v: Value) -> bool:
        """Whether its parts are parts of given values, and nobody else makes the whole."""
        if self.join(v) is not None:
            return all(map(self.is_given, self.rw.producer[v].inputs))
        node = self.made(v)
        if node is not None:
            return all(map(self.may_cut, node.inputs))
        return self.is_given(v)

    def is_given(self, v: Value) -> bool:
        """Whether a value is in memory, or made of such by loops: not what a matmul makes, nor of
        statistics, nor by a loop that others read, nor by one before a reshape."""
        node = self.rw.producer.get(v)
        if node is None or node.op.name in MOVES:
            return True
        if node.op.name == "cast" or is_plain_loop(node) and self.count.get(v, 1) == 1:
            return all(map(self.is_given, node.inputs))
        if node.op.name == "reshape":
            node = self.rw.producer.get(node.inputs[0])
        return node is None or not (is_plain_loop(node) or node.op.matmul or _is_statistic(node))

    def cut(self, v: Value, span: Span) -> Value:
        if not self.is_whole(v):
            return v
        at = self.axis - len(self.shape) + v.aval.ndim
        join = self.rw.made_by(v, "concatenate")
        if join is not None and join.attrs["axis"] == at and span in (spans := _spans(join)):
            return join.inputs[spans.index(span)]
        node = self.made(v)
        if node is not None:
            return self.rw.again(node, *(self.cut(x, span) for x in node.inputs))
        shape = extents_of(v)
        ends = [span if a == at else (0, n) for a, n in enumerate(shape)]
        return self.rw.emit("slice", v, starts=tuple(b for b, _ in ends),
                            stops=tuple(e for _, e in ends), steps=(1,) * len(shape))


def _behind_joins(graph: Graph) -> set[Node]:
    """The loops on joined values."""
    joined, found = set[Value](), set[Node]()
    for node in graph.nodes:
        if node.op.name == "concatenate":
            joined.update(node.outputs)
        elif not joined.isdisjoint(node.inputs) and is_plain_loop(node):
            found.add(node)
            joined.update(node.outputs)
    return found


def _is_statistic(node: Node) -> bool:
    """Whether the kernel of a reduction takes loops along: over the last axis."""
    return bool(node.op.reduction) and node.inputs[0].aval.ndim - 1 in node.attrs["axis"]


def loops_of_parts(graph: Graph) -> Graph:
    """Loops over joined values become one for each part, whose results are joined: where what
    follows is no loop, which would take the whole."""
    behind = _behind_joins(graph)
    if not behind:
        return graph
    readers = readers_of(graph)
    count = uses(graph)

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        v = node.outputs[0] if node in behind else None
        if v is None or not _is_concrete(node) or any(
                loop_space(n) is not None for n in readers.get(v, ())):
            return None
        shape = extents_of(v)
        for axis in sorted(_joined_axes(rw, inputs, v.aval.shape)):
            cutter = _Cutter(rw, count, shape, axis)
            joins = [j for x in inputs if cutter.is_whole(x) for j in cutter.joins(x)]
            spans = {tuple(_spans(j)) for j in joins}
            if len(spans) != 1 or not all(map(cutter.may_cut, inputs)):
                continue
            (own,) = spans
            if len(own) > PARTS or not _are_words(own, shape, axis, v.aval.dtype.bits):
                continue
            parts = [rw.emit(node.op.name, *(cutter.cut(x, span) for x in inputs), **node.attrs)
                     for span in own]
            return rw.emit("concatenate", *parts, axis=axis)
        return None

    return remove_dead(rebuild(graph, visit))


def _joined_axes(rw: Rewriter, inputs: Sequence[Value], shape: tuple) -> set[int]:
    """The axes along which values of this shape are joined from which loops make these."""
    axes, seen, work = set[int](), set[Value](), list(inputs)
    while work and len(seen) < MAX_OPS:
        v = work.pop()
        node = rw.producer.get(v)
        if v in seen or node is None or v.aval.shape != shape:
            continue
        seen.add(v)
        if node.op.name == "concatenate":
            axes.add(node.attrs["axis"])
        elif is_plain_loop(node):
            work += node.inputs
    return axes


def reductions_of_parts(graph: Graph) -> Graph:
    """Reductions of joined values are those of the parts, joined, where they take along what makes
    each: sum(stack([t[i], t[j]], 1), 2) is stack([sum(t[i], 1), sum(t[j], 1)], 1)."""
    count = uses(graph)

    def is_taken(rw: Rewriter, v: Value) -> bool:
        """Whether a loop makes a value, or integers pick it, for one reader."""
        node = rw.producer.get(v)
        while node is not None and node.op.name == "reshape" and count.get(v, 1) == 1:
            (v,) = node.inputs
            node = rw.producer.get(v)
        return node is not None and count.get(v, 1) == 1 and (
            node.op.name in PICKS or is_plain_loop(node))

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        join = rw.made_by(inputs[0], "concatenate") if node.op.reduction else None
        if join is None or count[inputs[0]] > 1 or not _is_concrete(node):
            return None
        axis, over = join.attrs["axis"], node.attrs["axis"]
        if axis in over or len(inputs) > 1 or not all(is_taken(rw, v) for v in join.inputs):
            return None
        parts = [rw.emit(node.op.name, v, **node.attrs) for v in join.inputs]
        gone = 0 if node.attrs["keepdims"] else sum(a < axis for a in over)
        return rw.emit("concatenate", *parts, axis=axis - gone)

    return remove_dead(rebuild(graph, visit))


def slices_of_loops(graph: Graph) -> Graph:
    """Of a value of which nothing but separate parts is read, the parts are made."""
    readers, results = readers_of(graph), set(graph.outputs)
    count = uses(graph)

    def is_apart(v: Value) -> bool:
        nodes = readers.get(v, [])
        return v not in results and all(n.op.name == "slice" and set(n.attrs["steps"]) == {1}
                                        for n in nodes) and (
            sum(prod(extents_of(n.outputs[0])) for n in nodes) <= prod(extents_of(v)))

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if node.op.name != "slice" or not _is_concrete(node) or not is_apart(node.inputs[0]):
            return None
        if 0 in extents_of(node.outputs[0]):  # none of one element: an extent of 1 is not cut
            return None
        (x,), made = inputs, rw.producer.get(inputs[0])
        shape = extents_of(x)
        spans = list(zip(node.attrs["starts"], node.attrs["stops"], strict=True))
        cuts = [a for a, n in enumerate(shape) if spans[a] != (0, n)]
        if made is None or not is_plain_loop(made) or len(cuts) != 1:
            return None
        cutter = _Cutter(rw, count, shape, cuts[0])
        if not all(map(cutter.may_cut, made.inputs)):
            return None
        parts = [cutter.cut(v, spans[cuts[0]]) for v in made.inputs]
        return rw.emit(made.op.name, *parts, **made.attrs)

    return remove_dead(rebuild(graph, visit))


def _is_concrete(node: Node) -> bool:
    return all(isinstance(n, int) for v in (*node.inputs, *node.outputs) for n in v.aval.shape)


def _are_words(spans: Sequence[Span], shape: tuple[int, ...], axis: int, bits: int) -> bool:
    """Whether each part of a row is so many words of memory."""
    inner = prod(shape[axis + 1:]) * bits
    return all((end - begin) * inner % WORD == 0 for begin, end in spans)


__all__ = ["loops_of_parts", "reductions_of_parts", "slices_of_loops"]
