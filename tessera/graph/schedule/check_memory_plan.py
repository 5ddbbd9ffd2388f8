"""Proof of a memory plan: nothing is written over while it is read, and nobody gets memory that is
somebody else's.

    verify_plan(graph, units, plan)     # raises GraphError naming both ops, or says nothing

Who owns which buffer is computed here from the ops' records (`GraphOp.memory`) and from the order
of the units alone. Of the plan only its decisions are read: places, what is released when, which
results are copied. So a mistake in planning and one in a record both show here, before anything
runs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import GraphError
from ..ir import Graph, Node, Value, elements
from ..op import FRESH, ResultMemory
from .fuse import FusionGroup, Unit

if TYPE_CHECKING:
    from .memory_plan import MemoryPlan

GIVEN = ("input", "capture", "known")  # memory of the caller, or of every call


def verify_plan(graph: Graph, units: Sequence[Unit], plan: MemoryPlan) -> None:
    """Raise GraphError unless every value keeps its memory until it is read last, and every result
    that is not copied has memory of its own."""
    proof = _Proof(graph, units, plan)
    proof.own()
    proof.overlaps()
    proof.releases()
    proof.results()


class _Proof:
    def __init__(self, graph: Graph, units: Sequence[Unit], plan: MemoryPlan):
        self.graph, self.units, self.plan = graph, units, plan
        self.owner: dict[Value, Value] = {}
        self.lying: dict[Value, list[Value]] = {}  # by owner: what lies there, in order
        self.made: dict[Value, int] = {}  # by owner: the unit that makes it
        self.ends: dict[Value, int] = {}  # by owner: the last unit that reads any value there

    def own(self) -> None:
        """Owners of all values, and until when their memory is read."""
        for v in (*self.graph.inputs, *(v for v, _ in self.graph.captures), *self.plan.known):
            self.owner[v], self.lying[v] = v, [v]
        for i, unit in enumerate(self.units):
            for v in unit.inputs:
                self.ends[self.owner[v]] = i
            for v in unit.outputs:
                self._own(v, unit, i)
        for v in self.graph.outputs:
            self.ends[self.owner[v]] = len(self.units)
        self._donations()

    def _own(self, v: Value, unit: Unit, i: int) -> None:
        place, memory = self.plan.places[v], memory_of(unit)
        if place.kind != "view":
            self.owner[v], self.lying[v] = v, [v]
            self.made[v] = self.ends[v] = i
            if place.root is not v:
                raise self._fault(f"{_name(unit)} has memory of its own, the plan gives it another "
                                  "value's")
            return
        if memory.kind == "fresh":
            raise self._fault(f"{_name(unit)} makes a new buffer, the plan calls it a view")
        self.owner[v] = owner = self.owner[unit.inputs[memory.operand]]
        self.ends[owner] = i
        self.lying[owner].append(v)
        if place.root is not owner:
            raise self._fault(f"{_name(unit)} lies in the memory of its operand {memory.operand}, "
                              "the plan puts it elsewhere")

    def _donations(self) -> None:
        """What is written over is not read afterwards, and was no one else's."""
        over: dict[Value, tuple[int, Unit]] = {}  # values that are gone, and since when
        for i, unit in enumerate(self.units):
            for v in unit.inputs:
                if v in over:
                    raise self._fault(f"{_name(unit)} reads what {_name(over[v][1])} has written "
                                      "over")
            memory = memory_of(unit)
            if memory.kind != "donated" or self.plan.places[unit.outputs[0]].kind != "view":
                continue
            x = unit.inputs[memory.operand]
            if self.plan.places[self.owner[x]].kind in GIVEN:
                raise self._fault(f"{_name(unit)} writes over memory that the graph was given")
            lying = self.lying[self.owner[x]]
            over |= {w: (i, unit) for w in lying[:lying.index(unit.outputs[0])]}
        for v in self.graph.outputs:
            if v in over:
                raise self._fault(f"a result lies where {_name(over[v][1])} has written over it")

    def overlaps(self) -> None:
        """No two values whose memory is read at one time share bytes of the arena."""
        live: list[tuple[int, int, int]] = []  # begin, end, number; they are apart
        at: dict[int, list[tuple[int, int, int]]] = {}
        for i, unit in enumerate(self.units):
            for v in unit.outputs:
                if self.owner[v] is not v or self.plan.places[v].kind != "arena":
                    continue
                begin = self.plan.places[v].offset
                span = (begin, begin + _bytes(v), i)
                self._apart(live, span)
                insort(live, span)
                at.setdefault(self.ends[v], []).append(span)
            for span in at.pop(i, ()):
                del live[bisect_left(live, span)]

    def _apart(self, live: list[tuple[int, int, int]], span: tuple[int, int, int]) -> None:
        place = bisect_left(live, span)
        for begin, end, unit in live[max(place - 1, 0): place + 1]:
            if begin < span[1] and span[0] < end:
                raise self._fault(
                    f"{_name(self.units[span[2]])} is given bytes {span[0]}..{span[1]} of the "
                    f"arena, where the result of {_name(self.units[unit])} is still read")

    def releases(self) -> None:
        """What is released is read by no later unit."""
        lives: dict[int, list[tuple[int, int]]] = {}  # by offset: made, and read last
        for v, made in self.made.items():
            if self.plan.places[v].kind == "arena":
                lives.setdefault(self.plan.places[v].offset, []).append((made, self.ends[v]))
        for i, ranges in self.plan.released.items():
            for offset, _ in ranges:
                for made, end in lives.get(offset, ()):
                    if made <= i < end:
                        raise self._fault(f"{_name(self.units[made])} is released behind "
                                          f"{_name(self.units[i])}, {_name_at(self.units, end)} "
                                          "reads it later")

    def results(self) -> None:
        """A result that is not copied owns its memory, alone."""
        seen: set[Value] = set()
        for v, copied in zip(self.graph.outputs, self.plan.copied, strict=True):
            owner = self.owner[v]
            kind = self.plan.places[owner].kind
            if copied:
                continue
            if kind in (*GIVEN, "arena") or owner in seen:
                whose = "another result" if owner in seen else f"memory of kind {kind!r}"
                raise self._fault(f"result {self.graph.outputs.index(v)} would leave in {whose}")
            seen.add(owner)

    def _fault(self, what: str) -> GraphError:
        return GraphError(f"memory plan of {self.graph.name}: {what}",
                          hint="this is a fault of tessera, not of the program: please report it")


def memory_of(unit: Unit) -> ResultMemory:
    """Where the results of a unit lie, by its op's record; loops write buffers of their own."""
    return FRESH if isinstance(unit, FusionGroup) else unit.op.lies(unit.attrs)


def _bytes(v: Value) -> int:
    return max(elements(v) * v.aval.dtype.numpy.itemsize, 1)


def _name(unit: Unit) -> str:
    where: Any = unit.where if isinstance(unit, Node) else unit.nodes[0].where
    what = unit.op.name if isinstance(unit, Node) else str(unit)
    return f"{what} ({where})" if where is not None else what


def _name_at(units: Sequence[Unit], i: int) -> str:
    return _name(units[i]) if i < len(units) else "the caller"


__all__ = ["memory_of", "verify_plan"]
