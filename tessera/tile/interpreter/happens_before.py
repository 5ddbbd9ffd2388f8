"""The order between groups that atomics make, by vector clocks.

Each group has a time, which goes on with each release and barrier; an access is at the time of its
group. A release publishes at an address what the group, or one lane of it, did until then and what
it had learned; who reads that address by an acquire learns it. An access of another group is
ordered before mine when I have learned a later time of that group.

What is learned is kept as a graph of publications, each with those that it builds on: a release or
an acquire costs one node, and only a conflict asks what is in the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

import numpy as np

from tessera.lazy_dataclass import dataclass
from tessera.tile.ir.ir import Function, Node, Op, SSAValue, uses, walk
from tessera.tile.ir.op_record import OPS
from tessera.tile.passes.written_arguments import written_parameters

ALL = -3  # pseudo lane: every lane of a group
Bounds = dict[tuple[int, int], int]  # (group, lane) -> the time before which its accesses are known


@dataclass(eq=False)
class Publication:
    """What a release makes known: accesses by the lanes of `bounds` before these times, and all
    that those it builds on make known."""

    bounds: Bounds
    builds_on: tuple[Publication, ...]
    whole: Bounds | None = field(default=None, repr=False)

    def all(self) -> Bounds:
        """The bounds of the whole graph below it."""
        if self.whole is None:
            self.whole = {}
            left, seen = [self], {id(self)}
            while left:
                at = left.pop()
                known = at.bounds if at.whole is None or at is self else at.whole
                for who, time in known.items():
                    self.whole[who] = max(time, self.whole.get(who, 0))
                below = at.builds_on if known is at.bounds else ()
                left += [p for p in below if id(p) not in seen]
                seen |= {id(p) for p in below}
        return self.whole


def _orders(node: Node, read: Mapping[SSAValue, int]) -> bool:
    """Whether a node may order what groups do: a barrier of clusters, or an atomic update of an
    element that releases or whose result is read."""
    if not isinstance(node, Op):
        return False
    if OPS[node.name].effect == "sync":
        return "groups" in node.attr
    return OPS[node.name].effect == "atomic" and node.attr.get("scope") != "group" and bool(
        node.attr.get("release") or any(d.value in read for d in node.outs))


class Clocks:
    """The clocks of one launch.

    times: of each group. barriers: the time of each group at its last barrier.
    active: whether an atomic of the kernel orders groups; written: the tensors that it writes;
    observed: the values that something reads
    """

    def __init__(self, function: Function | None = None, groups: int = 0):
        self.times, self.barriers = np.zeros(groups, np.int32), np.zeros(groups, np.int32)
        self.active, self.written = False, frozenset[str]()
        self.observed: Mapping[SSAValue, int] = {}
        self.group_knows: dict[int, Publication] = {}
        self.lane_knows: dict[int, dict[int, Publication]] = {}
        if function is not None:
            self.observed = uses(function.body)
            self.active = any(_orders(n, self.observed) for n in walk(function.body))
            self.written = frozenset(written_parameters(function))

    # --- what happens -------------------------------------------------------------------------
    def barrier(self, groups: np.ndarray) -> None:
        """All lanes of each group meet: what one has learned, all know."""
        self.times[groups] += 1
        self.barriers[groups] = self.times[groups]
        if self.lane_knows:
            for g in map(int, groups):
                for learned in self.lane_knows.pop(g, {}).values():
                    self._learn(g, ALL, learned)

    def cluster_barrier(self, groups: np.ndarray) -> None:
        """The groups of one cluster meet."""
        self.barrier(groups)
        if self.active:
            met = Publication({(g, ALL): int(self.times[g]) for g in map(int, groups)}, tuple(
                self.group_knows[g] for g in map(int, groups) if g in self.group_knows))
            for g in map(int, groups):
                self.group_knows[g] = met

    def acquire(self, group: int, lane: int, published: Publication | None) -> None:
        if published is not None:
            self._learn(group, lane, published)

    def release(self, group: int, lane: int, before: Publication | None) -> Publication:
        """What is published where `before` was; lane: ALL for the whole group."""
        now = int(self.times[group]) + 1
        self.times[group] = now
        bounds = {(group, ALL): now if lane == ALL else int(self.barriers[group])}
        if lane != ALL:
            bounds[group, lane] = now
        known = (before, self.group_knows.get(group), self.lane_knows.get(group, {}).get(lane))
        return Publication(bounds, tuple(p for p in known if p is not None))

    def _learn(self, group: int, lane: int, learned: Publication) -> None:
        mine = self.group_knows if lane == ALL else self.lane_knows.setdefault(group, {})
        who = group if lane == ALL else lane
        known = mine.get(who)
        if known is None:
            mine[who] = learned
        elif known is not learned and learned not in known.builds_on:
            mine[who] = Publication({}, (known, learned))

    # --- what it orders -----------------------------------------------------------------------
    def unordered(self, group: np.ndarray, lane: np.ndarray, other: np.ndarray,
                  other_lane: np.ndarray, time: np.ndarray) -> np.ndarray:
        """Whether nothing orders the accesses of others, at these times, before mine: [n]."""
        out = np.ones(len(group), bool)
        for g in map(int, np.unique(group)):
            mine = group == g
            out[mine] = ~self._known(self.group_knows.get(g), other[mine], other_lane[mine],
                                     time[mine])
            for one, learned in self.lane_knows.get(g, {}).items():
                at = mine & (lane == one) & out
                out[at] = ~self._known(learned, other[at], other_lane[at], time[at])
        return out

    def _known(self, learned: Publication | None, group: np.ndarray, lane: np.ndarray,
               time: np.ndarray) -> np.ndarray:
        if learned is None:
            return np.zeros(len(group), bool)
        bounds = learned.all()
        whole = np.zeros(len(self.times), np.int32)
        lanes: list[tuple[tuple[int, int], int]] = []
        for (g, one), bound in bounds.items():
            if one == ALL:
                whole[g] = bound
            else:
                lanes.append(((g, one), bound))
        known = time < whole[group]
        for (g, one), bound in lanes:
            known |= (group == g) & (lane == one) & (time < bound)
        return known


__all__ = ["ALL", "Clocks", "Publication"]
