"""When kernels and copies beside them ran on a GPU: events around each launch, on the host's clock.

    timeline = EventTimeline(); timeline.start(); ...; timeline.stop()
    timeline.events        # KernelEvent(name, device, stream, start_ns, end_ns), in order

While a timeline is open, it stands in the place of the driver's launch in every prepared launch;
otherwise launching costs nothing more. An interval holds the kernel and what the GPU needs to start
it. Launches that are captured into a graph are not seen, since they do not run then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .. import hooks
from ..lazy_dataclass import dataclass
from . import device as devices
from . import module
from .copy_times import is_timing
from .device import check, device
from .libcuda import LaunchConfig
from .timing import is_capturing


@dataclass(frozen=True)
class KernelEvent:
    """One kernel that ran: on a stream of a device, or under the interpreter (device -1). kind:
    kernel | copy, beside the kernels."""

    name: str
    device: int
    stream: int
    start_ns: int
    end_ns: int
    kind: str = "kernel"


@dataclass(frozen=True)
class _Pending:
    name: str
    device: int
    stream: int
    begin: Any
    end: Any
    kind: str = "kernel"


class EventTimeline:
    """Collects the events of all threads between start() and stop()."""

    def __init__(self) -> None:
        self.events: list[KernelEvent] = []
        self._pending: list[_Pending] = []
        self._bases: dict[int, tuple[Any, int]] = {}  # event and host time of each device
        self._lock = threading.Lock()

    def start(self) -> None:
        module.watch(self)
        hooks.copies.append(self._copy)

    def stop(self) -> None:
        """Waits for the kernels that were seen, and reads their times."""
        module.unwatch(self)
        hooks.copies.remove(self._copy)
        found = [self._read(p) for p in self._pending]
        for index, (event, _) in self._bases.items():
            with device(index).current():
                check(devices.driver().cuEventDestroy(event), "free an event")
        self._pending, self._bases = [], {}
        self.events = sorted([*self.events, *found], key=lambda e: (e.start_ns, e.end_ns))

    def add(self, event: KernelEvent) -> None:
        """A kernel that ran on the host."""
        self.events.append(event)

    def wrap(self, kernel: module.LoadedKernel, index: int,
             launch: Callable[..., int]) -> Callable[..., int]:
        """The driver's launch of a kernel, between two events."""
        def timed(config: Any, function: Any, addresses: Any, extra: Any) -> int:
            stream = LaunchConfig.from_address(config.value).stream or 0
            if is_timing() or is_capturing(stream):
                return launch(config, function, addresses, extra)
            self._base(index)
            begin = self._record(index, stream)
            status = launch(config, function, addresses, extra)
            pending = _Pending(kernel.name, index, stream, begin, self._record(index, stream))
            if not status:
                self._pending.append(pending)
            return status

        return timed

    @contextmanager
    def _copy(self, name: str, index: int, stream: int) -> Iterator[None]:
        """A copy beside the kernels."""
        self._base(index)
        begin = self._record(index, stream)
        yield
        self._pending.append(_Pending(name, index, stream, begin, self._record(index, stream),
                                      "copy"))

    def _base(self, index: int) -> None:
        """An event whose time the host knows: the device is idle when it is recorded."""
        with self._lock:
            if index in self._bases:
                return
            device(index).synchronize()
            event = self._record(index, 0)
            with device(index).current():
                check(devices.driver().cuEventSynchronize(event), "wait for an event")
            self._bases[index] = event, time.perf_counter_ns()

    def _record(self, index: int, stream: int) -> Any:
        with device(index).current():
            event = check(devices.driver().cuEventCreate(0), "make an event")
            check(devices.driver().cuEventRecord(event, stream), "record an event")
        return event

    def _read(self, p: _Pending) -> KernelEvent:
        base, at_ns = self._bases[p.device]
        with device(p.device).current():
            check(devices.driver().cuEventSynchronize(p.end), "wait for a kernel")
            after = check(devices.driver().cuEventElapsedTime(base, p.begin), "read a time")
            took = check(devices.driver().cuEventElapsedTime(p.begin, p.end), "read a time")
            for event in (p.begin, p.end):
                check(devices.driver().cuEventDestroy(event), "free an event")
        start = at_ns + int(1e6 * after)
        return KernelEvent(p.name, p.device, p.stream, start, start + max(1, int(1e6 * took)),
                           p.kind)


__all__ = ["KernelEvent", "EventTimeline"]
