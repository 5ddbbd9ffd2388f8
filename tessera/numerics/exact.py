"""Numbers of any type as f32 or f64, such that a later rounding sees no difference."""

from __future__ import annotations

import numpy as np

from tessera.numerics.round_bits import SOURCE_F64, round_up


def exact_float(x: np.ndarray) -> np.ndarray:
    """x as f32 or f64; rounding the result to 24 bits or fewer gives what rounding x would.

    That is exact except for integers beyond 2^53, which are rounded to odd at bit 11: the bits
    below are or-ed into it, so no tie appears or disappears (Boldo and Melquiond 2008).
    """
    if x.dtype in (np.float32, np.float64):
        return x
    if x.dtype.kind in "iu" and x.dtype.itemsize > 2:
        return _round_to_odd(x) if x.dtype.itemsize == 8 else x.astype(np.float64)
    return x.astype(np.float32)


def _round_to_odd(x: np.ndarray) -> np.ndarray:
    magnitude = _magnitude(x)
    low = magnitude & np.uint64(0x7FF)
    odd = (magnitude ^ low) | ((low != 0).astype(np.uint64) << np.uint64(11))
    exact = np.where(magnitude >> np.uint64(53), odd, magnitude).astype(np.float64)
    return np.where(x < 0, -exact, exact)


def long_to_f64(x: np.ndarray, rounding: str, bits: np.ndarray | None) -> np.ndarray:
    """64-bit integers rounded once to f64's 53 bits. x: [N] int64 or uint64"""
    magnitude = _magnitude(x)
    top = (magnitude >> np.uint64(11)).astype(np.float64)  # below 2^53: exact
    length = np.frexp(top)[1] + 11  # bits of a magnitude of 2^11 or more
    drop = np.maximum(length - 53, 0).astype(np.uint64)
    whole = magnitude >> drop
    fraction = magnitude << ((np.uint64(64) - drop) & np.uint64(63))
    fraction[drop == 0] = 0
    whole = round_up(whole, fraction, SOURCE_F64, rounding, bits)
    value = np.ldexp(whole.astype(np.float64), drop.astype(np.int32))
    return np.where(x < 0, -value, value)


def _magnitude(x: np.ndarray) -> np.ndarray:
    """|x| as uint64, of -2^63 too."""
    wrapped = x.astype(np.uint64)
    return np.where(x < 0, np.uint64(0) - wrapped, wrapped)
