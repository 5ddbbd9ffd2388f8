"""Sorts and the first of rows on the GPU, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu

require_gpu()


def order_of(x, descending):
    """Of each row, stable, NaN as the largest."""
    if not descending:
        return np.argsort(x, -1, kind="stable")
    return x.shape[-1] - 1 - np.argsort(x[:, ::-1], -1, kind="stable")[:, ::-1]


@pytest.mark.parametrize("kind", ["bf16", "f16", "f32", "f64", "int8", "int32", "uint32"])
@pytest.mark.parametrize("shape", [(37, 1), (33, 7), (130, 64), (9, 1000), (5, 4096), (2, 5000),
                                   (3, 40000), (1, 131072)])
@pytest.mark.parametrize("descending", [False, True])
def test_rows(kind, shape, descending, rng):
    """In one warp, in several, in runs that are merged; with ties, NaN and both zeros."""
    x = rng.integers(0, 9, shape).astype(np.float64)
    if kind in ("bf16", "f16", "f32", "f64"):
        special = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0])
        x = np.where(rng.random(shape) < 0.3, rng.choice(special, shape), x - 4)
    given = ts.cast(ts.tensor(x), kind)
    wide = np.asarray(ts.cast(given, "f64").array)
    ks = sorted({1, min(8, shape[1]), min(50, shape[1])})
    made = ts.jit(lambda x: (
        ts.sort(x, -1, descending), ts.argsort(x, -1, descending),
        *(y for k in ks for y in ts.top_k(x, k, -1, descending))))(given.to("cuda"))
    order = order_of(wide, descending)
    value = np.take_along_axis(wide, order, -1)
    want = [value, order, *(y for k in ks for y in (value[:, :k], order[:, :k]))]
    for got, w in zip(made, want, strict=True):
        got = np.asarray(got.numpy(), np.float64)
        np.testing.assert_array_equal(got, w)
        np.testing.assert_array_equal(np.signbit(got)[got == 0], np.signbit(w)[w == 0])
