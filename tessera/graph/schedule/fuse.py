"""Fusion: which nodes run together, in one loop or behind one anchor.

    groups = fuse(graph, target)      # in an order in which each runs after those it reads

A group has one iteration space, the shape of its full values. In it run elementwise ops whose
result has that shape or is constant along the last axis, reductions over the last axis, and sums
over all leading axes, which leave as outputs. Nodes join the groups of their producers, and sums
over leading axes those that read the same value, as long as
no path leaves the group and comes back, and the group reads few enough full values: all of these
lie in memory until the last is made, so a long sum, of a weight's gradients say, is taken in parts.
Elementwise ops on numbers of rows join a group that reduces such rows, before or behind them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from heapq import heappop, heappush

from ...lazy_dataclass import dataclass
from ..ir import Graph, Node, Value, node_effects, uses
from ..simplify import KEEP_EFFECTS
from .boundaries import narrow_boundaries
from .epilogues import join_epilogues, recompute_small
from .groups import MAX_OPS, FusionGroup
from .loop_ops import column_sum_axes, is_last_axis_reduction
from .target import ScheduleTarget


@dataclass(eq=False)
class _Entry:
    """A unit while groups grow: its nodes, its neighbours, and as bits all groups before it.

    sums: it does nothing but sum over leading axes.

    Only groups have a bit: nothing asks who depends on the others, and a graph of 10^5 of them
    would keep 10^10 bits.
    """

    index: int
    nodes: list[Node]
    shape: tuple[int, ...] | None = None  # iteration space of a group
    bit: int = 0
    sums: bool = True
    depends: int = 0
    before: set[_Entry] = field(default_factory=set)  # read by it
    behind: set[_Entry] = field(default_factory=set)  # that read it
    reads: frozenset[Value] = frozenset()  # of the whole space, made elsewhere


class _Fuser:
    def __init__(self, graph: Graph, target: ScheduleTarget):
        self.target = target
        self.entries: list[_Entry] = []
        self.entry_of: dict[Value, _Entry] = {}
        self.last: _Entry | None = None  # with an effect whose order counts
        self.leaving: set[Value] = set()  # sums over leading axes: known when their loop has ended
        self.readers: dict[Value, list[_Entry]] = {}
        self.graph, self.groups = graph, 0
        self.given = set(graph.given)

    def run(self) -> list[_Entry]:
        for node in self.graph.nodes:
            self.place(node)
        for entry in self.entries:
            self.join_rows(entry)
        return [e for e in self.entries if e.nodes]

    def place(self, node: Node) -> None:
        shape = self.target.loop_space(node)
        sources = {id(e): e for v in node.inputs if (e := self.entry_of.get(v)) is not None}
        if node_effects(node) & KEEP_EFFECTS and self.last is not None:
            sources[id(self.last)] = self.last
        mine = None
        if shape is not None:
            for e in sorted(sources.values(), key=lambda e: -e.index):
                if e.shape is not None and _fits(node, shape, e.shape) and self.may_join(
                    node, e, sources.values()
                ) and not self.waits(node, e):
                    mine = e
                    break
        if mine is None:
            mine = _Entry(len(self.entries), [], shape)
            if shape is not None:
                mine.bit, self.groups = 1 << self.groups, self.groups + 1
            self.entries.append(mine)
        self.join(mine, node, list(sources.values()))
        if node_effects(node) & KEEP_EFFECTS:
            self.last = mine
        if shape is not None:
            for e in [*sources.values(), *self.beside(node, mine)]:
                if e is not mine and e.nodes and e.shape == mine.shape:
                    self.merge(mine, e)

    def beside(self, node: Node, mine: _Entry) -> list[_Entry]:
        """Entries that read a value of the whole space which a node of `mine` reads too, and of the
        two one that does nothing but sum it over leading axes."""
        if len(mine.shape or ()) < 2:  # no axis but the last
            return []
        found = {id(e): e for v in self.full(node, mine) for e in self.readers[v] if e.nodes}
        return [e for e in found.values() if e.sums or mine.sums]

    def may_join(self, node: Node, e: _Entry, sources: object) -> bool:
        """No other source depends on e: else e would wait for itself."""
        if len(e.nodes) >= MAX_OPS or len(
                e.reads | self.full(node, e)) > self.target.most_reads:
            return False
        return all(s is e or not s.depends & e.bit for s in sources)  # type: ignore

    def full(self, node: Node, e: _Entry) -> set[Value]:
        """What a node of e reads of the whole space from elsewhere: no numbers, which are no reads
        where the space is one element either."""
        return {v for v in node.inputs
                if self.entry_of.get(v) is not e and tuple(v.aval.shape) == e.shape
                and (e.shape or v in self.entry_of or v in self.given)}

    def join(self, e: _Entry, node: Node, sources: list[_Entry]) -> None:
        e.nodes.append(node)
        e.reads |= self.full(node, e)
        for v in e.reads:
            if e not in (known := self.readers.setdefault(v, [])):
                known.append(e)
        if column_sum_axes(node) is not None:
            self.leaving.update(node.outputs)
        else:
            e.sums = False
        new = 0
        for s in sources:
            if s is not e:
                new |= s.depends | s.bit
                e.before.add(s)
                s.behind.add(e)
        for v in node.outputs:
            self.entry_of[v] = e
        self._extend(e, new)

    def waits(self, node: Node, e: _Entry) -> bool:
        """Whether a node reads what leaves an entry only at its end, or elsewhere."""
        return any((v in self.leaving or node.op.beside) and self.entry_of.get(v) is e
                   for v in node.inputs)

    def _extend(self, e: _Entry, new: int) -> None:
        """e depends on more groups, and so does all that reads it."""
        changed = [e]
        while changed:
            e = changed.pop()
            if new & ~e.depends:
                e.depends |= new
                changed += e.behind

    def merge(self, a: _Entry, b: _Entry) -> None:
        """Make b part of a, in whose space its nodes fit, unless a path between them runs through a
        third entry."""
        whole = a.reads | b.reads if a.shape == b.shape else a.reads
        reads = {v for v in whole if self.entry_of.get(v) not in (a, b)}
        if len(a.nodes) + len(b.nodes) > MAX_OPS or len(reads) > self.target.most_reads:
            return
        if any(self.waits(n, b) for n in a.nodes) or any(self.waits(n, a) for n in b.nodes):
            return
        for x, y in ((a, b), (b, a)):
            if any(p is not y and p.depends & y.bit for p in x.before):
                return
        a.nodes = sorted(a.nodes + b.nodes, key=self.order.__getitem__)
        for node in b.nodes:
            for v in node.outputs:
                self.entry_of[v] = a
        a.reads, a.sums, b.nodes = frozenset(reads), a.sums and b.sums, []
        a.before, a.behind = (a.before | b.before) - {a, b}, (a.behind | b.behind) - {a, b}
        for other in b.before:
            other.behind.discard(b)
            other.behind.add(a)
        for other in b.behind:
            other.before.discard(b)
            other.before.add(a)
        a.before.discard(a)
        a.behind.discard(a)
        deps = (a.depends | b.depends) & ~(a.bit | b.bit)
        # What depends on the one has a bit of it, which from now on is a bit of both.
        a.bit |= b.bit
        a.depends = deps
        for other in a.behind:
            self._extend(other, deps | a.bit)

    def join_rows(self, e: _Entry) -> None:
        """Elementwise ops on numbers of rows become part of a group that reduces such rows and
        makes some of their operands, or is all that reads them."""
        for a in sorted((*e.before, *(e.behind if len(e.behind) == 1 else ())),
                        key=lambda a: a.index):
            wide = a.shape if a.nodes and a.shape != e.shape else None
            if wide is not None and e.shape is not None and e.nodes and any(
                    map(is_last_axis_reduction, a.nodes)) and all(
                    _fits(n, e.shape, wide) for n in e.nodes):
                self.merge(a, e)

    @property
    def order(self) -> dict[Node, int]:
        if not hasattr(self, "_order"):
            self._order = {n: i for i, n in enumerate(self.graph.nodes)}
        return self._order


def _fits(node: Node, shape: tuple, space: tuple) -> bool:
    """The node's own space is the group's, or its rows: [..., 1]."""
    if shape == space:
        return True
    row = (*space[:-1], 1)
    return bool(space) and shape == row and not node.op.reduction and not node.op.placed


def fuse(graph: Graph, target: ScheduleTarget) -> list[FusionGroup]:
    """Groups in an order in which each runs after those it reads. Raises UnsupportedTargetError at
    an op that the target cannot run, with its line."""
    count = uses(graph).copy()  # groups of other boundaries read otherwise
    groups: list[FusionGroup] = []
    for entry in _in_order(_Fuser(graph, target).run()):
        groups += _groups_of(entry, target)
    for group in groups:
        if not group.writes_all:
            group.connect(count)
    joined = join_epilogues(narrow_boundaries(groups, count, target), count, target)
    return recompute_small(joined, count, target)


def _groups_of(entry: _Entry, target: ScheduleTarget) -> list[FusionGroup]:
    if entry.shape is None:
        return target.from_node(entry.nodes[0])
    return target.from_loop(FusionGroup("loop", entry.shape, list(entry.nodes)))


def _in_order(entries: list[_Entry]) -> Iterator[_Entry]:
    """Topological, and close to the order of the program (it bounds the live memory)."""
    waits = {e.index: len(e.before) for e in entries}
    ready = [e.index for e in entries if not e.before]
    at = {e.index: e for e in entries}
    while ready:
        done = at[heappop(ready)]
        yield done
        for e in done.behind:
            waits[e.index] -= 1
            if not waits[e.index]:
                heappush(ready, e.index)


__all__ = ["fuse"]
