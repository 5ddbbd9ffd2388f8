"""Calls on a GPU: how long they take, several sides in turn, and how far apart results are."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import record  # noqa: F401  # it makes the package found
import torch

from tessera.tile.launch.compile_images import compile_images
from tessera.tile.launch.precompile import wanted_image

Call = Callable[[], Any]
Runs = Mapping[str, Call]
AHEAD_CYCLES = 3_000_000


# --- times --------------------------------------------------------------------------------------
def in_turn(runs: Runs, calls: int = 1, rounds: int = 5, ahead_cycles: int = 0
            ) -> dict[str, float]:
    """Microseconds on the GPU of one of `calls` calls of each: medians over rounds, in each of
    which all run, in random order. ahead_cycles: for which the GPU is kept busy in front of each,
    so that what a call costs the host is not measured."""
    took: dict[str, list[float]] = {name: [] for name in runs}
    for r in range(rounds + 1):
        marks = []
        for name in random.sample(list(runs), len(runs)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if ahead_cycles:
                torch.cuda._sleep(ahead_cycles)
            begin.record()
            for _ in range(calls):
                runs[name]()
            end.record()
            marks.append((name, begin, end))
        torch.cuda.synchronize()
        for name, begin, end in marks if r else ():  # the first round warms up
            took[name].append(1e3 * begin.elapsed_time(end) / calls)
    return {name: statistics.median(us) for name, us in took.items()}


def clocked_in_turn(runs: Runs, rounds: int = 5, seconds: float = 0.05) -> dict[str, float]:
    """Milliseconds of a call by the host's clock, in rounds of as many as take so many seconds."""
    calls: dict[str, int] = {}
    for name, run in runs.items():
        run()
        calls[name] = max(2, min(50, int(1e3 * seconds / _clocked(run, 1))))
    took: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            took[name].append(_clocked(run, calls[name]))
    return {name: statistics.median(ms) for name, ms in took.items()}


def _clocked(run: Call, calls: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin) / calls


def captured(calls: Sequence[Call]) -> Call:
    """The calls as a CUDA graph. It keeps them: what they read must not be freed."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return lambda kept=calls: graph.replay()


# --- results ------------------------------------------------------------------------------------
def as_torch(x: Any) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.from_dlpack(x)


def distance(got: Any, want: torch.Tensor) -> float:
    """The norm of the difference by that of what is wanted, in f64."""
    want = want.double()
    return float((as_torch(got).double() - want).norm() / want.norm())


def require(title: str, got: Any, want: torch.Tensor, limit: float) -> float:
    """The distance; ends the program where it is above the limit."""
    error = distance(got, want)
    if not error <= limit:
        raise SystemExit(f"{title}: the error {error:.2e} is above {limit:.1e}")
    return error


def compile_calls(calls: Iterable[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> int:
    """What calls of routines run, compiled side by side: (routine, arguments, options) of each.
    How many kernels these are."""
    wanted = {}
    for routine, args, options in calls:
        for name, given, constants in routine.launches(*args, **options):
            kernel = routine.kernels[name]
            image = wanted_image(kernel, kernel.bind(given, constants))
            wanted[image.key] = image
    return compile_images(wanted.values())
