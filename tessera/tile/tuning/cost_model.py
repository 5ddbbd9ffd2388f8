"""A cost model that learns: the analytic estimate, corrected by what was measured.

    model = CostModel()
    model.fit(k.tuning_trace)             model.error      error on points that it had not seen
    model.predict(trial)                  microseconds     model.order(trials)  cheapest first

log(measured) = log(estimate) + w . features(schedule), fitted by ridge regression: the analytic
model knows the kernel, the extents and the GPU, the correction learns what it gets wrong about
warps, stages and shapes of tiles. Without points it is the analytic estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tessera.errors import ArgumentError, user_line
from tessera.tile.ir.schedule import ALIASES, DEFAULTS, Schedule
from tessera.tile.tuning.trial import Trial

KNOBS = ("m", "n", "k_", "warps_", "stages_", "vector_")
RIDGE = 0.05  # of the squared weights: few points must not bend the estimate far
FOLDS = 4


class CostModel:
    """Predicts microseconds. fit() replaces what was learnt before.

    .points   number of measured points      .error   mean of |log(predicted / measured)| of points
    that were held out, None before a fit with enough of them    .baseline   that of the estimates
    """

    def __init__(self) -> None:
        self.weights: np.ndarray | None = None
        self.names: tuple[str, ...] = ()
        self.points = 0
        self.error: float | None = None
        self.baseline: float | None = None

    def fit(self, trials: Iterable[Trial]) -> CostModel:
        """Learns from trials with a measured time; the others say nothing. Returns itself."""
        known = [t for t in trials if t.measured_ms]
        self.points, self.weights, self.error, self.baseline = len(known), None, None, None
        if not known:
            return self
        self.names = _extras(known)
        x = np.array([self._features(t.schedule) for t in known])
        y = np.array([math.log(t.measured_ms * 1e3 / _estimate(t))  # type: ignore[operator]
                      for t in known])
        if len(known) >= 2 * FOLDS:
            self.error, self.baseline = _held_out(x, y), float(np.abs(y - np.median(y)).mean())
        self.weights = _ridge(x, y)
        return self

    def predict(self, config: Trial | Schedule | Mapping[str, Any],
                estimate_us: float | None = None) -> float:
        """Microseconds of a candidate: a trial, a schedule, or a dict such as best_config."""
        if isinstance(config, Trial):
            estimate_us = config.estimate_us if estimate_us is None else estimate_us
            config = config.schedule
        schedule = config if isinstance(config, Schedule) else Schedule.from_dict(dict(config))
        if schedule.is_space:
            raise ArgumentError("a cost model predicts one schedule, not a space of them",
                                hint="[model.predict(s) for s in space]", where=user_line())
        base = 1.0 if estimate_us is None else estimate_us
        if self.weights is None:
            return base
        return base * math.exp(float(self._features(schedule) @ self.weights))

    def order(self, trials: Iterable[Trial]) -> list[Trial]:
        """Cheapest first; equal ones keep their order."""
        return sorted(trials, key=self.predict)

    def _features(self, schedule: Schedule) -> np.ndarray:
        """1, and for each knob its logarithm above the default and the square of it: a best value
        may lie in the middle."""
        steps = [_log(schedule.value(name), DEFAULTS.get(name, 1)) for name in KNOBS]
        extra = dict(schedule.extra)
        steps += [_log(extra.get(name), 1) for name in self.names]
        return np.array([1.0, *steps, *(s * s for s in steps)])

    def __repr__(self) -> str:
        error = "" if self.error is None else f", error {self.error:.2f} on points held out"
        return f"CostModel({self.points} points{error})"


def _extras(trials: list[Trial]) -> tuple[str, ...]:
    return tuple(sorted({n for t in trials for n in t.schedule.extra_names if n not in ALIASES}))


def _log(value: Any, unit: float) -> float:
    """Factors of two above `unit`; 0 for what has no size."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return math.log2(value / unit) if number else 0.0


def _estimate(t: Trial) -> float:
    return t.estimate_us if t.estimate_us else 1.0


def _ridge(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Weights of least squares with a penalty; the constant is not penalised."""
    penalty = RIDGE * len(y) * np.eye(x.shape[1])
    penalty[0, 0] = 1e-9
    return np.linalg.solve(x.T @ x + penalty, x.T @ y)


def _held_out(x: np.ndarray, y: np.ndarray) -> float:
    """Mean error of points predicted by a fit to the other three quarters."""
    part = np.arange(len(y)) % FOLDS
    errors = [np.abs(x[part == f] @ _ridge(x[part != f], y[part != f]) - y[part == f])
              for f in range(FOLDS)]
    return float(np.concatenate(errors).mean())


__all__ = ["CostModel"]
