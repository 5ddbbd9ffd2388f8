"""Time of work on a GPU: CUDA events around each of several repetitions, and their median."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..lazy_dataclass import dataclass
from . import libcuda
from .buffer import DeviceBuffer
from .device import check, device, driver

FEWEST, MOST = 5, 100  # repetitions
MOST_COVERS = 20
MOST_LATE = 5  # repetitions, one behind the other


@dataclass(frozen=True)
class Timing:
    """Milliseconds: the median of `repeats` repetitions, the least and the largest."""

    ms: float
    repeats: int
    least_ms: float
    largest_ms: float

    @staticmethod
    def of(times_ms: list[float]) -> Timing:
        return Timing(float(np.median(times_ms)), len(times_ms), min(times_ms), max(times_ms))


def is_capturing(stream: int) -> bool:
    """Whether the stream is being captured into a graph, where nothing can be timed."""
    status = check(driver().cuStreamIsCapturing(stream), "ask about graph capture")
    return status != libcuda.CAPTURE_STATUS_NONE


class EventTimer:
    """Times launches on one stream of a device.

    Before each repetition twice the second-level cache is overwritten, often enough to last longer
    than the host needs for a launch: operands come from memory, as in a program, and what lies
    between the events is the kernel's time and not the host's. Where the host took longer after
    all, as one that has other work does, the launch is repeated behind a longer cover, up to five
    times; of a host that is late each time the last one counts.
    """

    def __init__(self, index: int, stream: int):
        self.device, self.stream = device(index), stream
        self._scratch = DeviceBuffer(2 * self.device.l2_bytes, self.device)
        with self.device.current():
            self._begin, self._end = (check(driver().cuEventCreate(0), "make an event")
                                      for _ in range(2))
        self._covers = 1

    def close(self) -> None:
        """Gives the events back."""
        with self.device.current():
            for event in (self._begin, self._end):
                check(driver().cuEventDestroy(event), "free an event")

    def once(self, launch: Callable[[], Any]) -> float:
        """Milliseconds of one launch."""
        for _ in range(MOST_LATE):
            ms, late = self._once(launch)
            if not late:
                break
            self._covers = min(MOST_COVERS, 2 * self._covers)
        return ms

    def _once(self, launch: Callable[[], Any]) -> tuple[float, bool]:
        """Milliseconds, and whether the GPU may have waited for the host meanwhile."""
        self._cover()
        self._record(self._begin)
        launch()
        with self.device.current():
            late = driver().cuEventQuery(self._begin)[0] != libcuda.NOT_READY
        self._record(self._end)
        return self._elapsed(), late

    def _cover(self) -> None:
        with self.device.current():
            for _ in range(self._covers):
                check(driver().cuMemsetD8Async(self._scratch.pointer, 0, self._scratch.nbytes,
                                               self.stream), "overwrite the cache")

    def _record(self, event: Any) -> None:
        with self.device.current():
            check(driver().cuEventRecord(event, self.stream), "record an event")

    def _elapsed(self) -> float:
        with self.device.current():
            check(driver().cuEventSynchronize(self._end), "wait for the kernel")
            return check(driver().cuEventElapsedTime(self._begin, self._end), "read a time")

    def _warm(self, launch: Callable[[], Any]) -> None:
        """Loads the module and fills instruction caches; finds how long the cover has to last."""
        self._covers = 1
        self._once(launch)
        self._record(self._begin)
        self._cover()
        self._record(self._end)
        cover_ms = max(self._elapsed(), 1e-3)
        start = time.perf_counter()
        launch()
        host_ms = 1e3 * (time.perf_counter() - start)
        self._covers = min(MOST_COVERS, 1 + int(1.5 * host_ms / cover_ms))

    def time(self, launch: Callable[[], Any], limit_ms: float) -> Timing:
        """The median over as many repetitions as fit into limit_ms of wall time: 5 to 100, and
        fewer than 5 only when one alone takes longer than the limit."""
        start = time.perf_counter()
        self._warm(launch)
        times: list[float] = []
        while len(times) < MOST:
            times.append(self.once(launch))
            spent = 1e3 * (time.perf_counter() - start)
            if spent > limit_ms and (len(times) >= FEWEST or times[0] > limit_ms):
                break
        return Timing.of(times)


__all__ = ["EventTimer", "Timing", "is_capturing"]
