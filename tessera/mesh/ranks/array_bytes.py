"""Arrays as the bytes that travel. Types of fewer than 8 bits travel packed, as one row."""

from __future__ import annotations

import numpy as np

from tessera.numerics import DType, pack, row_bytes, unpack


def byte_count(elements: int, dtype: DType) -> int:
    """The bytes of so many elements on the way."""
    return row_bytes(elements, dtype)


def to_bytes(array: np.ndarray, dtype: DType) -> np.ndarray:
    """Elements of `dtype`, any shape, as uint8 [bytes]."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return pack(flat, dtype) if dtype.packed else flat.view(np.uint8)


def from_bytes(data: np.ndarray, dtype: DType, elements: int) -> np.ndarray:
    """The inverse: so many elements, flat."""
    return unpack(data, dtype, elements) if dtype.packed else data.view(dtype.numpy)
