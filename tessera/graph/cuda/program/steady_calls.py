"""Calls of a program whose donated arguments lie where results of the call before do, and whose
results take their places again: a step of a training loop.

The places of all these are known, so a call asks where the few others lie, a batch and a loss, and
launches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ....runtime.buffer import Borrowed
from ....tensor import Tensor
from ....tile.launch.resident import Resident
from ...placed_leaves import HERE
from .repeated_calls import NewTensors

if TYPE_CHECKING:
    from .repeated_calls import RepeatedCalls


POINTER = attrgetter("pointer")


class SteadyCalls:
    """Those of a program. places: of all its buffers that have one at each call, 0 of the others,
    which are `changing`: arguments, captured tensors, and results that take nobody's place."""

    def __init__(self, calls: RepeatedCalls, places: list[int], arguments: Sequence[int]):
        """arguments: the numbers of those that are asked at each call."""
        space, self.calls, self.places = calls.space, calls, places
        self.arguments, count = tuple(arguments), len(space.program.lowered.inputs)
        captures = range(count, count + len(calls.captures))
        written = [calls.at[r.base] for r in calls.written if r.given is None]
        self.changing = (*arguments, *captures, *written)
        self.sent: list[tuple[int, str]] = []  # arguments, by number among these
        number = {place: k for k, place in enumerate(self.changing)}
        rest = [space.results[j] for j, i in enumerate(calls.moved_arguments()) if i is None]
        self.copied = [(k, r, number.get(calls.at.get(r.base, -1))) for k, r in enumerate(rest)
                       if not r.own]
        self.mark = object()  # of its graphs
        self.results = NewTensors([number[calls.at[r.base]] if r.own else 0 for r in rest],
                                  [r.buffer for r in rest])

    @staticmethod
    def of(calls: RepeatedCalls, kept: Mapping[int, Any]) -> SteadyCalls | None:
        """kept: by number, the memory of arguments whose places results take. None for a program
        that writes over other arguments, or has a result that is a part of one."""
        lowered, moved = calls.space.program.lowered, calls.moved_arguments()
        if calls.over or {i for i in moved if i is not None} != kept.keys() or {
                *calls.given} != kept.keys():
            return None
        places = [0] * len(calls.names)
        for i, memory in kept.items():
            places[i] = memory.pointer
        for r in calls.written:
            if r.given is not None:
                places[calls.at[r.base]] = kept[r.given].pointer
        if any(places[at] for _, r in calls.copied if (at := calls.at.get(r.base)) is not None):
            return None
        return SteadyCalls(calls, places, [i for i in range(len(lowered.inputs)) if i not in kept])

    def run(self, tensors: Sequence[Tensor]) -> list[Any] | None:
        """The results of a call that take nobody's place. tensors: its `arguments`. None where it
        has to go the long way, and nothing has run."""
        calls, whole = self.calls, self.calls.whole and self.calls._as_graph()
        memories = self._memories(tensors)
        if memories is None:
            return None
        lent = [m for m in memories if type(m) is Borrowed]
        if calls.captures:
            memories += (calls.space.captured_memory(name, x) for name, x in calls.captures)
        memories += calls.memory.fresh() if calls.short else calls.memory.take()
        drawn = calls.space.draw(calls.by_rows and not whole) if calls.drawn else []
        self._launch(tuple(map(POINTER, memories)), whole, drawn)
        made = self.results.made(memories)
        for k, r, at in self.copied:
            calls.copy_result(made[k], r, None if at is None else memories[at])
        for m in lent:
            m.give_back()
        return made

    def _launch(self, pointers: tuple[int, ...], whole: bool, drawn: Sequence[int]) -> None:
        """pointers: of the buffers that change. drawn: of what the host drew."""
        key, graphs = (self.mark, pointers), self.calls.graphs
        if whole and graphs is not None and graphs.again(key):
            return
        places = self.places.copy()
        for at, pointer in zip(self.changing, pointers, strict=True):
            places[at] = pointer
        places[len(places) - len(drawn):] = drawn
        graph = self.calls.launch(places, whole)
        if graph is not None:
            graph.key = key

    def _memories(self, tensors: Sequence[Any]) -> list[Any] | None:
        """The memory of the arguments, of what lies elsewhere a copy's."""
        calls, names = self.calls, self.calls.space.program.lowered.inputs
        memories: list[Any] = []
        for i, x in zip(self.arguments, tensors, strict=True):
            memory: Any = x.held_now() if type(x) is Resident else None
            if type(memory) not in HERE or memory.device is not calls.device:
                if x.offloaded:
                    return None
                memory = calls.space.given_memory(names[i], x)
            memories.append(memory)
        if len(self.sent) != len(calls.steady):
            self.sent = [(self.arguments.index(i), name) for i, name in calls.steady]
        for k, name in self.sent:
            memories[k] = calls.sent(name, memories[k])
        return memories


__all__ = ["SteadyCalls"]
