"""What the launches of a program are given: made once, and told when buffers lie elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ....kernels.routine import ForeignArray
from ....runtime.buffer import DeviceBuffer as Memory
from ....runtime.device import Device
from ....runtime.sentinel_words import owned
from .batch_launch import BatchLaunch
from .node_kernels import NodeLaunch
from .placed_launch import BufferAddress, PlacedLaunch, Pointed
from .run import CudaProgram, GroupLaunch


class LaunchArguments:
    """The arrays of a program's launches. watched: its kernels count bad elements, for `owner`.
    alone: each group has a launch of its own.

    Where buffers lie, `follow` and `owner_of` say; `key_of` the words that the host drew.
    """

    program: CudaProgram
    device: Device
    watched: bool
    alone: bool
    owner: object
    drawn_places: frozenset[str] = frozenset()  # buffers of which one row is as good as another

    def __init__(self) -> None:
        self.counters: dict[str, Memory] = {}
        self.calls: list[tuple[GroupLaunch, list[ForeignArray]]] = []  # to be compiled
        self.batches: dict[int, BatchLaunch] = {}  # by their first step
        self.compiled = False

    def follow(self, base: str, made: Pointed, at: int) -> None:
        """From here on it lies so many bytes behind the begin of a buffer that owns its memory."""
        raise NotImplementedError

    def pointer(self, name: str) -> int:
        """Where a buffer lies in the call under way."""
        raise NotImplementedError

    def root_of(self, base: str) -> str:
        """The buffer of the program of a call in which it lies, "" where no call moves it."""
        raise NotImplementedError

    def owner_of(self, base: str) -> Any:
        """Whose memory it is, where that is the same in all calls."""
        return None

    def key_of(self, name: str) -> tuple[int, int]:
        """The words of a key that this call drew."""
        raise NotImplementedError

    def batch(self, run: range) -> BatchLaunch:
        """The launch of some steps, made once."""
        if run.start not in self.batches:
            launches = [s for s in self.program.steps[run.start:run.stop]
                        if isinstance(s, GroupLaunch)]
            first = self.program.launches.index(launches[0])
            self.batches[run.start] = BatchLaunch(
                launches, [self._arguments(launch) for launch in launches], self.device.index,
                range(first, first + len(launches)), self.owner)
        return self.batches[run.start]

    def launch(self, launch: GroupLaunch | NodeLaunch, stream: int
               ) -> list[tuple[str, Callable[[], Any]]]:
        steps = self._plain(launch, stream)
        if not self.watched:
            return steps
        number = self.program.launches.index(launch)
        return [(part, partial(self._owned, number, step)) for part, step in steps]

    def _owned(self, part: int, step: Callable[[], Any]) -> None:
        """A launch whose sentinels count for this program."""
        with owned(self.owner, part):
            step()

    def _plain(self, launch: GroupLaunch | NodeLaunch, stream: int
               ) -> list[tuple[str, Callable[[], Any]]]:
        if isinstance(launch, NodeLaunch):
            return launch.steps(self._placed, self._zeros, self.key_of, self.device.index, stream)
        arguments = self._arguments(launch)
        if not self.compiled:
            self.calls.append((launch, arguments))
        find = partial(launch.recipe, arguments)
        drawn = [i for i, (name, _) in enumerate(launch.arguments) if name in self.drawn_places]
        return [("kernel", PlacedLaunch(find, arguments, stream, alike=drawn))]

    def _arguments(self, launch: GroupLaunch) -> list[ForeignArray]:
        return [self._argument(n, shape, at)
                for (n, shape), at in zip(launch.arguments, launch.offsets, strict=True)]

    def _argument(self, name: str, shape: tuple[int, ...], offset: int) -> ForeignArray:
        """offset: the element of the buffer at which it begins."""
        base, dtype = self.program.base(name), self.program.plan.buffer(name).type.dtype
        made = ForeignArray(0, shape, dtype, self.device.index, self.owner_of(base))
        self.follow(base, made, offset * dtype.numpy.itemsize)
        return made

    def _placed(self, name: str, at: int) -> BufferAddress:
        """Where a buffer lies from a byte on, in any call."""
        made = BufferAddress()
        self.follow(self.program.base(name), made, at)
        return made

    def _zeros(self, name: str) -> BufferAddress:
        """Memory for a buffer in which launches count, which leave zeros there."""
        if name not in self.counters:
            made = self.counters[name] = Memory(self.program.plan.buffer(name).nbytes, self.device)
            made.write(np.zeros(made.nbytes, np.uint8))
        return BufferAddress(self.counters[name].pointer)


__all__ = ["LaunchArguments"]
