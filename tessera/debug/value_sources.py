"""From which arguments of a compiled function a value was computed: followed while it runs op by
op, so that a report can say whose NaN came in, and which of many parameters a bad value is of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..graph.ir import Graph, Node
from ..graph.operand import describe

MOST = 4  # arguments that a report names; what is computed of more is computed of all
Sources = frozenset[str] | None  # None: of more, or of a value that is none of the graph's


class ValueSources:
    """Of one run of a graph: the arguments by their names, such as params.blocks.1.w."""

    def __init__(self, graph: Graph):
        self.of: dict[Any, Sources] = {
            v: frozenset([f"argument {name}"])
            for v, name in zip(graph.inputs, graph.kept.get("argument_names", ()), strict=False)}
        self.of.update((v, frozenset([f"the captured {describe(t)}"])) for v, t in graph.captures)
        self._all = len(self.of)

    def follow(self, node: Node) -> None:
        """A node has run. The inputs of a graph that a node holds, as a loop does, are unknown."""
        found = self.among(node.inputs)
        for v in node.outputs:
            self.of[v] = found

    def among(self, keys: Sequence[Any]) -> Sources:
        """Of all these values together."""
        found = [self.of.get(k) for k in keys]
        if None in found:
            return None
        made = frozenset[str]().union(*(f for f in found if f is not None))
        return made if len(made) <= MOST else None

    def told(self, keys: Sequence[Any], some: bool) -> tuple[str, ...]:
        """Their names. some: where they are some of the arguments, and not all."""
        found = self.among(keys)
        return () if found is None or (some and len(found) == self._all) else tuple(sorted(found))
