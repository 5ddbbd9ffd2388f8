"""@ts.kernel and what stands behind its dot: schedules, tuning, whole-array functions."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

from tessera.errors import ArgumentError, UnsupportedTargetError, user_line
from tessera.tile.interpreter.launch import Config
from tessera.tile.ir.schedule import Schedule
from tessera.tile.kernel.kernel import Kernel


class KernelDecorator:
    """@ts.kernel, @ts.kernel(grid=...), .schedule(s), .autotune(...), .auto."""

    def __call__(self, fn: Any = None, *, grid: Any = None, schedule: Schedule | None = None,
                 axes: str | None = None, overwrites: tuple[str, ...] = (),
                 counters: tuple[str, ...] = (), fast_math: bool = False) -> Any:
        """Makes a kernel of a function.

        grid: groups per axis, a tuple or a function of named extents: lambda M, N: (M // 64, N)
        axes: index letters of its tensors and of what it gives (what it returns, then what it
        writes), by which distributed tensors are sharded: "mk,kn,mn->mn". A letter stands where
        each shard along it can be computed alone; "_" is an axis that is needed whole
        overwrites: tensors of which each launch writes every element, before any is read, where the
        compiler cannot tell: a graph then gives it memory that nothing was written to
        counters: tensors that are zeros again when a launch ends, if they were when it began: a
        graph then clears them once, not in front of each launch
        fast_math: on a GPU, divisions, roots, exponentials, logarithms, sines and tanh of f32 are
        the hardware's approximations, as under ts.determinism("fast"); see docs/reference/gpu.md
        """
        if fn is None:
            return lambda f: Kernel(f, schedule=schedule, grid=grid, axes=axes,
                                    overwrites=overwrites, counters=counters, fast_math=fast_math)
        return Kernel(fn, schedule=schedule, grid=grid, axes=axes, overwrites=overwrites,
                      counters=counters, fast_math=fast_math)

    def schedule(self, schedule: Schedule) -> Callable[[Any], Kernel]:
        """Attaches a schedule: @ts.kernel.schedule(base.with_block(64, 64)).

        A function whose body is ... takes the standard library's attention for its body (Q24).
        """
        if not isinstance(schedule, Schedule):
            raise ArgumentError(f"a schedule is a ts.Schedule, got {schedule!r}", where=user_line())
        if schedule.is_space:
            raise ArgumentError("lists in a schedule make a space: tune it",
                                hint="@ts.kernel.autotune(space=...)", where=user_line())
        return lambda fn: attach(fn, schedule)

    def auto(self, fn: Any) -> Kernel:
        """Makes a kernel of a function of whole arrays: @ts.kernel.auto. The compiler cuts its
        result into blocks; leading axes of the arguments are a batch."""
        from tessera.tile.kernel.whole_array import AutoKernel

        return AutoKernel(fn)

    def autotune(self, space: Any = None, metric: str = "latency_ms", budget_ms: float = 200,
                 cache: Any = None, key: Any = None, *, measure: Any = None, gpu: Any = "H200",
                 model: Any = None, compile_limit_s: float = 60.0, grid: Any = None) -> Any:
        """Chooses the schedule from a space at the first call for each set of types and extents.

        space      dict(BM=[64, 128], warps=[4, 8]), a Schedule with lists, or schedules; without
                   one the compiler's own proposals
        metric     'latency_ms'
        budget_ms  wall time after which no further candidate is begun; one is always measured
        cache      folder of tuned schedules, below TESSERA_CACHE_DIR unless given; False: none
        key        names of extents and parameters, or a function of them, that stand for the call
                   in place of all its extents
        measure    (launch, schedule) -> milliseconds, in place of CUDA events
        gpu        whose figures the model uses for arrays on the host
        model      a CostModel that several kernels share; compile_limit_s: of one candidate
        """
        from tessera.tile.kernel.autotune import TunedKernel

        if inspect.isfunction(space):
            return TunedKernel(space)
        return lambda fn: TunedKernel(
            fn, space, metric, budget_ms, cache, key, measure=measure, gpu=gpu, model=model,
            compile_limit_s=compile_limit_s, grid=grid)

    def __repr__(self) -> str:
        return "ts.kernel"


# --- a body of `...` ---------------------------------------------------------------------------
# Filled by the standard library: name -> kernel. A body of `...` stands for BODY (Q24).
LIBRARY: dict[str, Any] = {}
BODY = "flash_attention_2"


class DelegatedKernel(Kernel):
    """A schedule, and the library's kernel run with it."""

    @property
    def implementation(self) -> Any:
        """The library's kernel with this schedule. Raises UnsupportedTargetError without one."""
        if BODY not in LIBRARY:
            raise UnsupportedTargetError(
                f"the body of {self.__name__} is ..., which stands for {BODY}, and the standard "
                "library has no such kernel", where=user_line(),
                hint="write the kernel's body, or import tessera.stdlib")
        return LIBRARY[BODY].with_schedule(self.schedule)

    def with_schedule(self, schedule: Schedule) -> DelegatedKernel:
        """The same with another schedule."""
        super().with_schedule(schedule)  # checks it
        return DelegatedKernel(self.fn, schedule=schedule)

    def run(self, config: Config, args: tuple, kwargs: dict[str, Any], stream: Any = None,
            target: str | None = None, key: tuple[int, int] | None = None) -> Any:
        self._arguments(args, kwargs)  # the names of this function are the ones to be given
        kernel = self.implementation
        if config == Config() and stream is None and target is None:
            return kernel(*args, **kwargs)
        return kernel.launch(*args, groups=config.groups, lanes=config.lanes, stream=stream,
                             target=target, **kwargs)

    def inspect_ir(self, level: str = "tile", *, target: str | None = None, **sizes: int) -> str:
        if level == "schedule":
            return self.schedule.explained()
        return self.implementation.inspect_ir(level, target=target, **sizes)


def attach(fn: Any, schedule: Schedule) -> Kernel:
    """A kernel with a schedule; one of the library's when its body is only `...`."""
    made = Kernel(fn, schedule=schedule)
    body = [s for s in made.source.tree.body if not _is_text(s)]
    if len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(
            body[0].value, ast.Constant) and body[0].value.value is ...:
        return DelegatedKernel(fn, schedule=schedule)
    return made


def _is_text(s: ast.stmt) -> bool:
    return isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) and isinstance(
        s.value.value, str)


kernel = KernelDecorator()
__all__ = ["BODY", "LIBRARY", "DelegatedKernel", "KernelDecorator", "kernel"]
