"""A kernel: a plain Python function, its specialisations, and its launches."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, get_args, get_origin

from tessera import config as settings
from tessera import hooks
from tessera.call_errors import call_error
from tessera.errors import PACKAGE_DIR, ArgumentError, did_you_mean, trimmed, user_line
from tessera.numerics import DType, NumericType, as_type, i64
from tessera.open_trace import trace_state
from tessera.runtime.ptxas import Resources
from tessera.tensor import Tensor as Array
from tessera.tensor import TensorType
from tessera.tile.builder.kernel_spec import Kernel_, KernelSpec
from tessera.tile.frontend import composite_parameters
from tessera.tile.frontend.captured import Captured
from tessera.tile.frontend.seed_parameters import seed_parameters
from tessera.tile.frontend.source import KernelSource, capture, closure_of
from tessera.tile.frontend.trace_kernel import trace
from tessera.tile.interpreter.arguments import Bound, Placement, Tile, bind, no_array
from tessera.tile.interpreter.launch import Config, Specialisation, grid_of, lanes_of, run_grid
from tessera.tile.interpreter.machine import SanitizerReport
from tessera.tile.ir.errors import TileError
from tessera.tile.ir.ir import Function
from tessera.tile.ir.printing import print_ir
from tessera.tile.ir.schedule import Schedule
from tessera.tile.ir.types import GlobalTensor, Scalar
from tessera.tile.kernel.determinism import modes
from tessera.tile.kernel.launch_config import Launch, config_of, groups_of, lanes_given
from tessera.tile.launch import levels as device_levels
from tessera.tile.launch.first_call import call_on_gpu, form_of
from tessera.tile.launch.machine_code import Image
from tessera.tile.launch.placement import place_call, reader_for
from tessera.tile.launch.sentinels import watched_tensors
from tessera.tile.passes import run_passes
from tessera.tile.tuning.default_schedule import propose
from tessera.tile.tuning.legality import require_shared
from tessera.tile.tuning.measure import gpu_of_call

LEVELS = ("schedule", "tile", "target", "ptx", "sass")
_DEFAULT = Config()
_KEPT = 1024  # launch configurations of one kernel that are remembered
# level -> (kernel, function, target or None) -> text.
TARGET_LEVELS: dict[str, Callable[[Kernel, Function, str | None], str]] = device_levels.LEVELS


class Kernel(Kernel_):
    """A kernel: call it with arrays, k(...), or choose the launch: k[groups, lanes](...).

    It runs on the GPU when its arrays lie there, else under the interpreter (see tile/launch).

    Globals and closure variables that the body reads are constants of its specialisations. When one
    of them has changed, the next call traces and compiles anew.

    .specializations   one Tile IR function per set of types, constants and schedule
    .schedule          the schedule it is compiled with
    .shared_bytes      shared memory of a group in the last specialisation
    .report            what the sanitizer counted in the last run of the interpreter
    .compiled          what was compiled for GPUs, last used last; .resources of the last
    """

    key: Any = None  # what schedules depend on besides types, extents and constants

    held_lines: frozenset[tuple[int, str]] = frozenset()  # values that sentinels look at too

    rule: Any = None  # its derivative, see defvjp and defjvp

    modes: tuple[str, ...] = ()  # of ir/modes.py, beside those of the surroundings

    def __init__(self, fn: Any, *, schedule: Schedule | None = None, grid: Any = None,
                 axes: str | None = None, overwrites: tuple[str, ...] = (),
                 counters: tuple[str, ...] = (), fast_math: bool = False):
        if not inspect.isfunction(fn):
            raise ArgumentError(f"@ts.kernel decorates a function, got {fn!r}", where=user_line())
        self.fn, self.grid, self.axes, self.overwrites = fn, grid, axes, frozenset(overwrites)
        self.counters, self.fast_math = frozenset(counters), fast_math
        self.given = inspect.signature(fn)  # as written; `signature` has records apart
        self._signature: inspect.Signature | None = None
        self._written: dict[str, Any] | None = None  # annotations
        self._schedule = schedule
        self._cache: dict[Any, Function] = {}
        self._untold: set[int] = set()  # functions that no observer knows
        self.images: dict[Any, Image] = {}
        self.launchers: dict[Config, dict[tuple, Any]] = {_DEFAULT: {}}
        self._ready = self.launchers[_DEFAULT]
        self._chosen: dict[int, Callable[..., Any]] = {}
        self._proposed: dict[Any, Schedule] = {}
        self.report = SanitizerReport()
        self.last: Function | None = None
        self._captured = Captured()
        self.changes = 0  # how often what it reads from outside has changed
        self._retired: list[Any] = []  # may still run: images are not unloaded under a launch
        if not self.of_library:
            _ = self.source  # that there is none, or no kernel's, is said here
        self._check_signature()
        self.__name__, self.__doc__, self.__wrapped__ = fn.__name__, fn.__doc__, fn
        self.__module__ = fn.__module__

    def _check_signature(self) -> None:
        for p in self.given.parameters.values():
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                raise TileError(f"{self.fn.__name__} takes {p}: kernels have named parameters",
                                where=self.source.site(self.source.tree))
        if next(iter(self.given.parameters), "") == "self":
            raise TileError(f"{self.fn.__qualname__} is a method: a kernel has no object",
                            where=self.source.site(self.source.tree),
                            hint="write it as a function, and call it in the method")
        for name in sorted((self.overwrites | self.counters) - set(self.given.parameters)):
            use = "overwrite" if name in self.overwrites else "count in"
            raise ArgumentError(f"{self.fn.__name__} has no parameter {name!r} to {use}",
                                hint=did_you_mean(name, sorted(self.given.parameters)),
                                where=user_line())

    # --- what it is ---------------------------------------------------------------------------
    @property
    def of_library(self) -> bool:
        """Whether it is one of Tessera's own."""
        return self.fn.__code__.co_filename.startswith(PACKAGE_DIR)

    @functools.cached_property
    def source(self) -> KernelSource:
        """Parsed when the function is decorated; the library's when they are first traced, for
        there are many and a program uses few."""
        return capture(self.fn, self._captured)

    @property
    def schedule(self) -> Schedule:
        """The attached schedule, or the one that the compiler chose last."""
        chosen = next(reversed(self._proposed.values()), Schedule(source="auto"))
        return self._schedule or chosen

    @property
    def specializations(self) -> tuple[Function, ...]:
        return tuple(self._cache.values())

    @property
    def shared_bytes(self) -> int:
        return self._last().shared_bytes

    @property
    def compiled(self) -> tuple[Any, ...]:
        """A tile.cuda Compiled for each specialisation that ran on a GPU, last used last."""
        return tuple(image.compiled for image in self.images.values())

    @property
    def resources(self) -> Resources:
        """Registers, spills and shared bytes of the machine code that was used last."""
        if not self.images:
            raise ArgumentError(f"{self.__name__} has not run on a GPU yet",
                                hint='call it with arrays on one, or with target="cuda"')
        return next(reversed(self.images.values())).resources

    def _last(self) -> Function:
        if self.last is None:
            raise ArgumentError(f"{self.__name__} has not been compiled yet",
                                hint="call it, or k.lower(...) with its arguments")
        return self.last

    def with_schedule(self, schedule: Schedule) -> Kernel:
        """The same kernel with another schedule."""
        if not isinstance(schedule, Schedule):
            raise ArgumentError(f"a schedule is a ts.Schedule, got {schedule!r}", where=user_line())
        made = Kernel(self.fn, schedule=schedule, grid=self.grid, axes=self.axes,
                      overwrites=tuple(self.overwrites), counters=tuple(self.counters),
                      fast_math=self.fast_math)
        made.rule, made.modes = self.rule, self.modes
        return made

    # --- in graphs ----------------------------------------------------------------------------
    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Its derivative in reverse mode, for calls under ts.jit, ts.grad and the other transforms,
        in place of the one that follows from its body.

        fwd(*args) -> (value, saved): args as the kernel takes them; value is what it returns or
        writes, a tuple of them when they are several, what it returns first. The kernel may be
        called in it. bwd(saved, g) -> a cotangent per argument, None where there is none; g has the
        form of value. As ts.custom_vjp. Raises GradError.
        """
        self.rule = hooks.graph_kernels.get().vjp_rule(self, fwd, bwd)

    def defjvp(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Its derivative in forward mode, which serves both modes, in place of the one that follows
        from its body.

        rule(primals, tangents) -> (value, tangent), linear in the tangents; one entry per argument
        in each, value as in defvjp. As ts.custom_jvp. Returns the rule: usable as a decorator.
        """
        self.rule = hooks.graph_kernels.get().jvp_rule(self, rule)
        return rule

    def watched_tensors(self, function: Function) -> frozenset[str]:
        """The tensors that sentinels on a GPU look at."""
        return watched_tensors(function)

    def typed(self, bound: Bound) -> Function:
        """The Tile IR for arguments of which only types are known: what it returns and writes."""
        return self.specialise(bound, self.choose(bound), self.grid is not None)

    def bind_types(self, arguments: dict[str, Any], explicit: frozenset[str]) -> Bound:
        """Arguments by name, checked against the annotations; tensors by shape and type alone."""
        annotations = self.annotations
        for name, x in arguments.items():
            if hasattr(x, "shape") and self._is_constant(name, annotations):
                raise ArgumentError(
                    f"{self.__name__}: argument {name} is a compile-time parameter, and only shape "
                    f"and type of {x} are known while tracing", where=user_line(),
                    hint=f"pass a Python number, or annotate {name}: ts.f32, for a number that is "
                    "known when the kernel runs")
        scalars = [n for n, a in annotations.items() if isinstance(a, DType | NumericType)]
        held = {n: 1 if n in scalars and hasattr(v, "shape") else v for n, v in arguments.items()}

        def read(x: Any, what: str) -> tuple[Any, NumericType]:
            if not hasattr(x, "shape"):
                raise no_array(x, what)
            return x, x.type

        return self._bind(held, Placement(), explicit, read)

    @property
    def signature(self) -> inspect.Signature:
        """The parameters, a record's arrays one by one."""
        if self._signature is None:
            self._signature = composite_parameters.flat_signature(
                self.given, self._written_annotations())
        return self._signature

    @property
    def annotations(self) -> dict[str, Any]:
        """Annotations as objects, also under `from __future__ import annotations`; a record's
        arrays one by one; a seed is an int64."""
        found = composite_parameters.flat_annotations(self._written_annotations())
        if get_origin(found.get("return")) is tuple:
            found["return"] = get_args(found["return"])
        return found | dict.fromkeys(self._seeds(found), i64)

    def _seeds(self, annotations: dict[str, Any]) -> frozenset[str]:
        """Integers that are read as seeds only: any value runs the same code."""
        def whole(p: inspect.Parameter) -> bool:
            return annotations.get(p.name, type(p.default)) is int

        return frozenset(n for n in self._seed_names if whole(self.signature.parameters[n]))

    @functools.cached_property
    def _seed_names(self) -> frozenset[str]:
        return seed_parameters(self.source.tree) & set(self.signature.parameters)

    def _written_annotations(self) -> dict[str, Any]:
        """As written, as objects; evaluated again when something that they read has changed."""
        if self._written is None:
            scope = closure_of(self.fn)
            self._written = {n: self._evaluated(a, scope)
                             for n, a in self.fn.__annotations__.items()}
        return self._written

    def _evaluated(self, annotation: Any, scope: dict[str, Any]) -> Any:
        """Text as what it says: twice where a quoted annotation is text of text."""
        for _ in range(2):
            if isinstance(annotation, str):
                self._captured.expression(self.fn, annotation, scope)
                try:
                    annotation = eval(annotation, scope)  # noqa: S307
                except NameError as err:
                    raise TileError(
                        f"{self.__name__}: its annotation {annotation} has the name {err.name!r}, "
                        "which is not known where the kernel is defined",
                        code="E_UNDEFINED_NAME", where=user_line(),
                        hint="import or define it in the module: annotations that are text, as "
                        "under `from __future__ import annotations`, do not see what is local to a "
                        "function around the kernel") from None
        return annotation

    # --- calls --------------------------------------------------------------------------------
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if trace_state.builder is not None:
            return self.run(_DEFAULT, args, kwargs)
        if not self._captured.unchanged():
            self.forget()
        if kwargs:
            return self._launch(_DEFAULT, args, kwargs)
        ready = self._ready.get(tuple(map(type, args)))
        return self.run(_DEFAULT, args, kwargs) if ready is None else ready.launch(*args)

    def __getitem__(self, config: Any) -> Callable[..., Any]:
        """k[groups], k[groups, lanes], k[(gx, gy), lanes].

        Plain numbers are the grid where the kernel uses as many axes of it, by group_id(axis):
        k[gx, gy], which Python cannot tell from k[(gx, gy)]. k[[gx, gy]] is always the grid.
        """
        if type(config) is int and config in self._chosen:
            return self._chosen[config]
        made = Launch(self, config_of(self.__name__, config))
        if type(config) is int and len(self._chosen) < _KEPT:
            self._chosen[config] = made
        return made

    def launcher(self, groups: Any = None, lanes: int | None = None) -> Callable[..., Any]:
        return Launch(self, Config(groups_of(groups), lanes_given(lanes)))

    def launch(self, *args: Any, groups: Any = None, lanes: int | None = None, stream: Any = None,
               target: str | None = None, **kwargs: Any) -> Any:
        """A call with an explicit launch.

        stream: of CUDA, any library's; by default the one on which the arrays' library works.
        target: 'cuda' copies host arrays to the GPU and back, 'cpu' demands the interpreter.
        """
        chosen = Config(groups_of(groups), lanes_given(lanes))
        if target is not None:
            return self.run(chosen, args, kwargs, stream, target)
        return self._launch(chosen, args, kwargs, stream)

    def _launch(self, config: Config, args: tuple, kwargs: dict[str, Any],
                stream: Any = None) -> Any:
        """A call, the short way when there was one like it on a GPU."""
        if trace_state.builder is not None:
            return self.run(config, args, kwargs, stream)
        if not self._captured.unchanged():
            self.forget()
        ready = self.launchers.get(config, {}).get(form_of(args, kwargs))
        if ready is not None:
            return ready.launch(*args, *kwargs.values(), stream=stream)
        return self.run(config, args, kwargs, stream)

    @trimmed
    def run(self, config: Config, args: tuple, kwargs: dict[str, Any], stream: Any = None,
            target: str | None = None, key: tuple[int, int] | None = None) -> Any:
        """A call, the long way: arguments by name, where it runs, what runs there, its launch.

        key: by which it draws under the interpreter, else that of the kernel's next launch.
        """
        if composite_parameters.among(args, kwargs):
            args, kwargs = composite_parameters.spread(self.__name__, self.given, args, kwargs)
            if target is None:
                return self._launch(config, args, kwargs, stream)
        arguments, explicit = self._arguments(args, kwargs), self._explicit(args, kwargs)
        if trace_state.builder is not None or _distributed(arguments):
            self._require_free(stream, target)
            return hooks.graph_kernels.get().call(self, config, arguments, explicit)
        place = place_call(self.__name__, arguments, target)
        bound = self._bind(arguments, place, explicit)
        work = self.specialised(bound, config)
        if not place.on_host:
            return call_on_gpu(self, config, args, kwargs, bound, work, stream)
        result, self.report = run_grid(work.function, bound, work.lanes, work.grid, self.__name__,
                                       key=key)
        return result

    def specialised(self, bound: Bound, config: Config = _DEFAULT) -> Specialisation:
        """What a call with these arguments runs: its schedule, its Tile IR, its lanes and grid."""
        schedule = self.choose(bound, config)
        function = self.specialise(bound, schedule, self.grid is not None)
        if self.grid is not None and config.groups is None:
            config = Config(self.grid_for(bound, schedule), config.lanes)
        lanes = lanes_of(function, config, schedule.lanes)
        return Specialisation(schedule, function, lanes, grid_of(function, bound, config, lanes))

    def _require_free(self, stream: Any, target: str | None) -> None:
        """A graph chooses where and on which stream its kernels run."""
        if stream is not None or target is not None:
            asked = "stream" if target is None else "target"
            raise ArgumentError(f"{self.__name__}.launch({asked}=...) in a traced function",
                                hint=f"leave {asked} out: the graph's kernels run where it does",
                                where=user_line())

    def choose(self, bound: Bound, config: Config | None = None) -> Schedule:
        """The schedule for these arguments: the attached one, or the compiler's proposal."""
        if self._schedule is not None:
            return self._schedule
        gpu = gpu_of_call(bound)
        key = (tuple(bound.types.items()), tuple(bound.constants.items()), gpu)
        extents = tuple(bound.texts.items())
        at: tuple = (*key, None) if (*key, None) in self._proposed else (*key, extents)
        found = self._proposed.pop(at, None)  # and put back: the last one is `schedule`
        if found is None:
            found, by_extents = propose(self, bound, gpu)
            at = (*key, extents if by_extents else None)
        self._proposed[at] = found
        return found

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> Bound:
        """Arguments by the signature, checked against the annotations."""
        if composite_parameters.among(args, kwargs):
            args, kwargs = composite_parameters.spread(self.__name__, self.given, args, kwargs)
        arguments = self._arguments(args, kwargs)
        # nothing runs: arrays on a GPU may be asked about on a machine set to its CPU
        place = place_call(self.__name__, arguments,
                                  "auto" if settings.device == "cpu" else None)
        return self._bind(arguments, place, self._explicit(args, kwargs))

    def _explicit(self, args: tuple, kwargs: dict[str, Any]) -> frozenset[str]:
        """The parameters that a call gives itself."""
        return frozenset((*list(self.signature.parameters)[:len(args)], *kwargs))

    def _arguments(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        signature = self.signature
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError as err:
            raise call_error(self.__name__, signature, kwargs, err,
                             f"{self.__name__}{self.given}") from None
        given.apply_defaults()
        return given.arguments

    def _bind(self, arguments: dict[str, Any], place: Placement, explicit: frozenset[str],
              read: Callable[[Any, str], tuple[Any, NumericType]] | None = None) -> Bound:
        if not self._captured.unchanged():
            self.forget()
        annotations = self.annotations
        arguments = {n: v.fn if isinstance(v, Kernel_) else v for n, v in arguments.items()}
        bound = bind(self.__name__, dict(self.signature.parameters), annotations, arguments,
                     lambda n: self._is_constant(n, annotations), read or reader_for(place))
        bound.explicit, bound.place = explicit, place
        bound.kernel = f"{self.fn.__module__}.{self.fn.__qualname__}"
        return bound

    def constants(self, bound: Bound, schedule: Schedule) -> dict[str, Any]:
        """The compile-time parameters: those that the schedule sets have its values."""
        found = {n: schedule.for_parameter(n, v) for n, v in bound.constants.items()}
        for n in bound.explicit.intersection(found):
            if found[n] is not bound.constants[n] and found[n] != bound.constants[n]:
                raise ArgumentError(
                    f"{self.__name__}: the call gives {n}={bound.constants[n]}, its schedule sets "
                    f"{found[n]}", where=user_line(),
                    hint=f"leave {n} out of the call, or out of the schedule or space")
        return found

    def _is_constant(self, name: str, annotations: dict[str, Any]) -> bool:
        """Keyword-only parameters and those typed or defaulted by Python numbers, and functions,
        specialise."""
        p, annotation = self.signature.parameters[name], annotations.get(name)
        if isinstance(annotation, TensorType) or annotation is Tile:
            return False
        if annotation is i64 and name in self._seed_names:
            return False
        # ts.f32 equals float, and is no Python type
        python = isinstance(annotation, type) and annotation in (bool, int, float, str)
        function = Callable in (annotation, get_origin(annotation))
        if p.kind is p.KEYWORD_ONLY or python or function:
            return True
        return annotation is None and p.default is not p.empty

    def grid_for(self, bound: Bound, schedule: Schedule) -> tuple[int, ...]:
        """grid=: a tuple, or a function of named extents and parameters."""
        if not callable(self.grid):
            return groups_of(self.grid) or (1,)
        self._captured.names_of(self.grid)
        known = {**bound.sizes, **self.constants(bound, schedule),
                 **{n: v for n, v in bound.given.items() if isinstance(v, int)}}
        names = list(inspect.signature(self.grid).parameters)
        missing = [n for n in names if n not in known]
        if missing:
            raise ArgumentError(f"grid of {self.__name__} asks for {missing[0]!r}",
                                hint=did_you_mean(missing[0], sorted(known)), where=user_line())
        return groups_of(self.grid(*(known[n] for n in names))) or (1,)

    # --- compilation --------------------------------------------------------------------------
    def unchanged(self) -> bool:
        """Whether all that the body reads from outside is what it was when it was traced."""
        return self._captured.unchanged()

    def forget(self) -> None:
        """Something that the body reads from outside has changed: all that was made of it goes."""
        self.changes += 1
        self._retired.append((dict(self._cache), dict(self.images)))
        for ready in self.launchers.values():
            ready.clear()
        for made in (self._cache, self.images, self._proposed):
            made.clear()
        self._untold.clear()
        self._captured.clear()
        self._signature = self._written = None

    def specialise(self, bound: Bound, schedule: Schedule, given_grid: bool = False) -> Function:
        """The Tile IR for these types, constants and schedule; compiled once."""
        spec = self.spec(bound, schedule, given_grid)
        found = next((f for key, f in self._cache.items() if key[0] == spec and all(
            bound.sizes.get(n) == v for n, v in key[1])), None)
        if found is None:
            found = self.compile(spec, bound.sizes)
            self.keep(spec, bound.sizes, found)
        self.last = found
        if id(found) in self._untold:
            self._untold.remove(id(found))
            for tell in hooks.compiled:
                tell(self)
        return found

    def keep(self, spec: KernelSpec, sizes: dict[str, int], function: Function) -> None:
        """Remembers what was compiled for a specialisation."""
        dims = tuple((n, v) for n, v in function.constants if n in sizes)
        self._cache[(spec, dims)] = function
        self._untold.add(id(function))

    def spec(self, bound: Bound, schedule: Schedule, given_grid: bool | None = None) -> KernelSpec:
        """What a specialisation for these arguments is made for."""
        return KernelSpec(tuple(bound.types.items()),
                          tuple(self.constants(bound, schedule).items()),
                          self.annotations.get("return"), schedule,
                          given_grid=self.grid is not None if given_grid is None else given_grid,
                          records=tuple((n, tuple(f)) for n, f in composite_parameters.fields_of(
                        self._written_annotations()).items()),
                          wide_dims=frozenset(n for n, v in bound.sizes.items() if v >= 2**31),
                          modes=(*modes(self.fast_math), *self.modes))

    def compile(self, spec: KernelSpec, sizes: dict[str, int]) -> Function:
        """Traces and runs the passes; nothing is cached."""
        function = run_passes(trace(self.source, self.fn, spec, sizes))
        require_shared(function)
        return function

    @trimmed
    def lower(self, *args: Any, **kwargs: Any) -> Function:
        """The Tile IR that a call with these arguments would run."""
        bound = self.bind(args, kwargs)
        return self.specialise(bound, self.choose(bound), self.grid is not None)

    @trimmed
    def inspect_ir(self, level: str = "tile", *, target: str | None = None, **sizes: int) -> str:
        """The text of a level of the last specialisation.

        level: schedule | tile | target | ptx | sass. Before any call the annotations say the types,
        and `sizes` gives the named extents that must be constants. target: 'sm_80', 'sm_90a', ...
        for the last three; by default this machine's GPU, else sm_90a. They need no GPU.
        """
        if not isinstance(level, str) or level not in LEVELS:
            raise ArgumentError(f"a kernel has no level {level!r}", code="E_LEVEL",
                                hint=f"levels: {', '.join(LEVELS)}")
        if level == "schedule":
            return self.schedule.explained()
        function = self.inspected(**sizes)
        if level == "tile":
            return print_ir(function)
        return TARGET_LEVELS[level](self, function, target)

    def inspected(self, **sizes: int) -> Function:
        """The Tile IR that inspect_ir shows."""
        return self.last if self.last is not None and not sizes else self._from_types(sizes)

    def _from_types(self, sizes: dict[str, int]) -> Function:
        """Compiles from the annotations alone: one dummy argument for each parameter."""
        bound = Bound(sizes=dict(sizes))
        annotations = self.annotations
        for name, p in self.signature.parameters.items():
            kind = annotations.get(name)
            absent = isinstance(kind, TensorType) and kind.optional and p.default is None
            if isinstance(kind, TensorType) and kind.type is not None and not absent:
                bound.types[name] = GlobalTensor(kind.type, kind.shape)
            elif isinstance(kind, DType | NumericType) and not self._is_constant(name, annotations):
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
        return f"<kernel {self.__name__}{self.given}>"


def _distributed(arguments: dict[str, Any]) -> bool:
    return any(isinstance(x, Array) and x.layout is not None for x in arguments.values())


__all__ = ["LEVELS", "TARGET_LEVELS", "Kernel"]
