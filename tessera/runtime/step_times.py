"""When each step of a program ran on a GPU: kernels, copies, library calls; an event behind each.

    hooks.timed_steps.append(seen)     # seen(StepEvent) for every step, until it is removed
    run_timed(index, steps)            # what a program does in place of running them

A step lasts from the end of the one before it on its stream to its own end, so that the times of a
stream add up to the time that the GPU takes. The host is ahead all the while: steps are launched in
chunks behind memory that is overwritten, which lasts longer than launching them takes. What is seen
is the time on the GPU, not that of launching. No CUDA graph is replayed meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from .. import hooks
from ..lazy_dataclass import dataclass
from . import device as devices
from .buffer import DEFAULT, DeviceBuffer
from .copy_times import StepEvent, timing
from .device import check, device

CHUNK = 32  # steps that are launched behind one cover
LAUNCH_MS = 0.05  # that the host takes for one, until it is known
MOST_COVERS = 200


@dataclass(frozen=True)
class TimedStep:
    """A step of a program. what: for who looks at its time.  stream: that it runs on."""

    run: Callable[[], Any]
    what: Any
    stream: int


def run_timed(index: int, steps: Sequence[TimedStep], first: bool = False) -> None:
    """Run them, wait for their end, and tell the observers when each ran. first: see StepEvent."""
    with device(index).current():
        clock = _Clock(index)
        try:
            with timing():
                for begin in range(0, len(steps), CHUNK):
                    clock.run(steps[begin:begin + CHUNK])
            found = clock.read(first)
        finally:
            clock.close()
    for event in found:
        for see in hooks.timed_steps:
            see(event)


class _Clock:
    """The events of one run. Streams other than DEFAULT begin with what the default one has done.
    """

    def __init__(self, index: int):
        self.index, self.events = index, list[Any]()
        self.scratch = DeviceBuffer(2 * device(index).l2_bytes, device(index))
        self.launch_ms, self.cover_ms = LAUNCH_MS, self._measured_cover()
        device(index).synchronize()
        self.base, self.base_ns = self._record(DEFAULT), time.perf_counter_ns()
        self.seen: list[tuple[TimedStep, tuple[Any, ...], Any]] = []
        self.last: dict[int, Any] = {}

    def run(self, steps: Sequence[TimedStep]) -> None:
        """A chunk: the cover, then the steps with an event behind each."""
        self._cover(min(MOST_COVERS, 1 + int(1.5 * self.launch_ms * len(steps) / self.cover_ms)))
        self.last[DEFAULT] = self._record(DEFAULT)
        begin = time.perf_counter()
        for step in steps:
            before = tuple(self.last[s] for s in {DEFAULT, step.stream} & self.last.keys())
            step.run()
            end = self.last[step.stream] = self._record(step.stream)
            self.seen.append((step, before, end))
        took_ms = 1e3 * (time.perf_counter() - begin) / len(steps)
        self.launch_ms = max(took_ms, LAUNCH_MS / 5)

    def read(self, first: bool) -> list[StepEvent]:
        """Waits for the steps."""
        device(self.index).synchronize()
        return [StepEvent(step.what, self.index, step.stream, max(map(self._at, before)),
                          self._at(end), first) for step, before, end in self.seen]

    def close(self) -> None:
        for event in self.events:
            check(devices.driver().cuEventDestroy(event), "free an event")
        self.events = []

    def _at(self, event: Any) -> int:
        ms = check(devices.driver().cuEventElapsedTime(self.base, event), "read a time")
        return self.base_ns + int(1e6 * ms)

    def _record(self, stream: int) -> Any:
        event = check(devices.driver().cuEventCreate(0), "make an event")
        self.events.append(event)
        check(devices.driver().cuEventRecord(event, stream), "record an event")
        return event

    def _cover(self, count: int) -> None:
        for _ in range(count):
            check(devices.driver().cuMemsetD8Async(
                self.scratch.pointer, 0, self.scratch.nbytes, DEFAULT), "overwrite the cache")

    def _measured_cover(self) -> float:
        """Milliseconds of one."""
        self._cover(1)
        begin = self._record(DEFAULT)
        self._cover(1)
        end = self._record(DEFAULT)
        check(devices.driver().cuEventSynchronize(end), "wait for an event")
        return max(check(devices.driver().cuEventElapsedTime(begin, end), "read a time"), 1e-3)


__all__ = ["TimedStep", "run_timed"]
