"""Calls of a program on a GPU as CUDA graphs, which are made by themselves.

A program that has run once is recorded at its next call and launched as a whole from then on. A
graph names addresses, so there is one for each set of places where arguments, captured tensors and
results lie. Results are written where earlier ones lay that nobody has any more: a step that gets
what the step before it returned meets the same two sets of places in turn, and one with donated
arguments a single one. Where a few addresses are new (a batch, a loss that somebody keeps), the
kernels that read or write there are changed in the graph, and no others.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ... import config, hooks
from ...numerics import stored_bytes
from ...runtime.buffer import DEFAULT, DeviceBuffer, PooledBuffer
from ...runtime.device import Device
from ...runtime.flags import error_flags
from ...runtime.graphs import DeviceGraph, recording_stream
from ...tensor import Tensor
from ...tile.launch.resident import Resident
from .collective_steps import CollectiveStep
from .launch_work import GroupBatch

if TYPE_CHECKING:
    from .batch_launch import BatchLaunch, BatchTable
    from .device import Workspace
    from .node_kernels import NodeLaunch
    from .run import GroupLaunch

MOST_GRAPHS = 4  # of one program; each has its nodes once more
MOST_SETS = 3  # of places for results
CHEAP_SHARE = 4  # to change less than this part of a graph is cheap
KEPT_PLACES = 8
STEADY_BYTES = 1 << 20  # of an input that is copied where NCCL is to read it
MOST_MISSES = 8  # calls on end that were not cheap: the places never come again


class RecordedCalls:
    """The graphs of a program, by where its buffers lie, and the memory of its results.

    stopped: why its calls are not recorded any more, "" while they are.
    """

    def __init__(self, space: Workspace):
        self.space, self.stopped = space, ""
        lowered, self.device = space.program.lowered, space.device
        self.captures = tuple(lowered.captures.items())
        self.over = [(lowered.inputs.index(n), i in space.donated)
                     for n, i in lowered.overwritten.items()]
        own = [r for r in space.results if r.own]
        self.written = [r for r in own if r.base not in lowered.overwritten]
        self.names = [*lowered.inputs, *lowered.captures, *(r.base for r in self.written)]
        self.at = {name: i for i, name in enumerate(self.names)}
        self.made = [(self.at[r.base] if r.own else 0, r.buffer.shape, r.buffer.type)
                     for r in space.results]
        self.copied = [(i, r) for i, r in enumerate(space.results) if not r.own]
        kept = [r.buffer for r in self.written if r.given is None]
        copied = [space.program.plan.buffer(lowered.inputs[i])
                  for i, donated in self.over if not donated]
        self.memory = ResultPlaces(
            [stored_bytes(b.shape, b.type.dtype) for b in (*kept, *copied)], self.device)
        self.stream = recording_stream(self.device.index)
        steps = space._steps(self.stream)
        self.steps = [s.run for s in steps]
        self.touching = self._steps_by_buffer([s.what.step for s in steps])
        self.batches: dict[int, BatchLaunch] = {
            i: s.what.step.launch for i, s in enumerate(steps)
            if isinstance(s.what.step, GroupBatch)}
        self.sending = {i: s.what.step for i, s in enumerate(steps)
                        if isinstance(s.what.step, CollectiveStep)}
        self.last = self.sending[max(self.sending)] if self.sending else None
        self.steady = self._sent_inputs()
        self.graphs: list[PlacedGraph] = []
        self.before: list[list[int]] = []  # places that had no graph when they came
        self.misses = 0
        _all.add(self)

    def _steps_by_buffer(
            self, steps: Sequence[GroupLaunch | GroupBatch | NodeLaunch | CollectiveStep | None]
                         ) -> dict[str, set[int]]:
        """The steps that are given the address of a buffer. None: one that fills temporaries."""
        plan, found = self.space.program.plan, dict[str, set[int]]()
        for i, step in enumerate(steps):
            groups = () if step is None else (
                step.groups if isinstance(step, GroupBatch) else (step.group,))
            for o in (o for g in groups for o in (*g.reads, *g.writes)):
                found.setdefault(plan.base(o.name), set()).add(i)
        return found

    def _sent_inputs(self) -> list[tuple[int, str]]:
        """Small inputs that NCCL reads where they lie: those of each call, such as a batch, are
        copied to one place, since a graph is not changed there."""
        lowered, plan = self.space.program.lowered, self.space.program.plan
        taken = {i for i, _ in self.over} | {r.given for r in self.written}
        read = {plan.base(o.name) for s in self.sending.values() for o in s.group.reads}
        return [(i, name) for i, name in enumerate(lowered.inputs) if name in read
                and i not in taken and 0 < plan.buffer(name).nbytes <= STEADY_BYTES]

    # --- a call ---------------------------------------------------------------------------------
    def run(self, leaves: Sequence[Tensor]) -> list[Tensor] | None:
        """The results of a call; None where it has to go step by step, and nothing has run."""
        if self.stopped:
            return None
        memories = self._inputs(leaves)
        if memories is None:
            return None
        space = self.space
        space.draw()
        written = self._results(leaves, memories, self.memory.take())  # may change the others
        held = [*memories, *written]
        places = [m.pointer for m in held]
        graph = next((g for g in self.graphs if g.places == places), None)
        if graph is None:
            graph = self._placed(places, held)
        else:
            self.misses = 0
        error_flags(self.device.index).check()
        graph.graph.launch(DEFAULT)
        if self.last is not None:
            self.last.replayed(self.device.index, DEFAULT)
        made = self._made(held)
        for m in memories:
            if type(m) is not PooledBuffer:
                m.give_back()
        return made

    def _inputs(self, leaves: Sequence[Tensor]) -> list[Any] | None:
        """The memory of arguments and captured tensors; of what lies elsewhere a copy's."""
        space, lowered = self.space, self.space.program.lowered
        memories: list[Any] = [x.storage for x in leaves]
        if not ON_DEVICE.issuperset(map(type, memories)):
            others = [i for i, m in enumerate(memories)
                      if type(m) not in ON_DEVICE or m.device is not self.device]
            if any(leaves[i].offloaded for i in others):
                return None
            for i in others:
                memories[i] = self._given(lowered.inputs[i], leaves[i])
        elif any(m.device is not self.device for m in memories):
            return None
        for i, name in self.steady:
            own = space.own.get(name) or space.own.setdefault(
                name, DeviceBuffer(memories[i].nbytes, self.device))
            if memories[i] is not own:
                own.copy(memories[i])
                memories[i] = own
        for name, x in self.captures:
            if not space._reads(x):
                space._give_capture(name, x)
            memories.append(x.storage if space._reads(x) else space.own[name])
        return memories

    def _given(self, name: str, x: Tensor) -> DeviceBuffer:
        if self.space._reads(x):
            return x.storage
        self.space._give(name, x)
        return self.space.own[name]

    def _results(self, leaves: Sequence[Tensor], memories: list[Any], taken: list[PooledBuffer]
                 ) -> list[Any]:
        """The memory of results that kernels write; arguments that are written over are replaced
        by copies where they are not donated."""
        if not self.over and len(taken) == len(self.written):
            return taken
        kept, written = iter(taken), list[Any]()
        numbers = [r.given for r in self.written if r.given is not None]
        free = iter(self._free(leaves, memories, numbers))
        for r in self.written:
            if r.given is None:
                written.append(next(kept))
            else:
                written.append(memories[r.given] if next(free) else self._new(r.buffer))
        for i, donated in self.over:
            if donated and self._free(leaves, memories, [i])[0]:
                continue
            copy = self._new(self.space.program.plan.buffer(self.names[i])) if donated \
                else next(kept)
            if copy.nbytes:
                copy.copy(memories[i])
            if type(memories[i]) is not PooledBuffer:
                memories[i].give_back()
            memories[i] = copy
        return written

    def _free(self, leaves: Sequence[Tensor], memories: list[Any], numbers: Sequence[int]
              ) -> list[bool]:
        """Of donated arguments, whether nobody has the memory but the tensor; see
        Workspace._free_memory. What is captured is twice among the memories."""
        mine = [memories[i] for i in numbers]
        counts = list(map(sys.getrefcount, mine))
        known = ALONE + 2  # the list, `memories`, the tensor
        return [n <= known and type(m) in ON_DEVICE and leaves[i].storage is m
                for i, m, n in zip(numbers, mine, counts, strict=True)]

    def _new(self, b: Any) -> PooledBuffer:
        return PooledBuffer(stored_bytes(b.shape, b.type.dtype), self.device)

    def _made(self, held: list[Any]) -> list[Tensor]:
        """The results. held: the memory of each buffer that has a place of its own at each call."""
        new, made = Resident.__new__, list[Tensor]()
        for at, shape, numeric in self.made:
            y = new(Resident)
            y._shape, y.type, y.scale, y.is_param, y.name = shape, numeric, None, False, None
            y.storage, y.narrow = held[at], None
            made.append(y)
        for i, r in self.copied:
            memory = self._new(r.buffer)
            if memory.nbytes:
                place = self.at.get(r.base)
                memory.copy(self.space.memory[r.base][1] if place is None else held[place])
            made[i].storage = memory
        return made

    # --- graphs ---------------------------------------------------------------------------------
    def _placed(self, places: list[int], memories: Sequence[Any]) -> PlacedGraph:
        """A graph for new places: one that is changed, or recorded now."""
        space = self.space
        try:
            for name, memory in zip(self.names, memories, strict=True):
                space._bind(name, memory)
            graph = self._changed(places) or self._recorded(places)
        except BaseException:
            self.forget()  # what was begun is no graph of these places
            raise
        finally:
            space._forget()
        return graph

    def _changed(self, places: list[int]) -> PlacedGraph | None:
        """The graph that is cheapest to change, where that is cheap or there are many. Places that
        come again get a graph of their own. What NCCL has put into a graph is not changed."""
        before, self.before = places in self.before, [*self.before[1 - KEPT_PLACES:], places]
        found = [(len(new), -i, g) for i, g in enumerate(self.graphs)
                 if self.sending.keys().isdisjoint(new := self._steps_of(g, places))]
        if not found:
            return None
        count, _, graph = min(found)
        cheap = count * CHEAP_SHARE < len(self.steps)
        if (before or not cheap) and len(self.graphs) < MOST_GRAPHS:
            return None
        if not cheap:
            graph = self.graphs[0]
        steps = {i: self.steps[i] for i in sorted(self._steps_of(graph, places))}
        tables = {i: b.table() for i, b in self.batches.items() if i in steps}
        self.graphs.remove(graph)
        if not graph.graph.update(self.stream, steps):
            return None
        self._count(cheap)
        graph.places = places
        graph.tables |= tables
        self.graphs.append(graph)
        return graph

    def _steps_of(self, graph: PlacedGraph, places: list[int]) -> set[int]:
        """The steps that are given another address than they have in a graph."""
        found = set[int]()
        for name, old, new in zip(self.names, graph.places, places, strict=True):
            if old != new:
                found |= self.touching.get(name, set())
        return found

    def _recorded(self, places: list[int]) -> PlacedGraph:
        self._count(cheap=False)
        tables = {i: b.table() for i, b in self.batches.items()}
        made = PlacedGraph(DeviceGraph.record(self.device, self.stream, self.steps), places, tables)
        self.graphs = [*self.graphs[1 - MOST_GRAPHS:], made]
        return made

    def _count(self, cheap: bool) -> None:
        """Gives up where graphs are recorded again and again."""
        self.misses = 0 if cheap else self.misses + 1
        if self.misses > MOST_MISSES:
            self.stopped = "its arguments or results lie elsewhere at every call"

    def forget(self) -> None:
        """Give back the memory of results that nobody has, and the graphs that name it."""
        self.graphs = []
        self.memory.sets = []


