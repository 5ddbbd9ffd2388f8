"""Sparse products on the GPU."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu
from tolerance import assert_close

require_gpu()
CSR = ts.sparse.CSR


def drawn(rng, m, n, dtype=np.float32):
    """Dense, and in compressed rows on the GPU; some rows are empty, one is full."""
    a = (rng.standard_normal((m, n)) * (rng.random((m, n)) < 0.05)).astype(dtype)
    a[:3], a[-1] = 0, rng.standard_normal(n)
    indptr = np.concatenate([[0], np.count_nonzero(a, 1).cumsum()]).astype(np.int32)
    parts = (a[a != 0], np.nonzero(a)[1].astype(np.int32), indptr)
    return a.astype(np.float64), [ts.tensor(x).to("cuda") for x in parts]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("k", [0, 1, 7, 64, 300])
def test_products(k, dtype, rng):
    a, parts = drawn(rng, 333, 1000, dtype)
    x = rng.standard_normal((1000, k) if k else 1000).astype(dtype)
    made, there = CSR(*parts, a.shape), ts.tensor(x).to("cuda")
    assert made.indices.dtype is ts.int32
    eager = made @ there
    jitted = ts.jit(lambda a, x: a @ x)(made, there)
    assert eager.numpy().tobytes() == jitted.numpy().tobytes()
    assert_close(eager.numpy(), a @ x, "f32" if dtype is np.float32 else "f64", n=1000,
                 scale=abs(a) @ abs(x))


def test_gradients(rng):
    a, (values, indices, indptr) = drawn(rng, 60, 50)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((50, 20), (60, 20)))

    @ts.jit
    def slopes(values, x, w):
        return ts.grad(lambda v, x: ts.sum((CSR(v, indices, indptr, a.shape) @ x) * w),
                       (0, 1))(values, x)

    dv, dx = slopes(values, *(ts.tensor(y).to("cuda") for y in (x, w)))
    rows, cols = np.nonzero(a)
    assert_close(dv.numpy(), (w[rows].astype(np.float64) * x[cols]).sum(1), "f32", n=20, scale=20.0)
    assert_close(dx.numpy(), a.T @ w, "f32", n=60, scale=20.0)


def test_rows_that_are_none_are_told(rng):
    a, (values, indices, _) = drawn(rng, 60, 50)
    bad = ts.tensor(np.arange(61, dtype=np.int32)[::-1].copy()).to("cuda")
    x = ts.ones((50, 4)).to("cuda")
    with pytest.raises(ts.TesseraError):
        y = ts.jit(lambda v, i, p, x: CSR(v, i, p, a.shape) @ x)(values, indices, bad, x)
        y.numpy()
