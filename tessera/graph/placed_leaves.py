"""Tensors of a call of which is known where each lies, so that nobody has to look again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

from ..runtime.buffer import Borrowed, BufferPart, DeviceBuffer, PooledBuffer
from ..runtime.device import Device
from ..tensor import Tensor
from ..tile.launch.memory_turns import InTurn
from ..tile.launch.resident import Resident
from ..tile.launch.shared_views import SharedView

OURS = frozenset({PooledBuffer, DeviceBuffer, BufferPart})  # memory that nobody else gave us
HERE = OURS | {Borrowed}  # of a GPU; what is offloaded is elsewhere until it is used


class PlacedLeaves(list[Any]):
    """Tensors that all lie on one GPU, in memory that is ours. memories: of each, until somebody
    takes them: who asks how many have a memory must know of this list."""

    __slots__ = ("memories", "device")

    def __init__(self, tensors: Iterable[Tensor], memories: list[Any],
                 device: Device | None = None):
        super().__init__(tensors)
        self.memories, self.device = memories, device

    def take(self) -> list[Any]:
        """The list of memories, which is the caller's from here on."""
        memories, self.memories = self.memories, []
        return memories or storage_of(self)

    def add(self, tensors: Sequence[Tensor]) -> PlacedLeaves:
        """These too, which lie there."""
        self += tensors
        self.memories += memories_of(tensors)
        return self


class SpreadLeaves(list[Any]):
    """Distributed tensors that programs returned, so that their parts lie where those put them.
    rest: those of which that is not known."""

    __slots__ = ("rest",)

    def __init__(self, tensors: Iterable[Tensor], rest: Sequence[Tensor]):
        super().__init__(tensors)
        self.rest = rest

    def parts(self, of: Callable[[Sequence[Any]], list[Tensor]]) -> Sequence[Tensor]:
        """The parts of all. of: takes them of some."""
        parts: list[Any] = of(self)
        memories = storage_of(parts)
        on = memories[0].device
        if self.rest:
            rest = as_placed_leaves(of(self.rest))
            if type(rest) is not PlacedLeaves or rest.device is not on:
                return parts
        return PlacedLeaves(parts, memories, on)


def memories_of(tensors: Sequence[Any]) -> list[Any]:
    """What each has in place of memory: on a GPU its memory, or the call that used it up; None on
    the host."""
    if type(tensors) is PlacedLeaves:
        return tensors.memories
    return [x.held_now() if type(x) is Resident else x.storage for x in tensors]


def storage_of(tensors: Sequence[Any]) -> list[Any]:
    """Of tensors on a GPU, the memory of each, or the call that used it up, or the SharedView that
    tells it to those who read."""
    memories = [x._storage for x in tensors]
    if InTurn in {*map(type, memories)}:
        return [x.held_now() if type(m) is InTurn else m
                for x, m in zip(tensors, memories, strict=True)]
    return memories


def read_storage(tensors: Sequence[Any]) -> list[Any]:
    """The same, and of a view where it is read."""
    memories = storage_of(tensors)
    return memories if OURS.issuperset(map(type, memories)) else [x.held_now() for x in tensors]


def placed_on(tensors: list[Any], on: Device) -> Sequence[Tensor]:
    """Tensors that lie there, as PlacedLeaves where each has memory of its own."""
    memories = [x._storage for x in tensors]
    kinds = {*map(type, memories)}
    if InTurn in kinds:
        memories = storage_of(tensors)
    return tensors if SharedView in kinds else PlacedLeaves(tensors, memories, on)


def as_placed_leaves(tensors: list[Any]) -> Sequence[Tensor]:
    """Tensors as PlacedLeaves where they are such, else as they are."""
    if {*map(type, tensors)} <= {Resident}:
        memories = storage_of(tensors)
        if {*map(type, memories)} <= OURS:
            there = [m.device for m in memories]
            if there.count(there[0] if there else None) == len(there):
                return PlacedLeaves(tensors, memories, *there[:1])
    return tensors


FEW = 32  # tensors of a call for which what is done for many at once pays


class ResultOrigin:
    """Which result of a program a tensor is. result: the same for all that are this result."""

    __slots__ = ("result",)
    turns = None  # see InTurn, which is the origin of a tensor that has memory in turn

    def __init__(self, result: object):
        self.result = result


def origins(count: int) -> tuple[Any, ...]:
    """What tells apart the results of a program; nothing where they are few."""
    return tuple(ResultOrigin(object()) if count >= FEW else None for _ in range(count))


Picker = Callable[[Sequence[Any]], Sequence[Any]]


def picker(numbers: Sequence[int]) -> Picker:
    """What picks these of a list, many at once; runs of them quicker still."""
    if not numbers:
        return lambda values: ()
    runs = [slice(numbers[0], numbers[0])]
    for i in numbers:
        if i != runs[-1].stop:
            runs.append(slice(i, i))
        runs[-1] = slice(runs[-1].start, i + 1)
    if len(runs) == 1:
        return itemgetter(*runs)
    return _of_runs(itemgetter(*runs)) if 8 * len(runs) <= len(numbers) else itemgetter(*numbers)


def _of_runs(take: Callable[[Any], tuple[Sequence[Any], ...]]) -> Picker:
    def pick(values: Sequence[Any]) -> list[Any]:
        picked: list[Any] = []
        for run in take(values):
            picked += run
        return picked

    return pick


__all__ = ["FEW", "HERE", "OURS", "Picker", "PlacedLeaves", "ResultOrigin", "SpreadLeaves",
           "as_placed_leaves", "memories_of", "origins", "picker", "placed_on", "read_storage",
           "storage_of"]
