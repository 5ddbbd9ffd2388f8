"""Op ids: the numbers of a printed graph, carried by every level below it.

`%7` of the Graph IR is `v7` in kernels. Passes keep the line of the node that they rewrite, so the
id travels with the line, and what an op became is found again behind any of them.
"""

from __future__ import annotations

from dataclasses import fields, replace

from ...errors import SourceLine
from ...lazy_dataclass import dataclass
from ..ir import Graph, Node, Value
from ..simplify import Rewriter, rebuild


@dataclass(frozen=True)
class OpLine(SourceLine):
    """A line of the user's program, and the id of the op that stands on it."""

    id: str = ""


def number(graph: Graph) -> Graph:
    """The graph with the id of each node beside its line."""
    names = value_ids(graph)

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> None:
        return None

    marked = []
    for i, node in enumerate(graph.nodes):
        at = node.where or SourceLine("", 0)
        own = names[node.outputs[0]] if node.outputs else f"!{i}"
        where = OpLine(**{f.name: getattr(at, f.name) for f in fields(SourceLine)}, id=own)
        marked.append(Node(node.op, node.inputs, node.attrs, node.outputs, where))
    return rebuild(replace(graph, nodes=tuple(marked)), visit)


def value_ids(graph: Graph) -> dict[Value, str]:
    """`%n` of each value, as the graph prints it."""
    values = [*graph.given, *(v for node in graph.nodes for v in node.outputs)]
    return {v: f"%{i}" for i, v in enumerate(values)}


def id_of(node: Node) -> str:
    """The id of the op that a node came from; "" for a number that a pass made."""
    return node.where.id if isinstance(node.where, OpLine) else ""


def line_of(where: SourceLine | None) -> SourceLine | None:
    """The user's line, None when there is none."""
    return where if where is not None and where.file else None


def fates(graph: Graph, lowered: dict[str, str]) -> dict[str, str]:
    """What became of each op of a numbered graph: its group, or why it needs none.

    lowered: group by op id. Total: every op of the graph has an entry.
    """
    names, twins, live = value_ids(graph), _twins(graph), _live(graph)
    found: dict[str, str] = {}
    for node in graph.nodes:
        own = id_of(node)
        if own in lowered:
            found[own] = lowered[own]
        elif own not in live:
            found[own] = "not used"
        elif own in twins:
            found[own] = f"the same as {twins[own]}"
        elif not node.inputs:
            found[own] = "a constant"
        else:
            found[own] = f"no work: {', '.join(names[v] for v in node.inputs)} as it lies"
    return found


def _live(graph: Graph) -> set[str]:
    needed, live = set(graph.outputs), set()
    for node in reversed(graph.nodes):
        if node.op.effects or any(v in needed for v in node.outputs):
            needed.update(node.inputs)
            live.add(id_of(node))
    return live


def _twins(graph: Graph) -> dict[str, str]:
    """Ops that compute what an earlier one does, and that one."""
    first: dict[tuple, str] = {}
    same: dict[Value, str] = value_ids(graph)
    twins: dict[str, str] = {}
    for node in graph.nodes:
        key = (node.op.name, tuple(same[v] for v in node.inputs), repr(sorted(
            (k, repr(v)) for k, v in node.attrs.items())))
        own = id_of(node)
        if key in first and not node.op.effects:
            twins[own] = first[key]
            same.update((v, f"{first[key]}.{i}") for i, v in enumerate(node.outputs))
        else:
            first[key] = own
            same.update((v, f"{own}.{i}") for i, v in enumerate(node.outputs))
    return twins


__all__ = ["OpLine", "fates", "id_of", "line_of", "number", "value_ids"]
