"""Quantiles, distinct elements, and functions of matrices against NumPy and scipy."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import scipy.linalg

import tessera as ts
from functions import RUNS, Case, check_derivatives, check_values, check_vmap, each, shapes
from tessera.errors import ArgumentError, AxisError, ShapeError, TraceError
from tolerance import assert_close


def quantile(q: Any, **options: Any) -> Case:
    return Case(lambda x: ts.quantile(x, q, **options), lambda x: np.quantile(x, q, **options),
                shapes((3, 4, 5)), scale=1)


def full_rank(rng: np.random.Generator) -> tuple:
    return (rng.standard_normal((5, 3)) + 2 * np.eye(5, 3),)


def of_rank_two(rng: np.random.Generator) -> tuple:
    return (rng.standard_normal((4, 2)) @ rng.standard_normal((2, 3)),)


def exp_by_series(a: np.ndarray) -> np.ndarray:
    """exp(a / 2^8) by 80 terms of its series, squared 8 times, in integers with 400 bits below the
    point. (scipy's expm of a 3x3 matrix is off by up to 1300 units of f64.)"""
    bits = 400
    x = np.vectorize(lambda v: int(Fraction(v) * 2**(bits - 8)), otypes=[object])(a)
    one = np.vectorize(lambda v: int(v) << bits, otypes=[object])
    term = total = one(np.broadcast_to(np.eye(a.shape[-1]), a.shape))
    for k in range(1, 81):
        term = (term @ x >> bits) // k
        total = total + term
    for _ in range(8):
        total = total @ total >> bits
    return np.vectorize(lambda v: float(Fraction(v, 2**bits)), otypes=[float])(total)


def size_of_exp(a: np.ndarray) -> np.ndarray:
    """(1 + condition of exp at a) |exp(a)|: a rounding of the result, and one of a that exp passes
    on. Scaling and squaring makes them, of random matrices. Higham 2008, Functions of Matrices,
    sections 3.1 and 10.3."""
    norms = [(1 + scipy.linalg.expm_cond(x)) * np.linalg.norm(scipy.linalg.expm(x))
             for x in a.reshape(-1, *a.shape[-2:])]
    return np.reshape(norms, (*a.shape[:-2], 1, 1))


CASES = {
    "quantile": quantile(0.3), "of an axis": quantile(0.7, axis=1),
    "several, kept": quantile([0.0, 0.25, 1.0], axis=(0, 2), keepdims=True),
    "of two axes of q": quantile([[0.1, 0.5, 0.9]], axis=-1),
    **{m: quantile([0.3, 0.5, 0.125], axis=(1, 2), method=m)
       for m in ("lower", "higher", "nearest", "midpoint")},
    "q that moves": Case(lambda x, q: ts.quantile(x, q, axis=0), lambda x, q: np.quantile(x, q, 0),
                         lambda rng: (rng.standard_normal((6, 2)), rng.uniform(0.05, 0.15, 3)),
                         scale=1, n=8),
    "median": Case(ts.median, np.median, shapes((3, 5))),
    "median of pairs": Case(lambda x: ts.median(x, 1, True),
                            lambda x: np.median(x, 1, keepdims=True), shapes((3, 4)), scale=1),
    "pinv": Case(ts.pinv, np.linalg.pinv, full_rank, n=25, order=2),
    "pinv of wide": Case(lambda a: ts.pinv(ts.swapaxes(a, 0, 1)), lambda a: np.linalg.pinv(a.T),
                         full_rank, n=25),
    "matrix_exp": Case(ts.matrix_exp, exp_by_series, shapes((2, 3, 3)), n=3 * 8, order=2,
                       scale=size_of_exp),  # 6 matmuls, a solve, and for some a square
}


@each(CASES)
def test_values(case: Case, rng: np.random.Generator) -> None:
    check_values(case, rng)


@each(CASES)
def test_derivatives(case: Case, rng: np.random.Generator) -> None:
    check_derivatives(case, rng)


@each(CASES)
def test_vmap(case: Case, rng: np.random.Generator) -> None:
    check_vmap(case, rng)


def test_quantiles_at_the_edges() -> None:
    nan = np.float32([[1, np.nan, 3], [4, 2, 9]])
    np.testing.assert_array_equal(ts.median(nan, 1), [np.nan, 4])
    np.testing.assert_array_equal(ts.quantile(nan, [0.0, 1.0], 1), [[np.nan, 2], [np.nan, 9]])
    both = np.float32([-np.inf, -np.inf, 1, np.inf, np.inf])
    np.testing.assert_array_equal(ts.quantile(both, [0.1, 0.5, 0.9]), [-np.inf, 1, np.inf])
    far = ts.tensor([[-3.0, np.inf], [-np.inf, 1.0], [-np.inf, np.inf]])
    np.testing.assert_array_equal(ts.median(far, 1), [np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(ts.quantile(far, [0.3, 0.7], 1), [[np.inf, -np.inf, np.nan]] * 2)
    assert ts.median(ts.tensor(2.0), axis=0).item() == 2.0 and ts.median(ts.arange(4)).item() == 1.5
    places = ts.quantile(np.arange(11.0), np.arange(11) / 10, method="lower")  # 0.1 is not 1 / 10
    np.testing.assert_array_equal(places, np.quantile(np.arange(11.0), np.arange(11) / 10,
                                                      method="lower"))
    g = ts.grad(lambda x: ts.median(x))(np.array([3.0, 1.0, 2.0, 9.0]))
    assert g.tolist() == [0.5, 0.0, 0.5, 0.0]
    assert ts.median(ts.ones(3, "bf16")).type == "bf16"


# --- unique, nonzero, isin --------------------------------------------------------------------
ARRAYS = {
    "integers": lambda rng: rng.integers(-3, 4, (4, 6)),
    "floats": lambda rng: rng.choice(np.float32([2, -0.5, np.nan, np.inf, -np.inf, 0.0]), 40),
    "bools": lambda rng: rng.integers(0, 2, 9).astype(bool),
    "one": lambda rng: np.array([7]), "distinct": lambda rng: rng.permutation(20).reshape(4, 5),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_unique(name: str, rng: np.random.Generator) -> None:
    a = ARRAYS[name](rng)
    want = np.unique(a, return_index=True, return_inverse=True, return_counts=True)
    options = {"return_index": True, "return_inverse": True, "return_counts": True}
    for got, w in zip(ts.unique(a, **options), want, strict=True):
        np.testing.assert_array_equal(got, w)
    np.testing.assert_array_equal(ts.unique(a), want[0])
    assert ts.unique(a).dtype == ts.tensor(a).dtype
    count = len(want[0])
    for size in (count, count + 3, max(count - 2, 1)):
        for run in RUNS:
            got = run(lambda x, size=size: ts.unique(x, size, **options))(a)
            some = min(size, count)
            np.testing.assert_array_equal(got[0][:some], want[0][:some])
            np.testing.assert_array_equal(got[0][some:], np.repeat(want[0][:1], size - some))
            np.testing.assert_array_equal(got[1][:some], want[1][:some])
            np.testing.assert_array_equal(got[2], want[2].reshape(a.shape))
            np.testing.assert_array_equal(got[3][:some], want[3][:some])
            np.testing.assert_array_equal(got[3][some:], 0)


def test_unique_has_a_gradient_and_a_batch(rng: np.random.Generator) -> None:
    x = np.float32([3, 1, 3, 2])
    w = np.float32([1, 10, 100])
    assert ts.grad(lambda x: ts.sum(ts.unique(x, 3) * w))(x).tolist() == [100, 1, 0, 10]
    rows = rng.integers(0, 5, (6, 7))
    got = ts.vmap(lambda r: ts.unique(r, 7, fill_value=-1))(rows).numpy()
    for row, u in zip(rows, got, strict=True):
        want = np.unique(row)
        np.testing.assert_array_equal(u, np.pad(want, (0, 7 - len(want)), constant_values=-1))


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4), (0, 3)])
def test_nonzero(shape: tuple, rng: np.random.Generator) -> None:
    a = rng.integers(0, 3, shape) * rng.choice([0.5, -1.0], shape)
    want = np.nonzero(a)
    for kind in (a, a != 0, a.astype(np.float32)):
        for got, w in zip(ts.nonzero(kind), want, strict=True):
            assert got.dtype == "int64"
            np.testing.assert_array_equal(got, w)
    count = len(want[0])
    for size in (count, count + 4, count // 2, 0):
        for run in RUNS:
            out = run(lambda x, size=size: ts.nonzero(x, size, -1))(a)
            some = min(size, count)
            for got, w in zip(out, want, strict=True):
                np.testing.assert_array_equal(got, [*w[:some], *[-1] * (size - some)])


def test_isin(rng: np.random.Generator) -> None:
    x = rng.integers(0, 9, (4, 5))
    for values in (rng.integers(0, 12, 6), [[3], [4]], [], 5):
        for invert in (False, True):
            fn = lambda x, v=values, i=invert: ts.isin(x, v, i)  # noqa: E731
            for run in RUNS:
                np.testing.assert_array_equal(run(fn)(x), np.isin(x, values, invert=invert))
    nan = np.float32([np.nan, 1.0, np.inf])
    np.testing.assert_array_equal(ts.isin(nan, nan), [False, True, True])
    rows = rng.integers(0, 4, (3, 5))
    np.testing.assert_array_equal(ts.vmap(lambda r: ts.isin(r, [1, 3]))(rows),
                                  np.isin(rows, [1, 3]))


def test_errors() -> None:
    x = ts.arange(4)
    for call, kind, words in (
        (lambda: ts.jit(lambda x: ts.unique(x))(x), TraceError, r"ts.unique\(x, size=n\)"),
        (lambda: ts.jit(lambda x: ts.nonzero(x))(x), TraceError, r"ts.nonzero\(x, size=n\)"),
        (lambda: ts.nonzero(ts.tensor(1.0)), ShapeError, "nonzero of a scalar"),
        (lambda: ts.unique(x, -1), ArgumentError, "size=-1"),
        (lambda: ts.unique(x[:0], 2), ShapeError, "unique of no elements with size=2"),
        (lambda: ts.quantile(x, 1.5), ArgumentError, r"quantiles are in \[0, 1\], got 1.5"),
        (lambda: ts.quantile(x, 0.5, method="cubic"), ArgumentError, "method 'cubic'"),
        (lambda: ts.median(x[:0]), ShapeError, "a quantile needs a known number of elements"),
        (lambda: ts.median(x, 3), AxisError, "axis 3"),
        (lambda: ts.pinv(x), ShapeError, "a matrix needs two axes"),
        (lambda: ts.pinv(ts.eye(2), -1.0), ArgumentError, "rcond=-1.0"),
        (lambda: ts.matrix_exp(ts.ones((2, 3))), ShapeError, "square"),
    ):
        with pytest.raises(kind, match=words):
            call()


# --- matrices ---------------------------------------------------------------------------------
def test_pinv_of_less_than_full_rank(rng: np.random.Generator) -> None:
    """Along changes that keep the rank the derivative is that of differences."""
    (a,) = of_rank_two(rng)
    y = ts.pinv(a, 1e-10).numpy()
    assert_close(y, np.linalg.pinv(a, 1e-10), dtype="f64", n=400)
    assert_close(a @ y @ a, a, dtype="f64", n=400)
    u, _, v = np.linalg.svd(a)
    t = u[:, :3] @ rng.standard_normal((3, 2)) @ v[:2]
    step = 1e-6
    ahead, behind = (np.linalg.pinv(a + s * step * t, 1e-8) for s in (1, -1))
    slope = ts.jvp(lambda a: ts.pinv(a, 1e-8), (a,), (t,))[1].numpy()
    np.testing.assert_allclose(slope, (ahead - behind) / (2 * step), rtol=1e-5,
                               atol=1e-5 * np.abs(slope).max())
    assert_close(ts.pinv(np.zeros((2, 3))), np.zeros((3, 2)), dtype="f64")
    half = ts.pinv(np.diag([1.0, 1e-3]), 1e-2).numpy()
    np.testing.assert_array_equal(half, np.diag([1.0, 0.0]))


def test_matrix_exp_of_all_sizes(rng: np.random.Generator) -> None:
    a = rng.standard_normal((4, 5, 5)) * np.array([1e-8, 0.1, 2, 12])[:, None, None]
    for run in RUNS:
        for got, x in zip(run(ts.matrix_exp)(a).numpy(), a, strict=True):
            assert_close(got, exp_by_series(x), "f64", n=5 * 12, scale=size_of_exp(x))
    turn = np.array([[0, -1], [1, 0]]) * 100.0
    c, s = np.cos(100.0), np.sin(100.0)
    np.testing.assert_allclose(ts.matrix_exp(turn), [[c, -s], [s, c]], atol=1e-12)
    np.testing.assert_array_equal(ts.matrix_exp(np.zeros((2, 2))), np.eye(2))
    assert ts.matrix_exp(np.zeros((0, 0))).shape == (0, 0)
    mixed = np.stack([np.eye(2), np.full((2, 2), np.nan), np.diag([np.inf, 0])]).astype(np.float32)
    got = ts.matrix_exp(mixed).numpy()
    np.testing.assert_allclose(got[0], np.eye(2) * np.e, rtol=1e-6)
    assert np.isnan(got[1:]).all()
