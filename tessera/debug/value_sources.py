"""From which arguments of a compiled function a value was computed: followed while it runs op by
op, so that a report can say whose NaN came in, and which of many parameters a bad value is of."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ..graph.ir import Graph, Node, handed, subgraphs
from ..graph.operand import describe

MOST = 4  # arguments that a report names; what is computed of more is computed of all
Sources = frozenset[str] | None  # None: of more, or of a value of which it is not known


class ValueSources:
    """Of one run of a graph: the arguments by their names, such as params.blocks.1.w."""

    def __init__(self, graph: Graph):
        self.graph = graph

    @cached_property
    def of(self) -> dict[Any, Sources]:
        """By value, of those that have been made so far. Calls without a finding need it not."""
        kept = self.graph.kept
        if "value_sources" not in kept:
            kept["value_sources"] = _inputs(self.graph)
        return dict(kept["value_sources"])

    def follow(self, node: Node) -> None:
        """A node has run."""
        found = _among(self.of, node.inputs)
        for v in node.outputs:
            self.of[v] = found

    def told(self, keys: Sequence[Any], some: bool) -> tuple[str, ...]:
        """The names of the arguments that led to these values. some: where they are not all."""
        found = _among(self.of, keys)
        every = len(self.graph.inputs) + len(self.graph.captures)
        return () if found is None or (some and len(found) == every) else tuple(sorted(found))


def _among(of: dict[Any, Sources], keys: Sequence[Any]) -> Sources:
    """Of all these values together."""
    found = [of.get(k) for k in keys]
    if None in found:
        return None
    made = frozenset[str]().union(*(f for f in found if f is not None))
    return made if len(made) <= MOST else None


def _inputs(graph: Graph) -> dict[Any, Sources]:
    """Those of the inputs of a graph, and of the graphs that its nodes hold."""
    names = graph.kept.get("argument_names", ())
    of: dict[Any, Sources] = {v: frozenset([f"argument {name}"])
                              for v, name in zip(graph.inputs, names, strict=False)}
    of.update((v, frozenset([f"the captured {describe(t)}"])) for v, t in graph.captures)
    _walk(graph, of)
    return of


def _walk(graph: Graph, of: dict[Any, Sources]) -> None:
    for node in graph.nodes:
        for inner in subgraphs(node):
            for v, given in handed(node, inner):
                of[v] = of.get(given)
            _walk(inner, of)
        found = _among(of, node.inputs)
        for v in node.outputs:
            of[v] = found