class PlacedGraph:
    """A graph, and where the buffers lie that it names. tables: of its batches, by step."""

    __slots__ = ("graph", "places", "tables")

    def __init__(self, graph: DeviceGraph, places: list[int], tables: dict[int, BatchTable]):
        self.graph, self.places, self.tables = graph, places, tables


class ResultPlaces:
    """Memory of results, used again when nobody has it any more. sizes: in bytes."""

    def __init__(self, sizes: Sequence[int], on: Device):
        self.sizes, self.device = tuple(sizes), on
        self.sets: list[list[PooledBuffer]] = []

    def take(self) -> list[PooledBuffer]:
        """A buffer for each result, which is free: of a set of which most are, or new ones."""
        if not self.sizes:
            return []
        best, least = None, len(self.sizes) + 1
        for held in self.sets:
            counts = list(map(sys.getrefcount, held))
            if max(counts) <= ALONE:
                return held
            others = sum(n > ALONE for n in counts)
            best, least = (held, others) if others < least else (best, least)
        few = least * CHEAP_SHARE <= len(self.sizes)
        if best is None or (not few and len(self.sets) < MOST_SETS):
            best = [PooledBuffer(n, self.device) for n in self.sizes]
        else:
            counts = list(map(sys.getrefcount, best))
            best[:] = [m if n <= ALONE else PooledBuffer(m.nbytes, self.device)
                       for m, n in zip(tuple(best), counts, strict=True)]
        self.sets = [*(s for s in self.sets if s is not best), best]
        return best


ALONE = list(map(sys.getrefcount, [object()]))[0]  # of what a list has and nobody else
ON_DEVICE = frozenset({PooledBuffer, DeviceBuffer})
_all: weakref.WeakSet[RecordedCalls] = weakref.WeakSet()


def _trim(on: Device) -> None:
    for calls in [c for c in _all if c.device is on]:
        calls.forget()


hooks.trimmed.append(_trim)


def recordable() -> bool:
    """Whether a call that runs now may be a graph: its kernels are not looked at one by one. What
    sentinels count is looked at behind a call, so graphs have them too."""
    return bool(config.cuda_graphs) and not (hooks.timed_steps or config.nvtx or config.debug)


__all__ = ["RecordedCalls", "recordable"]
