"""Functions lowered for GPUs, for tests that need none: arguments, programs, their groups, and what
their kernels give under the interpreter and in emulated instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import tessera as ts
from emulator import compare
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.program.run import run_of


def normal(rng: np.random.Generator, *shape: int, dtype: Any = None) -> ts.Tensor:
    """Normal numbers, of f32 unless another type is given."""
    return ts.tensor(rng.standard_normal(shape).astype(np.float32), dtype)


def lowered(fn: Callable, *inputs: Any, target: Any = "sm_90a", donated: Any = ()) -> CudaProgram:
    return CudaProgram(ts.jit(fn).graph(*inputs), target, donated)


def kinds(made: CudaProgram) -> list[str]:
    """Of its groups, in order."""
    return [g.kind for g in made.plan.groups]


def both_ways(fn: Callable, *inputs: Any, target: Any = "sm_90a"
              ) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The results of the kernels, and of NumPy node by node."""
    given = [x if isinstance(x, ts.Tensor) else ts.tensor(x) for x in inputs]
    made = lowered(fn, *given, target=target).run([x.array for x in given])
    want = fn(*given)
    return made, [y.array for y in (want if isinstance(want, tuple) else (want,))]


def emulate(fn: Callable, *inputs: ts.Tensor, target: str = "sm_80", kind: str = "",
            **options: Any) -> int:
    """Every kernel of a function, or those of some kinds, on what it is given when the function
    runs; how many. Exactly, but where a tolerance is given."""
    options = {"rtol": 0.0, "atol": 0.0} | options
    made = lowered(fn, *inputs, target=target)
    memory = made._host_memory([x.array for x in inputs])
    types = {b.name: b.type for b in made.plan.buffers}
    emulated = 0
    for launch in made.launches:
        given = [ts.Tensor(run_of(memory[made.base(n)], types[n].dtype, shape, at), types[n])
                 for (n, shape), at in zip(launch.arguments, launch.offsets, strict=True)]
        if not kind or launch.group.kind in kind.split():
            compare(launch.kernel, *given, lanes=launch.group.schedule.lanes, target=target,
                    schedule=launch.group.schedule, **options)
            emulated += 1
        launch.kernel(*given)
    return emulated
