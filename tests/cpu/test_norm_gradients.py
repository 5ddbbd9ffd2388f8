"""Sums of a norm's gradient: which there are, and what they give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from lowered_functions import both_ways
from tessera.graph.cuda.prepare import prepare
from tessera.runtime.generations import GENERATIONS
from tolerance import assert_close

HOPPER = GENERATIONS["sm_90a"]


def sums(fn: Any, *args: Any) -> list[tuple[int, ...]]:
    """The axes of the sums of a function on a GPU, of more than one element."""
    graph = prepare(ts.jit(fn).graph(*args), HOPPER).graph
    return [n.attrs["axis"] for n in graph.nodes if n.op.reduction == "sum"
            and n.inputs[0].aval.shape != n.outputs[0].aval.shape]


def normed(x: np.ndarray, g: np.ndarray, b: np.ndarray, dy: np.ndarray, axis: int) -> list:
    """The gradients of sum(dy batch_norm(x, g, b)) by x, g and b, in f64."""
    others = tuple(d for d in range(x.ndim) if d != axis)
    n = x.size // x.shape[axis]
    x, g, dy = (np.moveaxis(v, axis, -1).astype("f8") if v.ndim > 1 else v.astype("f8")
                for v in (x, g, dy))
    others = tuple(range(x.ndim - 1))
    c = x - x.mean(others)
    r = 1 / np.sqrt((c * c).mean(others) + 1e-5)
    first, second = dy.sum(others), (dy * c).sum(others)
    dx = g * r * (dy - first / n - c * (r * r * second / n))
    return [np.moveaxis(dx, -1, axis), r * second, first]


@pytest.mark.parametrize("axis", [1, 3], ids=["first", "last"])
@pytest.mark.parametrize("shape", [(2, 6, 5, 8), (8, 16, 9, 16)], ids=str)
@pytest.mark.parametrize("numeric", ["f32", "bf16"])
def test_gradients_of_a_batch_norm(numeric, shape, axis, rng):
    """Where the mean is far from 0, too."""
    dtype = ts.tensor(np.zeros(1), numeric).array.dtype
    x, dy = (rng.standard_normal(shape).astype(np.float32).astype(dtype) for _ in range(2))
    x = (x.astype(np.float32) * 3 + 5).astype(dtype)
    g, b = (rng.standard_normal(shape[axis]).astype(np.float32) for _ in range(2))

    def loss(x: Any, g: Any, b: Any, dy: Any) -> Any:
        y = ts.batch_norm(x, g, b, axis=axis)
        return ts.sum(ts.cast(y, "f32") * ts.cast(dy, "f32"))

    want = normed(np.asarray(x, np.float32), g, b, np.asarray(dy, np.float32), axis)
    n = x.size // x.shape[axis]
    for found in both_ways(ts.grad(loss, argnums=(0, 1, 2)), x, g, b, dy):
        for got, exact, size in zip(found, want, (4, 4 * n**0.5, 4 * n**0.5), strict=True):
            assert_close(np.asarray(got, np.float32), exact, numeric if got is found[0] else "f32",
                         n=n, scale=8 * size)


@pytest.mark.parametrize("norm", [
    lambda x, g, b: ts.batch_norm(x, g, b, axis=3),
    lambda x, g, b: (x - ts.mean(x, (0, 1, 2), True)) * ts.rsqrt(
        ts.var(x, (0, 1, 2)) + 1e-5) * g + b],
    ids=["batch_norm", "by hand"])
def test_a_norms_gradient_has_two_sums(norm):
    """Those of the cotangents and of these times distances from the mean; five were made of the
    parts of the norm, and read all elements twice."""
    x, g = np.zeros((4, 5, 6, 8), np.float32), np.zeros(8, np.float32)

    def cotangents(x: Any, g: Any, b: Any, dy: Any) -> Any:
        return ts.vjp(norm, x, g, b)[1](dy)

    assert sums(cotangents, x, g, g, x) == [(0, 1, 2)] * 4
    assert sums(norm, x, g, g) == [(0, 1, 2)] * 2


def test_sums_of_the_same_elements_are_one(rng):
    x, y = (rng.standard_normal((6, 7, 5)).astype(np.float32) for _ in range(2))
    a, b = (rng.standard_normal(5).astype(np.float32) for _ in range(2))

    def fn(x: Any, y: Any, a: Any, b: Any) -> Any:
        return (ts.sum(x * a * y, (0, 1)), ts.sum(-(x * (y / b)), (0, 1), keepdims=True),
                ts.sum(y * x, (0, 1)))

    assert sums(fn, x, y, a, b) == [(0, 1)]
    for got, want in zip(*both_ways(fn, x, y, a, b), strict=True):
        assert_close(got, want, "f32", n=42, scale=30)


def test_what_is_no_multiple_stays_a_sum_of_its_own(rng):
    """Sums that may cancel are not taken apart, nor is one alone, whose factor may keep it in
    range."""
    x, y, a = (rng.standard_normal(s).astype(np.float32) for s in ((6, 5), (6, 5), (5,)))
    for fn, many in (
            (lambda x, y, a: (ts.sum(x - y, 0), ts.sum(x, 0), ts.sum(y, 0)), 3),
            (lambda x, y, a: (ts.sum(x * y, 0), ts.sum(x * x, 0)), 2),
            (lambda x, y, a: (ts.sum(x * a, 0), ts.sum(x, 1)), 2),
            (lambda x, y, a: (ts.sum(x * a[:, None][:1], 0), ts.sum(y * a, 0)), 2)):
        assert len(sums(fn, x, y, a)) == many
        for got, want in zip(*both_ways(fn, x, y, a), strict=True):
            assert_close(got, want, "f32", n=6, scale=20)
    (got,), _ = both_ways(lambda x, a: ts.sum(x * a, 0), np.full((64, 5), 3e38, np.float32),
                          np.full(5, 1e-3, np.float32))
    np.testing.assert_allclose(got, 64 * 3e35, rtol=1e-5)


def test_reductions_of_reductions_are_one_over_all_their_axes(rng):
    """Unless something else reads what lies between, or they differ."""
    x = rng.standard_normal((4, 5, 6, 8)).astype(np.float32)
    assert sums(lambda x: ts.sum(ts.sum(x, 2), (0, 1)), x) == [(2,), (0, 1)]  # no axis between
    whole = lambda x: ts.sum(ts.sum(x, 2, keepdims=True), (0, 1))  # noqa: E731
    assert sums(whole, x) == [(0, 1, 2)]

    def both(x: Any) -> Any:
        rows = ts.sum(x, 2, keepdims=True)
        return rows, ts.sum(rows, (0, 1))

    assert sums(both, x) == [(2,), (0, 1)]
    for fn in (whole, both, lambda x: ts.max(ts.sum(x, 2, keepdims=True), (0, 1))):
        for got, want in zip(*both_ways(fn, x), strict=True):
            assert_close(got, want, "f32", n=120, scale=30)


@pytest.mark.parametrize("ddof", [0, 1])
def test_second_derivatives_of_a_variance(ddof, rng):
    """2 (I - 1 / n) / (n - ddof) times the cotangent."""
    x = rng.standard_normal((3, 5))

    def curved(x: Any) -> Any:
        return ts.sum(ts.grad(lambda x: ts.sum(ts.var(x, 1, ddof=ddof) ** 2))(x) ** 2)

    got = ts.grad(curved)(x)
    c = x - x.mean(1, keepdims=True)
    v = (c * c).sum(1, keepdims=True) / (5 - ddof)
    k = 4 / (5 - ddof)  # the gradient is k v c, its square summed k^2 v^3 (5 - ddof)
    want = 3 * k**2 * v**2 * 2 * c
    assert_close(np.asarray(got), want, "f64", n=5, scale=100)
