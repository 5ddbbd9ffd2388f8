"""One search for the best schedule of a call.

    1 compile each candidate and test whether it fits
    2 order by the cost model
    3 until the budget is spent: run, compare with the reference, measure

What a candidate does wrong stays with it: it is recorded and skipped, and only when none is left
does the search fail. Wall time is at most the budget and one candidate.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from tessera.errors import ArgumentError, DeviceError, TesseraError, user_line
from tessera.lazy_dataclass import dataclass
from tessera.numerics.random_state import rehearsal
from tessera.tile.interpreter.arguments import Bound
from tessera.tile.interpreter.launch import Config
from tessera.tile.ir.errors import KernelError
from tessera.tile.ir.ir import Function
from tessera.tile.ir.schedule import Schedule
from tessera.tile.launch.precompile import prepare
from tessera.tile.tuning import accuracy
from tessera.tile.tuning.cost import estimate
from tessera.tile.tuning.gpus import Gpu
from tessera.tile.tuning.legality import require_legal
from tessera.tile.tuning.measure import Bench
from tessera.tile.tuning.trial import Trace, Trial

if TYPE_CHECKING:
    from tessera.tile.kernel.autotune import TunedKernel

SLACK = 3.0  # a candidate this much slower than the best, by the model, is not measured
LEAST_MS = 5.0  # of measuring one candidate
COMPARE_ALL = 1 << 22  # with more elements of results only a new best is compared


class WrongResult(ArgumentError):
    """A candidate whose results differ from the reference."""

    default_code = "E_WRONG_RESULT"


class TooSlow(ArgumentError):
    """A candidate whose compilation does not end."""

    default_code = "E_COMPILE_TIME"


@dataclass
class Search:
    kernel: TunedKernel
    bound: Bound
    config: Config
    gpu: Gpu
    space: tuple[Schedule, ...]
    bench: Bench | None
    trials: list[Trial] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    functions: dict[int, Function] = field(default_factory=dict)  # by position in the space
    reference: str = ""
    start: float = field(default_factory=time.perf_counter)

    def run(self) -> Trial:
        """The best candidate. Raises when there is none."""
        for i, schedule in enumerate(self.space):
            late = self.bench is not None and self.functions and self._spent
            self.trials.append(Trial(schedule, "estimated", reason=f"{self._spent} before it was "
                                     "compiled") if late else self._compiled(i, schedule))
        if not self.functions:
            raise failure_of(self.kernel.__name__, self.errors)
        if self.bench is None:
            return self._choose(self._order()[0], "by the cost model: nothing is measured on the "
                                "host")
        return self._measure_all(self.bench)

    def trace(self) -> Trace:
        measured = any(t.measured_ms is not None for t in self.trials)
        return Trace(tuple(self.trials), "measured" if measured else "model", self.elapsed_ms,
                     self.bench.name if self.bench else "", self.reference, self.gpu.name)

    @property
    def elapsed_ms(self) -> float:
        return 1e3 * (time.perf_counter() - self.start)

    @property
    def _spent(self) -> str:
        """A reason to stop, once there is one."""
        budget = self.kernel.budget_ms
        return f"the budget of {budget:g} ms was spent" if self.elapsed_ms > budget else ""

    # --- before measuring ---------------------------------------------------------------------
    def _compiled(self, i: int, schedule: Schedule) -> Trial:
        """To Tile IR, and whether it fits."""
        try:
            function = self.kernel.specialise(self.bound, schedule, self.kernel.grid is not None)
            require_legal(function, schedule, self.bound, self.gpu)
            us = estimate(function, schedule, self.bound, self.gpu)
        except Exception as err:  # one candidate's failure is not the others'
            return self._skipped(Trial(schedule, "estimated"), err)
        self.functions[i] = function
        return Trial(schedule, "estimated", us)

    def _skipped(self, trial: Trial, err: Exception) -> Trial:
        self.errors.append(err)
        code = err.code if isinstance(err, TesseraError) else type(err).__name__
        text = err.message if isinstance(err, TesseraError) else str(err) or repr(err)
        return replace(trial, status="skipped", error=code, reason=text, measured_ms=None)

    def _order(self) -> list[int]:
        """Positions of the legal candidates, cheapest first."""
        predict = self.kernel.cost_model.predict
        return sorted(self.functions, key=lambda i: predict(self.trials[i]))

    def _choose(self, i: int, reason: str) -> Trial:
        chosen = self.trials[i].schedule.with_source("tuned")
        self.trials[i] = replace(self.trials[i], schedule=chosen, status="chosen", reason=reason)
        return self.trials[i]

    # --- measuring ----------------------------------------------------------------------------
    def _measure_all(self, bench: Bench) -> Trial:
        order, best = self._order(), None
        want = self._reference(order)
        for turn, i in enumerate(order):
            why = self._not_worth(i, best)
            if why:
                status, reason = why
                self.trials[i] = replace(self.trials[i], status=status, reason=reason)
                continue
            left = self.kernel.budget_ms - self.elapsed_ms
            limit_ms = max(LEAST_MS, left / (len(order) - turn))
            try:
                ms = self._measure(i, bench, want, limit_ms, best)
            except Exception as err:  # recorded, and the next one gets its turn
                self.trials[i] = self._skipped(self.trials[i], err)
                _raise_if_lost(err, self.trials[i])
                continue
            self.trials[i] = replace(self.trials[i], status="measured", measured_ms=ms)
            if best is None or ms < self.trials[best].measured_ms:  # type: ignore[operator]
                best = i
        if best is None:
            raise failure_of(self.kernel.__name__, self.errors)
        return self._choose(best, f"the fastest of {self.trace().count('measured')} measured")

    def _not_worth(self, i: int, best: int | None) -> tuple[str, str] | None:
        """Why a candidate is not measured: its status and the reason. The first one always is."""
        if best is None:
            return None
        if self._spent:
            return "estimated", self._spent
        predict = self.kernel.cost_model.predict
        ratio = predict(self.trials[i]) / predict(self.trials[best])
        if ratio > SLACK:
            return "pruned", f"the model says {ratio:.1f} times the time of the best"
        return None

    def _measure(self, i: int, bench: Bench, want: dict[str, Any] | None, limit_ms: float,
                 best: int | None) -> float:
        """Milliseconds of a candidate that is right. Raises for one that is not."""
        function, schedule = self.functions[i], self.trials[i].schedule
        self._prepare(function, schedule)
        size = sum(x.size for x in want.values()) if want else 0
        if want and size <= COMPARE_ALL:
            self._compare(function, schedule, want)
        launch = self._launch(schedule, accuracy.copies(function, self.bound))
        with rehearsal():
            ms = bench.measure(launch, schedule, limit_ms)
        faster = best is None or ms < self.trials[best].measured_ms  # type: ignore[operator]
        if want and size > COMPARE_ALL and faster:
            self._compare(function, schedule, want)
        return ms

    def _prepare(self, function: Function, schedule: Schedule) -> None:
        """Compiles for the GPU, in a thread that is left behind when it does not end."""
        kernel = self.kernel.candidate(schedule)
        within(self.kernel.compile_limit_s, lambda: prepare(kernel, self.bound, self.config))

    def _launch(self, schedule: Schedule, given: dict[str, Any]) -> Callable[[], Any]:
        kernel = self.kernel.candidate(schedule)
        args, kwargs = self.kernel.spread(given, schedule)
        return lambda: kernel._launch(self.config, args, kwargs)

    # --- accuracy -----------------------------------------------------------------------------
    def _reference(self, order: list[int]) -> dict[str, Any] | None:
        """Results of the default schedule; where that does not work, of the first that does."""
        default = self._default(order[0])
        tries = [("the default schedule", default)] if default is not None else []
        tries += [(f"the candidate {self.trials[i].schedule.to_dict()}", self.trials[i].schedule)
                  for i in order]
        for name, schedule in tries:
            try:
                function = self.kernel.specialise(self.bound, schedule,
                                                  self.kernel.grid is not None)
                self._prepare(function, schedule)
                found = self._outputs(function, schedule)
            except Exception as err:  # a candidate shows it again when its turn comes
                _raise_if_lost(err, Trial(schedule, "skipped"))
                continue
            self.reference = name
            return found
        return None

    def _default(self, first: int) -> Schedule | None:
        """The defaults, with the kernel's own parameters of the first candidate; None when they do
        not fit."""
        extra = dict(self.trials[first].schedule.extra)
        default = Schedule(**extra, source="auto")
        try:
            function = self.kernel.specialise(self.bound, default, self.kernel.grid is not None)
            require_legal(function, default, self.bound, self.gpu)
        except Exception:  # the defaults need not suit a kernel that is made for its space
            return None
        return default

    def _outputs(self, function: Function, schedule: Schedule) -> dict[str, Any]:
        given = accuracy.copies(function, self.bound)
        with rehearsal():  # each candidate draws what the reference drew
            return accuracy.outputs(function, given, self._launch(schedule, given)())

    def _compare(self, function: Function, schedule: Schedule, want: dict[str, Any]) -> None:
        limit = accuracy.limit_of(function, self.bound)
        message = accuracy.compare(self._outputs(function, schedule), want, limit)
        if message:
            raise WrongResult(f"{message} by {self.reference}")


def within(limit_s: float, work: Callable[[], Any]) -> None:
    """Runs work in a thread. Raises TooSlow after limit_s, else what the work raises."""
    failed: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as err:  # handed to the thread that waits
            failed.append(err)

    thread = threading.Thread(target=body, name="tessera-compile", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise TooSlow(f"its compilation took more than {limit_s:g} s")
    if failed:
        raise failed[0]


def _raise_if_lost(err: Exception, trial: Trial) -> None:
    """After some errors of a GPU nothing runs any more in this process: no candidate is left."""
    if isinstance(err, DeviceError) and "context is lost" in (err.hint or ""):
        raise DeviceError(f"tuning, candidate {trial.schedule.to_dict()}: {err.message}",
                          hint=f"{err.hint}; leave this candidate out of the space",
                          where=user_line()) from err


def failure_of(name: str, errors: list[Exception]) -> Exception:
    """What to raise when no candidate is left: the kernel's own error where all have that one."""
    texts = list(dict.fromkeys(e.message if isinstance(e, TesseraError) else repr(e)
                               for e in errors))
    if len(texts) == 1 and isinstance(errors[0], KernelError):
        return errors[0]
    return ArgumentError(f"no schedule of the space fits {name}: {'; '.join(texts)}",
                         where=user_line())


__all__ = ["Search", "TooSlow", "WrongResult", "failure_of", "within"]
