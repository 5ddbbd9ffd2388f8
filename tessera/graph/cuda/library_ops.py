"""Ops that library kernels do as a whole: they replace what they stand for in a lowered graph.

A product takes in the transpositions of its operands. Of attention see attention_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ...errors import SourceLine
from ..ir import Graph, Node, Value
from ..schedule.library_call import LibraryCall, library_call
from ..schedule.op_ids import OpLine, id_of

PRODUCT = library_call("product")


class Makers:
    """Who makes each value of a graph."""

    def __init__(self, graph: Graph):
        self.maker: dict[Value, Node] = {v: n for n in graph.nodes for v in n.outputs}

    def made_by(self, v: Value, *names: str) -> Node | None:
        node = self.maker.get(v)
        return node if node is not None and node.op.name in names else None

Matcher = Callable[[Makers, Node], Node | None]


def replace_calls(graph: Graph, match: Matcher) -> Graph:
    """The graph with each node for which `match` gives a call replaced by it."""
    users = Makers(graph)
    nodes = [match(users, node) or node for node in graph.nodes]
    return Graph(graph.name, graph.inputs, graph.captures, tuple(nodes), graph.outputs)


def joined(where: SourceLine | None, parts: list[Node]) -> SourceLine | None:
    """The line of a call, with the ids of all that it stands for."""
    if not isinstance(where, OpLine):
        return where
    ids = dict.fromkeys(i for n in parts for i in id_of(n).split() if i)
    return replace(where, id=" ".join(ids))


# --- products ---------------------------------------------------------------------------------
def match_product(users: Makers, node: Node) -> Node | None:
    """matmul of operands as they lie in memory: transposed matrices included."""
    if node.op.name != "matmul":
        return None
    sides = [_operand(users, v) for v in node.inputs]
    attrs = {"layout": "".join("t" if s.transposed else "n" for s in sides), **node.attrs}
    parts = [*sides[0].parts, *sides[1].parts, node]
    return Node(PRODUCT, tuple(s.value for s in sides), attrs, node.outputs,
                joined(node.where, parts))


@dataclass(frozen=True)
class _Side:
    value: Value
    transposed: bool
    parts: list[Node]


def _operand(users: Makers, v: Value) -> _Side:
    transposed, parts = False, list[Node]()
    while (turn := users.made_by(v, "transpose")) and _swaps_last(turn.attrs["axes"]):
        parts.append(turn)
        v, transposed = turn.inputs[0], not transposed
    return _Side(v, transposed, parts)


def _swaps_last(axes: tuple[int, ...]) -> bool:
    n = len(axes)
    return n >= 2 and axes == (*range(n - 2), n - 1, n - 2)


__all__ = ["PRODUCT", "LibraryCall", "Makers", "joined", "match_product", "replace_calls"]
