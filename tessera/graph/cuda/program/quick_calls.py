"""The quickest calls of a short program: its operands lie on the GPU in memory of ours, its results
are new, and every launch is known by where these lie. Nothing is told to the program, whose steps
stay as the last other call left them; what is not so goes that way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

from .... import config, hooks
from ....numerics import stored_bytes
from ....runtime.buffer import DEFAULT, PooledBuffer
from ....runtime.device import restore
from ....tile.launch.resident import Resident
from ...placed_leaves import OURS, read_storage
from .placed_launch import PlacedLaunch

if TYPE_CHECKING:
    from .device import DeviceExecutable
    from .workspace import Workspace

Pick = Callable[[Sequence[int]], tuple[int, ...]]
pointer_of = attrgetter("pointer")
NOTHING = nullcontext()


class QuickCalls:
    """Those of a program with this memory. May be used while the executable has it, see `hold`."""

    def __init__(self, executable: DeviceExecutable, space: Workspace,
                 launches: Sequence[tuple[PlacedLaunch, Pick]], beyond: tuple[int, ...],
                 parts: Sequence[tuple[int, int]]):
        """launches: each with what picks its pointers of those of the operands, of the results, of
        parts of these, and those beyond, which are the same in all calls.  parts: which of the
        first, and the byte at which one begins."""
        self.executable, self.space, self.device = executable, space, space.device
        self.launches, self.beyond, self.parts = launches, beyond, parts
        self.alone = len(launches) == 1  # else its launches must not mix with those of others
        self.sizes = [stored_bytes(r.buffer.shape, r.buffer.type.dtype) for r in space.results]
        self.results = [(r.buffer.shape, r.buffer.type) for r in space.results]

    @staticmethod
    def of(executable: DeviceExecutable) -> QuickCalls | None:
        """None of a program that does anything but launch kernels on these."""
        space = executable._workspace
        calls = None if space is None else space.repeated
        if space is None or calls is None or space.watched or space.alone:
            return None
        if executable._node_kernels or executable.copies.copies or calls.drawn or \
                calls.captures or calls.over or calls.given or calls.copied or \
                not all(type(step) is PlacedLaunch for step in space.steps):
            return None
        names = [*space.program.lowered.inputs, *(r.base for r in space.results)]
        if len({*names}) != len(names):
            return None
        at = {id(place): (names.index(base), begin) for base, places in space.arrays.items()
              if base in names for place, begin in places}
        beyond: list[int] = []
        parts = list(dict.fromkeys(p for p in at.values() if p[1]))
        found = []
        for launch in space.steps:
            assert type(launch) is PlacedLaunch
            if not launch.by_pointers:
                return None
            numbers = []
            for place in launch.places:
                which = at.get(id(place))
                if which is None:  # a temporary, a constant
                    numbers.append(len(names) + len(parts) + len(beyond))
                    beyond.append(place.pointer)
                else:
                    numbers.append(len(names) + parts.index(which) if which[1] else which[0])
            found.append((launch, _picker(numbers)))
        return QuickCalls(executable, space, found, tuple(beyond), parts)

    def hold(self) -> bool:
        """Whether the settings are those of these calls."""
        return config.numerics == "off" and not (
            hooks.timed_steps or config.nvtx or config.debug) and \
            self.executable._workspace is self.space

    def run(self, operands: Sequence[Any]) -> list[Resident] | None:
        """The results; None where nothing has run."""
        memories = [x._storage if type(x) is Resident else None for x in operands]
        if not OURS.issuperset(map(type, memories)):
            if None in memories:
                return None
            memories = read_storage(operands)
            if not OURS.issuperset(map(type, memories)):
                return None
        on = self.device
        before = on.activate()
        try:
            made = [PooledBuffer(n, on) for n in self.sizes]
            pointers = [*map(pointer_of, memories), *map(pointer_of, made)]
            if self.parts:
                pointers += [pointers[i] + begin for i, begin in self.parts]
            pointers += self.beyond
            ready: list[tuple[Callable[..., None], tuple[int, ...]]] = []
            for launch, pick in self.launches:
                mine = pick(pointers)
                start = launch.ready(mine)
                if start is None:
                    return None
                ready.append((start, mine))
            with NOTHING if self.alone else self.executable._lock:
                for begin, mine in ready:
                    begin(DEFAULT, *mine)
        finally:
            restore(before)
        return [_tensor(shape, numeric, memory)
                for (shape, numeric), memory in zip(self.results, made, strict=True)]


def _tensor(shape: tuple[int, ...], numeric: Any, memory: PooledBuffer) -> Resident:
    """As Resident makes it, which looks whether the shape is a tuple and the memory there."""
    y: Any = Resident.__new__(Resident)
    y._shape, y.type, y._storage = shape, numeric, memory
    y._scale = y._name = y.narrow = y.origin = None
    y._is_param = False
    return y


def _picker(numbers: Sequence[int]) -> Pick:
    if len(numbers) == 1:
        only = numbers[0]
        return lambda pointers: (pointers[only],)
    return itemgetter(*numbers) if numbers else lambda pointers: ()


__all__ = ["QuickCalls"]
