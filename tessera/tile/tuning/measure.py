"""What measures the candidates of a search.

On a GPU: CUDA events. On the host nothing does: how long the interpreter takes says nothing about a
GPU. A function may be given instead, `measure=f` with f(launch, schedule) -> milliseconds, for
another clock or objective, and for tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from tessera.errors import ArgumentError, user_line
from tessera.runtime import timing
from tessera.runtime.arrays import Array as DeviceArray
from tessera.runtime.arrays import current_stream
from tessera.runtime.device import device
from tessera.tile.interpreter.arguments import Bound
from tessera.tile.ir.schedule import Schedule
from tessera.tile.tuning.gpus import DEFAULT, Gpu, gpu_of

Launch = Callable[[], Any]


class Bench(Protocol):
    """name: for traces and cache keys; times measured differently are never mixed."""

    name: str

    def measure(self, launch: Launch, schedule: Schedule, limit_ms: float) -> float:
        """Milliseconds of a launch; limit_ms is how long measuring it may take."""

    def close(self) -> None:
        """Gives back what it holds."""


class FunctionBench:
    """A user's f(launch, schedule) -> milliseconds."""

    def __init__(self, function: Callable[[Launch, Schedule], float]):
        if not callable(function):
            raise ArgumentError(f"measure={function!r}: a function of a launch and a schedule that "
                                "returns milliseconds", where=user_line())
        self.function = function
        self.name = getattr(function, "__qualname__", type(function).__name__)

    def measure(self, launch: Launch, schedule: Schedule, limit_ms: float) -> float:
        got = self.function(launch, schedule)
        number = isinstance(got, int | float | np.number) and not isinstance(got, bool)
        if not number or not math.isfinite(got) or got <= 0:
            raise ArgumentError(f"{self.name} measured {got!r}: a time in milliseconds is a number "
                                "above 0")
        return float(got)

    def close(self) -> None:
        """Holds nothing."""


class DeviceBench:
    """CUDA events on the stream that the arguments' library works on; the median."""

    name = "CUDA events"

    def __init__(self, index: int, stream: int):
        if timing.is_capturing(stream):
            raise ArgumentError("a tuned kernel's first call cannot be captured in a graph: it "
                                "measures its candidates", where=user_line(),
                                hint="call it once before the capture")
        self.timer = timing.EventTimer(index, stream)

    def measure(self, launch: Launch, schedule: Schedule, limit_ms: float) -> float:
        return self.timer.time(launch, limit_ms).ms

    def close(self) -> None:
        self.timer.close()


def bench_for(bound: Bound, measure: Callable | None) -> Bench | None:
    """What measures this call: the user's function, events on its GPU, or nothing.

    Nothing also where host arrays are copied for each call: that would be what is measured.
    """
    if measure is not None:
        return FunctionBench(measure)
    place = bound.place
    if place.on_host or place.staged:
        return None
    library = next(a.library for a in bound.values.values() if isinstance(a, DeviceArray))
    return DeviceBench(place.device, current_stream(library, place.device))


def gpu_of_call(bound: Bound, default: Gpu = DEFAULT) -> Gpu:
    """The GPU whose figures count: the one that the call runs on, `default` on the host."""
    return default if bound.place.on_host else gpu_of(device(bound.place.device))


__all__ = ["Bench", "DeviceBench", "FunctionBench", "bench_for", "gpu_of_call"]
