"""Casts to integers and bool: saturating, truncating toward zero, NaN becomes 0.

C leaves such casts undefined out of range and NumPy follows the processor; here they are defined,
the same on every device.
"""

from __future__ import annotations

import numpy as np

from tessera.numerics.counts import CastCounts
from tessera.numerics.dtypes import DType


def encode_bool(x: np.ndarray, counts: CastCounts | None) -> np.ndarray:
    """x != 0, so NaN is True as in NumPy. [N] -> [N]"""
    if counts is not None and x.dtype.kind not in "iub":
        wide = x.astype(np.float64)
        counts.add(nan=np.isnan(wide).sum(), inf=np.isinf(wide).sum())
    return x.astype(np.int8) != 0 if x.dtype.name == "int4" else x != 0


def encode_int(
    x: np.ndarray, dtype: DType, bits: np.ndarray | None, counts: CastCounts | None
) -> np.ndarray:
    """[N] numbers -> [N] integers of `dtype`. bits: uint32 [N] to round stochastically."""
    if x.dtype.name == "int4":
        x = x.astype(np.int8)
    if x.dtype.kind in "iub":
        result = _from_integers(x, dtype, counts)
    else:
        result = _from_floats(x.astype(np.float64), dtype, bits, counts)
    return result.astype(dtype.numpy)


def _from_integers(x: np.ndarray, dtype: DType, counts: CastCounts | None) -> np.ndarray:
    if x.dtype.kind == "b":
        return x.astype(np.int8)
    info = np.iinfo(x.dtype)
    low, high = max(dtype.min, info.min), min(dtype.max, info.max)
    out = np.clip(x, x.dtype.type(low), x.dtype.type(high))
    if counts is not None:
        counts.add(overflow=np.count_nonzero(out != x))
    return out


def _from_floats(
    x: np.ndarray, dtype: DType, bits: np.ndarray | None, counts: CastCounts | None
) -> np.ndarray:
    """x: f64 [N], exact for every source type that is not an integer."""
    whole = np.trunc(x)
    if bits is not None:
        up = bits < np.floor(np.abs(x - whole) * 2.0**32)  # inf - inf is NaN: never up
        whole += np.copysign(up.astype(np.float64), x)
    nan = np.isnan(x)
    high = whole >= dtype.max + 1  # max + 1 is a power of two, exact in f64; max may not be
    low = whole < dtype.min
    if counts is not None:
        inf = np.count_nonzero(np.isinf(x))
        counts.add(
            overflow=np.count_nonzero(high | low) - inf,
            underflow=np.count_nonzero((whole == 0) & (x != 0)),
            nan=np.count_nonzero(nan),
            inf=inf,
        )
    wide = np.uint64 if dtype.kind == "uint" else np.int64
    out = np.where(high | low | nan, 0.0, whole).astype(wide)
    out[high] = dtype.max
    out[low] = dtype.min
    return out
