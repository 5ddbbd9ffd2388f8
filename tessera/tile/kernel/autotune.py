"""@ts.kernel.autotune: the best schedule of a space, found once for each set of types and extents.

A candidate must compile and fit the machine. The cost model orders those that do; they are then run
and compared with the default schedule, and measured, within the budget (search.py). On the host
nothing measures, unless a function is given: the model's first choice is taken, and
`.tuning_trace` says so. What was measured is kept on disk (tuned_schedules.py).
"""

from __future__ import annotations

import ast
import inspect
import itertools
import threading
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from tessera.errors import ArgumentError, did_you_mean, user_line
from tessera.tile.cuda.lower.warp_specialised.program import PipelineKnobs
from tessera.tile.frontend.trace_kernel import record_constant
from tessera.tile.interpreter.arguments import Bound
from tessera.tile.interpreter.launch import Config
from tessera.tile.ir.ir import Function
from tessera.tile.ir.schedule import ALIASES, Schedule
from tessera.tile.kernel.kernel import Kernel
from tessera.tile.tuning import default_schedule, tuned_schedules
from tessera.tile.tuning.cost_model import CostModel
from tessera.tile.tuning.gpus import DEFAULT, Gpu, gpu
from tessera.tile.tuning.legality import HEADS
from tessera.tile.tuning.measure import FunctionBench, bench_for, gpu_of_call
from tessera.tile.tuning.search import Search, failure_of
from tessera.tile.tuning.trial import Trace, Trial
from tessera.tile.tuning.tuned_schedules import TunedSchedule, TuningCache, digest

METRICS = ("latency_ms",)
# What compilers read of a schedule, whatever the kernel does.
KNOBS = frozenset({"warps", "stages", "vector", "swizzle", "cluster", "unit",
                   *(f.name for f in fields(PipelineKnobs))})
COMPILE_LIMIT_S = 60.0


