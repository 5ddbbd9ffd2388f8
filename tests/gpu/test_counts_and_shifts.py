"""Shifts by any amount, the sign of zeros, counts of values: NumPy's results on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu

require_gpu()


@pytest.mark.parametrize("kind", ["int8", "uint16", "int32", "uint32", "int64"])
def test_shifts(kind, rng):
    ends = np.iinfo(kind)
    a = rng.integers(ends.min, ends.max, 1000, kind, endpoint=True)
    b = rng.integers(-3 if ends.min else 0, 70, 1000).astype(kind)
    f = ts.jit(lambda a, b: (a << b, a >> b, a << 3, 1 << b), target="cuda")
    for got, want in zip(f(ts.tensor(a), ts.tensor(b)),
                         (a << b, a >> b, a << 3, 1 << b), strict=True):
        assert got.numpy().dtype == kind and np.array_equal(got.numpy(), want)


def test_the_sign_of_zeros():
    x = np.array([-0.0, 0.0, np.nan, -2.0, 3.0], np.float32)
    got = ts.sign(ts.to(ts.tensor(x), "cuda")).numpy()
    assert np.array_equal(got, np.sign(x), equal_nan=True) and not np.signbit(got[0])


def test_counts(rng):
    """The same each time: integers are added in any order."""
    ids, x = rng.integers(0, 300, 100_000), rng.standard_normal(100_000).astype(np.float32)
    ids_gpu, x_gpu = (ts.to(ts.tensor(v), "cuda") for v in (ids, x))
    for _ in range(3):
        assert np.array_equal(ts.bincount(ids_gpu, length=300).numpy(), np.bincount(ids, None, 300))
    counts, edges = ts.histogram(x_gpu, 50)
    assert np.array_equal(counts.numpy(), np.histogram(x, edges.numpy())[0])
