"""Times of the choices for a problem: CUDA graphs of many launches, in turn, medians over rounds.

Kernels are compiled first, side by side. Each choice's result is compared with the model's; one
that does not compile, or gives something else, is left out and said.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, Protocol

import numpy as np

from ..errors import TesseraError
from ..kernels.cards import Card
from ..kernels.routine import ForeignArray, Routine, find
from ..kernels.routine_launcher import LaunchRecorder
from ..lazy_dataclass import dataclass
from ..numerics import decode
from ..runtime.buffer import DEFAULT, DeviceBuffer, fill_bytes
from ..runtime.device import Device, check, driver
from ..runtime.graphs import DeviceGraph, recording_stream
from ..runtime.normal_numbers import normal_numbers
from ..tensor import Tensor
from ..tile.launch.compile_images import WantedImage, compile_images
from ..tile.launch.precompile import wanted_image
from .tunable import Tunable, TuningProblem

GRAPH_US = 1200.0  # of the launches in one graph
MOST_LAUNCHES = 100
ROUNDS = 7
COMPARED = 1 << 16  # elements of a result
FAR = 2.0**-6  # relative, of results of 16 bits

Launches = list[tuple[Any, tuple, dict[str, Any]]]  # kernel, arguments, constants


class Clock(Protocol):
    """Measures launches."""

    def times(self, runs: Mapping[str, Callable[[Any], None]], guess_us: float) -> dict[str, float]:
        """Microseconds of each. runs: run(stream) asks for the launches of a call."""


class GraphClock:
    """Graphs of as many calls as take some milliseconds, launched in turn in random orders."""

    def __init__(self, on: Device, rounds: int = ROUNDS):
        self.device, self.rounds = on, rounds
        with on.current():
            self.begin, self.end = (check(driver().cuEventCreate(0), "make an event")
                                    for _ in range(2))

    def times(self, runs: Mapping[str, Callable[[Any], None]], guess_us: float) -> dict[str, float]:
        count = max(1, min(MOST_LAUNCHES, round(GRAPH_US / max(guess_us, 1.0))))
        stream = recording_stream(self.device.index)
        graphs = {name: DeviceGraph.record(self.device, stream, [partial(run, stream)] * count)
                  for name, run in runs.items()}
        took: dict[str, list[float]] = {name: [] for name in runs}
        for i in range(self.rounds + 1):
            for name in random.sample(list(graphs), len(graphs)):
                us = self._replayed(graphs[name]) / count
                if i:  # the first warms up
                    took[name].append(us)
        return {name: statistics.median(times) for name, times in took.items()}

    def _replayed(self, graph: DeviceGraph) -> float:
        with self.device.current():
            check(driver().cuEventRecord(self.begin, DEFAULT), "record an event")
            graph.launch(DEFAULT)
            check(driver().cuEventRecord(self.end, DEFAULT), "record an event")
            check(driver().cuEventSynchronize(self.end), "wait for a graph")
            return 1e3 * check(driver().cuEventElapsedTime(self.begin, self.end), "read a time")


@dataclass(frozen=True)
class Measured:
    """us: of each choice, the model's among them.  left_out: why, by choice."""

    problem: TuningProblem
    model: str
    us: Mapping[str, float]
    left_out: Mapping[str, str]


class Operands:
    """Memory for the operands of all problems: normal numbers, which repeat."""

    def __init__(self, on: Device):
        self.device, self.held = on, dict[tuple[int, str], DeviceBuffer]()

    def of(self, tunable: Tunable, p: TuningProblem) -> list[ForeignArray]:
        shapes = tunable.shapes_of(p)
        return [ForeignArray(self._memory(i, prod(s), p).pointer, tuple(s), p.dtype,
                             self.device.index, self) for i, s in enumerate(shapes)]

    def _memory(self, number: int, count: int, p: TuningProblem) -> DeviceBuffer:
        key, size = (number, p.dtype.name), p.dtype.numpy.itemsize
        found = self.held.get(key)
        if found is None or found.nbytes < count * size:
            self.held.pop(key, None)
            self.held[key] = found = normal_numbers(self.device, number, count, p.dtype)
        return found


