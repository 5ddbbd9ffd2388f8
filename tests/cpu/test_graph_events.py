"""Events that a graph records again and again: which nodes go, and that all keep their order."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.runtime import graph_events
from tessera.runtime.graph_events import RecordedEdges, drop_repeated, without_repeated

KERNEL, WAIT, RECORD = 0, 6, 7
FIRST, SECOND = 900, 901  # events


class Graph:
    """What the driver says of a graph. kinds: by node, with the event."""

    def __init__(self, kinds, edges):
        self.kinds, self.edges = kinds, {(a, b): data for a, b, data in edges}

    def cuDriverGetVersion(self):
        return 0, 12080

    def cuGraphGetNodes(self, graph, nodes, count):
        if nodes is not None:
            (ctypes.c_void_p * count).from_address(nodes)[:] = list(self.kinds)
        return 0, len(self.kinds)

    def cuGraphNodeGetType(self, node):
        return 0, self.kinds[node][0]

    def cuGraphEventRecordNodeGetEvent(self, node):
        return 0, self.kinds[node][1]

    cuGraphEventWaitNodeGetEvent = cuGraphEventRecordNodeGetEvent

    def cuGraphGetEdges(self, graph, first, second, data, count):
        if first is not None:
            for at, values in ((first, [a for a, _ in self.edges]),
                               (second, [b for _, b in self.edges])):
                (ctypes.c_void_p * count).from_address(at)[:] = values
            (ctypes.c_uint64 * count).from_address(data)[:] = list(self.edges.values())
        return 0, len(self.edges)

    def cuGraphAddDependencies(self, graph, first, second, data, count):
        pair = (ctypes.c_void_p.from_address(first).value,
                ctypes.c_void_p.from_address(second).value)
        assert count == 1 and data is None and pair not in self.edges
        self.edges[pair] = 0
        return (0,)

    def cuGraphDestroyNode(self, node):
        del self.kinds[node]
        self.edges = {k: d for k, d in self.edges.items() if node not in k}
        return (0,)


@pytest.fixture
def of(monkeypatch):
    def dropped(graph):
        monkeypatch.setattr(graph_events, "driver", lambda: graph)
        return drop_repeated(1)
    return dropped


def test_of_messages_in_a_row_the_last_event_stays(of):
    """Kernels 1 3 5 7 of the program, messages 2 4 6 as NCCL captures them."""
    kernels, records = range(1, 8), (12, 14, 16)
    graph = Graph(dict.fromkeys(kernels, (KERNEL, 0)) | dict.fromkeys(records, (RECORD, FIRST)),
                  [(1, 2, 0), (2, 3, 0), (3, 4, 0), (4, 5, 0), (5, 6, 0), (6, 7, 0),
                   (2, 12, 0), (12, 4, 0), (4, 14, 0), (14, 6, 0), (6, 16, 0)])
    assert of(graph) == {12, 14}
    assert sorted(graph.edges) == [(1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (6, 16)]


def test_events_beside_the_way_of_the_messages_go_too(of):
    graph = Graph(dict.fromkeys(range(1, 4), (KERNEL, 0))
                  | dict.fromkeys((11, 12, 13), (RECORD, FIRST)) | {9: (WAIT, FIRST)},
                  [(9, 1, 0), (1, 2, 0), (2, 3, 0), (1, 11, 0), (2, 12, 0), (3, 13, 0)])
    assert of(graph) == {11, 12}
    assert sorted(graph.edges) == [(1, 2), (2, 3), (3, 13), (9, 1)]


def test_what_follows_an_event_alone_follows_what_stood_before_it(of):
    graph = Graph({1: (KERNEL, 0), 2: (RECORD, FIRST), 3: (KERNEL, 0), 4: (RECORD, FIRST)},
                  [(1, 2, 0), (2, 3, 0), (3, 4, 0)])
    assert of(graph) == {2} and sorted(graph.edges) == [(1, 3), (3, 4)]


def test_a_kernel_that_begins_early_is_no_wait(of):
    """5 is launched while 1 runs: 3 would not wait for 1 by it."""
    graph = Graph({1: (KERNEL, 0), 2: (RECORD, FIRST), 3: (KERNEL, 0), 4: (RECORD, FIRST),
                   5: (KERNEL, 0)},
                  [(1, 2, 0), (2, 3, 0), (3, 4, 0), (1, 5, 1), (5, 3, 0)])
    assert of(graph) == {2} and (1, 3) in graph.edges
    graph = Graph({1: (KERNEL, 0), 2: (RECORD, FIRST), 3: (KERNEL, 0), 4: (RECORD, FIRST)},
                  [(1, 2, 0), (2, 3, 0), (3, 4, 0), (1, 3, 1)])
    assert not of(graph)  # there is an edge, which is not this one


@pytest.mark.parametrize("kinds, edges", [
    ({1: (RECORD, FIRST), 2: (RECORD, SECOND)}, [(1, 2, 0)]),  # of two communicators
    ({1: (KERNEL, 0), 2: (KERNEL, 0), 11: (RECORD, FIRST), 12: (RECORD, FIRST)},
     [(1, 11, 0), (2, 12, 0)]),  # neither tells of both kernels
    ({1: (RECORD, FIRST), 2: (WAIT, FIRST), 3: (RECORD, FIRST)}, [(1, 2, 0), (2, 3, 0)]),
    ({1: (KERNEL, 0), 2: (KERNEL, 0)}, [(1, 2, 1)])])
def test_what_somebody_sees_stays(kinds, edges, of):
    graph = Graph(dict(kinds), edges)
    assert not of(graph) and graph.kinds == kinds and len(graph.edges) == len(edges)


def test_an_old_driver_does_not_tell(of):
    graph = Graph({1: (RECORD, FIRST), 2: (RECORD, FIRST)}, [(1, 2, 0)])
    graph.cuDriverGetVersion = lambda: (0, 12020)
    assert not of(graph)


def waits(edges, nodes):
    """Pairs of which the second waits for all of the first, which begin with such an edge."""
    found = {(a, b) for (a, b), whole in edges.items() if whole}
    after = {n: {b for a, b in edges if a == n} for n in nodes}
    while True:
        more = {(a, c) for a, b in found for c in after[b]} - found
        if not more:
            return found
        found |= more


@given(st.data())
def test_all_that_waited_waits(data):
    count = data.draw(st.integers(2, 9))
    nodes = data.draw(st.permutations(range(1, count + 1)))
    kinds = data.draw(st.lists(st.sampled_from([KERNEL, KERNEL, WAIT, RECORD]), min_size=count,
                               max_size=count))
    events = {n: data.draw(st.sampled_from([FIRST, SECOND])) for n in nodes}
    chosen = data.draw(st.lists(st.sampled_from([None, True, True, False]), min_size=count ** 2,
                                max_size=count ** 2))
    of_kind = {n: k for n, k in zip(sorted(nodes), kinds, strict=True)}
    edges = {(a, b): chosen[(a - 1) * count + b - 1]
             or RECORD in (of_kind[a], of_kind[b])  # those of events are plain
             for a in nodes for b in nodes if a < b and chosen[(a - 1) * count + b - 1] is not None}
    made = RecordedEdges()
    for (a, b), whole in edges.items():
        made.add(a, b, whole)
    recorded = {n: events[n] for n in nodes if of_kind[n] == RECORD}
    awaited = {n: events[n] for n in nodes if of_kind[n] == WAIT}
    gone, new = without_repeated(nodes, made, recorded, awaited)
    left = set(nodes) - {*gone}
    assert not {*new} & edges.keys()
    now = {k: w for k, w in edges.items() if left.issuperset(k)} | dict.fromkeys(new, True)
    assert {(a, b) for a, b in waits(edges, nodes) if {a, b} <= left} == waits(now, left)
    order = waits(edges, nodes)
    for n in gone:  # somebody tells of all of which it told
        assert any(recorded[m] == recorded[n] and all((a, m) in order for a, b in order if b == n)
                   for m in recorded.keys() & left)
