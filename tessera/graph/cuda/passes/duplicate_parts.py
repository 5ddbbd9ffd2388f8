"""Values that are parts of several concatenations, or a result too: each is written by what makes
it.

    concatenate(a, b, c), concatenate(a, b, d)    ->    concatenate(a, b, c), concatenate(a', b', d)

A part is made where it belongs, in one of them; in any other it is a copy, and a launch. a' is a by
an op of the loop that makes a, which writes it twice. Gradients of a recurrent cell's gates are
such: by the inputs, and by the states.
"""

from __future__ import annotations

from dataclasses import replace

from ...ir import Graph, Node, Value, producers_of
from ...op import OPS
from ...schedule.loop_ops import loop_space
from ..kernels.spell import template


def duplicate_parts(graph: Graph) -> Graph:
    """The graph with an op for each such part but the first."""
    makers = producers_of(graph)
    nodes: list[Node] = []
    taken = set(graph.outputs)
    for node in graph.nodes:
        inputs = list(node.inputs)
        for i, v in enumerate(inputs if node.op.name == "concatenate" else ()):
            maker = makers.get(v)
            if v in taken and maker is not None and loop_space(maker) is not None and (
                    template(maker) is not None):
                same = {"source": v.aval.type, "to": v.aval.type}
                again = Node(OPS["cast"], (v,), same, (Value(v.aval),), maker.where)
                nodes.append(again)
                inputs[i] = again.outputs[0]
            taken.add(v)
        nodes.append(node if tuple(inputs) == node.inputs else
                     Node(node.op, tuple(inputs), node.attrs, node.outputs, node.where))
    return replace(graph, nodes=tuple(nodes))


__all__ = ["duplicate_parts"]
