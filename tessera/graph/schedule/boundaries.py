"""What lies in memory between groups: the values from which readers make theirs again, where these
are fewer bytes, by a third at least: a longer life of other values has its price too.

    pre = bf16(x @ w); y = gelu(pre)          # one group, and in the backward pass another:
    dx = dy * gelu'(pre)

Fusion puts gelu'(pre) into the first group, because its operand is there, and 4 bytes an element
would be written and read. Of all sets of values from which the readers can make it with elementwise
ops, the one of the fewest bytes is kept instead: pre, of 2 bytes. It is a minimum cut of the ops
that lead to the value (Ford and Fulkerson 1956, doi:10.4153/CJM-1956-045-5), where a value weighs
the bytes that would be written and read of it. Values that lie in memory anyway weigh no write;
the sums of a matmul do not lie there, if what follows can take them from registers, unless a reader
reads them already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...lazy_dataclass import dataclass
from ..ir import Node, Value, value_bytes
from .groups import MAX_OPS, FusionGroup
from .loop_axes import extents_of
from .target import ScheduleTarget, takes_nothing

LEAST_BYTES = 1 << 20  # a value of less is written and read in a microsecond
MOST_OPS = 32  # that a reader does again

Count = dict[Value, int]  # how often each value is read, results of the graph included


def narrow_boundaries(groups: list[FusionGroup], count: Count, target: ScheduleTarget
                      ) -> list[FusionGroup]:
    """The groups with fewer bytes between them, in the same order, but those of which readers do
    all. count is kept up to date."""
    if target.takes is takes_nothing:
        return groups
    readers: dict[Value, list[FusionGroup]] = {}
    for g in groups:
        for v in g.inputs:
            readers.setdefault(v, []).append(g)
    fleeting = _fleeting(groups)
    for group in groups:
        again = not group.writes_all
        while again:  # what is kept for one value may make another
            again = any([all(map(_is_large, some)) and _Boundary(
                group, some, readers, count, target, fleeting).narrow()
                for some in (*_read_together(group, readers), *([v] for v in group.outputs))])
    return [g for g in groups if g.nodes]


def _read_together(group: FusionGroup, readers: dict[Value, list[FusionGroup]]
                   ) -> list[list[Value]]:
    """Results that the same groups read, several of them: seven conditions of a clip and a rounding
    are a byte each, and what they are made of has two."""
    found: dict[tuple[int, ...], list[Value]] = {}
    for v in filter(_is_large, group.outputs):
        found.setdefault(tuple(map(id, readers.get(v, ()))), []).append(v)
    return [some for by, some in found.items() if by and len(some) > 1]


def _is_large(v: Value) -> bool:
    return all(isinstance(n, int) for n in v.aval.shape) and value_bytes(v) >= LEAST_BYTES


def _fleeting(groups: Sequence[FusionGroup]) -> set[Value]:
    """Results of anchors, and views of them."""
    found: set[Value] = set()
    for g in groups:
        if g.anchor is not None or g.kind == "view" and found.intersection(g.inputs):
            found.update(g.outputs)
    return found


@dataclass
class _Boundary:
    """Values that a group writes and the same others read."""

    group: FusionGroup
    values: list[Value]
    readers: dict[Value, list[FusionGroup]]
    count: Count
    target: ScheduleTarget
    fleeting: set[Value]

    def narrow(self) -> bool:
        """Whether the readers make some of them again from now on."""
        readers = self.readers.get(self.values[0], [])
        if not readers or self.group in readers:
            return False
        for v in self.values:
            read = sum(r.reads(v) for r in readers)
            if v not in self.group.outputs or self.count[v] != read + self.group.reads(v):
                return False  # a result of the graph
        if any(r.space != self.group.space or r.anchor is not None or any(
                n.op.beside and not set(self.values).isdisjoint(n.inputs) for n in r.nodes)
                for r in readers):
            return False
        cone = self.cone()
        again = self.cut(cone) if cone else []
        if not again or len(again) > MOST_OPS:
            return False
        made = [self.with_nodes(r, again) for r in readers]
        fits = all(self.target.takes(g) and len(g.nodes) <= MAX_OPS for g, _ in made)
        if fits:
            self.values = [v for v in self.values if any(v in n.outputs for n in again)]
            self.replace(readers, made)
        return fits

    # --- which values to keep -----------------------------------------------------------------
    def cone(self) -> list[Node]:
        """The elementwise nodes of the group that lead to the values, in order."""
        wanted, found = set(self.values), []
        for n in reversed(self.group.nodes):
            if wanted.intersection(n.outputs) and self.again(n):
                found.append(n)
                wanted.update(n.inputs)
        return found[::-1]

    def again(self, n: Node) -> bool:
        return self.target.repeatable(n) and extents_of(n.outputs[0]) == self.group.space

    def weight(self, v: Value) -> int:
        """Bytes written and read if the readers take v from memory."""
        readers = self.readers[self.values[0]]
        mine = v in self.group.inputs or v in self.group.outputs
        stored = v not in self.values and (mine and v not in self.fleeting
                                           or any(v in r.inputs for r in readers))
        more = sum(v not in r.inputs or v in self.values for r in readers)
        return value_bytes(v) * (more + (not stored))

    def cut(self, cone: Sequence[Node]) -> list[Node]:
        """The nodes behind the lightest cut, in order; none where the values are lightest."""
        flow = _Flow()
        made = {n.outputs[0] for n in cone}
        seen: set[Value] = set()
        for n in cone:
            for v in (*n.inputs, n.outputs[0]):
                if v not in seen:
                    seen.add(v)
                    flow.edge((v, "in"), (v, "out"), self.weight(v))
                    if v not in made:
                        flow.edge("source", (v, "in"), None)
            for v in n.inputs:
                flow.edge((v, "out"), (n.outputs[0], "in"), None)
        for v in self.values:
            if v in seen:
                flow.edge((v, "out"), "sink", None)
        behind = flow.behind_cut("source", "sink")
        kept = {v for v in seen if (v, "out") in behind and (v, "in") not in behind}
        if 3 * sum(map(self.weight, kept)) > 2 * sum(
                self.weight(v) for v in self.values if v in seen):
            return []
        return [n for n in cone if (n.outputs[0], "in") in behind]

    # --- the groups with it -------------------------------------------------------------------
    def with_nodes(self, reader: FusionGroup, again: Sequence[Node]
                   ) -> tuple[FusionGroup, list[Node]]:
        """A reader that makes the values itself, and the nodes that are new in it."""
        own: dict[Value, Value] = {}
        new = []
        for n in again:
            out = Value(n.outputs[0].aval)
            new.append(Node(n.op, tuple(own.get(v, v) for v in n.inputs), n.attrs, (out,), n.where))
            own[n.outputs[0]] = out
        mine = {v: own[v] for v in self.values if v in own}
        rest = [n if mine.keys().isdisjoint(n.inputs) else
                Node(n.op, tuple(mine.get(v, v) for v in n.inputs), n.attrs,
                     n.outputs, n.where) for n in reader.nodes]
        made = FusionGroup(reader.kind, reader.space, [*new, *rest])
        inside = {v for n in made.nodes for v in n.outputs}
        made.inputs = list(dict.fromkeys(v for n in made.nodes for v in n.inputs
                                         if v not in inside))
        made.outputs = list(reader.outputs)
        return made, new

    def replace(self, readers: Sequence[FusionGroup],
                made: Sequence[tuple[FusionGroup, list[Node]]]) -> None:
        for reader, (group, new) in zip(list(readers), made, strict=True):
            for v in self.values:
                self.count[v] -= reader.reads(v)
            for v in reader.inputs:
                self.readers[v].remove(reader)
            reader.nodes, reader.inputs = group.nodes, group.inputs
            for v in reader.inputs:
                self.readers.setdefault(v, []).append(reader)
            for n in new:
                for v in n.inputs:
                    self.count[v] = self.count.get(v, 0) + 1
            for n in new:
                self.count[n.outputs[0]] = reader.reads(n.outputs[0])
        self.prune()

    def prune(self) -> None:
        """Without nodes that nothing reads any more."""
        g = self.group
        for n in reversed(list(g.nodes)):
            if not any(self.count.get(v, 0) for v in n.outputs):
                g.nodes.remove(n)
                for v in n.inputs:
                    self.count[v] -= 1
        before = set(g.inputs)
        g.connect(self.count)
        for v in before.difference(g.inputs):
            self.readers[v].remove(g)


class _Flow:
    """A network with capacities; None is without bound. Maximum flow by shortest paths."""

    def __init__(self) -> None:
        self.left: dict[object, dict[object, int]] = {}

    def edge(self, a: object, b: object, capacity: int | None) -> None:
        self.left.setdefault(a, {})[b] = UNBOUNDED if capacity is None else capacity
        self.left.setdefault(b, {}).setdefault(a, 0)

    def behind_cut(self, source: object, sink: object) -> set[object]:
        """What lies behind the minimum cut that is nearest to the sink."""
        while sink in (before := self._search(source)):
            path, b = [], sink
            while b != source:
                path.append((before[b], b))
                b = before[b]
            most = min(self.left[a][b] for a, b in path)
            for a, b in path:
                self.left[a][b] -= most
                self.left[b][a] += most
        found, ahead = {sink}, [sink]
        while ahead:
            b = ahead.pop()
            for a in self.left[b]:
                if self.left[a][b] > 0 and a not in found:
                    found.add(a)
                    ahead.append(a)
        return found

    def _search(self, source: object) -> dict[object, object]:
        before: dict[object, object] = {source: source}
        ahead = deque([source])
        while ahead:
            a = ahead.popleft()
            for b, room in self.left[a].items():
                if room > 0 and b not in before:
                    before[b] = a
                    ahead.append(b)
        return before


UNBOUNDED = 1 << 62

__all__ = ["narrow_boundaries"]
