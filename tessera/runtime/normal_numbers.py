"""Memory of normal numbers, for what is measured: a kernel's power depends on its operands."""

from __future__ import annotations

import functools

import numpy as np

from ..numerics import DType, encode
from .buffer import DEFAULT, DeviceBuffer, copy_bytes
from .device import Device

DRAWN = 1 << 22  # numbers, which repeat


@functools.lru_cache(maxsize=8)
def _codes(seed: int, count: int, dtype: DType) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    return np.ascontiguousarray(encode(drawn, dtype))


def normal_numbers(on: Device, seed: int, count: int, dtype: DType) -> DeviceBuffer:
    """So many of a type, of which the first DRAWN repeat."""
    codes = _codes(seed, DRAWN, dtype)[:count]
    made = DeviceBuffer(count * dtype.numpy.itemsize, on)
    made.write(codes)
    at = codes.nbytes
    with on.current():
        while at < made.nbytes:  # twice as much each time
            n = min(at, made.nbytes - at)
            copy_bytes(made.pointer + at, made.pointer, n, DEFAULT)
            at += n
    return made


__all__ = ["normal_numbers"]
