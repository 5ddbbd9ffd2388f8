"""Matmuls of narrow elements as matmuls of these widened: BLAS has no narrow types.

An operand is widened where it is made, in front of the views and copies that lead to the matmul:
there a loop that rounds it widens it in the same pass. What is exact stays exact, so no result
changes.
"""

from __future__ import annotations

from .. import flops
from ..ir import Graph, Node, Value
from ..ops.contract import is_multiplied_as_stored, wide_type
from ..simplify import Rewriter, merge_common, rebuild, remove_dead


def widen_matmuls(graph: Graph) -> Graph:
    """The graph with every matmul in the wide type of its operands."""
    if not any(map(_narrow, graph.nodes)):
        return graph
    made: dict[Value, Value] = {}

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if not _narrow(node):
            return None
        a, b = (_widened(rw, v, made) for v in inputs)
        return rw.emit(node.op.name, a, b, **node.attrs)

    return remove_dead(merge_common(rebuild(graph, visit)))


def _narrow(node: Node) -> bool:
    return node.op.name == "matmul" and is_multiplied_as_stored(node.inputs[0].aval.dtype)


def _widened(rw: Rewriter, v: Value, made: dict[Value, Value]) -> Value:
    if v not in made:
        node = rw.producer.get(v)
        if node is not None and _only_moves_elements(node):
            made[v] = rw.emit(node.op.name, _widened(rw, node.inputs[0], made), **node.attrs)
        else:
            made[v] = rw.emit("cast", v, source=v.aval.type, to=wide_type(v.aval.dtype))
    return made[v]


def _only_moves_elements(node: Node) -> bool:
    """Whether an op only moves elements of its one operand, which commutes with widening them."""
    if len(node.inputs) != 1 or node.op.multi or node.op.effects:
        return False
    same = node.inputs[0].aval.type == node.outputs[0].aval.type
    return same and node.op.operations is flops.none


__all__ = ["widen_matmuls"]
