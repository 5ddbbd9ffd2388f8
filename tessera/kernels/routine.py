"""A library routine: a function of arrays in front of tile kernels that fill its results.

    y = stable_softmax(x)                                  arrays of any library, where they lie
    mine = stable_softmax.with_schedule(ts.Schedule(warps=8))
    stable_softmax.kernels["softmax"].inspect_ir("tile")
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from .. import hooks
from ..errors import ArgumentError, did_you_mean, user_line
from ..numerics import DType, NumericType, as_type
from ..open_trace import trace_state
from ..runtime.arrays import HOST, Array, dense_strides, place_of, read_array, reader
from ..runtime.device import device
from ..runtime.generations import Generation
from ..tensor import Tensor
from ..tile.ir.schedule import ALIASES, Schedule
from ..tile.kernel.decorator import LIBRARY
from ..tile.kernel.kernel import Kernel
from ..tile.launch.results import maker
from .record import Benchmark, CompiledCall, KernelSample, RoutineRecord

ROUTINES: dict[str, Routine] = {}  # the library, by name


class Routine:
    """Call it with arrays; it returns new ones of the same library, in the same place.

    .schedule   the one it was given, else what the compiler chose for the last call
    .kernels    the tile kernels behind it, by name     .with_schedule(s)   a variant
    .record     reference, samples, tolerance, benchmarks, and the same in ops

    Under ts.jit, ts.grad and the other transforms its launches become nodes of the graph, and its
    derivative is that of the same in ops.
    """

    def __init__(self, fn: Callable[..., Any], kernels: Mapping[str, Kernel],
                 record: RoutineRecord, schedule: Schedule | None = None):
        self.fn, self.record, self._schedule = fn, record, schedule
        self.kernels = MappingProxyType(dict(kernels) if schedule is None else {
            n: k.with_schedule(schedule) for n, k in kernels.items()})
        self.signature = inspect.signature(fn)
        self.__name__, self.__doc__, self.__wrapped__ = fn.__name__, fn.__doc__, fn
        self.__module__, self.__signature__ = fn.__module__, self.shown_signature

    @property
    def schedule(self) -> Schedule:
        return self._schedule or self.ran.schedule

    def with_schedule(self, schedule: Schedule) -> Routine:
        """The same routine with another schedule. Raises ArgumentError for what is none."""
        if not isinstance(schedule, Schedule):
            raise ArgumentError(f"a schedule is a ts.Schedule, got {schedule!r}", where=user_line())
        if schedule.is_space:
            raise ArgumentError("lists in a schedule make a space, a routine has one schedule",
                                hint="for s in space: routine.with_schedule(s)", where=user_line())
        return Routine(self.fn, self.kernels, self.record, schedule)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.launch(*args, **kwargs)

    def launch(self, *args: Any, groups: Any = None, lanes: int | None = None, stream: Any = None,
               target: str | None = None, **kwargs: Any) -> Any:
        """A call with an explicit launch; the parameters are those of `kernel.launch`."""
        return self._called(RoutineLauncher(self, groups, lanes, stream, target), args, kwargs)

    def launches(self, *args: Any, **kwargs: Any) -> list[tuple[str, tuple, dict[str, Any]]]:
        """What a call would run: (kernel, arguments, constants) of each launch. Nothing runs."""
        recorder = LaunchRecorder(self)
        self._called(recorder, args, kwargs)
        return recorder.launches

    def _called(self, launcher: RoutineLauncher, args: tuple, kwargs: dict[str, Any]) -> Any:
        try:
            self.signature.bind(launcher, *args, **kwargs)
        except TypeError as error:
            raise ArgumentError(f"{self.__name__}: {error}", where=user_line(),
                                hint=f"{self.__name__}{self.shown_signature}") from None
        if trace_state.builder is None and not any(map(distributed, (*args, *kwargs.values()))):
            return self.fn(launcher, *args, **kwargs)
        return hooks.graph_kernels.get().routine(self, launcher.options, args, kwargs)

    @property
    def shown_signature(self) -> inspect.Signature:
        """Without the launcher, which callers do not pass."""
        bare = [p.replace(annotation=p.empty) for p in self.signature.parameters.values()][1:]
        return inspect.Signature(bare)

    @property
    def ran(self) -> Kernel:
        """The kernel that a call used, or the first."""
        return next((k for k in self.kernels.values() if k.last is not None),
                    next(iter(self.kernels.values())))

    def inspect_ir(self, level: str = "tile", *, target: str | None = None, **sizes: int) -> str:
        """The text of a level of the kernel that a call used."""
        return self.ran.inspect_ir(level, target=target, **sizes)

    def __repr__(self) -> str:
        return f"<routine {self.__name__}{self.shown_signature}>"


class RoutineLauncher:
    """What a routine's function launches with: `run("softmax", x, y)`."""

    def __init__(self, routine: Routine, groups: Any = None, lanes: int | None = None,
                 stream: Any = None, target: str | None = None):
        self.routine, self.given = routine, routine._schedule
        self.options = {"groups": groups, "lanes": lanes, "stream": stream, "target": target}

    def size(self, name: str, default: int) -> int:
        """A block size of the schedule: "m", "n" or "k"; `default` when it does not say."""
        if self.given is None:
            return default
        chosen = getattr(self.given, ALIASES[name])
        return default if chosen is None else int(chosen)

    def run(self, name: str, *args: Any, warps: int | None = None, **kwargs: Any) -> Any:
        """A launch. warps: of a group, where neither a schedule nor the call says."""
        kernel, options = self.routine.kernels[name], self.options | {"lanes": self.lanes(warps)}
        if not any(v is not None for v in options.values()):
            return kernel(*args, **kwargs)
        return kernel.launch(*args, **options, **kwargs)

    def lanes(self, warps: int | None) -> int | None:
        given = self.options["lanes"]
        return 32 * warps if warps and given is None and self.given is None else given

    def fail(self, message: str, hint: str | None = None, kind: type = ArgumentError) -> Any:
        raise kind(f"{self.routine.__name__}: {message}", hint=hint, where=user_line())