def launches_of(routine: Routine, arrays: Sequence[Any], options: Mapping[str, Any], plan: Any
                ) -> tuple[Launches, Tensor]:
    """What a call with a plan runs, and its result."""
    recorder = LaunchRecorder(routine, plan)
    result = routine.fn(recorder, *arrays, **options)
    return [(routine.kernels[name], args, constants)
            for name, args, constants in recorder.launches], result


class Measurement:
    """Of the problems of a routine, with one clock."""

    def __init__(self, tunable: Tunable, card: Card, on: Device, clock: Clock, count: int):
        self.tunable, self.routine = tunable, find(tunable.name)
        self.card, self.clock, self.count = card, clock, count
        self.device, self.operands = on, Operands(on)
        self.failed: dict[tuple[TuningProblem, str], str] = {}

    def compile(self, problems: Sequence[TuningProblem]) -> int:
        """All that they run, side by side; how many kernels. What does not compile is left out."""
        wanted = {image.key: image for p in problems for _, image in self._images(p)}
        try:
            return compile_images(wanted.values())
        except TesseraError:
            return sum(self._compiled_alone(p) for p in problems)

    def _images(self, p: TuningProblem) -> Iterator[tuple[str, WantedImage]]:
        for text, plan in self.tunable.trials(p, self.card, self.count).items():
            try:
                for kernel, args, constants in self._launches(p, plan)[0]:
                    yield text, wanted_image(kernel, kernel.bind(args, constants))
            except TesseraError as error:
                self.failed[p, text] = error.message

    def _compiled_alone(self, p: TuningProblem) -> int:
        count = 0
        for text, image in self._images(p):
            try:
                count += compile_images([image])
            except TesseraError as error:
                self.failed[p, text] = error.message
        return count

    def _launches(self, p: TuningProblem, plan: Any) -> tuple[Launches, Tensor]:
        return launches_of(self.routine, self.operands.of(self.tunable, p),
                           self.tunable.options(p), plan)

    def measure(self, p: TuningProblem) -> Measured:
        """Of a problem whose kernels are compiled."""
        plans = self.tunable.trials(p, self.card, self.count)
        model, runs = next(iter(plans)), dict[str, Callable[[Any], None]]()
        left_out = {t: self.failed[p, t] for t in plans if (p, t) in self.failed}
        expected: np.ndarray | None = None
        for text, plan in plans.items():
            if text in left_out:
                continue
            launches, result = self._launches(p, plan)
            found = self._result(launches, result)
            expected = found if expected is None else expected
            off = _distance(found, expected)
            if off <= FAR:
                runs[text] = _runner(launches)
            else:
                left_out[text] = f"its result is off by {off:.1e} of the model's"
        us = self.clock.times(runs, self.tunable.flops(p) / 6e8) if model in runs else {}
        return Measured(p, model, {t: round(x, 3) for t, x in us.items()}, left_out)

    def _result(self, launches: Launches, result: Any) -> np.ndarray:
        """The first elements of what is computed, into memory that held NaNs."""
        memory = result.memory
        with self.device.current():
            fill_bytes(memory.pointer, 0xFF, memory.nbytes, DEFAULT)
        _runner(launches)(None)
        self.device.synchronize()
        codes = np.empty(min(prod(result.shape), COMPARED), result.dtype.numpy)
        memory.read(codes)
        return np.asarray(decode(codes, result.dtype), np.float64)


def _runner(launches: Launches) -> Callable[[Any], None]:
    def run(stream: Any) -> None:
        for kernel, args, constants in launches:
            kernel.launch(*args, stream=stream, **constants)

    return run


def _distance(got: np.ndarray, want: np.ndarray) -> float:
    """Of the whole; infinite where something is no number."""
    off = float(np.linalg.norm(got - want) / max(float(np.linalg.norm(want)), 1e-30))
    return off if np.isfinite(off) else float("inf")


__all__ = ["Clock", "GraphClock", "Measured", "Measurement", "Operands", "launches_of"]
