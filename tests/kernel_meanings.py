"""Kernels that run under the interpreter are told in ops of the graph, and both must leave the
same: what the derivative of a kernel without a rule rests on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera.graph.ops.kernel_meaning import meaning
from tessera.numerics import decode
from tessera.tile.interpreter.launch import Specialisation, extent
from tessera.tile.interpreter.memory import Memory
from tessera.tile.ir.schedule import Schedule
from tessera.tile.kernel import kernel as kernels
from tessera.tile.passes.graph_arguments import with_given_results
from tessera.tile.passes.random_draws import draws

Held = dict[str, np.ndarray]


@contextmanager
def compared(patch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """Every launch in it is told in the graph's ops too and compared. Gives how many were told,
    how many refused."""
    seen: Counter = Counter()
    run = kernels.run_grid

    def both(function: Any, bound: Any, lanes: int, grid: tuple, name: str, *a: Any, **k: Any):
        memory = {n: m for n, m in bound.values.items() if isinstance(m, Memory)}
        before = {n: numbers(m) for n, m in memory.items()}
        result = run(function, bound, lanes, grid, name, *a, **k)
        if draws(function):
            return result
        work = Specialisation(Schedule(), with_given_results(function), lanes, grid)
        try:
            with patch.context() as inner:
                inner.setattr(kernels, "run_grid", run)
                left = meaning(name, work, bound, tensors_of(function, bound, memory, before))
        except ts.GradError as error:
            seen[str(error).partition("body: ")[2].partition("\n")[0]] += 1
            return result
        seen["told"] += 1
        for n, m in memory.items():
            require_close(np.asarray(left[n].numpy()), numbers(m), m, f"{name}: {n}")
        return result

    with patch.context() as outer:
        outer.setattr(kernels, "run_grid", both)
        yield seen


def numbers(m: Memory) -> np.ndarray:
    return np.array(decode(m.flat, m.numeric.dtype)).reshape(m.shape)


def tensors_of(function: Any, bound: Any, memory: dict[str, Memory], before: Held) -> dict:
    made = {p.value.name: p.type for p in function.params if p.role == "output"}
    out = {n: ts.tensor(before[n], m.numeric) for n, m in memory.items()}
    return out | {n: ts.zeros(tuple(extent(str(d), bound) for d in kind.dims), kind.numeric)
                  for n, kind in made.items()}


def require_close(got: np.ndarray, want: np.ndarray, m: Memory, what: str) -> None:
    bits = m.numeric.dtype.bits
    near = {64: 1e-12, 32: 1e-5}.get(bits, 2e-2) if m.numeric.dtype.kind == "float" else 0.0
    with np.errstate(all="ignore"):
        got, want = got.astype(np.float64), want.astype(np.float64)
        largest = np.abs(want[np.isfinite(want)]).max(initial=0.0)
        np.testing.assert_allclose(got, want, rtol=near, atol=near * largest, err_msg=what)


__all__ = ["compared"]
