"""Reductions of few and long rows, which as many groups would have, as those of parts of them and
then of what the parts gave: the sum of 2^20 numbers took one multiprocessor.

    sum(x)     of [1048576]   ->  sum(sum(x as [256, 4096], 1))
    sum(x x)   of [700003]    ->  sum(sum(y y, 1)) + sum(z z),
                                  of y = x[:696320] as [256, 2720] and z = x[696320:]

Elementwise ops that nothing else reads make the elements of the parts.
"""

from __future__ import annotations

from math import prod

from ....kernels.row_blocks import few_row_share
from ....lazy_dataclass import dataclass
from ....runtime.generations import Generation
from ...ir import Graph, Node, Value
from ...schedule.loop_axes import extents_of
from ...simplify import Rewriter, rebuild, remove_dead
from .cut_axes import Cut, Rebuilder, Shape

LONG, SHORTEST = 1 << 16, 2048  # elements of a row that is worth a second kernel, of a part of it
FEWEST_PARTS, MOST_PARTS = 16, 256  # of a row; of all: two for each of 128 multiprocessors
SHARED = 1 << 16  # elements of a row that the groups of a cluster read as quickly as two kernels
JOINS = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}
STEP = 16  # elements: parts of a row that has no such divisor begin where wide accesses may


def split_few_rows(graph: Graph, chip: Generation) -> Graph:
    """Rows that are not so long are shared by the groups of a cluster (few_row_share), in one
    kernel."""
    again = _Rebuilder(graph)

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        parts, each = _parts(node, chip)
        if not parts:
            return None
        old, first = node.inputs[0], node.attrs["axis"][0]
        outer, length = old.aval.shape[:first], prod(extents_of(old)[first:])
        rest = {k: v for k, v in node.attrs.items() if k not in ("axis", "keepdims")}

        def reduced(x: Value, axis: int) -> Value:
            return rw.emit(node.op.name, x, axis=(axis,), keepdims=True, **rest)

        x = again.emit(rw, old, _Part(first, length, (0, parts * each), (parts, each)))
        out = reduced(rw.emit("reshape", reduced(x, first + 1), shape=(*outer, parts)), first)
        if parts * each < length:
            last = _Part(first, length, (parts * each, length), (length - parts * each,))
            out = rw.emit(JOINS[node.op.reduction], out, reduced(again.emit(rw, old, last), first))
        return rw.emit("reshape", out, shape=node.outputs[0].aval.shape)

    return remove_dead(rebuild(graph, visit))


@dataclass(frozen=True)
class _Part:
    """Of rows that begin at an axis: a span of their elements, in extents of its own."""

    first: int
    length: int
    span: tuple[int, int]
    extents: Shape

    def __call__(self, shape: Shape) -> Shape | None:
        elements = prod(shape[self.first:])
        if elements not in (1, self.length):
            return None
        return *shape[:self.first], *(self.extents if elements > 1 else (1,) * len(self.extents))


class _Rebuilder(Rebuilder):
    def lay(self, rw: Rewriter, v: Value, cut: Cut, shape: Shape) -> Value:
        assert isinstance(cut, _Part)
        outer, elements = v.aval.shape[:cut.first], prod(v.aval.shape[cut.first:])
        if elements > 1 and cut.span != (0, elements):
            starts, stops = (cut.span[0],), (cut.span[1],)
            v = rw.emit("reshape", v, shape=(*outer, elements))
            v = rw.emit("slice", v, starts=(0,) * len(outer) + starts, stops=(*outer, *stops),
                        steps=(1,) * v.aval.ndim)
        return rw.emit("reshape", v, shape=shape)


def _parts(node: Node, chip: Generation) -> tuple[int, int]:
    """Of each row, and the elements of one; (0, 0): it stays whole."""
    if node.op.reduction not in JOINS or not node.attrs.get("keepdims"):
        return 0, 0
    x, axis = node.inputs[0], node.attrs["axis"]
    if not all(isinstance(d, int) for d in x.aval.shape):
        return 0, 0
    shape = extents_of(x)
    rows, length = prod(shape[:axis[0]]), prod(shape[axis[0]:])
    most = min(MOST_PARTS // max(1, rows), length // SHORTEST)
    if prod(shape[axis[-1] + 1:]) != 1 or length < LONG or most < FEWEST_PARTS or (
            length <= SHARED and few_row_share(rows, length, chip)):
        return 0, 0
    most = 1 << (most.bit_length() - 1)
    parts = min(length & -length, most)
    if parts >= FEWEST_PARTS:
        return parts, length // parts
    # Of several rows such parts do not lie one after another, and would be copied.
    return (most, length // most // STEP * STEP) if rows == 1 else (0, 0)


__all__ = ["split_few_rows"]
