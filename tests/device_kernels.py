"""Kernels for launches on the GPU that is not there, and arrays for them."""

from __future__ import annotations

import numpy as np

import tessera as ts
from fake_gpu import filled

CAPTURING = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


def fresh(kernel):
    """The same kernel, never called."""
    return ts.kernel(kernel.fn)


def floats(rng, *shape, offset=0):
    return filled(rng.standard_normal(shape).astype(np.float32), offset)


@ts.kernel
def double(x: ts.Tensor["N", ts.f32]) -> ts.Tensor["N", ts.f32]:
    i = ts.tile.linear_id()
    if i < N:
        x[i] = 2.0 * x[i]
    return x


@ts.kernel
def rows_doubled(x: ts.Tensor["M", "N", ts.f32]) -> ts.Tensor["M", "N", ts.f32]:
    for row in ts.tile.range(0, M, 1):
        y = 2.0 * ts.tile.load(x[row:row + 1, 0:64])
    return y


def long_ways(kernel, monkeypatch):
    """How often the kernel was called the long way."""
    counted = []
    real = type(kernel).run
    monkeypatch.setattr(kernel, "run", lambda *a: counted.append(a) or real(kernel, *a),
                        raising=False)
    return counted
