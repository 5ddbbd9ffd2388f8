"""Times of kernels in a row, long enough that the GPU's power decides its clock.

    clock = SustainedClock(device())
    clock.loads({"ours": run, "theirs": other}, guess_us=200)     a SustainedLoad each

Kernels of a training step run at the clock that the power limit leaves. One that is measured alone
for a millisecond runs at the highest clock, and what it moves more through shared memory or the
second-level cache does not show. Here each has the GPU for a while, in turn, several times; the
first part of each while, in which the clock changes, does not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..errors import DeviceError, UnsupportedTargetError
from ..lazy_dataclass import dataclass
from . import libcuda
from .buffer import DEFAULT
from .device import Device, check, driver
from .energy import EnergyMeter
from .graphs import DeviceGraph, recording_stream

GRAPH_US = 8000.0  # of the launches in one graph
MOST_LAUNCHES = 200
POLL_S = 0.002
METERED_S = 0.5  # without as many between changes of the counter there is no mean power


@dataclass(frozen=True)
class SustainedLoad:
    """us: of a call, the median of rounds.  spread: of these, relative.  watts: of the GPU
    meanwhile, None where its energy is not counted."""

    us: float
    spread: float
    watts: float | None

    @property
    def joules(self) -> float | None:
        """Of a call."""
        return None if self.watts is None else self.watts * self.us / 1e6


class SustainedClock:
    """settle_ms: that do not count.  window_ms: behind them, that do.  rounds: of each.

    An H200 counts its energy ten times a second: power needs windows of some of these.
    """

    def __init__(self, on: Device, settle_ms: float = 100, window_ms: float = 400, rounds: int = 3):
        self.device, self.rounds = on, rounds
        self.settle_ms, self.window_ms = settle_ms, window_ms
        try:
            self.meter: EnergyMeter | None = EnergyMeter(on)
            self.no_energy = ""
        except (UnsupportedTargetError, DeviceError) as error:
            self.meter, self.no_energy = None, error.message
        with on.current():
            self.begin, self.end = (check(driver().cuEventCreate(0), "make an event")
                                    for _ in range(2))

    def times(self, runs: Mapping[str, Callable[[Any], None]], guess_us: float) -> dict[str, float]:
        """Microseconds of each, as GraphClock has them."""
        return {name: load.us for name, load in self.loads(runs, guess_us).items()}

    def loads(self, runs: Mapping[str, Callable[[Any], None]], guess_us: float
              ) -> dict[str, SustainedLoad]:
        """Of each. runs: run(stream) asks for the launches of a call."""
        count = max(1, min(MOST_LAUNCHES, round(GRAPH_US / max(guess_us, 1.0))))
        stream = recording_stream(self.device.index)
        graphs = {name: DeviceGraph.record(self.device, stream, [partial(run, stream)] * count)
                  for name, run in runs.items()}
        ms = {name: max(1e-3, self._while(graph, 1, 1)[0]) for name, graph in graphs.items()}
        took: dict[str, list[float]] = {name: [] for name in runs}
        energy = {name: (0.0, 0.0) for name in runs}  # joules, seconds
        for i in range(self.rounds):
            for name in reversed(graphs) if i % 2 else graphs:
                settling, counted = (max(1, round(t / ms[name]))
                                     for t in (self.settle_ms, self.window_ms))
                window, joules, seconds = self._while(graphs[name], settling, counted)
                took[name].append(1e3 * window / counted / count)
                energy[name] = energy[name][0] + joules, energy[name][1] + seconds
        return {name: _load(took[name], *energy[name]) for name in runs}

    def _while(self, graph: DeviceGraph, settling: int, counted: int) -> tuple[float, float, float]:
        """Milliseconds of the launches that count; and joules, in how many seconds, of all."""
        with self.device.current():
            for _ in range(settling):
                graph.launch(DEFAULT)
            check(driver().cuEventRecord(self.begin, DEFAULT), "record an event")
            for _ in range(counted):
                graph.launch(DEFAULT)
            check(driver().cuEventRecord(self.end, DEFAULT), "record an event")
            joules, seconds = self._metered() if self.meter else (0.0, 0.0)
            check(driver().cuEventSynchronize(self.end), "wait for a graph")
            return (check(driver().cuEventElapsedTime(self.begin, self.end), "read a time"),
                    joules, seconds)

    def _metered(self) -> tuple[float, float]:
        """Between the first and the last change of the counter until the launches are done."""
        assert self.meter is not None
        seen: list[tuple[float, float]] = []
        while driver().cuEventQuery(self.end)[0] == libcuda.NOT_READY:
            now = self.meter.joules(), time.perf_counter()
            if not seen or now[0] != seen[-1][0]:
                seen.append(now)
            time.sleep(POLL_S)
        changes = seen[1:]  # the first is what stood there before
        if len(changes) < 2:
            return 0.0, 0.0
        return changes[-1][0] - changes[0][0], changes[-1][1] - changes[0][1]


def _load(us: list[float], joules: float, seconds: float) -> SustainedLoad:
    middle, watts = statistics.median(us), joules / seconds if seconds >= METERED_S else None
    return SustainedLoad(middle, (max(us) - min(us)) / middle, watts)


__all__ = ["SustainedClock", "SustainedLoad"]
