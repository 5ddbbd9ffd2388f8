"""bincount and histogram against NumPy's, eagerly, compiled, on a GPU's kernels and in a batch."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from tessera.graph.cuda import CudaProgram
from tolerance import assert_close


@pytest.mark.parametrize("shape", [(0,), (1,), (1000,), (7, 13)])
@pytest.mark.parametrize("kind", ["int32", "uint8", "int64"])
def test_bincount(shape, kind, rng):
    x = rng.integers(0, 23, shape).astype(kind)
    w = rng.standard_normal(shape).astype(np.float32)
    X, W = ts.tensor(x), ts.tensor(w)
    want = np.bincount(x.ravel(), minlength=30)
    got = ts.bincount(X)
    assert got.type == "int64" and np.array_equal(got.numpy(), np.bincount(x.ravel()))
    counts = ts.jit(lambda x: ts.bincount(x, length=30))
    (on_gpu,) = CudaProgram(counts.graph(X), "sm_90a").run([x])
    for y in (ts.bincount(X, length=30).numpy(), counts(X).numpy(), on_gpu):
        assert np.array_equal(y, want)
    sums = np.bincount(x.ravel(), w.ravel().astype(np.float64), 30)
    assert_close(ts.bincount(X, W, length=30), sums, dtype="f32", n=max(x.size, 1))


@pytest.mark.parametrize("bins, limits", [(10, None), (1, None), (7, (-1.0, 2.0)),
                                          ([-1.0, 0.0, 0.5, 3.0], None)])
def test_histogram(bins, limits, rng):
    x = np.round(rng.standard_normal((40, 25)), 2).astype(np.float32)
    edges = np.asarray(ts.histogram(ts.tensor(x), bins, limits)[1])
    assert_close(edges, np.histogram(x.astype(np.float64), bins, limits)[1], dtype="f32", n=4)
    want, _ = np.histogram(x, edges)  # edges of f32: a number beside one lies where they say
    f = ts.jit(lambda x: ts.histogram(x, bins, limits)[0])
    (on_gpu,) = CudaProgram(f.graph(ts.tensor(x)), "sm_90a").run([x])
    for got in (ts.histogram(ts.tensor(x), bins, limits)[0].numpy(), f(ts.tensor(x)).numpy(),
                on_gpu):
        assert got.dtype == np.int64 and np.array_equal(got, want)
    w = rng.uniform(0.5, 1.0, x.shape).astype(np.float32)
    sums, _ = ts.histogram(ts.tensor(x), bins, limits, ts.tensor(w))
    assert_close(sums, np.histogram(x, edges, weights=w.astype(np.float64))[0], dtype="f32", n=1000)
    part, _ = ts.histogram(ts.tensor(x), bins, limits, density=True)
    assert_close(part, np.histogram(x, edges, density=True)[0], dtype="f32", n=8)


def test_what_is_not_counted():
    x = ts.tensor([np.nan, -1.0, 0.0, 0.5, 1.0, 1.5, np.inf])
    assert ts.histogram(x, 2, (0.0, 1.0))[0].tolist() == [1, 2]
    assert ts.histogram(ts.tensor([3.0, 3.0]), 2)[1].tolist() == [2.5, 3.0, 3.5]
    assert ts.histogram(ts.zeros((0,)), 3)[0].tolist() == [0, 0, 0]


def test_in_a_batch(rng):
    x = rng.integers(0, 5, (3, 40))
    got = ts.vmap(lambda x: ts.bincount(x, length=5))(ts.tensor(x))
    assert got.tolist() == [np.bincount(row, minlength=5).tolist() for row in x]


@pytest.mark.parametrize("call, error", [
    (lambda: ts.bincount(ts.ones((2,))), ts.DTypeError),
    (lambda: ts.bincount(ts.tensor([5]), length=5), ts.AxisError),
    (lambda: ts.bincount(ts.tensor([-1, 2])), ts.AxisError),
    (lambda: ts.jit(lambda x: ts.bincount(x, length=5))(ts.tensor([-1, 2])), ts.AxisError),
    (lambda: ts.bincount(ts.tensor([5]), ts.ones((2,))), ts.ShapeError),
    (lambda: ts.bincount(ts.tensor([5]), length=-1), ts.ArgumentError),
    (lambda: ts.jit(ts.bincount)(ts.tensor([5])), ts.TraceError),
    (lambda: ts.histogram(ts.ones((2,)), 0), ts.ArgumentError),
    (lambda: ts.histogram(ts.ones((2,)), [1.0]), ts.ShapeError),
    (lambda: ts.histogram(ts.ones((2,)), 2, (1.0, 0.0)), ts.ArgumentError),
])
def test_errors(call, error):
    with pytest.raises(error):
        call()
