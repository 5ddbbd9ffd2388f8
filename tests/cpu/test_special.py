"""Special functions against 40-digit values (mpmath 1.3, in special_values.json) and scipy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.special

import emulator
import tessera as ts
from functions import Case, check_derivatives, check_vmap, each, shapes
from kernels.build import build
from tessera.errors import ArgumentError
from tessera.graph.cuda import CudaProgram
from tolerance import assert_close

# name -> [[x, value rounded to f64, what rounding lost]], numbers as float.hex
VALUES = json.loads((Path(__file__).parents[1] / "special_values.json").read_text())


def compiled(fn: Callable) -> Callable:
    """In a loop of its own, whatever the extent."""
    def run(x: np.ndarray) -> ts.Tensor:
        with ts.config.scope(loop_min_elements=1):
            return ts.jit(fn)(x)

    return run


FUNCTIONS: dict[str, tuple[Callable, float]] = {  # and the bound that its docstring states, in ulp
    "lgamma": (ts.lgamma, 8), "digamma": (ts.digamma, 4),
    "lgamma_negative": (ts.lgamma, 4), "digamma_negative": (ts.digamma, 4),
    "erfinv": (ts.erfinv, 4),
    **{f"polygamma_{n}": (lambda x, n=n: ts.polygamma(n, x), 4 + 2 * n) for n in (1, 2, 5)},
}


def scale(name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The size whose last place a bound counts in."""
    if name == "lgamma_negative":
        return np.abs(y) + np.abs(np.log(-x)) + 1
    if name == "digamma_negative":
        return np.abs(y) + np.abs(np.pi / np.tan(np.pi * (x - np.rint(x)))) + 1
    return np.abs(y)


@pytest.mark.parametrize("name", VALUES)
def test_f64_within_the_stated_ulps(name: str) -> None:
    x, high, low = (np.array([float.fromhex(row[i]) for row in VALUES[name]]) for i in range(3))
    fn, bound = FUNCTIONS[name]
    for run in (fn, compiled(fn)):
        error = np.abs((run(x).numpy() - high) - low) / np.spacing(scale(name, x, high))
        assert error.max() <= bound, (x[error.argmax()], error.max())


SWEEPS: dict[str, tuple] = {
    "lgamma": (ts.lgamma, scipy.special.gammaln, 1e-30, 1e30),
    "digamma": (ts.digamma, scipy.special.digamma, 1e-30, 1e30),
    "trigamma": (lambda x: ts.polygamma(1, x), lambda x: scipy.special.polygamma(1, x), 1e-15,
                 1e30),
    "lgamma below 0": (ts.lgamma, scipy.special.gammaln, -30, 0),
    "digamma below 0": (ts.digamma, scipy.special.digamma, -30, 0),
    "erfinv": (ts.erfinv, scipy.special.erfinv, -1, 1),
}


@pytest.mark.parametrize("name", SWEEPS)
def test_f32_within_one_ulp(name: str, rng: np.random.Generator) -> None:
    """Against scipy in f64. 1e-12 of the terms that cancel is what scipy itself may be off."""
    fn, oracle, low, high = SWEEPS[name]
    even = rng.uniform(max(low, -30), min(high, 20), 4000)
    wide = 10.0 ** rng.uniform(-30, 30, 2000) if low > 0 else even
    x = np.concatenate([even, wide]).astype(np.float32)
    x = x[(x > low) & (x < high)]
    want = oracle(x.astype(np.float64))
    for run in (fn, compiled(fn)):
        got = run(x)
        assert got.dtype == "f32"
        finite = np.isfinite(want.astype(np.float32))
        error = np.abs(got.numpy().astype(np.float64) - want)[finite]
        allowed = np.spacing(np.abs(want[finite]).astype(np.float32)).astype(np.float64)
        slack = 1e-12 * (1 + np.abs(want[finite]) + np.abs(x[finite]))
        assert (error <= allowed + slack).all()


def test_edges() -> None:
    inf, nan = np.inf, np.nan
    for dtype in (np.float32, np.float64):
        for fn, x, want in (
            (ts.lgamma, [0, -0.0, -1, -7, inf, -inf, nan, 1, 2],
             [inf, inf, inf, inf, inf, inf, nan, 0, 0]),
            (ts.digamma, [0, -0.0, -1, -7, inf, nan], [-inf, inf, nan, nan, inf, nan]),
            (lambda x: ts.polygamma(1, x), [0, -1, inf, nan], [inf, inf, 0, nan]),
            (lambda x: ts.polygamma(2, x), [-1, inf, nan], [nan, 0, nan]),
            (ts.erfinv, [1, -1, 1.5, -2, nan, 0], [inf, -inf, nan, nan, nan, 0]),
        ):
            for run in (fn, compiled(fn)):
                np.testing.assert_array_equal(run(np.array(x, dtype)), np.array(want, dtype))
    assert np.signbit(ts.erfinv(np.array([-0.0]))[0].item())
    assert ts.grad(ts.erfinv)(np.float64(0.0)).item() == pytest.approx(np.sqrt(np.pi) / 2)
    assert ts.lgamma(ts.tensor([5])).type == "f32" and ts.lgamma(ts.ones(1, "bf16")).type == "bf16"


