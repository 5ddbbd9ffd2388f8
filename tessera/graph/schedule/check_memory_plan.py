"""Proof of a memory plan: nothing is written over while it is read, and nobody gets memory that is
somebody else's.

    verify_plan(graph, groups, plan)     # raises GraphError naming both ops, or says nothing

Who owns which buffer is computed here from the records of the ops and of the target
(`ScheduleTarget.memory`) and from the order of the groups alone. Of the plan only its decisions are
read: places, what is released when, which results are copied. So a mistake in planning and one in
a record both show here, before anything runs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...errors import GraphError
from ..ir import Graph, Value, value_bytes
from .groups import FusionGroup

if TYPE_CHECKING:
    from .memory_plan import MemoryPlan

GIVEN = ("input", "capture", "drawn", "known")  # memory of the caller, or of every call


def verify_plan(graph: Graph, groups: Sequence[FusionGroup], plan: MemoryPlan) -> None:
    """Raise GraphError unless every value keeps its memory until it is read last, and every result
    that is not copied has memory of its own."""
    proof = _Proof(graph, groups, plan)
    proof.own()
    proof.overlaps()
    proof.releases()
    proof.results()


class _Proof:
    def __init__(self, graph: Graph, groups: Sequence[FusionGroup], plan: MemoryPlan):
        self.graph, self.groups, self.plan = graph, groups, plan
        self.owner: dict[Value, Value] = {}
        self.lying: dict[Value, list[Value]] = {}  # by owner: what lies there, in order
        self.made: dict[Value, int] = {}  # by owner: the group that makes it
        self.ends: dict[Value, int] = {}  # by owner: the last that reads any there

    def own(self) -> None:
        """Owners of all values, and until when their memory is read."""
        drawn = (v for v, place in self.plan.places.items() if place.kind == "drawn")
        for v in (*self.graph.inputs, *(v for v, _ in self.graph.captures), *self.plan.known,
                  *drawn):
            self.owner[v], self.lying[v] = v, [v]
        for i, group in enumerate(self.groups):
            for v in group.inputs:
                self.ends[self.owner[v]] = i
            for v in group.outputs:
                self._own(v, group, i)
        for v in self.graph.outputs:
            self.ends[self.owner[v]] = len(self.groups)
        self._donations()

    def _own(self, v: Value, group: FusionGroup, i: int) -> None:
        place, memory = self.plan.places[v], self.plan.target.memory(group)
        if place.kind != "view":
            self.owner[v], self.lying[v] = v, [v]
            self.made[v] = self.ends[v] = i
            if place.kind in GIVEN:
                raise self._fault(f"{_name(group)} writes {place.kind} memory")
            if place.root is not v:
                raise self._fault(f"{_name(group)} has memory of its own, the plan gives it "
                                  "another value's")
            return
        if memory.kind == "fresh":
            raise self._fault(f"{_name(group)} makes a new buffer, the plan calls it a view")
        self.owner[v] = owner = self.owner[group.inputs[memory.operand]]
        self.ends[owner] = i
        self.lying[owner].append(v)
        if place.root is not owner:
            raise self._fault(f"{_name(group)} lies in the memory of its operand {memory.operand}, "
                              "the plan puts it elsewhere")

    def _donations(self) -> None:
        """What is written over is not read afterwards, and was no one else's."""
        over: dict[Value, tuple[int, FusionGroup]] = {}  # values that are gone, and since when
        for i, group in enumerate(self.groups):
            for v in group.inputs:
                if v in over:
                    raise self._fault(f"{_name(group)} reads what {_name(over[v][1])} has written "
                                      "over")
            memory = self.plan.target.memory(group)
            if memory.kind != "donated" or self.plan.places[group.outputs[0]].kind != "view":
                continue
            x = group.inputs[memory.operand]
            if self.plan.places[self.owner[x]].kind in GIVEN and (
                    self.owner[x] not in self.plan.donated):
                raise self._fault(f"{_name(group)} writes over memory that the graph was given")
            lying = self.lying[self.owner[x]]
            over |= {w: (i, group) for w in lying[:lying.index(group.outputs[0])]}
        for v in self.graph.outputs:
            if v in over:
                raise self._fault(f"a result lies where {_name(over[v][1])} has written over it")

    def overlaps(self) -> None:
        """No two values whose memory is read at one time share bytes of the arena."""
        live: list[tuple[int, int, int]] = []  # begin, end, number; they are apart
        at: dict[int, list[tuple[int, int, int]]] = {}
        for i, group in enumerate(self.groups):
            for v in group.outputs:
                if self.owner[v] is not v or self.plan.places[v].kind != "arena":
                    continue
                begin = self.plan.places[v].offset
                if begin % self.plan.target.align_bytes:
                    raise self._fault(f"{_name(group)} is given byte {begin} of the arena, which "
                                      f"is no multiple of {self.plan.target.align_bytes}")
                span = (begin, begin + _bytes(v), i)
                self._apart(live, span)
                insort(live, span)
                at.setdefault(self.ends[v], []).append(span)
            for span in at.pop(i, ()):
                del live[bisect_left(live, span)]

    def _apart(self, live: list[tuple[int, int, int]], span: tuple[int, int, int]) -> None:
        place = bisect_left(live, span)
        for begin, end, group in live[max(place - 1, 0): place + 1]:
            if begin < span[1] and span[0] < end:
                raise self._fault(
                    f"{_name(self.groups[span[2]])} is given bytes {span[0]}..{span[1]} of the "
                    f"arena, where the result of {_name(self.groups[group])} is still read")

    def releases(self) -> None:
        """What is released is read by no later group."""
        lives: dict[int, list[tuple[int, int]]] = {}  # by offset: made, and read last
        for v, made in self.made.items():
            if self.plan.places[v].kind == "arena":
                lives.setdefault(self.plan.places[v].offset, []).append((made, self.ends[v]))
        for i, ranges in self.plan.released.items():
            for offset, _ in ranges:
                for made, end in lives.get(offset, ()):
                    if made <= i < end:
                        raise self._fault(f"{_name(self.groups[made])} is released behind "
                                          f"{_name(self.groups[i])}, {_name_at(self.groups, end)} "
                                          "reads it later")

    def results(self) -> None:
        """A result that is not copied owns its memory, alone."""
        seen: set[Value] = set()
        for v, copied in zip(self.graph.outputs, self.plan.copied, strict=True):
            owner = self.owner[v]
            kind = self.plan.places[owner].kind
            if copied:
                continue
            given = kind in GIVEN and owner not in self.plan.donated
            if given or kind == "arena" or owner in seen:
                whose = "another result" if owner in seen else f"memory of kind {kind!r}"
                raise self._fault(f"result {self.graph.outputs.index(v)} would leave in {whose}")
            seen.add(owner)

    def _fault(self, what: str) -> GraphError:
        return GraphError(f"memory plan of {self.graph.name}: {what}",
                          hint="this is a fault of tessera, not of the program: please report it")


def _bytes(v: Value) -> int:
    return max(value_bytes(v), 1)


def _name(group: FusionGroup) -> str:
    what = str(group) if len(group.nodes) > 1 else group.nodes[0].op.name
    return f"{what} ({group.where})" if group.where is not None and group.where.file else what


def _name_at(groups: Sequence[FusionGroup], i: int) -> str:
    return _name(groups[i]) if i < len(groups) else "the caller"


__all__ = ["verify_plan"]
