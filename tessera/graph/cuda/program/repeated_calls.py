"""Calls of a program on a GPU behind its first: what differs is where its buffers lie.

Arguments and captured tensors are read where they are, results are written where nobody else has
anything. From these addresses follows what is launched: a program of a launch or two runs step by
step, its steps told of the addresses that have changed; a longer one is a CUDA graph, of which
there is one for each set of addresses (placed_graphs.py), and its results are written where earlier
ones lay that nobody has any more, so that there are few sets.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .... import config, hooks
from ....numerics import stored_bytes
from ....runtime.buffer import Borrowed, DeviceBuffer, PooledBuffer
from ....runtime.device import Device
from ....tensor import Tensor
from ....tile.launch.resident import Resident
from ...donation import ALONE, blank
from ...placed_leaves import HERE, OURS, Picker, PlacedLeaves, origins, picker
from .graph_limits import has_few_launches
from .placed_graphs import CHEAP_SHARE, PlacedGraph, PlacedGraphs

if TYPE_CHECKING:
    from .result_buffers import ResultBuffer
    from .workspace import Workspace

MOST_SETS = 3  # of places for results
STEADY_BYTES = 1 << 20  # of an input that is copied where NCCL is to read it


class RepeatedCalls:
    """Those of one program. whole: it is launched as CUDA graphs, where the settings say so."""

    def __init__(self, space: Workspace, whole: bool):
        self.space, self.whole = space, whole
        self.short = has_few_launches(space.program)
        lowered, self.device = space.program.lowered, space.device
        self.drawn = bool(lowered.drawn)
        # A batch has a table of where its buffers lie, which would be copied instead.
        self.by_rows = space.alone or not space.program.batched
        self.captures = tuple(lowered.captures.items())
        self.over = [(lowered.inputs.index(n), i in space.donated)
                     for n, i in lowered.overwritten.items()]
        own = [r for r in space.results if r.own]
        written = [r for r in own if r.base not in lowered.overwritten]
        self.written = sorted(written, key=lambda r: r.given is None)  # in donated memory: first
        self.given = [r.given for r in self.written if r.given is not None]
        self.pick_given = picker(self.given)
        self.names = [*lowered.inputs, *lowered.captures, *(r.base for r in self.written),
                      *space.drawn.places]
        self.at = {name: i for i, name in enumerate(self.names)}
        self.devices = [self.device] * len(lowered.inputs)
        self.tensors: dict[int, ResultTensors] = {}  # by how many arguments may be results
        self.copied = [(i, r) for i, r in enumerate(space.results) if not r.own]
        kept = [r.buffer for r in self.written if r.given is None]
        copied = [space.program.plan.buffer(lowered.inputs[i])
                  for i, donated in self.over if not donated]
        self.memory = ResultPlaces(
            [stored_bytes(b.shape, b.type.dtype) for b in (*kept, *copied)], self.device)
        self.places: list[int] = []  # that the steps were told
        # Of the call under way: whether somebody else's memory is among what it reads; and whether
        # that of donated arguments is theirs and ours.
        self.lent, self.in_place = False, True
        self.graphs: PlacedGraphs | None = None  # from the first call on that may be one
        self.steady: list[tuple[int, str]] = []
        _all.add(self)

    def run(self, leaves: Sequence[Tensor], ours: int = 0) -> list[Tensor] | None:
        """The results of a call; None where it has to go the long way, and nothing has run. ours:
        nobody else has so many arguments, the last ones: whose memory a result takes may be it."""
        whole = self.whole and self._as_graph()
        memories = self._inputs(leaves)
        if memories is None:
            return None
        drawn = self.space.draw(self.by_rows and not whole) if self.drawn else []
        taken = self.memory.fresh() if self.short else self.memory.take()
        free, whole_free = self._free(leaves, memories, self.given, self.pick_given)
        written = self._results(leaves, memories, taken, free if whole_free else [
            self._new(r.buffer) if m is None else m
            for r, m in zip(self.written, free, strict=False)])  # may change the others
        held = [*memories, *written]
        self.launch([m.pointer for m in held] + drawn, whole)
        made = self._made(held, leaves, ours if whole_free else 0)
        if self.lent:
            for m in memories:
                m.give_back()
        return made

    def _as_graph(self) -> bool:
        if not config.cuda_graphs:
            return False
        if self.graphs is None:
            self.graphs = PlacedGraphs(self.space, self.names, self._tell)
            self.steady = self._sent_inputs(self.graphs)
        if self.graphs.restless:
            self._copy_restless(self.graphs)
        return not self.graphs.stopped

    def _copy_restless(self, graphs: PlacedGraphs) -> None:
        """Inputs that lie elsewhere at each call, and of which most of a graph is told, as the
        sequence of a long loop, are copied to one place from here on."""
        lowered, taken = self.space.program.lowered, self._taken
        known = {name for _, name in self.steady}
        self.steady += [(i, name) for i, name in enumerate(lowered.inputs)
                        if name in graphs.restless - known and i not in taken]
        graphs.restless = set()

    @property
    def _taken(self) -> set[int | None]:
        """The inputs in whose memory something is written."""
        return {i for i, _ in self.over} | {r.given for r in self.written}

    def launch(self, places: list[int], whole: bool) -> PlacedGraph | None:
        """What a call launches whose buffers lie there. whole: as a graph, which is given back."""
        if whole and self.graphs is not None:
            return self.graphs.launch(places)
        self._tell(places)
        for step in self.space.steps:
            step()
        return None

    def _tell(self, places: list[int]) -> None:
        """Let the steps know where the buffers of a call lie."""
        before = self.places
        if places != before:
            self.places = []  # until the steps know all of them
            self.space.place(self.names, places, before)
            self.places = places

    def _sent_inputs(self, graphs: PlacedGraphs) -> list[tuple[int, str]]:
        """Small inputs that NCCL reads where they lie: those of each call, such as a batch, are
        copied to one place, since a graph is not changed there."""
        lowered, plan = self.space.program.lowered, self.space.program.plan
        taken = self._taken
        read = {plan.base(o.name) for s in graphs.sending.values() for o in s.group.reads}
        return [(i, name) for i, name in enumerate(lowered.inputs) if name in read
                and i not in taken and 0 < plan.buffer(name).nbytes <= STEADY_BYTES]

    # --- memory ---------------------------------------------------------------------------------
    def _inputs(self, leaves: Sequence[Tensor]) -> list[Any] | None:
        """The memory of arguments and captured tensors; of what lies elsewhere a copy's."""
        space, lowered = self.space, self.space.program.lowered
        known = type(leaves) is PlacedLeaves
        memories: list[Any] = leaves.take() if known else [  # type: ignore[attr-defined]
            x.held_now() if type(x) is Resident else x.storage for x in leaves]
        kinds = OURS if known else {*map(type, memories)}
        copied: set[int] = set()
        if (leaves.device is not self.device if known  # type: ignore[attr-defined]
                else not kinds <= HERE or [m.device for m in memories] != self.devices):
            copied = {i for i, m in enumerate(memories)
                      if type(m) not in HERE or m.device is not self.device}
            if any(leaves[i].offloaded for i in copied):
                return None
            for i in copied:
                memories[i] = space.given_memory(lowered.inputs[i], leaves[i])
        for i, name in self.steady:
            memories[i] = self.sent(name, memories[i])
        self.lent = Borrowed in kinds or bool(self.captures) and any(
            type(x.storage) is Borrowed for _, x in self.captures)
        self.in_place = not self.lent and not (copied and copied & {*self.given})
        memories += [space.captured_memory(name, x) for name, x in self.captures]
        return memories

    def sent(self, name: str, memory: Any) -> DeviceBuffer:
        """The one place from which NCCL reads an input; it is copied there."""
        own: DeviceBuffer = self.space.own.get(name) or self.space.own.setdefault(
            name, DeviceBuffer(memory.nbytes, self.device))
        if memory is not own:
            own.copy(memory)
        return own

    def _results(self, leaves: Sequence[Tensor], memories: list[Any], taken: list[PooledBuffer],
                 mine: Sequence[Any]) -> list[Any]:
        """The memory of results that kernels write; arguments that are written over are replaced
        by copies where they are not donated. mine: that of the first results, which donated
        arguments had where it was free."""
        if not self.given and not self.over:
            return taken
        kept = iter(taken)
        written = [*mine, *itertools.islice(kept, len(self.written) - len(mine))]
        for i, donated in self.over:
            if donated and self._free(leaves, memories, [i], picker([i]))[1]:
                continue
            copy = self._new(self.space.program.plan.buffer(self.names[i])) if donated \
                else next(kept)
            if copy.nbytes:
                copy.copy(memories[i])
            if type(memories[i]) is Borrowed:
                memories[i].give_back()
            memories[i] = copy
        return written

    def _free(self, leaves: Sequence[Tensor], memories: list[Any], numbers: Sequence[int],
              pick: Picker) -> tuple[Sequence[Any], bool]:
        """The memory of donated arguments; None where somebody has it beside the tensor, see
        Workspace._free_memory; and whether nobody has. What is captured is twice among the
        memories."""
        if not numbers:
            return [], True
        mine = pick(memories)
        known = ALONE + 2  # `mine`, `memories`, the tensor
        if sum(map(sys.getrefcount, mine)) <= known * len(mine) and self.in_place:
            return mine, True
        counts = list(map(sys.getrefcount, mine))
        found = [m if n <= known and type(m) in OURS and leaves[i].storage is m else None
                 for i, m, n in zip(numbers, mine, counts, strict=True)]
        return found, None not in found

    def _new(self, b: Any) -> PooledBuffer:
        return PooledBuffer(stored_bytes(b.shape, b.type.dtype), self.device)

    def _made(self, held: list[Any], leaves: Sequence[Tensor], ours: int) -> list[Tensor]:
        """The results. held: the memory of each buffer that has a place of its own at each call."""
        if ours not in self.tensors:
            self.tensors[ours] = ResultTensors(self, ours)
        made = self.tensors[ours].made(held, leaves)
        for i, r in self.copied:
            place = self.at.get(r.base)
            self.copy_result(made[i], r, None if place is None else held[place])
        return made

    def copy_result(self, y: Any, r: ResultBuffer, memory: Any) -> None:
        """A result that is copied from where others have it too: from there, or from memory of the
        program."""
        y.storage = copy = self._new(r.buffer)
        if copy.nbytes:
            copy.copy(self.space.memory[r.base][1] if memory is None else memory)

    def moved_arguments(self) -> list[int | None]:
        """By result, the donated argument that is it when it has its memory: of its extents and
        type."""
        plan, lowered = self.space.program.plan, self.space.program.lowered
        found: list[int | None] = []
        for r in self.space.results:
            given = plan.buffer(lowered.inputs[r.given]) if r.given is not None else None
            same = given is not None and (given.shape, given.type) == (r.buffer.shape,
                                                                       r.buffer.type)
            found.append(r.given if same else None)
        return found

    def forget(self) -> None:
        """Give back the memory of results that nobody has, and the graphs that name it."""
        if self.graphs is not None:
            self.graphs.forget()
        self.memory.sets = []


