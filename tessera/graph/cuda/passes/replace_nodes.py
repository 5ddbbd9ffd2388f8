"""Several nodes of a graph replaced by others at once, wherever in the order they stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ....lazy_dataclass import dataclass
from ...ir import Graph, Node, Value
from ...simplify import Rewriter, remove_dead


@dataclass(frozen=True, eq=False)
class Replacement:
    """nodes: what goes.  reads: what stands in their place is made of.
    write(rw): writes it, and puts into rw.env what stands for the values of the nodes that others
    read. rw.env has all of `reads`."""

    nodes: tuple[Node, ...]
    reads: tuple[Value, ...]
    write: Callable[[Rewriter], None]


def replace_nodes(graph: Graph, replacements: Sequence[Replacement]) -> Graph:
    """The graph with each node behind what it reads, as near to its place as that allows.

    Of replacements that wait for each other, as two may whose nodes read each other's values, the
    last is left out; so is one that reads what is made of its own nodes.
    """
    wanted = list(replacements)
    while wanted:
        rw, waiting = _rewrite(graph, wanted)
        if not waiting:
            outputs = tuple(rw.env[v] for v in graph.outputs)
            return remove_dead(replace(graph, nodes=tuple(rw.nodes), outputs=outputs))
        wanted.remove([r for r in waiting if isinstance(r, Replacement)][-1])
    return graph


def _rewrite(graph: Graph, replacements: Sequence[Replacement]
             ) -> tuple[Rewriter, list[Node | Replacement]]:
    """The new graph, and what of it waits for itself."""
    rw, made = Rewriter(), {n: r for r in replacements for n in r.nodes}
    rw.env.update((v, v) for v in graph.given)
    waiting: list[Node | Replacement] = []
    seen = set[Node]()
    for node in graph.nodes:
        if node not in seen:
            waiting.append(made.get(node, node))
            seen.update(made[node].nodes if node in made else ())
        waiting = _write(rw, waiting)
    return rw, waiting


def _write(rw: Rewriter, waiting: Sequence[Node | Replacement]) -> list[Node | Replacement]:
    """Writes what has all that it reads, in order; what is left."""
    left: list[Node | Replacement] = []
    for item in waiting:
        reads = item.inputs if isinstance(item, Node) else item.reads
        if any(v not in rw.env for v in reads):
            left.append(item)
        elif isinstance(item, Node):
            inputs = tuple(rw.env[v] for v in item.inputs)
            rw.add(item if inputs == item.inputs else replace(item, inputs=inputs))
            rw.env.update((v, v) for v in item.outputs)
        else:
            item.write(rw)
    return left


__all__ = ["Replacement", "replace_nodes"]
