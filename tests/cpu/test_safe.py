"""Safe primitives at the edges: huge, tiny, constant, masked."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.special
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tessera as ts

RUNS = pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])


def rms64(x, eps=1e-6):
    x = np.asarray(x, np.float64)
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)


def layer64(x, eps=1e-5):
    x = np.asarray(x, np.float64)
    c = x - x.mean(-1, keepdims=True)
    return c / np.sqrt(np.mean(c * c, -1, keepdims=True) + eps)


@RUNS
@pytest.mark.parametrize("eps", [1e-5, 0.0])
@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1e-6, 1e-3, 1.0, 1e6, 1e18, 1e30, 1e37])
def test_norms_at_any_scale(run, scale, eps, rng):
    x = (rng.standard_normal((5, 33)) * scale).astype(np.float32)
    for fn, oracle in [(ts.rmsnorm_safe, rms64), (ts.layernorm_safe, layer64)]:
        got = run(lambda v, fn=fn: fn(v, eps=eps))(ts.tensor(x)).numpy()
        want = oracle(x, eps)
        assert np.isfinite(got).all()
        assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


def test_the_fast_norms_do_overflow_where_the_safe_ones_do_not():
    """Why the safe ones exist."""
    x = ts.tensor(np.float32([[1e20, -1e20, 2e20]]))
    assert not np.any(ts.rmsnorm(x).numpy())
    assert np.abs(ts.rmsnorm_safe(x).numpy()).max() > 1


@RUNS
@pytest.mark.parametrize("value", [0.1, -3e38, 1e18, 1e-30, 0.0])
def test_constant_rows_normalize_to_zero(run, value):
    x = ts.tensor(np.full((2, 7), value, np.float32))
    np.testing.assert_array_equal(run(ts.layernorm_safe)(x).numpy(), 0)
    zero = run(lambda v: ts.layernorm_safe(v, eps=0.0))(x)
    np.testing.assert_array_equal(zero.numpy(), 0)


def test_a_large_mean_does_not_drown_the_differences(rng):
    """Neighbouring f32 numbers around 1e6: their differences are exact."""
    x = np.float32(1e6) + rng.integers(0, 16, (4, 32)).astype(np.float32) * np.float32(0.0625)
    np.testing.assert_allclose(ts.layernorm_safe(ts.tensor(x)).numpy(), layer64(x), atol=2e-6)


def test_zero_rows_give_zeros_and_a_finite_gradient():
    x = ts.zeros((2, 4))
    for fn in (ts.rmsnorm_safe, ts.layernorm_safe):
        np.testing.assert_array_equal(fn(x).numpy(), 0)
        np.testing.assert_array_equal(fn(x, eps=0.0).numpy(), 0)
        assert np.isfinite(ts.grad(lambda v, fn=fn: ts.sum(fn(v)))(x).numpy()).all()
    assert ts.rmsnorm_safe(ts.zeros((3, 0))).shape == (3, 0)


@RUNS
@pytest.mark.parametrize("lse_of", [ts.logsumexp, ts.logsumexp_safe])
def test_a_row_that_sees_nothing(run, lse_of):
    x = ts.tensor(np.float32([[-np.inf] * 3, [0, -np.inf, 0]]))
    np.testing.assert_array_equal(run(ts.softmax_safe)(x).numpy(), [[0, 0, 0], [0.5, 0, 0.5]])
    lse = run(lse_of)(x).numpy()
    assert lse[0] == -np.inf and lse[1] == np.float32(math.log(2))
    g = run(ts.grad(lambda v: ts.sum(ts.softmax_safe(v) * ts.tensor([1.0, 2.0, 3.0]))))(x)
    np.testing.assert_array_equal(g.numpy(), [[0, 0, 0], [-0.5, 0, 0.5]])
    g = run(ts.grad(lambda v: ts.sum(ts.where(ts.isfinite(v), v, 0.0) * 0.0)
                    + ts.sum(ts.where(ts.isfinite(v[:, 0]), lse_of(v), 0.0))))(x)
    np.testing.assert_array_equal(g.numpy(), [[0, 0, 0], [0.5, 0, 0.5]])


@RUNS
@pytest.mark.parametrize("shape, axis", [((5,), -1), ((2, 3), None), ((4096, 3), 1), ((3, 5), 0)])
def test_logsumexp_of_rows_of_minus_infinity(run, shape, axis):
    """-inf, as logaddexp gives, and a gradient of zeros; both modes."""
    x = ts.full(shape, -np.inf)
    got = run(lambda v: ts.logsumexp(v, axis=axis))(x).numpy()
    np.testing.assert_array_equal(got, np.logaddexp.reduce(x.numpy(), axis=axis))
    g = run(ts.grad(lambda v: ts.sum(ts.maximum(ts.logsumexp(v, axis=axis), -1e30))))(x).numpy()
    np.testing.assert_array_equal(g, np.zeros(shape))
    _, t = run(lambda v: ts.jvp(lambda u: ts.logsumexp(u, axis=axis), (v,), (ts.ones(shape),)))(x)
    np.testing.assert_array_equal(t.numpy(), np.zeros(got.shape))


def test_plain_softmax_gives_nan_there():
    x = ts.tensor(np.full((1, 3), -np.inf, np.float32))
    assert np.isnan(ts.softmax(x).numpy()).all()


@RUNS
def test_infinities_and_nan_of_logsumexp(run):
    x = ts.tensor(np.float32([[np.inf, 1.0], [np.nan, 1.0], [np.inf, -np.inf]]))
    got = run(ts.logsumexp)(x).numpy()
    assert got[0] == np.inf and np.isnan(got[1]) and got[2] == np.inf
    g = run(ts.grad(lambda v: ts.sum(ts.logsumexp(v))))(x).numpy()
    np.testing.assert_array_equal(g, [[np.nan, 0.0], [np.nan, np.nan], [np.nan, 0.0]])
    _, t = run(lambda v: ts.jvp(ts.logsumexp, (v,), (ts.ones((3, 2)),)))(x)
    assert np.isnan(t.numpy()).all()


@given(x=hnp.arrays(np.float32, hnp.array_shapes(max_dims=2, max_side=9), elements=st.floats(
    width=32, allow_nan=False, allow_infinity=False)))
def test_norms_are_finite_and_bounded(x):
    n = x.shape[-1]
    for fn in (ts.rmsnorm_safe, ts.layernorm_safe):
        y = fn(ts.tensor(x)).numpy()
        assert np.isfinite(y).all()
        assert np.abs(y).max() <= math.sqrt(n) * (1 + 1e-5)


@given(x=hnp.arrays(np.float64, hnp.array_shapes(max_dims=2, max_side=9),
                    elements=st.floats(-700, 700)))
def test_softmax_safe_is_scipys(x):
    np.testing.assert_allclose(ts.softmax_safe(ts.tensor(x, ts.f64)).numpy(),
                               scipy.special.softmax(x, axis=-1), rtol=1e-12, atol=1e-300)
