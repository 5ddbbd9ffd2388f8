"""@ts.kernel: a plain Python function as a tile kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.errors import ArgumentError, UnsupportedTargetError, did_you_mean, user_line
from tessera.numerics import DType, NumericType
from tessera.tensor import TensorType
from tessera.tile.arguments import Bound, Tile, bind
from tessera.tile.errors import TileError
from tessera.tile.expressions import Kernel_, closure_of
from tessera.tile.ir import Function
from tessera.tile.launch import Config, run
from tessera.tile.machine import Report
from tessera.tile.passes import PIPELINE
from tessera.tile.printing import print_ir
from tessera.tile.schedule import Schedule
from tessera.tile.source import Source, capture
from tessera.tile.tracer import Spec, trace

# Called with each kernel that was compiled; the debug layer puts ts.inspect_ir's memory here.
COMPILED: list[Callable[[Kernel], None]] = []
LEVELS = ("schedule", "tile", "target", "ptx", "sass")
# Filled by tile/cuda: level -> (kernel, function) -> text.
TARGET_LEVELS: dict[str, Callable[[Kernel, Function], str]] = {}


class Kernel(Kernel_):
    """A kernel: call it with arrays, k(...), or choose the launch: k[groups, lanes](...).

    Globals and closure variables that the body reads are constants of each specialisation, frozen
    when it is compiled: a later change is seen by new specialisations only.

    .specializations   one Tile IR function per set of types, constants and schedule
    .schedule          the schedule it is compiled with
    .shared_bytes      shared memory of a group in the last specialisation
    .report            what the sanitizer counted in the last run
    """

    def __init__(self, fn: Any, *, schedule: Schedule | None = None, grid: Any = None):
        if not inspect.isfunction(fn):
            raise ArgumentError(f"@ts.kernel decorates a function, got {fn!r}", where=user_line())
        self.fn, self.grid = fn, grid
        self.source: Source = capture(fn)
        self.signature = inspect.signature(fn)
        self._schedule = schedule
        self._cache: dict[Any, Function] = {}
        self.report = Report()
        self.last: Function | None = None
        self._check_signature()
        self.__name__, self.__doc__, self.__wrapped__ = fn.__name__, fn.__doc__, fn
        self.__module__ = fn.__module__

    def _check_signature(self) -> None:
        for p in self.signature.parameters.values():
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                raise TileError(f"{self.fn.__name__} takes {p}: kernels have named parameters",
                                where=self.source.site(self.source.tree))

    # --- what it is ---------------------------------------------------------------------------
    @property
    def schedule(self) -> Schedule:
        """The attached schedule, or one that the compiler chose."""
        return self._schedule or Schedule(source="auto")

    @property
    def specializations(self) -> tuple[Function, ...]:
        return tuple(self._cache.values())

    @property
    def shared_bytes(self) -> int:
        return self._last().shared_bytes

    def _last(self) -> Function:
        if self.last is None:
            raise ArgumentError(f"{self.__name__} has not been compiled yet",
                                hint="call it, or k.lower(...) with its arguments")
        return self.last

    def with_schedule(self, schedule: Schedule) -> Kernel:
        """The same kernel with another schedule."""
        if not isinstance(schedule, Schedule):
            raise ArgumentError(f"a schedule is a ts.Schedule, got {schedule!r}", where=user_line())
        return Kernel(self.fn, schedule=schedule, grid=self.grid)

    @property
    def annotations(self) -> dict[str, Any]:
        """Annotations as objects, also under `from __future__ import annotations`."""
        scope = closure_of(self.fn)
        out = {}
        for name, value in self.fn.__annotations__.items():
            out[name] = eval(value, scope) if isinstance(value, str) else value  # noqa: S307
            if isinstance(out[name], str):
                out[name] = eval(out[name], scope)  # noqa: S307  a quoted annotation
        return out

    # --- calls --------------------------------------------------------------------------------
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(Config(), args, kwargs)

    def __getitem__(self, config: Any) -> Callable[..., Any]:
        """k[groups], k[groups, lanes]; a grid of several axes is a tuple: k[(gx, gy), lanes]."""
        items = config if isinstance(config, tuple) else (config,)
        if len(items) > 2:
            raise ArgumentError(f"{self.__name__}[{', '.join(map(str, items))}]: a launch is "
                                "[groups] or [groups, lanes]", where=user_line(),
                                hint="a grid of several axes is a tuple: k[(gx, gy), lanes](...)")
        return self.launcher(*items)

    def launcher(self, groups: Any = None, lanes: int | None = None) -> Callable[..., Any]:
        chosen = Config(_groups(groups), _lanes(lanes))
        return lambda *args, **kwargs: self._run(chosen, args, kwargs)

    def launch(self, *args: Any, groups: Any = None, lanes: int | None = None, stream: Any = None,
               **kwargs: Any) -> Any:
        """A call with an explicit launch. stream: for the CUDA target; ignored on the host."""
        return self._run(Config(_groups(groups), _lanes(lanes)), args, kwargs)

    def _run(self, config: Config, args: tuple, kwargs: dict[str, Any]) -> Any:
        bound = self.bind(args, kwargs)
        schedule = self.choose(bound)
        function = self.specialise(bound, schedule, self.grid is not None)
        if self.grid is not None and config.groups is None:
            config = Config(self._grid(bound), config.lanes)
        result, self.report = run(function, bound, config, schedule.lanes, self.__name__)
        return result

    def choose(self, bound: Bound) -> Schedule:
        """The schedule for these arguments."""
        return self.schedule

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> Bound:
        """Arguments by the signature, checked against the annotations."""
        try:
            given = self.signature.bind(*args, **kwargs)
        except TypeError as err:
            raise ArgumentError(f"{self.__name__}: {err}", hint=f"{self.__name__}{self.signature}",
                                where=user_line()) from None
        given.apply_defaults()
        annotations = self.annotations
        return bind(self.__name__, dict(self.signature.parameters), annotations, given.arguments,
                    lambda n: self._is_constant(n, annotations))

    def _is_constant(self, name: str, annotations: dict[str, Any]) -> bool:
        """Keyword-only parameters and those typed or defaulted by Python numbers specialise."""
        p, annotation = self.signature.parameters[name], annotations.get(name)
        if isinstance(annotation, TensorType) or annotation is Tile:
            return False
        if p.kind is p.KEYWORD_ONLY or annotation in (bool, int, float, str):
            return True
        return annotation is None and p.default is not p.empty

    def _grid(self, bound: Bound) -> tuple[int, ...]:
        """grid=: a tuple, or a function of named extents and parameters."""
        if not callable(self.grid):
            return _groups(self.grid) or (1,)
        known = {**bound.sizes, **bound.constants,
                 **{n: v for n, v in bound.given.items() if isinstance(v, int)}}
        names = list(inspect.signature(self.grid).parameters)
        missing = [n for n in names if n not in known]
        if missing:
            raise ArgumentError(f"grid of {self.__name__} asks for {missing[0]!r}",
                                hint=did_you_mean(missing[0], sorted(known)), where=user_line())
        return _groups(self.grid(*(known[n] for n in names))) or (1,)

    # --- compilation --------------------------------------------------------------------------
    def specialise(self, bound: Bound, schedule: Schedule, given_grid: bool = False) -> Function:
        """The Tile IR for these types, constants and schedule; compiled once."""
        spec = Spec(tuple(bound.types.items()), tuple(bound.constants.items()),
                    self.annotations.get("return"), schedule, given_grid=given_grid,
                    wide_dims=frozenset(n for n, v in bound.sizes.items() if v >= 2**31))
        for key, function in self._cache.items():
            if key[0] == spec and all(bound.sizes.get(n) == v for n, v in key[1]):
                self.last = function
                return function
        function = self.compile(spec, bound.sizes)
        dims = tuple((n, v) for n, v in function.constants if n in bound.sizes)
        self._cache[(spec, dims)] = function
        self.last = function
        for tell in COMPILED:
            tell(self)
        return function

    def compile(self, spec: Spec, sizes: dict[str, int]) -> Function:
        """Traces and runs the passes; nothing is cached."""
        function = trace(self.source, self.fn, spec, sizes)
        for run_pass in PIPELINE:
            function = run_pass(function)
        return function

    def lower(self, *args: Any, **kwargs: Any) -> Function:
        """The Tile IR that a call with these arguments would run."""
        bound = self.bind(args, kwargs)
        return self.specialise(bound, self.choose(bound), self.grid is not None)

    def inspect_ir(self, level: str = "tile", **sizes: int) -> str:
        """The text of a level of the last specialisation.

        level: schedule | tile | target | ptx | sass. Before any call the annotations say the types,
        and `sizes` gives the named extents that must be constants.
        """
        if level not in LEVELS:
            raise ArgumentError(f"a kernel has no level {level!r}", code="E_LEVEL",
                                hint=f"levels: {', '.join(LEVELS)}")
        if level == "schedule":
            return self.schedule.text()
        function = self.last if self.last is not None and not sizes else self._from_types(sizes)
        if level == "tile":
            return print_ir(function)
        if level not in TARGET_LEVELS:
            raise UnsupportedTargetError(f"the level {level!r} needs the CUDA target",
                                         hint="available here: schedule, tile")
        return TARGET_LEVELS[level](self, function)

    def _from_types(self, sizes: dict[str, int]) -> Function:
        """Compiles from the annotations alone: one dummy argument for each parameter."""
        bound = Bound(sizes=dict(sizes))
        annotations = self.annotations
        for name, p in self.signature.parameters.items():
            kind = annotations.get(name)
            if isinstance(kind, TensorType) and kind.type is not None:
                from tessera.tile.types import Tensor

                bound.types[name] = Tensor(kind.type, kind.shape)
            elif isinstance(kind, DType | NumericType) and not self._is_constant(name, annotations):
                from tessera.numerics import as_type
                from tessera.tile.types import Scalar

                bound.types[name] = Scalar(as_type(kind).dtype)
            elif p.default is not p.empty:
                bound.constants[name] = p.default
            else:
                raise ArgumentError(f"the type of {self.__name__}'s parameter {name} is not known",
                                    hint="call the kernel once, or k.lower(...) with arguments")
        try:
            return self.specialise(bound, self.schedule, self.grid is not None)
        except KeyError as err:
            raise ArgumentError(f"{self.__name__} needs the extent {err} at compile time",
                                hint=f'k.inspect_ir("tile", {err.args[0]}=128)') from None

    def __repr__(self) -> str:
        return f"<kernel {self.__name__}{self.signature}>"


def _groups(groups: Any) -> tuple[int, ...] | None:
    if groups is None:
        return None
    items = groups if isinstance(groups, tuple) else (groups,)
    if not items or not all(isinstance(n, int | np.integer) and not isinstance(n, bool) and n >= 0
                            for n in items):
        raise ArgumentError(f"groups of a launch are numbers >= 0, got {groups!r}",
                            hint="k[groups, lanes](...), k[(gx, gy), lanes](...)",
                            where=user_line())
    return tuple(int(n) for n in items)


def _lanes(lanes: Any) -> int | None:
    if lanes is not None and (not isinstance(lanes, int) or lanes < 1):
        raise ArgumentError(f"lanes of a launch is a number >= 1, got {lanes!r}", where=user_line())
    return lanes


class KernelDecorator:
    """@ts.kernel, @ts.kernel(grid=...), @ts.kernel.schedule(s), @ts.kernel.autotune(...)."""

    def __call__(self, fn: Any = None, *, grid: Any = None,
                 schedule: Schedule | None = None) -> Any:
        """Makes a kernel of a function.

        grid: groups per axis, a tuple or a function of named extents: lambda M, N: (M // 64, N)
        """
        if fn is None:
            return lambda f: Kernel(f, schedule=schedule, grid=grid)
        return Kernel(fn, schedule=schedule, grid=grid)

    def schedule(self, schedule: Schedule) -> Callable[[Any], Kernel]:
        """Attaches a schedule: @ts.kernel.schedule(base.with_block(64, 64))."""
        if not isinstance(schedule, Schedule):
            raise ArgumentError(f"a schedule is a ts.Schedule, got {schedule!r}", where=user_line())
        if schedule.is_space:
            raise ArgumentError("lists in a schedule make a space: tune it",
                                hint="@ts.kernel.autotune(space=...)", where=user_line())
        return lambda fn: Kernel(fn, schedule=schedule)

    def autotune(self, space: Any = None, metric: str = "latency_ms", budget_ms: float = 200,
                 cache: Any = None, key: Any = None) -> Callable[[Any], Kernel]:
        """Chooses the schedule from a space at the first call for each set of types and extents."""
        from tessera.tile.autotune import TunedKernel

        return lambda fn: TunedKernel(fn, space, metric, budget_ms, cache, key)

    def __repr__(self) -> str:
        return "ts.kernel"


kernel = KernelDecorator()
__all__ = ["COMPILED", "TARGET_LEVELS", "Kernel", "KernelDecorator", "kernel"]