class NewTensors:
    """Results that are tensors of their own. at: of each, its memory among that of all buffers."""

    def __init__(self, at: Sequence[int], buffers: Sequence[Any]):
        self.count, self.pick, self.origins = len(at), picker(at), origins(len(at))
        self.shapes, self.types = [b.shape for b in buffers], [b.type for b in buffers]

    def made(self, held: list[Any]) -> list[Any]:
        """held: the memory of each buffer that has a place of its own at each call."""
        made = blank(Resident, self.count)
        for y, memory, shape, numeric, origin in zip(
                made, self.pick(held), self.shapes, self.types, self.origins, strict=True):
            y._shape = shape
            y.type = numeric
            y._scale = y._name = None
            y._is_param = False
            y._storage = memory
            y.origin = origin
            y.narrow = None
        return made


class ResultTensors:
    """The tensors that a call returns: arguments that nobody else has, and new ones."""

    def __init__(self, calls: RepeatedCalls, ours: int):
        """ours: how many of the last arguments nobody else has."""
        space, first = calls.space, len(calls.space.program.lowered.inputs) - ours
        own = {j: i for j, i in enumerate(calls.moved_arguments()) if i is not None and i >= first}
        new = [j for j in range(len(space.results)) if j not in own]
        self.new = NewTensors(
            [calls.at[space.results[j].base] if space.results[j].own else 0 for j in new],
            [space.results[j].buffer for j in new])
        self.pick_own, self.all_new = picker([*own.values()]), not own
        place = {j: k for k, j in enumerate([*new, *own])}
        self.order = picker([place[j] for j in range(len(place))])

    def made(self, held: list[Any], leaves: Sequence[Tensor]) -> list[Any]:
        """held: see NewTensors.made."""
        if self.all_new:
            return self.new.made(held)
        own: Sequence[Any] = self.pick_own(leaves)
        for x in own:
            x.narrow = None  # copies of what it was, which another function left
        return list(self.order([*self.new.made(held), *own]))


