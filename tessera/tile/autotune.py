"""@ts.kernel.autotune: the best schedule of a space, found once for each set of types and extents.

A candidate must compile and fit the machine (legality). The analytic model orders the legal ones;
on a device they are then measured within the budget. On the host there is nothing to measure: the
interpreter's time says nothing about a GPU, so the model's first choice is taken, and
`.tuning_trace` says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tessera.errors import ArgumentError, TesseraError, did_you_mean, user_line
from tessera.tile.arguments import Bound
from tessera.tile.cost import estimate
from tessera.tile.ir import Function
from tessera.tile.kernel import Kernel
from tessera.tile.launch import MAX_LANES
from tessera.tile.schedule import ALIASES, Schedule

METRICS = ("latency_ms",)
SHARED_LIMIT_BYTES = 232_448  # 227 KiB per group on sm_90; CUDA C++ Programming Guide, table 21


@dataclass(frozen=True)
class Trial:
    """One candidate. status: 'chosen' | 'estimated' | 'skipped'; reason: why it was skipped."""

    schedule: Schedule
    status: str
    estimate_us: float | None = None
    measured_ms: float | None = None
    reason: str = ""


class TunedKernel(Kernel):
    """A kernel that chooses its schedule from a space.

    .space   the candidates        .best_config  the parameters chosen last
    .tuning_trace  every candidate of the last choice, with its estimate or why it was skipped
    """

    def __init__(self, fn: Any, space: Any, metric: str, budget_ms: float, cache: Any, key: Any):
        if metric not in METRICS:
            raise ArgumentError(f"metric={metric!r} is not known",
                                hint=did_you_mean(metric, METRICS), where=user_line())
        if not budget_ms > 0:
            raise ArgumentError(f"budget_ms={budget_ms!r}: a time above 0", where=user_line())
        super().__init__(fn)
        self.space = candidates(space)
        self.metric, self.budget_ms, self.cache, self.key = metric, budget_ms, cache, key
        self.chosen: dict[Any, Schedule] = {}
        self.tuning_trace: list[Trial] = []

    @property
    def schedule(self) -> Schedule:
        """The schedule chosen last; before any call the first of the space."""
        return next(reversed(self.chosen.values()), self.space[0])

    @property
    def best_config(self) -> dict[str, Any]:
        return self.schedule.values

    def choose(self, bound: Bound) -> Schedule:
        """The schedule for these types and extents, found at their first call."""
        key = (tuple(bound.types.items()), tuple(bound.constants.items()),
               tuple(sorted(bound.texts.items())), self._user_key(bound))
        if key not in self.chosen:
            self.chosen[key] = self._search(bound)
        return self.chosen[key]

    def _user_key(self, bound: Bound) -> Any:
        return self.key(**bound.given) if callable(self.key) else self.key

    def _search(self, bound: Bound) -> Schedule:
        trials: list[Trial] = []
        for schedule in self.space:
            try:
                function = self.specialise(bound, schedule)
                require_legal(function, schedule, bound)
            except TesseraError as err:
                trials.append(Trial(schedule, "skipped", reason=err.message))
                continue
            trials.append(Trial(schedule, "estimated", estimate(function, schedule, bound)))
        legal = sorted((t for t in trials if t.status != "skipped"),
                       key=lambda t: t.estimate_us)  # type: ignore[arg-type,return-value]
        if not legal:
            self.tuning_trace = trials
            reasons = "; ".join(dict.fromkeys(t.reason for t in trials))
            raise ArgumentError(f"no schedule of the space fits {self.__name__}: {reasons}",
                                where=user_line())
        best = Trial(legal[0].schedule, "chosen", legal[0].estimate_us,
                     reason="by the cost model: nothing is measured on the host")
        self.tuning_trace = [best if t is legal[0] else t for t in trials]
        return best.schedule.with_source("tuned")


def candidates(space: Any) -> tuple[Schedule, ...]:
    """The schedules of dict(BM=[64, 128], warps=[4, 8]), of a Schedule with lists, or given."""
    if isinstance(space, Schedule):
        return tuple(space)
    if isinstance(space, dict):
        lists = [v if isinstance(v, list | tuple) else [v] for v in space.values()]
        return tuple(_schedule(dict(zip(space, point, strict=True)))
                     for point in itertools.product(*lists))
    if isinstance(space, Iterable) and not isinstance(space, str):
        found = tuple(space)
        if found and all(isinstance(s, Schedule) for s in found):
            return found
    raise ArgumentError(f"a space is a dict of lists, a Schedule with lists, or schedules; got "
                        f"{space!r}", hint="space=dict(BM=[64, 128], warps=[4, 8])",
                        where=user_line())


def _schedule(values: dict[str, Any]) -> Schedule:
    for name in values:
        if name not in ALIASES and not name[0].isupper():
            raise ArgumentError(f"a space has no {name!r}", hint=did_you_mean(name, list(ALIASES)),
                                where=user_line())
    return Schedule(**values, source="tuned")


def require_legal(function: Function, schedule: Schedule, bound: Bound) -> None:
    """Raises ArgumentError when a group does not fit a multiprocessor, or BD the head size."""
    if function.shared_bytes > SHARED_LIMIT_BYTES:
        raise ArgumentError(f"{function.shared_bytes} bytes of shared memory, a group has "
                            f"{SHARED_LIMIT_BYTES}")
    if schedule.lanes > MAX_LANES:
        raise ArgumentError(f"{schedule.lanes} lanes, a group has at most {MAX_LANES}")
    head = schedule.d
    for name in ("D", "D_h"):
        size = bound.texts.get(name)
        if head is not None and size is not None and head != size:
            raise ArgumentError(f"BD={head} is not the extent {name}={size}")


Choice = Callable[[Bound], Schedule]