class LaunchRecorder(RoutineLauncher):
    """Writes down what a routine's function would launch."""

    def __init__(self, routine: Routine):
        super().__init__(routine)
        self.launches: list[tuple[str, tuple, dict[str, Any]]] = []

    def run(self, name: str, *args: Any, warps: int | None = None, **kwargs: Any) -> Any:
        self.launches.append((name, args, kwargs))


def routine(*kernels: Kernel, arrays: str, reference: Callable[..., Any],
            samples: tuple[KernelSample, ...], variant: Schedule,
            compiled: tuple[CompiledCall, ...],
            benchmarks: tuple[Benchmark, ...] = (),
            ops: Callable[..., Any] | None = None) -> Callable[..., Routine]:
    """Decorator: fn(launcher, *arrays), which runs these kernels, becomes a routine of the library.

    The rest is its record, see `RoutineRecord`. A second of that name raises.
    """
    record = RoutineRecord(arrays, reference, samples, variant, compiled, benchmarks, ops)

    def declare(fn: Callable[..., Any]) -> Routine:
        if fn.__name__ in ROUTINES:
            raise ArgumentError(f"a routine named {fn.__name__!r} is declared twice")
        ROUTINES[fn.__name__] = LIBRARY[fn.__name__] = Routine(
            fn, {k.__name__: k for k in kernels}, record)
        return ROUTINES[fn.__name__]

    return declare


def find(name: str) -> Routine:
    """A routine by name. Raises ArgumentError."""
    if name not in ROUTINES:
        raise ArgumentError(f"the library has no routine {name!r}",
                            hint=did_you_mean(name, sorted(ROUTINES)))
    return ROUTINES[name]


# --- results ----------------------------------------------------------------------------------
class RoutineArray(ABC):
    """What stands for an array while a routine's launches become nodes of a graph."""

    shape: tuple[int, ...]
    type: NumericType

    @abstractmethod
    def empty(self, shape: tuple[int, ...], numeric: NumericType) -> RoutineArray:
        """One that a kernel will fill."""

    @abstractmethod
    def reshape(self, shape: tuple[int, ...]) -> RoutineArray:
        """The same elements: what is written into one is in the other."""


def distributed(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout is not None


def type_of(x: Any, name: str) -> NumericType:
    """The numeric type of an array of any library."""
    return x.type if isinstance(x, Tensor | RoutineArray) else as_type(read_array(x, name).dtype)


def generation_of(x: Any) -> Generation | None:
    """What the GPU has on which an array lies; None on a host, and where that is not known."""
    where = None if isinstance(x, RoutineArray) else place_of(x)
    return None if where is None or where == HOST else device(where).target.generation


def empty_like(x: Any, shape: tuple[int, ...] | None = None, dtype: Any = None) -> Any:
    """An array that a kernel will fill: of x's library, place, and unless given extents and type.
    """
    numeric = type_of(x, "x") if dtype is None else as_type(dtype)
    shape = tuple(x.shape) if shape is None else shape
    if isinstance(x, RoutineArray):
        return x.empty(shape, numeric)
    where = place_of(x)
    if where is not None and where != HOST:
        return maker(read_array(x, "x").library, shape, numeric, where)(None).array
    made = np.zeros(shape, numeric.dtype.numpy)
    return Tensor(made, numeric) if isinstance(x, Tensor) or numeric.dtype.packed else made


def reshaped(x: Any, shape: tuple[int, ...]) -> Any:
    """An array of any library in another shape, on the same memory."""
    if tuple(x.shape) == shape:
        return x
    if type(x) is Tensor:
        return Tensor(x.array.reshape(shape), x.type)
    if not isinstance(x, Tensor) and hasattr(type(x), "reshape"):
        return x.reshape(shape)
    array = read_array(x, "x")
    return ForeignArray(array.pointer, shape, array.dtype, array.device, x)


class ForeignArray:
    """Device memory of somebody else as an array that kernels take."""

    __slots__ = ("pointer", "shape", "dtype", "index", "owner")

    def __init__(self, pointer: int, shape: tuple[int, ...], dtype: DType, index: int, owner: Any):
        self.pointer, self.shape, self.dtype = pointer, shape, dtype
        self.index, self.owner = index, owner


@reader(ForeignArray, place=lambda x: x.index, pointer="{}.pointer",
        facts=("{}.shape", "{}.dtype", "{}.index"))
def read_view(x: Any, name: str) -> Array:
    return Array(x.pointer, x.shape, dense_strides(x.shape), x.dtype, x.index, "view", x)


__all__ = ["LIBRARY", "ROUTINES", "RoutineLauncher", "LaunchRecorder", "Routine", "ForeignArray",
           "empty_like", "find", "generation_of", "reshaped", "routine", "type_of"]
