"""A library routine: a function of arrays in front of tile kernels that fill its results.

    y = stable_softmax(x)                                  arrays of any library, where they lie
    mine = stable_softmax.with_schedule(ts.Schedule(warps=8))
    stable_softmax.kernels["softmax"].inspect_ir("tile")
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from .. import hooks
from ..errors import ArgumentError, did_you_mean, user_line
from ..open_trace import trace_state
from ..tile.ir.schedule import Schedule
from ..tile.kernel.decorator import LIBRARY
from ..tile.kernel.kernel import Kernel
from .record import Benchmark, CompiledCall, KernelSample, RoutineRecord
from .routine_arrays import (
    ForeignArray,
    RoutineArray,
    distributed,
    empty_like,
    generation_of,
    reshaped,
    type_of,
    viewed,
)
from .routine_calls import RoutineCalls
from .routine_launcher import LaunchRecorder, RoutineLauncher

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
        self.notes: tuple[str, ...] = ()  # why the last call was launched as it was
        self.calls = RoutineCalls()  # that may be repeated

    @property
    def schedule(self) -> Schedule:
        found = self._schedule or self.ran.schedule
        return found.with_notes(*self.notes) if self.notes else found

    def with_schedule(self, schedule: Schedule) -> Routine:
        """The same routine with another schedule. Raises ArgumentError for what is none."""
        if not isinstance(schedule, Schedule):
            raise ArgumentError(f"a schedule is a ts.Schedule, got {schedule!r}", where=user_line())
        if schedule.is_space:
            raise ArgumentError("lists in a schedule make a space, a routine has one schedule",
                                hint="for s in space: routine.with_schedule(s)", where=user_line())
        return Routine(self.fn, self.kernels, self.record, schedule)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if trace_state.builder is not None:
            return self.launch(*args, **kwargs)
        if (call := self.calls.find(args, kwargs)) is not None:
            return call(*args, *kwargs.values())
        result = self.launch(*args, **kwargs)
        self.calls.add(self, args, kwargs)
        return result

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
        if level == "schedule":
            return self.schedule.explained()
        return self.ran.inspect_ir(level, target=target, **sizes)

    def __repr__(self) -> str:
        return f"<routine {self.__name__}{self.shown_signature}>"


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


__all__ = ["LIBRARY", "ROUTINES", "ForeignArray", "LaunchRecorder", "Routine", "RoutineArray",
           "RoutineLauncher", "distributed", "empty_like", "find", "generation_of", "reshaped",
           "routine", "type_of", "viewed"]
