"""The state of the random streams that are given no key: a seed, a step, launches of kernels.

A compiled function that draws takes one step per call, and a kernel that draws takes the next
number of its own launches, so that each draws anew, and the same in every run, on every rank and
on any device:

    key of stream n of a compiled function = fold_in(fold_in(seed, n), step)
    key of a launch of a kernel            = fold_in(fold_in(seed, kernel), launch)

The setting `seed` begins a run: a scope that sets it has a state of its own, and so has the block
around it when the scope ends.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field
from hashlib import blake2b

import numpy as np

from tessera import config
from tessera.errors import ArgumentError
from tessera.lazy_dataclass import dataclass
from tessera.numerics.philox import fold_words

KERNELS = 1 << 63  # apart from the numbers of streams, which have 32 bits


@dataclass(frozen=True)
class RandomState:
    """All there is to restore: equal states give equal draws.

    launches: (kernel, number of its launches that drew), by name.
    """

    seed: int = 0
    step: int = 0
    launches: tuple[tuple[str, int], ...] = ()


@dataclass
class _Run:
    """A state while it goes on."""

    seed: int
    step: int = 0
    launches: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def of(state: RandomState) -> _Run:
        return _Run(state.seed, state.step, dict(state.launches))


class _Holder:
    """The runs of a process or of a simulated rank, by the choice of the setting `seed`."""

    def __init__(self) -> None:
        self.runs: dict[int, _Run] = {}


_process = _Holder()
_own: ContextVar[_Holder | None] = ContextVar("random state of a simulated rank", default=None)
_lock = threading.RLock()


def _current() -> _Run:
    """The run that the setting `seed` stands for now. Those of scopes that ended are dropped."""
    holder = _own.get() or _process
    open_ = config.choices("seed")
    run = holder.runs.get(open_[0])
    if run is None:
        run = _Run(int(config.get("seed")))
        holder.runs = {n: r for n, r in holder.runs.items() if n in open_} | {open_[0]: run}
    return run


def isolate() -> None:
    """From here on this context has a state of its own, equal to the one so far: ranks simulated
    in one process draw as those of several do."""
    holder = _Holder()
    with _lock:
        holder.runs = {config.choices("seed")[0]: _Run.of(get_state())}
    _own.set(holder)


def get_state() -> RandomState:
    """The seed, the step and the launches, for a checkpoint."""
    with _lock:
        run = _current()
        return RandomState(run.seed, run.step, tuple(sorted(run.launches.items())))


def set_state(state: RandomState) -> None:
    """Continue from a state that get_state returned."""
    with _lock:
        run = _current()
        run.seed, run.step, run.launches = state.seed, state.step, dict(state.launches)


def seed(value: int) -> None:
    """Start again from this seed, at step 0 and the first launch of every kernel."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ArgumentError(f"a seed is an integer, got {value!r}")
    set_state(RandomState(int(value) & (2**64 - 1)))


def next_step() -> tuple[int, int]:
    """Advance the step: once per call of a compiled function that draws. The seed and the step."""
    with _lock:
        run = _current()
        run.step += 1
        return run.seed, run.step


def seed_and_step() -> tuple[int, int]:
    run = _current()
    return run.seed, run.step


def next_launch(kernel: str) -> tuple[int, int]:
    """The key of the next launch of a kernel, as two words; the launch counts."""
    with _lock:
        run = _current()
        number = run.launches.get(kernel, 0)
        run.launches[kernel] = number + 1
        return fold_words(_kernel_key(run.seed, kernel), number)


@functools.lru_cache(1024)
def _kernel_key(seed: int, kernel: str) -> tuple[int, int]:
    name = int.from_bytes(blake2b(kernel.encode(), digest_size=8).digest(), "little")
    return fold_words((seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF), name | KERNELS)


@contextmanager
def rehearsal() -> Iterator[None]:
    """Launches in this block do not count: trials of schedules must not change what a program
    draws."""
    run = _current()
    with _lock:
        before = dict(run.launches)
    try:
        yield
    finally:
        with _lock:
            run.launches = before


__all__ = ["RandomState", "get_state", "isolate", "next_launch", "next_step", "rehearsal", "seed",
           "seed_and_step", "set_state"]
