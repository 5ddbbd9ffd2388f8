"""The end of a program that sends between ranks: what came first is used first.

    g0, g1 = sums(...), sums(...)          # of buckets of gradients, the last made last
    w0, w1 = update(w0, g0), update(w1, g1)

When the last that is sent is made, nothing is left beside which it could be on its way but uses of
what has come before. So collectives begin there at once, and what needs the last of them is last:
an optimizer in the order of parameters would begin with those of the first layer, whose gradients
come at the end. What others read alone comes with the first of them, since loops are fused, and one
begins where its first op stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...ir import Graph, Node, Value, node_effects
from ...schedule.groups import FusionGroup
from ...simplify import KEEP_EFFECTS


def use_as_it_comes(graph: Graph) -> Graph:
    """The nodes behind the last that anything sent is made of: first those that send, then others
    by the last of them that they need."""
    nodes, begin = _made_first(graph.nodes)
    if any(node_effects(n) & KEEP_EFFECTS and not _sends(n) for n in nodes[begin:]):
        return graph
    came: dict[Value, int] = {}  # by value, the last collective that it needs
    keys: dict[Node, tuple[bool, int]] = {}
    for i, node in enumerate(nodes):
        last = max((came.get(v, -1) for v in node.inputs), default=-1)
        keys[node] = (False, i) if _sends(node) else (True, last)
        came.update(dict.fromkeys(node.outputs, i if _sends(node) else last))
    read: dict[Value, tuple[bool, int]] = {}  # by value, where it is read first
    for node in reversed(nodes[begin:]):
        if not _sends(node):
            keys[node] = max(keys[node], min((read[v] for v in node.outputs if v in read),
                                             default=keys[node]))
        for v in node.inputs:
            read[v] = min(read.get(v, keys[node]), keys[node])
    return replace(graph, nodes=(*nodes[:begin], *sorted(nodes[begin:], key=keys.__getitem__)))


def cut_where_read(graph: Graph) -> Graph:
    """Parts of what is sent stand in front of the first node that reads them, and those that are
    results at the end: one that has to be copied would wait right behind the collective."""
    held: dict[Value, Node] = {}
    brought, out = set[Value](), list[Node]()

    def emit(node: Node) -> None:
        for v in node.inputs:
            if v in held:
                emit(held.pop(v))
        out.append(node)

    for node in graph.nodes:
        cuts = node.op.view and not brought.isdisjoint(node.inputs)
        if _sends(node) or cuts:
            brought.update(node.outputs)
        if cuts:
            held[node.outputs[0]] = node
        else:
            emit(node)
    while held:
        emit(held.pop(next(iter(held))))
    return replace(graph, nodes=tuple(out))


def _sends(node: Node) -> bool:
    return node.op.exchange is not None


def _all_made(nodes: Sequence[Node]) -> int:
    """Behind the last node that something sent is made of."""
    sent = set[Value]()
    for i in reversed(range(len(nodes))):
        made_of_it = not sent.isdisjoint(nodes[i].outputs)
        if made_of_it and not _sends(nodes[i]):
            return i + 1
        if made_of_it or _sends(nodes[i]):
            sent.update(nodes[i].inputs)
    return len(nodes) if not sent else 0


def _made_first(nodes: Sequence[Node]) -> tuple[Sequence[Node], int]:
    """The nodes, with those that wait for the last but one that sends behind what the last sends is
    made of, unless it is made of them; and where that ends."""
    end = _all_made(nodes)
    begin = next((i + 1 for i in reversed(range(end)) if _sends(nodes[i])), end)
    needed = {v for n in nodes[end:] if _sends(n) for v in n.inputs}
    for node in reversed(nodes[begin:end]):
        if not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
    brought, late = {v for n in nodes[begin - 1:begin] for v in n.outputs}, set[Node]()
    for node in nodes[begin:end]:
        if not brought.isdisjoint(node.inputs):
            brought.update(node.outputs)
            if needed.isdisjoint(node.outputs):
                late.add(node)
    first = [n for n in nodes[begin:end] if n not in late]
    rest = [n for n in nodes[begin:end] if n in late]
    return (*nodes[:begin], *first, *rest, *nodes[end:]), begin + len(first)


def come_by(groups: Sequence[FusionGroup]) -> dict[Value, int]:
    """The collective, by the number of its group, that groups which read what one brings wait for
    last, by what they make."""
    brought = set[Value]()
    last: dict[Value, int] = {}
    found: dict[Value, int] = {}
    for i, group in enumerate(groups):
        sends, need = group.kind == "exchange", max((last.get(v, -1) for v in group.inputs),
                                                    default=-1)
        reads = not brought.isdisjoint(group.inputs)
        last.update(dict.fromkeys(group.outputs, i if sends else need))
        if sends or group.kind == "view" and reads:
            brought.update(group.outputs)
        elif reads:
            found.update(dict.fromkeys(group.outputs, need))
    return found


__all__ = ["come_by", "cut_where_read", "use_as_it_comes"]
