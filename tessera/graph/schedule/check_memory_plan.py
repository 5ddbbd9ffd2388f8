"""Proof of a memory plan: nothing is written over while it is read, and nobody gets memory that is
somebody else's.

    verify_plan(graph, groups, plan)     # raises GraphError naming both ops, or says nothing

Who owns which buffer is computed here from the records of the ops and of the target
(`ScheduleTarget.memory`) and from the order of the groups alone. Of the plan only its decisions are
read: places, where in its owner's memory a value is made before the owner, what is released when,
which results are copied. How views lie follows from their ops. So a mistake in planning and one in
a record both show here, before anything runs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from ...errors import GraphError
from ..ir import Graph, Value, value_bytes
from .groups import FusionGroup, batch_ends
from .layouts import StridedLayout, are_disjoint
from .view_plan import dense, is_copy, parts_of, view_layout

if TYPE_CHECKING:
    from .memory_plan import MemoryPlan

GIVEN = ("input", "capture", "drawn", "known")  # memory of the caller, or of every call


def verify_plan(graph: Graph, groups: Sequence[FusionGroup], plan: MemoryPlan) -> None:
    """Raise GraphError unless every value keeps its memory until it is read last, and every result
    that is not copied has memory of its own."""
    proof = _Proof(graph, groups, plan)
    proof.own()
    if not plan.target.strides:
        proof.layouts()
    proof.overlaps()
    proof.releases()
    proof.results()


class _Proof:
    def __init__(self, graph: Graph, groups: Sequence[FusionGroup], plan: MemoryPlan):
        self.graph, self.groups, self.plan = graph, groups, plan
        self.owner: dict[Value, Value] = {}
        self.lying: dict[Value, list[Value]] = {}  # by owner: what lies there, in order
        self.made: dict[Value, int] = {}  # by owner: the group that makes it
        self.ends: dict[Value, int] = {}  # by owner: the last that reads any there, or the last
        # of its batch, whose groups run at once
        self.until = batch_ends(groups)
        self.readers: dict[Value, list[int]] = {}  # by owner: the groups that read any there

    def own(self) -> None:
        """Owners of all values, and until when their memory is read."""
        drawn = (v for v, place in self.plan.places.items() if place.kind == "drawn")
        for v in (*self.graph.given, *self.plan.known, *drawn):
            self.owner[v], self.lying[v] = v, [v]
        maker: dict[Value, int] = {}
        for i, group in enumerate(self.groups):
            maker |= dict.fromkeys(group.outputs, i)
            for v in group.inputs:
                if maker.get(v, i) != i and self.until[maker[v]] == self.until[i]:
                    raise self._fault(f"{_name(group)} reads what {_name(self.groups[maker[v]])} "
                                      "makes in the same launch")
                self.ends[self.owner[v]] = self.until[i]
                self.readers.setdefault(self.owner[v], []).append(i)
            for v in group.outputs:
                self._own(v, group, i)
        for v in self.graph.outputs:
            self.ends[self.owner[v]] = len(self.groups)
        self._donations()

    def _own(self, v: Value, group: FusionGroup, i: int) -> None:
        place, memory = self.plan.places[v], self.plan.target.memory(group)
        if v in self.plan.views.pieces:
            self._own_piece(v, group, i)
            return
        if place.kind != "view":
            self.owner[v] = v
            self.lying.setdefault(v, []).append(v)
            self.made.setdefault(v, i)
            self.ends[v] = self.until[i]
            if place.kind in GIVEN:
                raise self._fault(f"{_name(group)} writes {place.kind} memory")
            if place.root is not v:
                raise self._fault(f"{_name(group)} has memory of its own, the plan gives it "
                                  "another value's")
            return
        if memory.kind == "fresh":
            raise self._fault(f"{_name(group)} makes a new buffer, the plan calls it a view")
        self.owner[v] = owner = self.owner[group.inputs[memory.operand]]
        self.ends[owner] = self.until[i]
        self.lying[owner].append(v)
        if place.root is not owner:
            raise self._fault(f"{_name(group)} lies in the memory of its operand {memory.operand}, "
                              "the plan puts it elsewhere")

    def _own_piece(self, v: Value, group: FusionGroup, i: int) -> None:
        """A part of a value that a later group completes."""
        owner = self.plan.places[v].root
        if self.plan.target.memory(group).kind == "view" or self.plan.places[owner].kind in GIVEN:
            raise self._fault(f"{_name(group)} cannot make its result in {owner}'s memory")
        self.owner[v] = owner
        self.lying.setdefault(owner, []).append(v)
        self.made.setdefault(owner, i)
        self.ends[owner] = self.until[i]

    def layouts(self) -> None:
        """Every group can read and write its values where they lie, and the parts of a value that
        are made before it are where its own op puts them."""
        lies: dict[Value, StridedLayout] = {}
        origin: dict[Value, Value] = {}  # of views: the part that they show
        done: set[Value] = set()
        reads: dict[Value, list[tuple[int, Value]]] = {}  # by owner: what groups read of it
        target, views = self.plan.target, self.plan.views
        for i, group in enumerate(self.groups):
            memory = target.memory(group)
            shown = [v for v in group.outputs if memory.kind == "view"
                     and self.plan.places[v].kind == "view" and v not in views.pieces]
            for v in group.outputs:
                if v in views.pieces:
                    lies[v], origin[v] = self._piece_layout(v, group), v
            for v in group.inputs:
                layout = lies.get(v)
                if not shown:
                    reads.setdefault(self.owner[v], []).append((i, v))
                if layout is None or layout.is_dense or shown:
                    continue
                if is_copy(group) and self._is_there(v, group, lies):
                    continue
                if why := target.reads(group, v, layout):
                    raise self._fault(f"{_name(group)} cannot read an operand that lies "
                                      f"{layout}: {why}")
            for v in shown:
                lies[v] = self._view_layout(v, group, memory.flat, lies)
                if group.inputs[0] in origin:
                    origin[v] = origin[group.inputs[0]]
            if is_copy(group) and not shown:
                done |= self._parts(group, lies, origin)
        done |= self._over_parts(lies, origin, reads)
        if left := views.pieces - done:
            raise self._fault(f"{len(left)} parts are made in memory of which they are no part")

    def _piece_layout(self, v: Value, group: FusionGroup) -> StridedLayout:
        layout, owner = self.plan.views.layout(v), self.owner[v]
        if layout.shape != dense(v).shape or layout.end > dense(owner).end:
            raise self._fault(f"{_name(group)} writes beyond its part")
        if not is_copy(group):  # else of what is there already, see _parts
            self._require_written(v, layout, group)
        return layout

    def _require_written(self, v: Value, layout: StridedLayout, group: FusionGroup) -> None:
        if why := self.plan.target.writes(group, v, layout):
            raise self._fault(f"{_name(group)} cannot write a result that lies {layout}: {why}")

    def _is_there(self, x: Value, group: FusionGroup, lies: dict[Value, StridedLayout]) -> bool:
        """Whether a copy finds an operand in each place of its result where it belongs."""
        (y,) = group.outputs
        return self.owner[x] is self.owner[y] and all(
            at == lies.get(x) for v, at in parts_of(group, lies.get(y) or dense(y)) if v is x)

    def _view_layout(self, v: Value, group: FusionGroup, flat: bool,
                     lies: dict[Value, StridedLayout]) -> StridedLayout:
        x = group.inputs[0]
        source = lies.get(x) or dense(x)
        layout = view_layout(group, flat, source)
        if layout is None and flat and source.is_dense:
            layout = dense(v)
        if layout is None or layout != self.plan.views.layout(v):
            raise self._fault(f"the result of {_name(group)} does not lie as the plan says")
        return layout

    def _parts(self, group: FusionGroup, lies: dict[Value, StridedLayout],
               origin: dict[Value, Value]) -> set[Value]:
        """What of a copy's result is made there, all of it: the rest is copied there, from other
        memory or from what is made elsewhere in this. When each is all of a part of one copy, they
        are apart from each other and from what is copied."""
        (y,), found, views = group.outputs, set[Value](), self.plan.views
        for x, layout in parts_of(group, lies.get(y) or dense(y)):
            there = self.owner[x] is self.owner[y] and x in origin and lies[x] == layout
            if there and prod(lies[x].shape) == prod(lies[origin[x]].shape):
                found.add(origin[x])
            elif y in views.pieces:
                self._require_written(y, lies[y], group)
        return found

    def _over_parts(self, lies: dict[Value, StridedLayout], origin: dict[Value, Value],
                    reads: dict[Value, list[tuple[int, Value]]]) -> set[Value]:
        """What is made in memory that was made before: a kernel writes it over a part that it
        reads, of which, from then on, others read what was written alone."""
        maker = {v: i for i, group in enumerate(self.groups) for v in group.outputs}
        late, pieces = len(self.groups), self.plan.views.pieces
        over = [v for v, i in maker.items()
                if v in pieces and i > maker.get(self.owner[v], late)]
        for y in over:
            i, owner, group = maker[y], self.owner[y], self.groups[maker[y]]
            if is_copy(group):  # of parts that are there, and are written over what was
                if not all(self.owner[x] is owner and at == lies.get(x) and x in origin
                           for x, at in parts_of(group, lies[y])):
                    raise self._fault(f"{_name(group)} copies to memory that holds something else")
                continue
            taken = [x for x in group.inputs if self.owner[x] is owner and x not in origin
                     and lies.get(x) == lies[y] and self.plan.target.overwrites(group, x, y)]
            if len(taken) != 1 or lies[y].repeats:
                raise self._fault(f"{_name(group)} cannot write its result over a part")
            since = bisect_left(self.until, self.until[i])
            for r, x in reads[owner]:
                if r < since or r == i and x is taken[0] or are_disjoint(
                        lies.get(x) or dense(x), lies[y]):
                    continue
                new = origin.get(x)
                if new is not y and not (r > i and new is not None and y in (
                        origin.get(p) for p in self.groups[maker[new]].inputs)):
                    raise self._fault(f"{_name(group)} writes over what "
                                      f"{_name(self.groups[r])} reads")
        return set(over)

    def _donations(self) -> None:
        """What is written over is not read afterwards, and was no one else's."""
        over: dict[Value, tuple[int, FusionGroup]] = {}  # values that are gone, and since when
        for i, group in enumerate(self.groups):
            for v in group.inputs:
                if v in over:
                    raise self._fault(f"{_name(group)} reads what {_name(over[v][1])} has written "
                                      "over")
            memory = self.plan.target.memory(group)
            y = group.outputs[0] if group.outputs else None
            if memory.kind != "donated" or y is None or y in self.plan.views.pieces or (
                    self.plan.places[y].kind != "view"):
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
        spans: dict[Value, tuple[int, int, int]] = {}
        at: dict[int, list[Value]] = {}
        for i, group in enumerate(self.groups):
            for v in dict.fromkeys(self.owner[v] for v in group.outputs):
                if self.plan.places[v].kind != "arena" or self.made.get(v) != i:
                    continue
                begin = self.plan.places[v].offset
                if begin % self.plan.target.align_bytes:
                    raise self._fault(f"{_name(group)} is given byte {begin} of the arena, which "
                                      f"is no multiple of {self.plan.target.align_bytes}")
                spans[v] = span = (begin, begin + _bytes(v), i)
                if (gone := self.plan.over.get(v)) is not None:
                    self._over(gone, v, group, i)
                    del live[bisect_left(live, spans.pop(gone))]
                self._apart(live, span)
                insort(live, span)
                at.setdefault(self.ends[v], []).append(v)
            for v in at.pop(i, ()):
                if v in spans:
                    del live[bisect_left(live, spans[v])]

    def _over(self, gone: Value, y: Value, group: FusionGroup, i: int) -> None:
        """A group writes y where what it reads as the last one lay."""
        lay = [v for v in group.inputs if self.owner[v] is gone]
        others = [r for r in self.readers.get(gone, ()) if r != i]
        if gone not in self.readers or self.plan.places[gone].kind != "arena":
            raise self._fault(f"{_name(group)} writes over memory that it does not read")
        if len(lay) != 1 or not self.plan.target.overwrites(group, lay[0], y):
            raise self._fault(f"{_name(group)} cannot write its result over an operand")
        if not self.plan.views.layout(lay[0]).is_dense or not (
                _bytes(lay[0]) == _bytes(gone) == _bytes(y)):
            raise self._fault(f"{_name(group)} reads a part of what it is to write over")
        if self.ends[gone] > self.until[i] or any(
                self.until[r] == self.until[i] for r in others):
            raise self._fault(f"{_name(group)} writes over what is still read")

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