class TunedKernel(Kernel):
    """A kernel that chooses its schedule from a space.

    .space         the candidates, () when the compiler proposes them at the call
    .best_config   the parameters chosen last
    .tuning_trace  every candidate of the last choice, its estimate, its time, or why it was skipped
    .cost_model    what ordered the candidates; learns from each search
    """

    def __init__(self, fn: Any, space: Any = None, metric: str = "latency_ms",
                 budget_ms: float = 200, cache: Any = None, key: Any = None, *,
                 measure: Callable | None = None, gpu: str | Gpu = DEFAULT,
                 model: CostModel | None = None, compile_limit_s: float = COMPILE_LIMIT_S,
                 grid: Any = None):
        _check(metric, budget_ms, compile_limit_s)
        super().__init__(fn, grid=grid)
        self.space = candidates(space) if space is not None else ()
        self.metric, self.budget_ms, self.compile_limit_s = metric, budget_ms, compile_limit_s
        self.measure = measure if measure is None else FunctionBench(measure).function
        TuningCache.of(cache)  # a wrong one is an error here, not at the first call
        self.cache, self.key = cache, _checked_key(key, self)
        self.gpu = _gpu(gpu)
        self.cost_model = model if model is not None else CostModel()
        self.chosen: dict[Any, Schedule] = {}
        self._latest: Schedule | None = None
        self.tuned: dict[str, TunedSchedule] = {}  # by digest: measured here, or imported
        self.tuning_trace: Trace = Trace()
        self._history: list[Trial] = []
        self._lock = threading.RLock()

    @property
    def schedule(self) -> Schedule:
        """The schedule chosen last; before any call the first of the space."""
        first = self.space[0] if self.space else Schedule(source="auto")
        return self._latest or first

    @property
    def best_config(self) -> dict[str, Any]:
        return self.schedule.values

    def forget(self) -> None:
        super().forget()
        self.chosen.clear()

    # --- the choice ---------------------------------------------------------------------------
    def choose(self, bound: Bound, config: Config | None = None) -> Schedule:
        """The schedule for these types and extents, found at their first call."""
        target = gpu_of_call(bound, self.gpu)
        key = (tuple(bound.types.items()), tuple(bound.constants.items()), target,
               tuple(bound.texts.items()) if self.key is None else self._user_key(bound))
        if key not in self.chosen:
            with self._lock:
                if key not in self.chosen:
                    self.chosen[key] = self._find(bound, config or Config(), target)
        self._latest = self.chosen[key]
        return self._latest

    def typed(self, bound: Bound) -> Function:
        """By the first candidate that compiles: all of them give the same results."""
        target = gpu_of_call(bound, self.gpu)
        return self._identity(bound, self.space or default_schedule.space(self, bound, target))

    def _user_key(self, bound: Bound) -> Any:
        """What distinguishes calls in place of all extents."""
        known = {**bound.given, **bound.constants, **bound.sizes}
        if callable(self.key):
            asked = inspect.signature(self.key).parameters
            every = any(p.kind is p.VAR_KEYWORD for p in asked.values())
            return self.key(**(known if every else {n: known[n] for n in asked}))
        return tuple(known[n] for n in self.key)

    def _find(self, bound: Bound, config: Config, target: Gpu) -> Schedule:
        """From this process, from the disk, or by a search."""
        space = self.space or default_schedule.space(self, bound, target)
        if self.space:
            self._require_read(bound)
        bench = bench_for(bound, self.measure)
        if bench is None:
            return self._search(bound, config, target, space, None).schedule
        try:
            key = self._cache_key(bound, target, space, bench.name)
            cache = TuningCache.of(self.cache)
            found = self._known(key, cache, space)
            if found is not None:
                return found
            if cache is None:
                return self._measured(bound, config, target, space, bench, key, None)
            with cache.tuning(self.compile_limit_s + 10e-3 * self.budget_ms):
                return self._known(key, cache, space) or self._measured(
                    bound, config, target, space, bench, key, cache)
        finally:
            bench.close()

    def _known(self, key: dict[str, Any], cache: TuningCache | None,
               space: tuple[Schedule, ...]) -> Schedule | None:
        """A tuned schedule, if it is one of the candidates."""
        entry = self.tuned.get(digest(key)) or (cache.find(key) if cache else None)
        match = next((s for s in space if entry is not None and s == entry.schedule.with_source(
            s.source)), None)
        if entry is None or match is None:
            return None
        self.tuned[entry.digest] = entry
        trial = Trial(match, "chosen", entry.estimate_us, entry.measured_ms,
                      reason="tuned before")
        self.tuning_trace = Trace((trial,), "cache", bench=key["bench"], gpu=key["gpu"])
        return match.with_source("tuned")

    def _measured(self, bound: Bound, config: Config, target: Gpu, space: tuple[Schedule, ...],
                  bench: Any, key: dict[str, Any], cache: TuningCache | None) -> Schedule:
        best = self._search(bound, config, target, space, bench)
        if best.measured_ms is not None:
            trials = [t.to_dict() for t in self.tuning_trace if t.measured_ms is not None]
            entry = TunedSchedule(key, best.schedule, best.measured_ms, best.estimate_us, trials)
            self.tuned[entry.digest] = entry
            if cache is not None:
                cache.store(entry)
        return best.schedule

    def _search(self, bound: Bound, config: Config, target: Gpu, space: tuple[Schedule, ...],
                bench: Any) -> Trial:
        search = Search(self, bound, config, target, space, bench)
        try:
            best = search.run()
        finally:
            self.tuning_trace = search.trace()
        self._history += [t for t in self.tuning_trace if t.measured_ms is not None]
        if bench is not None:
            self.cost_model.fit(self._history)
        return best

    def candidate(self, schedule: Schedule) -> Kernel:
        """The kernel with one schedule; what was traced is shared."""
        made = Kernel(self.fn, schedule=schedule, grid=self.grid)
        made._cache, made.images = self._cache, self.images
        return made

    def spread(self, given: dict[str, Any], schedule: Schedule
               ) -> tuple[tuple, dict[str, Any]]:
        """Arguments by name as positional and keyword arguments, without those that a schedule
        sets."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        unset, left_out = object(), False
        for p in self.signature.parameters.values():
            if schedule.for_parameter(p.name, unset) is not unset:
                left_out = True
            elif left_out or p.kind is p.KEYWORD_ONLY:
                kwargs[p.name] = given[p.name]
            else:
                args.append(given[p.name])
        return tuple(args), kwargs

    def _require_read(self, bound: Bound) -> None:
        """Every block size and parameter of the space is one that the kernel asks for. What the
        compiler itself reads (warps, stages, a pipeline's knobs) is no matter of the kernel's."""
        asked = self._asked(bound)
        if asked is None:
            return
        for name in dict.fromkeys(n for s in self.space for n in s.values):
            field = ALIASES.get(name, name)
            if field in asked or name in KNOBS or name.lower() in KNOBS and name not in ALIASES:
                continue
            shown = next((n for n in ALIASES if n.isupper() and ALIASES[n] == field), name)
            raise ArgumentError(
                f"the space of {self.__name__} sets {shown}, which {self.__name__} never reads: "
                "all its candidates would be one", where=user_line(),
                hint=f"take it as an argument, {shown}=64, or read ts.tile.context().{shown} in "
                "the body; or leave it out of the space")

    def _asked(self, bound: Bound) -> set[str] | None:
        """The parameters of schedules that the kernel's source names, or its trace asks for; None
        when no candidate can be traced, for which the search has the words."""
        named = {n.attr for n in ast.walk(self.source.tree) if isinstance(n, ast.Attribute)}
        asked = {ALIASES.get(n, n) for n in named} | ({"d"} if {*HEADS} & {*bound.texts} else set())
        for schedule in self.space:
            recorder = default_schedule.ParameterRecorder(schedule)
            try:
                self.compile(self.spec(bound, recorder, self.grid is not None), bound.sizes)
            except Exception:  # whatever a candidate raises, the next may be sound
                continue
            return asked | recorder.read
        return None

    # --- what a tuned schedule holds for ------------------------------------------------------
    def _cache_key(self, bound: Bound, target: Gpu, space: tuple[Schedule, ...],
                   bench: str) -> dict[str, Any]:
        shapes = {n: [bound.texts[str(d)] for d in t.dims]
                  for n, t in bound.types.items() if hasattr(t, "dims")}
        user = "" if self.key is None else repr(self._user_key(bound))
        return {
            "kernel": self.__name__, "hash": self._identity(bound, space).content_hash,
            "shapes": shapes if self.key is None else {}, "user": user,
            "types": {n: str(getattr(t, "numeric", t.dtype)) for n, t in bound.types.items()},
            "constants": {n: str(record_constant(v)) for n, v in bound.constants.items()},
            "space": digest({"space": [s.to_dict() for s in space]}),
            "arch": target.target, "gpu": f"{target.name}, {target.multiprocessors} "
            "multiprocessors", "metric": self.metric, "bench": bench}

    def _identity(self, bound: Bound, space: tuple[Schedule, ...]) -> Function:
        """Stands for the kernel's source, constants and types: its first candidate that compiles.

        Raises the error of the last one when none does.
        """
        for schedule in space:
            try:
                return self.specialise(bound, schedule, self.grid is not None)
            except Exception as err:  # whatever a candidate raises, the next may be sound
                last = err
        raise failure_of(self.__name__, [last])

    # --- carrying it elsewhere ----------------------------------------------------------------
    def export_tuning(self, path: Any) -> int:
        """Writes what is known of this kernel, here and in its cache folder, to one JSON file.

        Returns the number of tuned configurations.
        """
        cache = TuningCache.of(self.cache)
        known = {e.digest: e for e in (cache.entries(self.__name__) if cache else [])}
        return tuned_schedules.export(path, (known | self.tuned).values())

    def import_tuning(self, path: Any) -> int:
        """Takes configurations over from a file by `export_tuning`: later calls that they hold for
        measure nothing. Returns how many there were. Raises ArgumentError for a file that is not
        sound, or of other kernels only."""
        found = tuned_schedules.read_export(path)
        mine = [e for e in found if e.key["kernel"] == self.__name__]
        if found and not mine:
            names = ", ".join(sorted({e.key["kernel"] for e in found}))
            raise ArgumentError(f"{path} holds schedules of {names}, none of {self.__name__}",
                                where=user_line())
        cache = TuningCache.of(self.cache)
        for entry in mine:
            self.tuned[entry.digest] = entry
            if cache is not None:
                cache.store(entry)
        self.chosen.clear()
        return len(mine)


def _check(metric: str, budget_ms: float, compile_limit_s: float) -> None:
    if metric not in METRICS:
        raise ArgumentError(f"metric={metric!r} is not known", where=user_line(),
                            hint=did_you_mean(str(metric), METRICS))
    for name, value in (("budget_ms", budget_ms), ("compile_limit_s", compile_limit_s)):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not value > 0:
            raise ArgumentError(f"{name}={value!r}: a time above 0", where=user_line())


def _gpu(name: str | Gpu) -> Gpu:
    return gpu(name)


def _checked_key(key: Any, kernel: Kernel) -> Any:
    """A function, or names of extents and parameters."""
    if key is None or callable(key):
        return key
    names = (key,) if isinstance(key, str) else tuple(key)
    known = [*kernel.signature.parameters]
    for annotation in kernel.annotations.values():
        known += [str(d) for d in getattr(annotation, "shape", ()) if str(d).isidentifier()]
    for name in names:
        if name not in known:
            raise ArgumentError(f"key={key!r}: {kernel.__name__} has no extent or parameter "
                                f"{name!r}", hint=did_you_mean(str(name), known),
                                where=user_line())
    return names


def candidates(space: Any) -> tuple[Schedule, ...]:
    """The schedules of dict(BM=[64, 128], warps=[4, 8]), of a Schedule with lists, or given."""
    if isinstance(space, Schedule):
        return tuple(space)
    if isinstance(space, dict):
        lists = [v if isinstance(v, list | tuple) else [v] for v in space.values()]
        empty = [n for n, v in zip(space, lists, strict=True) if not v]
        if empty:
            raise ArgumentError(f"the space has no value for {empty[0]!r}", where=user_line())
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


__all__ = ["TunedKernel", "candidates"]