class ResultPlaces:
    """Memory of results, used again when nobody has it any more. sizes: in bytes."""

    def __init__(self, sizes: Sequence[int], on: Device):
        self.sizes, self.device = tuple(sizes), on
        self.sets: list[list[PooledBuffer]] = []

    def fresh(self) -> list[PooledBuffer]:
        """A buffer for each result."""
        return [PooledBuffer(n, self.device) for n in self.sizes]

    def take(self) -> list[PooledBuffer]:
        """A buffer for each result, which is free: of a set of which most are, or new ones."""
        if not self.sizes:
            return []
        best, least = None, len(self.sizes) + 1
        for held in self.sets:
            others = sum(map(ALONE.__lt__, map(sys.getrefcount, held)))
            if not others:
                return held
            best, least = (held, others) if others < least else (best, least)
        few = least * CHEAP_SHARE <= len(self.sizes)
        if best is None or (not few and len(self.sets) < MOST_SETS):
            best = self.fresh()
        else:
            counts = list(map(sys.getrefcount, best))
            best[:] = [m if n <= ALONE else PooledBuffer(m.nbytes, self.device)
                       for m, n in zip(tuple(best), counts, strict=True)]
        self.sets = [*(s for s in self.sets if s is not best), best]
        return best


_all: weakref.WeakSet[RepeatedCalls] = weakref.WeakSet()


def _trim(on: Device) -> None:
    for calls in [c for c in _all if c.device is on]:
        calls.forget()


hooks.trimmed.append(_trim)


__all__ = ["RepeatedCalls"]
