"""Events that a recorded graph records again and again: the last time of each is all that anybody
can see.

NCCL records an event of its own behind each of its launches in a graph, so that what it is asked
for outside waits for the graph. Each such node costs the host time at every launch of the graph. A
node goes where another one records the same event behind all that it stands behind: who waits for
the event waits for as much. What stood behind a node that went comes behind what stood in front.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import field
from functools import reduce
from operator import and_, or_

from ..lazy_dataclass import dataclass
from . import libcuda
from .device import check, driver

OLDEST = 12030  # the driver that tells edges with their data


@dataclass
class RecordedEdges:
    """Who waits for whom. after: by node, those behind it and whether each waits for all of it."""

    after: dict[int, dict[int, bool]] = field(default_factory=lambda: defaultdict(dict))
    before: dict[int, dict[int, bool]] = field(default_factory=lambda: defaultdict(dict))

    def add(self, first: int, second: int, whole: bool = True) -> None:
        self.after[first][second] = self.before[second][first] = whole

    def drop(self, node: int) -> None:
        for first in self.before.pop(node, {}):
            del self.after[first][node]
        for second in self.after.pop(node, {}):
            del self.before[second][node]

    def in_order(self, nodes: Sequence[int]) -> list[int]:
        left = {n: len(self.before[n]) for n in nodes}
        out = [n for n in nodes if not left[n]]
        for n in out:
            for second in self.after[n]:
                left[second] -= 1
                if not left[second]:
                    out.append(second)
        return out


def drop_repeated(graph: int) -> frozenset[int]:
    """The nodes that went of a graph that is not instantiated yet."""
    if check(driver().cuDriverGetVersion(), "ask for the driver's version") < OLDEST:
        return frozenset()
    nodes = _nodes(graph)
    kinds = {n: check(driver().cuGraphNodeGetType(n), "ask for the kind of a node") for n in nodes}
    recorded = {n: check(driver().cuGraphEventRecordNodeGetEvent(n), "ask for an event")
                for n in nodes if kinds[n] == libcuda.RECORD_NODE}
    if len(recorded) == len({*recorded.values()}):
        return frozenset()
    awaited = {n: check(driver().cuGraphEventWaitNodeGetEvent(n), "ask for an event")
               for n in nodes if kinds[n] == libcuda.WAIT_NODE}
    edges = _edges(graph)
    gone, new = without_repeated(nodes, edges, recorded, awaited)
    for first, second in new:
        a, b = ctypes.c_void_p(first), ctypes.c_void_p(second)
        check(driver().cuGraphAddDependencies(
            graph, ctypes.addressof(a), ctypes.addressof(b), None, 1), "order nodes of a graph")
    for n in gone:
        check(driver().cuGraphDestroyNode(n), "take a node out of a graph")
    return frozenset(gone)


def without_repeated(nodes: Sequence[int], edges: RecordedEdges, recorded: dict[int, int],
                     awaited: dict[int, int]) -> tuple[list[int], list[tuple[int, int]]]:
    """The nodes that may go, and what has to wait for what then. recorded, awaited: by node, the
    event. Edges are changed."""
    order, bit = edges.in_order(nodes), {n: 1 << k for k, n in enumerate(nodes)}
    reached = dict[int, int]()
    for n in reversed(order):  # of each, what stands behind it
        reached[n] = _all(reached[s] | bit[s] for s in edges.after[n])
    left, gone, new = {*nodes}, list[int](), list[tuple[int, int]]()
    for n in (n for n in order if n in recorded):
        first, second = edges.before[n], edges.after[n]
        behind = reduce(and_, (reached[a] for a in first), -1)  # all that n stands behind
        seen = _all(reached[a] for a in (n, *first))
        pairs = [(a, b) for a in first for b in second if not bit[b] & _all(
            reached[s] | bit[s] for s, whole in edges.after[a].items() if whole and s != n)]
        if (not any(behind & bit[m] for m in left if m != n and recorded.get(m) == recorded[n])
                or any(seen & bit[w] for w, e in awaited.items() if e == recorded[n])
                or not all((*first.values(), *second.values()))
                or any(b in edges.after[a] for a, b in pairs)):
            continue
        edges.drop(n)
        left.discard(n)
        gone.append(n)
        for a, b in pairs:
            edges.add(a, b)
        new += pairs
    return gone, [(a, b) for a, b in new if a in left and b in left]


def _all(sets: Iterable[int]) -> int:
    return reduce(or_, sets, 0)


def _nodes(graph: int) -> list[int]:
    library, what = driver(), "ask for the nodes of a graph"
    count = check(library.cuGraphGetNodes(graph, None, 0), what)
    nodes = (ctypes.c_void_p * count)()
    check(library.cuGraphGetNodes(graph, ctypes.addressof(nodes), count), what)
    return [n or 0 for n in nodes]


def _edges(graph: int) -> RecordedEdges:
    library, what, made = driver(), "ask for the edges of a graph", RecordedEdges()
    count = check(library.cuGraphGetEdges(graph, None, None, None, 0), what)
    first, second = (ctypes.c_void_p * count)(), (ctypes.c_void_p * count)()
    data = (ctypes.c_uint64 * count)()
    check(library.cuGraphGetEdges(graph, *map(ctypes.addressof, (first, second, data)), count),
          what)
    for a, b, how in zip(first, second, data, strict=True):
        made.add(a or 0, b or 0, not how)
    return made


__all__ = ["drop_repeated"]
