"""Calls of the standard library with their oracles in f64, for tests with and without a GPU.

All of them come from the records of the routines: see tessera/kernels/record.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import tessera as ts
from tessera.kernels import ROUTINES, Routine
from tessera.kernels.record import CompiledCall, KernelSample, wide
from tolerance import assert_close


@dataclass(frozen=True)
class Call:
    """One sample of a routine."""

    routine: Routine
    sample: KernelSample

    @property
    def name(self) -> str:
        return f"{self.routine.__name__} {self.sample.name}".strip()

    def check(self, rng: Any, schedule: ts.Schedule | None = None, target: str | None = None
              ) -> None:
        """Run it on fresh arrays and compare every result with the reference.

        target: "cuda" copies host arrays to the GPU and back.
        """
        arguments, options = self.sample.drawn(rng)
        want = self.routine.record.expected(arguments, options)
        routine = self.routine if schedule is None else self.routine.with_schedule(schedule)
        launch = {} if target is None else {"target": target}
        got = routine.launch(*arguments, **launch, **options)
        got = got if isinstance(got, tuple) else (got,)
        assert len(got) == len(want)
        if arguments[0].dtype.bits == 8:  # of codes
            assert got[0].dtype is ts.bf16
        else:
            assert got[0].type is arguments[0].type
        for y, z in zip(got, want, strict=True):
            assert isinstance(y, ts.Tensor)
            assert_close(y.array, z, *self.sample.tolerance)


def calls_of(*routines: Routine) -> dict[str, Call]:
    found = [Call(r, s) for r in routines for s in r.record.samples]
    calls = {call.name: call for call in found}
    assert len(calls) == len(found), "two samples of one name"
    return calls


def compiled_of(*routines: Routine) -> list[tuple[str, str, list[Any], dict[str, Any],
                                                  CompiledCall]]:
    """(routine, kernel, arguments, constants, the case) of each launch that is compiled."""
    found = []
    for routine in routines:
        for case in routine.record.compiled:
            variant = (routine if case.schedule is None
                       else routine.with_schedule(case.schedule))
            arguments, options = case.zeros()
            for kernel, args, constants in variant.launches(*arguments, **options):
                found.append((routine.__name__, kernel, list(args), constants, case))
    return found


CALLS = calls_of(*ROUTINES.values())
attention = ROUTINES["flash_attention_2"].record.reference


def adam(steps: int, rng: Any, n: tuple[int, ...]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Gradients of some steps, and p, m, v before the first."""
    return ([rng.standard_normal(n).astype(np.float32) for _ in range(steps)],
            [rng.standard_normal(n).astype(np.float32), np.zeros(n, np.float32),
             np.zeros(n, np.float32)])


def adam_f64(p: np.ndarray, gradients: list[np.ndarray], **options: float) -> tuple[Any, ...]:
    """p, m, v after a step with each gradient."""
    p = p.astype(np.float64)
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(gradients, 1):
        p, m, v = ROUTINES["fused_adam"].record.reference(p, g.astype(np.float64), m, v, t,
                                                          **options)
    return p, m, v


__all__ = ["CALLS", "Call", "adam", "adam_f64", "attention", "calls_of", "compiled_of", "wide"]
