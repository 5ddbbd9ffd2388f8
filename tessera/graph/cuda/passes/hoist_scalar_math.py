"""What is computed of the numbers of reductions and of constants, such as means of sums, stands in
front of the reshape that takes the axes of the reductions away: their kernel does it.

Not what is computed further with other values, as a gradient is with moments: loops over arrays of
any shape share a launch, and those of numbers with an axis more would be apart. And not what is
moved: sums alone are written where they are joined.
"""

from __future__ import annotations

from ...ir import Graph, Node, Value, producers_of, readers_of
from ...schedule.region_copies import MOVES
from ...simplify import Rewriter, rebuild
from ..kernels.spell import template
from .data_movement import is_plain_loop


def hoist_scalar_math(graph: Graph) -> Graph:
    finished = _finished(graph)

    def reduced(rw: Rewriter, v: Value) -> Value:
        """What it is a reshape of, where that is numbers of a reduction."""
        while (made := rw.made_by(v, "reshape")) is not None:
            (v,) = made.inputs
        return v

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if node not in finished:
            return None
        given = [v if _is_number(rw.producer.get(v)) else reduced(rw, v) for v in inputs]
        if len({v.aval.shape for v in given if not _is_number(rw.producer.get(v))}) > 1:
            return None  # one of them met others, and stayed where it was
        out = rw.emit(node.op.name, *given, **node.attrs)
        shape = node.outputs[0].aval.shape
        return out if out.aval.shape == shape else rw.emit("reshape", out, shape=shape)

    return rebuild(graph, visit) if finished else graph


def _finished(graph: Graph) -> set[Node]:
    """The nodes that compute with such numbers alone, and whose results nothing else computes with
    element by element."""
    maker = producers_of(graph)
    readers, found = readers_of(graph), set[Node]()
    numbers: dict[Value, tuple] = {}  # with the extents that the reductions have given them
    for node in graph.nodes:
        if node.op.reduction:
            numbers |= {v: v.aval.shape for v in node.outputs}
        elif node.op.name == "reshape" and (x := node.inputs[0]) in numbers and \
                _differ_by_unit_axes(x, node.outputs[0]):
            numbers[node.outputs[0]] = numbers[x]
        elif (extents := _extents(node, maker, numbers)) is not None:
            found.add(node)
            numbers[node.outputs[0]] = extents

    def meets_others(v: Value) -> bool:
        return any(meets_others(n.outputs[0]) if n.op.name == "reshape" else n.op.name in MOVES or
                   n not in found and is_plain_loop(n) and _differ_by_unit_axes(v, n.outputs[0])
                   for n in readers.get(v, ()))

    for node in reversed(graph.nodes):
        if node in found and node.outputs[0].aval.ndim and meets_others(node.outputs[0]):
            found.remove(node)
    return {n for n in found if any(maker[v].op.name == "reshape" or maker[v] in found
                                    for v in n.inputs if v in numbers)}


def _extents(node: Node, maker: dict[Value, Node], numbers: dict[Value, tuple]) -> tuple | None:
    """Those of the numbers that a node computes with, where these have the same; numbers of one
    element are finished one by one: their sums are trees."""
    if len(node.outputs) != 1 or not is_plain_loop(node) or template(node) is None:
        return None
    mine = [v for v in node.inputs if not _is_number(maker.get(v))]
    extents = {numbers.get(v) for v in mine}
    shape = node.outputs[0].aval.shape
    if len(extents) != 1 or (not shape and len(mine) > 1) or any(
            v.aval.shape != shape for v in mine):
        return None
    return extents.pop()


def _differ_by_unit_axes(x: Value, y: Value) -> bool:
    """Whether they differ in axes of one element at most."""
    return [n for n in x.aval.shape if n != 1] == [n for n in y.aval.shape if n != 1]


def _is_number(made: Node | None) -> bool:
    return made is not None and made.op.name == "constant" and not made.outputs[0].aval.ndim


__all__ = ["hoist_scalar_math"]
