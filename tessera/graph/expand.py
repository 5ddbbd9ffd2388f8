"""Expansion: ops that are records for the sake of their derivatives, written in smaller ops.

Softmax and the norms have short derivative rules as a whole, and are chains of elementwise ops and
reductions for a compiler. A graph keeps the whole op while it is differentiated; before it is
compiled, `expand` opens it, so that fusion sees the chain.

One expansion serves every target. A target that looks for something among the whole ops asks for
`expand_control` first, which opens the graphs that ops hold: checkpoints, functions with a rule of
their own, branches, short loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from ..errors import SourceLine
from ..tensor import Tensor
from .ir import Graph, Node, Value
from .trace import apply, at_line, evaluate, trace

Rule = Callable[..., Any]


def expand(graph: Graph) -> Graph:
    """The graph with every op that has an `expand` rule replaced by that rule's ops."""
    return expand_by(graph, lambda node: node.op.expand)


def expand_control(graph: Graph) -> Graph:
    """The graph with the ops that hold a graph replaced by it, each of its ops on its own line.
    Short loops of known length are repeated, branches chosen from element by element; other loops
    stay, for a host to run."""
    return expand_by(graph, _without_control)


def split_loops(graph: Graph) -> Graph:
    """The graph with matmuls of loops' bodies that wait for nothing that is carried in front of the
    loops and behind them, of all iterations at once."""
    return expand_by(graph, lambda node: node.op.splits and node.op.splits(**node.attrs))


def _without_control(node: Node) -> Rule | None:
    op = node.op
    if op.repeats is not None:
        loop = op.repeats(**node.attrs)
        if loop.is_long or loop.is_launched:
            return None
    return (op.expand or op.unroll) if op.graph_attrs else None


def expand_by(graph: Graph, chosen: Callable[[Node], Rule | None]) -> Graph:
    """The graph with every node for which there is a rule replaced by what that records, until
    there is none."""
    while any(chosen(node) is not None for node in graph.nodes):
        graph = _expand_once(graph, chosen)
    return graph


def _expand_once(graph: Graph, chosen: Callable[[Node], Rule | None]) -> Graph:
    """Nodes that are not chosen stay the nodes that they are."""
    env: dict[Value, Value] = {}
    nodes: list[Node] = []
    captures = list(graph.captures)
    known: dict[Any, Graph] = {}
    for node in graph.nodes:
        inputs = tuple([env.get(v, v) for v in node.inputs])
        rule = chosen(node)
        if rule is None:
            nodes.append(node if inputs == node.inputs else
                         Node(node.op, inputs, node.attrs, node.outputs, node.where))
            continue
        inner = _rule_graph(node, rule, known)
        given: dict[Value, Value] = dict(zip(inner.inputs, inputs, strict=True))
        captures += inner.captures
        nodes += [Node(n.op, tuple(given.get(v, v) for v in n.inputs), n.attrs, n.outputs,
                       _line_inside(node.where, n.where)) for n in inner.nodes]
        env.update(zip(node.outputs, (given.get(v, v) for v in inner.outputs), strict=True))
    outputs = tuple(env.get(v, v) for v in graph.outputs)
    return Graph(graph.name, graph.inputs, tuple(captures), tuple(nodes), outputs)


def _rule_graph(node: Node, rule: Rule, known: dict[Any, Graph]) -> Graph:
    """What a rule records. It is run once for nodes that do the same, as those of other layers."""
    if node.meaning is None:
        return rule_graph(node, rule)
    key = rule, node.meaning, tuple(v.aval for v in node.inputs)
    if key in known:
        return _copy(known[key], node.where)
    made = rule_graph(node, rule)
    if not made.captures and all(
            n.where is None or n.where is node.where for n in made.nodes):
        known[key] = made
    return made


def _copy(graph: Graph, where: SourceLine | None) -> Graph:
    """The same ops on values of their own, on another line."""
    new = {v: Value(v.aval) for v in graph.inputs}
    nodes = []
    for n in graph.nodes:
        new.update((v, Value(v.aval)) for v in n.outputs)
        nodes.append(Node(n.op, tuple(new[v] for v in n.inputs), n.attrs,
                          tuple(new[v] for v in n.outputs), where))
    return Graph(graph.name, tuple(new[v] for v in graph.inputs), (), tuple(nodes),
                 tuple(new[v] for v in graph.outputs))


def rule_graph(node: Node, rule: Rule | None = None) -> Graph:
    """What a rule records, by default the `expand` of the node's op, on the node's line."""
    rule = rule or node.op.expand

    def body(*xs: Any) -> list:
        assert rule is not None
        with at_line(node.where):
            made = rule(*xs, **node.attrs)
        return list(made) if node.op.multi else [made]

    return trace(body, [v.aval for v in node.inputs], node.op.name)


def _line_inside(outer: SourceLine | None, inner: SourceLine | None) -> SourceLine | None:
    """The line of an op that another holds; what a line has beside its place, such as the id of an
    op, is the other's."""
    if outer is None or inner is None:
        return inner or outer
    return replace(outer, **{f.name: getattr(inner, f.name) for f in fields(SourceLine)})


def inline(graph: Graph, args: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results of a held graph, its nodes recorded in place, each on the user's line."""
    return tuple(evaluate(graph, args, lambda node, xs: apply(node.op, *xs, **node.attrs)))