def test_polygamma_below_zero_and_of_high_order(rng: np.random.Generator) -> None:
    """psi_n(x + 1) = psi_n(x) + (-1)^n n! / x^(n + 1) leads to where x is positive."""
    x = rng.uniform(-4, 0, 200)
    x = x[np.abs(x - np.rint(x)) > 0.02]
    for n in (1, 2, 3, 6):
        want = scipy.special.polygamma(n, x + 5)
        for k in range(5):
            want = want - (-1.0) ** n * scipy.special.factorial(n) / (x + k) ** (n + 1)
        np.testing.assert_allclose(ts.polygamma(n, x), want, rtol=1e-11,
                                   atol=1e-11 * scipy.special.factorial(n))
    y = rng.uniform(0.1, 50, 100)
    for n in (12, 30):
        np.testing.assert_allclose(ts.polygamma(n, y), scipy.special.polygamma(n, y), rtol=1e-11)
    np.testing.assert_array_equal(ts.polygamma(0, y), ts.digamma(y))
    for n in (-1, 31, 1.5, True):
        with pytest.raises(ArgumentError, match="polygamma of order"):
            ts.polygamma(n, y)


CASES = {
    "lgamma": Case(ts.lgamma, np.abs, shapes((3, 4), low=0.2, high=12), order=2),
    "lgamma below 0": Case(ts.lgamma, np.abs, shapes((6,), low=-0.8, high=-0.2), order=2),
    "digamma": Case(ts.digamma, np.abs, shapes((3, 4), low=0.5, high=12), order=2),
    "polygamma": Case(lambda x: ts.polygamma(2, x), np.abs, shapes((5,), low=0.7, high=12)),
    "erfinv": Case(ts.erfinv, np.abs, shapes((3, 4), low=-0.9, high=0.9), order=2),
}


@each(CASES)
def test_derivatives(case: Case, rng: np.random.Generator) -> None:
    check_derivatives(case, rng)


@each(CASES)
def test_vmap(case: Case, rng: np.random.Generator) -> None:
    check_vmap(case, rng)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_erfc_keeps_its_digits(dtype: str) -> None:
    """Where 1 - erf(x) has none left; at once, compiled, in a kernel, in code for GPUs, and its
    first two derivatives."""
    kind = np.dtype(f"float{dtype[1:]}")
    x = np.concatenate([np.linspace(-6, 9, 301), [0, -0.0, np.inf, -np.inf, np.nan]]).astype(kind)
    k = build(f"""@kernel
def k(x: Tensor["N", {dtype}], y: Tensor["N", {dtype}], z: Tensor["N", {dtype}]):
    y[tile_n:tile_n+64] = tile.erfc(tile.load(x[tile_n:tile_n+64]))
    i = tile.linear_id()
    if i < N:
        z[i] = math.erfc(x[i])""")["k"]
    y, z, given = np.zeros_like(x), np.zeros_like(x), ts.tensor(x)
    k(x, y, z)
    program = CudaProgram(ts.jit(lambda x: ts.erfc(x * 1.0)).graph(given), "sm_90a")
    want = scipy.special.erfc(x.astype(np.float64))
    bound = (2 + x * x) * np.spacing(want.astype(kind))  # scipy's own: x^2 of exp is rounded
    for got in (y, z, ts.erfc(given), ts.jit(lambda x: ts.erfc(x * 1.0))(given),
                program.run([x])[0]):
        got = np.asarray(got)
        assert np.array_equal(np.isnan(got), np.isnan(want)) and got.dtype == kind
        assert (np.abs(got - want) <= bound)[:301].all()
        assert np.array_equal(got[301:], [1, 1, 0, 2, np.nan], equal_nan=True)
    emulator.compare(k, x, y, z, lockstep=False, rtol=4 * np.finfo(kind).eps)
    once = ts.grad(lambda x: ts.sum(ts.erfc(x)))
    first = -2 / np.sqrt(np.pi) * np.exp(-x.astype(np.float64) ** 2)
    assert_close(once(given), first, dtype=dtype, n=4, scale=1.0)
    finite = x[:301]
    twice = ts.grad(lambda x: ts.sum(once(x)))(ts.tensor(finite))
    assert_close(twice, -2 * finite * first[:301], dtype=dtype, n=8, scale=1.0)
