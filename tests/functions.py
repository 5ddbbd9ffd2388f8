"""One function of ts in all the ways it is used, against a meaning written in NumPy's f64.

    CASES = {"hypot": Case(ts.hypot, np.hypot, shapes((3, 4), (4,)))}

    @each(CASES)
    def test_values(case, rng): check_values(case, rng)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tolerance import assert_close

RUNS = (lambda f: f, ts.jit)


@dataclass(frozen=True)
class Case:
    """`oracle` gets f64 arrays (integers as they are) and returns an array or a tuple of them.

    n: terms of the longest sum, for the tolerance   order: derivatives that are checked   batch:
    how many of the arguments vmap may give an axis, from the first on; None all   scale: of the
    tolerance, or a function of the arguments that gives it
    """

    fn: Callable
    oracle: Callable
    args: Callable[[np.random.Generator], tuple]
    n: int = 4
    order: int = 1
    batch: int | None = None
    scale: float | Callable[..., Any] | None = None


def shapes(*each: tuple[int, ...], low: float | None = None, high: float = 2.0) -> Callable:
    """Arguments of these shapes: normal, or uniform from `low` to `high`."""
    def draw(rng: np.random.Generator) -> tuple:
        return tuple(rng.standard_normal(s) if low is None else rng.uniform(low, high, s)
                     for s in each)

    return draw


def each(cases: dict[str, Case]) -> Callable:
    return pytest.mark.parametrize("case", cases.values(), ids=cases)


def _results(out: Any) -> tuple:
    return tuple(out) if isinstance(out, tuple | list) else (out,)


def _is_float(a: Any) -> bool:
    return isinstance(a, np.ndarray) and a.dtype.kind == "f"


def check_values(case: Case, rng: np.random.Generator, *types: str) -> None:
    """Eager and compiled, in f32 and f64, against the oracle of the rounded arguments."""
    args = case.args(rng)
    for dtype in types or ("f32", "f64"):
        given = [ts.tensor(a, dtype) if _is_float(a) else ts.tensor(a) for a in args]
        exact = [np.asarray(x.numpy(), np.float64) if x.dtype.kind == "float" else x.numpy()
                 for x in given]
        wants = _results(case.oracle(*exact))
        scale = case.scale(*exact) if callable(case.scale) else case.scale
        for run in RUNS:
            outs = _results(run(case.fn)(*given))
            assert len(outs) == len(wants)
            for got, want in zip(outs, wants, strict=True):
                want = np.asarray(want)
                assert got.shape == want.shape
                if got.dtype.kind == "float":
                    assert got.dtype == dtype
                    assert_close(got, want, dtype=dtype, n=case.n, scale=scale)
                else:
                    assert want.dtype.kind in "bui" and got.dtype.kind != "float"
                    np.testing.assert_array_equal(got, want)


def check_derivatives(case: Case, rng: np.random.Generator) -> None:
    if case.order:
        ts.gradcheck(case.fn, case.args(rng), order=case.order)


def check_vmap(case: Case, rng: np.random.Generator) -> None:
    """With an axis in all arguments, and in each alone, against a loop."""
    rows = [case.args(rng) for _ in range(3)]
    count = len(rows[0]) if case.batch is None else case.batch
    choices = {tuple(range(count)), *((i,) for i in range(count))}
    for mapped in choices if count else ():
        full = [np.stack([r[i] for r in rows]) if i in mapped else rows[0][i]
                for i in range(len(rows[0]))]
        axes = tuple(0 if i in mapped else None for i in range(len(full)))
        got = _results(ts.vmap(lambda *a: _results(case.fn(*a)), in_axes=axes)(
            *(ts.tensor(a) for a in full)))
        alone = [[r[i] if i in mapped else rows[0][i] for i in range(len(full))] for r in rows]
        for row, given in enumerate(alone):  # each judged alone: a result of one element may cancel
            scale = case.scale(*given) if callable(case.scale) else case.scale
            wants = _results(case.fn(*map(ts.tensor, given)))
            for y, want in zip(got, wants, strict=True):
                assert_close(y.numpy()[row], want.numpy(), n=max(case.n, 4), scale=scale)
