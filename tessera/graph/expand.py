"""Expansion: ops that are records for the sake of their derivatives, written in smaller ops.

Softmax and the norms have short derivative rules as a whole, and are chains of elementwise ops and
reductions for a compiler. A graph keeps the whole op while it is differentiated; before it is
compiled, `expand` opens it, so that fusion sees the chain. Ops that hold a graph for the sake of
its derivatives (a checkpoint, a function with a rule of its own) are opened by `inline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..tensor import Tensor
from .ir import Graph, Node
from .trace import apply, evaluate, run_nodes, trace


def expand(graph: Graph) -> Graph:
    """The graph with every op that has an `expand` rule replaced by that rule's ops."""
    while any(node.op.expand is not None for node in graph.nodes):
        graph = _expand_once(graph)
    return graph


def _expand_once(graph: Graph) -> Graph:
    """Captures are traced as inputs: they are read when the graph runs, not now."""
    held = [v for v, _ in graph.captures]

    def body(*args: Any) -> list:
        env = dict(zip((*graph.inputs, *held), args, strict=True))
        run_nodes(graph, env, _open)
        return [env[v] for v in graph.outputs]

    new = trace(body, [v.aval for v in (*graph.inputs, *held)], graph.name)
    n = len(graph.inputs)
    captures = zip(new.inputs[n:], (t for _, t in graph.captures), strict=True)
    return Graph(new.name, new.inputs[:n], (*captures, *new.captures), new.nodes, new.outputs)


def _open(node: Node, inputs: list) -> Any:
    if node.op.expand is None:
        return apply(node.op, *inputs, **node.attrs)
    return node.op.expand(*inputs, **node.attrs)


def inline(graph: Graph, args: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results of a held graph, its nodes recorded in place, each on the user's line."""
    return tuple(evaluate(graph, args, lambda node, xs: apply(node.op, *xs, **node.attrs)))
