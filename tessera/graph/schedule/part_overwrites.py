"""Results that are written over a part of a value of which other parts are still read.

    h = x w                                    # queries, keys and values
    q, k = rotated(h[0]), rotated(h[1])        # in their own place
    attention(q, k, h[2])

Copies of the parts would be in memory beside h, which stays there for what is left of it: in
training, until the backward pass. A loop reads each element of a part before it writes there
(`ScheduleTarget.overwrites`). What it makes may be one result, or parts of one that is joined, such
as the two halves of a rotation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence

from ..ir import Value
from .groups import FusionGroup, batch_ends
from .layouts import StridedLayout, are_disjoint
from .loop_axes import extents_of
from .target import ScheduleTarget
from .view_plan import ViewPlan, dense, is_copy, parts_of

Places = dict[Value, tuple[Value, StridedLayout]]  # in the memory of other values


def find_part_overwrites(plan: ViewPlan, groups: Sequence[FusionGroup], target: ScheduleTarget,
                         results: Collection[Value]) -> Places:
    """Where such results, and the parts of those that are joined, are made. plan: how values lie
    without that."""
    return _Finder(plan, groups, target, results).found()


class _Finder:
    def __init__(self, plan: ViewPlan, groups: Sequence[FusionGroup], target: ScheduleTarget,
                 results: Collection[Value]):
        self.plan, self.groups, self.target = plan, groups, target
        self.ends = batch_ends(groups)
        self.maker = {v: i for i, g in enumerate(groups) for v in g.outputs}
        self.leaving = {plan.owner(v) for v in results}
        self.kept = self.leaving | {plan.owner(v) for v in plan.pieces}
        self.readers: dict[Value, list[tuple[int, Value]]] = {}  # of an owner's memory
        self.parts: dict[tuple, dict[StridedLayout, None]] = {}  # of an owner, by their extents
        for i, g in enumerate(groups):
            if target.memory(g).kind == "view" and all(v in plan.owners for v in g.outputs):
                continue
            for v in g.inputs:
                self.readers.setdefault(plan.owner(v), []).append((i, v))
        for v, lies in plan.layouts.items():
            if v not in plan.pieces and not lies.is_dense and not lies.repeats:
                self.parts.setdefault((plan.owner(v), extents_of(v)), {})[lies] = None
        self.taken: dict[Value, list[StridedLayout]] = {}

    def found(self) -> Places:
        made: Places = {}
        for i, group in enumerate(self.groups):
            for y in group.outputs:
                if y in self.taken:  # nothing that is written over lies in another's memory
                    continue
                for owner, lies, places in self.candidates(i, y):
                    if owner not in made and all(
                            are_disjoint(lies, other) for other in self.taken.get(owner, ())):
                        self.taken.setdefault(owner, []).append(lies)
                        made |= places
                        break
        return made

    def candidates(self, i: int, y: Value) -> Iterator[tuple[Value, StridedLayout, Places]]:
        """The parts of others' memory that y can be written over."""
        group, plan = self.groups[i], self.plan
        joins = is_copy(group)
        parts = [p for p, _ in parts_of(group, dense(y))] if joins else [y]
        if y in plan.owners or y in self.leaving or joins and not all(
                plan.owner(p) is y and p in plan.pieces for p in parts):
            return
        reads = [x for p in parts[:1] for x in self.groups[self.maker[p]].inputs]
        for owner in dict.fromkeys(map(plan.owner, reads)):
            known = self.parts.get((owner, extents_of(y)), {})
            if not known or not self.is_free(owner):
                continue
            read = dict.fromkeys(plan.layout(x) for x in reads if plan.owner(x) is owner)
            for lies in known if joins else filter(known.__contains__, read):
                places = dict(parts_of(group, lies)) if joins else {y: lies}
                if lies.end <= dense(owner).end and all(
                        at is not None and self.writes(p, owner, at) for p, at in places.items()):
                    made = {**places, y: lies}
                    yield owner, lies, {v: (owner, at) for v, at in made.items() if at is not None}

    def is_free(self, owner: Value) -> bool:
        """Whether the memory is the graph's own, and made at once."""
        made = self.maker.get(owner)
        if made is None or owner in self.kept or owner.aval.dtype.packed:
            return False
        group = self.groups[made]
        return (self.target.memory(group).kind != "view"
                and self.target.buffer(group) == "arena")

    def writes(self, p: Value, owner: Value, place: StridedLayout) -> bool:
        """Whether a loop can make p where it alone reads from then on."""
        i = self.maker[p]
        group = self.groups[i]
        begin = bisect_left(self.ends, self.ends[i])
        if group.kind != "loop" or self.target.writes(group, p, place):
            return False
        over = [x for x in group.inputs if self.plan.owner(x) is owner
                and self.plan.layout(x) == place and self.target.overwrites(group, x, p)]
        return len(over) == 1 and all(
            are_disjoint(self.plan.layout(x), place) for r, x in self.readers[owner]
            if r >= begin and not (r == i and x is over[0]))


__all__ = ["find_part_overwrites"]
