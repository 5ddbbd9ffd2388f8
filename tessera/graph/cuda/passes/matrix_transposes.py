"""Matrices that are read both ways: what is done to each element of the transposed one, and sums
and extrema of its rows, are done on the matrix as it lies.

A contrastive loss is the cross entropy of the rows of all similarities, and of its columns, written
as the same loss of z.T: that was a copy of z, and one of its cotangent.
"""

from __future__ import annotations

from math import prod

from ...ir import Graph, Node, Value, readers_of
from ...simplify import Rewriter, rebuild, remove_dead
from .data_movement import is_plain_loop

SWAP = 1, 0
LEAST = 1 << 16  # elements


def read_matrices_as_they_lie(graph: Graph) -> Graph:
    """Elementwise ops and reductions in front of transposes of matrices that are read as they are,
    too."""
    readers = readers_of(graph)

    def is_read_both_ways(node: Node) -> bool:
        x = node.inputs[0]
        known = all(isinstance(d, int) for d in x.aval.shape)
        return known and prod(x.aval.shape) >= LEAST and any(
            not _swaps(n) for n in readers[x])

    chosen = {n.outputs[0] for n in graph.nodes if _swaps(n) and is_read_both_ways(n)}
    if not chosen:
        return graph
    pass_ = _Turner(chosen)
    return remove_dead(rebuild(graph, pass_.visit))


def _swaps(node: Node) -> bool:
    return node.op.name == "transpose" and tuple(node.attrs["axes"]) == SWAP


class _Turner:
    """turned: of a transposed value what it is the transpose of.  again: of others the transpose
    that was computed for them; None where that takes a copy."""

    def __init__(self, chosen: set[Value]):
        self.chosen = chosen
        self.turned: dict[Value, Value] = {}
        self.again: dict[Value, Value | None] = {}

    def visit(self, rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if len(node.outputs) != 1:
            return None
        (out,) = node.outputs
        if out in self.chosen:
            self.turned[out] = inputs[0]
            return None
        if not any(v in self.turned for v in inputs):
            return None
        if _swaps(node):
            return self.turned[inputs[0]]
        if node.op.reduction and len(inputs) == 1 and "axis" in node.attrs:
            return self.reduced(rw, node, inputs[0])
        if not is_plain_loop(node) or out.aval.ndim != 2:
            return None
        given = [self.of(rw, v, out) for v in inputs]
        if any(v is None for v in given):
            return None
        made = rw.emit(node.op.name, *(v for v in given if v is not None), **node.attrs)
        back = rw.emit("transpose", made, axes=SWAP)
        self.turned[back] = made
        return back

    def reduced(self, rw: Rewriter, node: Node, x: Value) -> Value:
        axis = tuple(sorted(1 - a for a in node.attrs["axis"]))
        made = rw.emit(node.op.name, self.turned[x], **{**node.attrs, "axis": axis})
        shape = node.outputs[0].aval.shape
        return made if made.aval.shape == shape else rw.emit("reshape", made, shape=shape)

    def of(self, rw: Rewriter, v: Value, out: Value) -> Value | None:
        """An operand of an op with this result, transposed, if that takes no copy."""
        if v in self.turned:
            return self.turned[v]
        if v.aval.ndim == 0 or prod(v.aval.shape) == 1:
            return v
        if v.aval.ndim == 1 or 1 in v.aval.shape:
            rows, columns = (1, *v.aval.shape)[-2:]
            return rw.emit("reshape", v, shape=(columns, rows))
        made = rw.producer.get(v)
        if made is None or not is_plain_loop(made) or v.aval.shape != out.aval.shape:
            return None
        if v not in self.again:
            given = list[Value]()
            for x in made.inputs:
                if (operand := self.of(rw, x, out)) is None:
                    break
                given.append(operand)
            self.again[v] = rw.emit(made.op.name, *given, **made.attrs) \
                if len(given) == len(made.inputs) else None
        return self.again[v]


__all__ = ["read_matrices_as_they_lie"]
