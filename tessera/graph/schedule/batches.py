"""Batches: groups that do the same to other values and do not wait for each other, side by side.

    groups = batch_groups(groups, graph, key, target)

A step of an optimizer does the same to hundreds of parameters, most of which are small: one launch
over all of them costs less than one for each. Which groups do the same is the target's to say
(`key`). Those that no path joins may run in any order, so at once; they come to stand one after
another, with the same number in `FusionGroup.batch`, and the memory plan takes what such a run
reads and writes as in use from its first group to its last.

To stand together some of them move: a value is made earlier than it is read, or kept until the last
group of the batch is ready. A batch is taken where the most bytes that are in use at one time do
not grow by more than SMALL, or by a PART of them, for all batches together; else halves of it are
tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import field
from heapq import heapify, heappop, heappush

from ...lazy_dataclass import dataclass
from ..ir import Graph, Value, value_bytes
from .group_order import group_order
from .groups import FusionGroup
from .place_views import joined_owners
from .target import ScheduleTarget

SMALL, PART = 1 << 20, 32  # bytes, and a part of all, that the batches of a program may take
LARGE = 1 << 28  # bytes of a group on average, from which on a launch is no part of its time


@dataclass(eq=False)
class _Unit:
    """Groups that stand together, by number, and the units that it reads from and is read by."""

    groups: list[int]
    before: set[_Unit] = field(default_factory=set)
    behind: set[_Unit] = field(default_factory=set)


class _Batcher:
    def __init__(self, groups: Sequence[FusionGroup], graph: Graph, target: ScheduleTarget):
        self.groups = groups
        self.unit = [_Unit([i]) for i in range(len(groups))]  # of each group
        order = group_order(groups, target)
        joined = joined_owners(graph, groups, target)
        self.root = {v: joined.get(root, root) for v, root in order.roots.items()}
        for i, before in enumerate(order.before):
            for b in before:
                self.unit[b].behind.add(self.unit[i])
                self.unit[i].before.add(self.unit[b])
        elsewhere = {self.root.get(v, v) for v in graph.outputs}
        elsewhere |= {v for g in groups if target.buffer(g) == "host" for v in g.outputs}
        self.bytes = {v: value_bytes(v) for v in self.root
                      if self.root[v] is v and v not in elsewhere}
        over = ([(self.root.get(x, x), y) for x, y in target.overwritten(g)] for g in groups)
        self.over = [[(x, y) for x, y in pairs if x in self.bytes
                      and self.bytes[x] == self.bytes.get(y)] for pairs in over]
        # of each group, what has bytes that count
        self.writes = [self._counted(g.outputs) for g in groups]
        self.reads = [self._counted(g.inputs) for g in groups]
        peak = self.peak()
        self.limit = peak + max(SMALL, peak // PART)

    def _counted(self, values: Sequence[Value]) -> list[Value]:
        roots = dict.fromkeys(self.root.get(v, v) for v in values)
        return [v for v in roots if v in self.bytes]

    # --- order --------------------------------------------------------------------------------
    def order(self) -> list[_Unit]:
        """As in the program, a batch where its last group was: what reads it waits, and nothing is
        made early for its sake but what it reads."""
        waits = {unit: len(unit.before) for unit in self.unit}
        ready = [unit.groups[-1] for unit, n in waits.items() if not n]
        heapify(ready)
        out = list[_Unit]()
        while ready:
            unit = self.unit[heappop(ready)]
            out.append(unit)
            for b in unit.behind:
                waits[b] -= 1
                if not waits[b]:
                    heappush(ready, b.groups[-1])
        return out

    def peak(self) -> int:
        """The most bytes of values between groups that are in use at one time."""
        units = self.order()
        first: dict[Value, int] = {}
        last: dict[Value, tuple[int, int]] = {}  # the unit, and how many of its groups
        for at, unit in enumerate(units):
            for i in unit.groups:
                for v in self.writes[i]:
                    first.setdefault(v, at)
                    last[v] = at, 1
                for v in self.reads[i]:
                    last[v] = at, last[v][1] + 1 if v in last and last[v][0] == at else 1
        change = [0] * (len(units) + 1)
        for v, nbytes in self.bytes.items():
            change[first[v]] += nbytes
            change[last[v][0] + 1] -= nbytes
        for at, unit in enumerate(units):
            for i in unit.groups:
                if self.over[i]:
                    self._write_over(self.over[i], at, last, change)
        return max(itertools.accumulate(change))

    def _write_over(self, pairs: Sequence[tuple[Value, Value]], at: int,
                    last: dict[Value, tuple[int, int]], change: list[int]) -> None:
        """Take the bytes of operands that a group writes over as given back before it."""
        gone, there = set[Value](), set[Value]()
        for x, y in pairs:
            if x not in gone and y not in there and last.get(x) == (at, 1):
                change[at] -= self.bytes[x]
                change[at + 1] += self.bytes[x]
                gone.add(x)
                there.add(y)

    # --- batches ------------------------------------------------------------------------------
    def levels(self, members: Sequence[int]) -> list[list[int]]:
        """Groups by how many of them lie on the longest path to each: of one level none waits for
        another, whatever runs between."""
        mine, depth = {self.unit[i] for i in members}, dict[_Unit, int]()
        found: dict[int, list[int]] = {}
        for unit in self.order():
            depth[unit] = max((depth[b] + (b in mine) for b in unit.before), default=0)
            if unit in mine:
                found.setdefault(depth[unit], []).append(unit.groups[0])
        return [sorted(level) for _, level in sorted(found.items())]

    def take(self, members: Sequence[int]) -> None:
        """Make one unit of them, or of halves of them, as memory allows."""
        if len(members) < 2:
            return
        old = [self.unit[i] for i in members]
        made = _Unit(list(members), {b for u in old for b in u.before},
                     {b for u in old for b in u.behind})
        self._put(made, old, [made])
        if self.peak() > self.limit:
            self._put(made, [made], old)
            half = len(members) // 2
            self.take(members[:half])
            self.take(members[half:])

    def _put(self, made: _Unit, gone: Sequence[_Unit], there: Sequence[_Unit]) -> None:
        """Units of the same groups in place of others."""
        for u in gone:
            for b in u.before:
                b.behind.discard(u)
            for b in u.behind:
                b.before.discard(u)
        for u in there:
            for i in u.groups:
                self.unit[i] = u
            for b in u.before:
                b.behind.add(u)
            for b in u.behind:
                b.before.add(u)


def batch_groups(groups: Sequence[FusionGroup], graph: Graph,
                 key: Callable[[FusionGroup], Hashable | None], target: ScheduleTarget
                 ) -> list[FusionGroup]:
    """The groups in an order in which those of a batch stand together, with its number.

    key: equal for groups that may share a launch, None for those that cannot.
    """
    alike: dict[Hashable, list[int]] = {}
    for i, group in enumerate(groups):
        if (of := key(group)) is not None:
            alike.setdefault(of, []).append(i)
    several = [m for m in alike.values() if len(m) > 1
               and sum(_moved_bytes(groups[i]) for i in m) <= LARGE * len(m)]
    if not several:
        return list(groups)
    batcher = _Batcher(groups, graph, target)
    for members in several:
        for level in batcher.levels(members):
            batcher.take(level)
    out = []
    for number, unit in enumerate(batcher.order()):
        for i in unit.groups:
            groups[i].batch = number if len(unit.groups) > 1 else None
            out.append(groups[i])
    return out


def _moved_bytes(group: FusionGroup) -> int:
    return sum(map(value_bytes, (*group.inputs, *group.outputs)))


__all__ = ["batch_groups"]
