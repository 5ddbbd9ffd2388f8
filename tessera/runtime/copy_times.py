"""Times of copies between host and GPU, and on a GPU, while somebody looks (`hooks.timed_steps`).

    begin = begin_copy(device, stream) if hooks.timed_steps else None
    ...                                              # the copy is asked for
    if begin is not None:
        end_copy("to the GPU", nbytes, begin)        # waits for it, and tells the observers
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .. import hooks
from ..lazy_dataclass import dataclass
from . import device as devices
from .device import Device, check


@dataclass(frozen=True)
class StepEvent:
    """One step that ran, on the host's clock. device: -1 is the host.  first: of a program that
    has not run before, whose kernels are loaded between its steps."""

    what: Any
    device: int
    stream: int
    start_ns: int
    end_ns: int
    first: bool = False


@dataclass(frozen=True)
class CopyLabel:
    """What a copy is. way: to the GPU | from the GPU | on the GPU."""

    way: str
    nbytes: int


@dataclass(frozen=True)
class BegunCopy:
    """The event in front of a copy."""

    device: Device
    stream: int
    event: Any


class _Local(threading.local):
    timing = False


_local = _Local()


def is_timing() -> bool:
    """Whether this thread runs steps that are timed: what they launch needs no events of its own.
    """
    return _local.timing


@contextmanager
def timing() -> Iterator[None]:
    """While steps run that are timed."""
    _local.timing = True
    try:
        yield
    finally:
        _local.timing = False


def begin_copy(on: Device, stream: int) -> BegunCopy | None:
    """None inside of a step that is timed."""
    if is_timing():
        return None
    with on.current():
        event = check(devices.driver().cuEventCreate(0), "make an event")
        check(devices.driver().cuEventRecord(event, stream), "record an event")
    return BegunCopy(on, stream, event)


def end_copy(way: str, nbytes: int, begun: BegunCopy) -> None:
    """Waits for the copy, and tells its observers when it ran."""
    library = devices.driver()
    with begun.device.current():
        end = check(library.cuEventCreate(0), "make an event")
        check(library.cuEventRecord(end, begun.stream), "record an event")
        check(library.cuEventSynchronize(end), "wait for a copy")
        done = time.perf_counter_ns()
        ms = check(library.cuEventElapsedTime(begun.event, end), "read a time")
        for event in (begun.event, end):
            check(library.cuEventDestroy(event), "free an event")
    seen = StepEvent(CopyLabel(way, nbytes), begun.device.index, begun.stream,
                     done - max(1, int(1e6 * ms)), done)
    for see in hooks.timed_steps:
        see(seen)


__all__ = ["BegunCopy", "CopyLabel", "StepEvent", "begin_copy", "end_copy", "is_timing", "timing"]
