"""Rows of the area SAFE."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import scipy.special
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tessera as ts
from tolerance import assert_close, f64

RUNS = pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
STORAGES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16,
            "fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}


@pytest.mark.row("SAFE-01")
@RUNS
def test_softmax_safe(run, rng):
    x = rng.standard_normal((6, 50)).astype("f4") * 5
    fn = run(ts.softmax_safe)
    assert_close(fn(ts.tensor(x)).numpy(), scipy.special.softmax(f64(x), axis=-1), n=50)
    huge = np.float32([[1e38, -1e38, 1e38], [-1e38, -1e38, -1e38], [1e38, 1, 0]])
    y = fn(ts.tensor(huge)).numpy()
    assert np.isfinite(y).all()
    np.testing.assert_allclose(y.sum(-1), 1, atol=1e-6)
    nothing = np.full((2, 4), -np.inf, np.float32)
    np.testing.assert_array_equal(fn(ts.tensor(nothing)).numpy(), 0)


@pytest.mark.row("SAFE-02")
@RUNS
def test_softmax_is_exp_of_x_minus_logsumexp(run, rng):
    x = ts.tensor(rng.standard_normal((7, 30)).astype("f4") * 4)
    a = run(ts.softmax_safe)(x)
    b = run(lambda v: ts.exp(v - ts.logsumexp_safe(v, keepdims=True)))(x)
    np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6)
    row = x[0]
    np.testing.assert_allclose(ts.softmax_safe(row).numpy(),
                               ts.exp(row - ts.logsumexp_safe(row)).numpy(), atol=1e-6)


@pytest.mark.row("SAFE-03")
@pytest.mark.parametrize("name", STORAGES)
def test_no_finite_input_overflows(name):
    dtype = STORAGES[name]
    top = float(ml_dtypes.finfo(dtype).max)

    @given(hnp.arrays(np.float32, hnp.array_shapes(max_dims=2, max_side=8),
                      elements=st.floats(-top, top, width=32)))
    def check(x):
        x = x.astype(dtype)
        x = np.where(np.isfinite(f64(x)), x, np.zeros_like(x))
        y = ts.softmax_safe(ts.tensor(x))
        assert y.dtype.name == name and np.isfinite(f64(y)).all()

    check()


@pytest.mark.row("SAFE-04")
@RUNS
def test_layernorm_safe(run, rng):
    x = rng.standard_normal((5, 40)).astype("f4")
    g, b = rng.standard_normal((2, 40)).astype("f4")
    c = f64(x) - f64(x).mean(-1, keepdims=True)
    want = c / np.sqrt((c * c).mean(-1, keepdims=True) + 1e-3) * f64(g) + f64(b)
    got = run(lambda *a: ts.layernorm_safe(*a, eps=1e-3))(*map(ts.tensor, (x, g, b)))
    assert_close(got.numpy(), want, n=40)
    for value in (0.0, 0.1, -3.7, 1e18, 3e38):
        row = ts.tensor(np.full((1, 9), value, np.float32))
        np.testing.assert_array_equal(run(ts.layernorm_safe)(row).numpy(), 0)
    assert np.isfinite(run(ts.layernorm_safe)(ts.tensor(x * np.float32(1e18))).numpy()).all()


@pytest.mark.row("SAFE-05")
@RUNS
def test_rmsnorm_safe(run, rng):
    fn = run(ts.rmsnorm_safe)
    x = (rng.standard_normal((4, 30)) * 1e30).astype("f4")
    want = f64(x) / np.sqrt(np.mean(f64(x) ** 2, -1, keepdims=True))
    assert_close(fn(ts.tensor(x)).numpy(), want, n=30)
    w = rng.standard_normal(30).astype("f4")
    assert_close(fn(ts.tensor(x), ts.tensor(w)).numpy(), want * w, n=30)
    low = (rng.standard_normal((4, 30)) * 1e30).astype(ml_dtypes.bfloat16)
    y = fn(ts.tensor(low))
    want = f64(low) / np.sqrt(np.mean(f64(low) ** 2, -1, keepdims=True))
    assert y.dtype is ts.bf16
    assert_close(y.numpy(), want, dtype="bf16")
    np.testing.assert_array_equal(fn(ts.zeros((2, 5))).numpy(), 0)


@pytest.mark.row("SAFE-06")
@RUNS
def test_logsumexp_safe(run, rng):
    fn = run(ts.logsumexp_safe)
    assert fn(ts.tensor([1000.0, 1000.0])).item() == np.float32(1000 + math.log(2))
    assert fn(ts.tensor([-np.inf, -np.inf])).item() == -np.inf
    x = rng.standard_normal((4, 5, 6)).astype("f4") * 20
    for axis in (-1, 0, (1, 2)):
        got = run(lambda v, a=axis: ts.logsumexp_safe(v, axis=a))(ts.tensor(x)).numpy()
        assert_close(got, scipy.special.logsumexp(f64(x), axis=axis), n=30)


@pytest.mark.row("SAFE-07")
@RUNS
@pytest.mark.parametrize("power", range(-18, 19, 6))
def test_norms_over_scales(run, power, rng):
    x = (rng.standard_normal((8, 64)) * 10.0**power).astype("f4")
    c = f64(x) - f64(x).mean(-1, keepdims=True)
    for fn, v, eps in [(ts.rmsnorm_safe, f64(x), 1e-6), (ts.layernorm_safe, c, 1e-5)]:
        want = v / np.sqrt((v * v).mean(-1, keepdims=True) + eps)
        got = f64(run(fn)(ts.tensor(x)))
        error = np.abs(got - want).max(-1) / np.abs(want).max(-1)
        assert np.all(error < 1e-3)
