"""Types and numbers for kernels of single lanes."""

from __future__ import annotations

import numpy as np

import tessera as ts
from kernels.build import build
from tessera.numerics import find_dtype

FLOATS = ["f64", "f32", "bf16", "f16", "fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1",
          "fp4_e3m0"]
INTS = ["int64", "int32", "int16", "int8", "int4", "uint64", "uint32", "uint16", "uint8", "bool_"]
PACKED = ["fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "fp4_e3m0", "int4"]
WHOLE = [t for t in FLOATS + INTS if t not in PACKED]
LANES = [1, 7, 32, 45, 64, 100, 1024]


def values(rng, shape, dtype: str):
    """Numbers over the range of a type, with special values of floats among them."""
    d = find_dtype(dtype)
    if d.kind == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if d.kind != "float":
        low, high = max(int(d.min), -2**40), min(int(d.max), 2**40)
        x = rng.integers(low, high + 1, shape, dtype=np.int64).astype(
            np.int8 if d.packed else d.numpy)
        return ts.tensor(x, dtype) if d.packed else x
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 4, shape))
    if x.size > 4:
        x.reshape(-1)[:4] = [0.0, -0.0, np.inf, -np.inf]
    return x if dtype == "f64" else ts.tensor(x.astype(np.float32), dtype)


def zeros(shape, dtype: str):
    d = find_dtype(dtype)
    if d.kind == "float" and dtype not in ("f32", "f64") or d.packed:
        return ts.zeros(shape, dtype)
    return np.zeros(shape, d.numpy)


def kernel(source: str, **names):
    return build(source, **names)["k"]


def small(rng, n: int, dtype: str):
    """Whole numbers whose sums are exact in any order."""
    d = find_dtype(dtype)
    low = 0 if d.kind == "uint" else -2
    x = rng.integers(low, 3, n)
    if d.kind != "float":
        return x.astype(d.numpy)
    return x.astype(np.float64) if dtype == "f64" else ts.tensor(x.astype(np.float32), dtype)
