"""Packed storage of the formats narrower than a byte.

4-bit: two per byte, the first in the low nibble. 6-bit: four codes in three bytes, little-endian:
code i takes bits 6i .. 6i+5 of the 24. Packing is along the last axis and each row is padded with
zero codes to whole groups (one byte, three bytes), so that rows start on bytes.
Formats of whole bytes are stored as their little-endian bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from tessera.errors import DTypeError, ShapeError
from tessera.numerics.dtypes import DType
from tessera.numerics.policy import as_dtype


def row_bytes(n: int, dtype: DType | str) -> int:
    """Bytes that a row of n elements takes: whole groups of 2 (4-bit) or 4 (6-bit) elements."""
    dtype = as_dtype(dtype)
    if dtype.bits == 4:
        return (n + 1) // 2
    if dtype.bits == 6:
        return (n + 3) // 4 * 3
    return n * dtype.numpy.itemsize


def stored_bytes(shape: Sequence[int], dtype: DType) -> int:
    """Of a tensor in row-major order: packed types take whole bytes per row; a number is a row."""
    if not dtype.packed:
        return prod(shape) * dtype.numpy.itemsize
    return prod(shape[:-1]) * row_bytes(shape[-1] if shape else 1, dtype)


def pack(a: Any, dtype: DType | str) -> np.ndarray:
    """[..., n] of dtype.numpy -> uint8 [..., row_bytes(n, dtype)].

    Raises DTypeError for another element type, ShapeError for a scalar.
    """
    dtype = as_dtype(dtype)
    a = np.asarray(a)
    if a.dtype != dtype.numpy:
        raise DTypeError(f"pack({dtype}) takes elements of {dtype.numpy}; got {a.dtype}")
    if a.ndim == 0:
        raise ShapeError("pack needs a last axis; got a scalar", hint="reshape it to (1,)")
    if not dtype.packed:
        return _bytes_of(a)
    group = 2 if dtype.bits == 4 else 4
    codes = np.ascontiguousarray(a).view(np.uint8) & np.uint8((1 << dtype.bits) - 1)
    n = a.shape[-1]
    if n % group:
        codes = np.concatenate([codes, np.zeros((*a.shape[:-1], -n % group), np.uint8)], axis=-1)
    codes = codes.reshape(*a.shape[:-1], -(-n // group), group)  # [..., groups, group]
    if group == 2:
        return codes[..., 0] | (codes[..., 1] << np.uint8(4))
    return _pack_six(codes).reshape(*a.shape[:-1], row_bytes(n, dtype))


def unpack(b: Any, dtype: DType | str, n: int) -> np.ndarray:
    """uint8 [..., row_bytes(n, dtype)] -> [..., n] of dtype.numpy: the inverse of pack."""
    dtype = as_dtype(dtype)
    b = np.asarray(b)
    expected = row_bytes(n, dtype)
    if b.dtype != np.uint8:
        raise DTypeError(f"unpack takes bytes (uint8); got {b.dtype}")
    if b.ndim == 0 or b.shape[-1] != expected:
        raise ShapeError(
            f"{n} elements of {dtype} take {expected} bytes per row; got shape {b.shape}"
        )
    rows = b.shape[:-1]
    if not dtype.packed:
        little = np.ascontiguousarray(b).view(dtype.code_type.newbyteorder("<"))
        return little.astype(dtype.code_type).view(dtype.numpy).reshape(*rows, n)
    if dtype.bits == 4:
        codes = np.stack([b & np.uint8(0xF), b >> np.uint8(4)], axis=-1)
    else:
        codes = _unpack_six(b.reshape(*rows, expected // 3, 3))
    codes = codes.reshape(*rows, codes.shape[-2] * codes.shape[-1])[..., :n]
    return np.ascontiguousarray(codes).view(dtype.numpy)


def _bytes_of(a: np.ndarray) -> np.ndarray:
    little = np.ascontiguousarray(a).view(f"u{a.itemsize}").astype(f"<u{a.itemsize}")
    return little.view(np.uint8).reshape(*a.shape[:-1], a.shape[-1] * a.itemsize)


def _pack_six(c: np.ndarray) -> np.ndarray:
    """uint8 [..., 4] six-bit codes -> uint8 [..., 3]; shifts drop what the next byte takes."""
    first = c[..., 0] | (c[..., 1] << np.uint8(6))
    second = (c[..., 1] >> np.uint8(2)) | (c[..., 2] << np.uint8(4))
    third = (c[..., 2] >> np.uint8(4)) | (c[..., 3] << np.uint8(2))
    return np.stack([first, second, third], axis=-1)


def _unpack_six(b: np.ndarray) -> np.ndarray:
    """uint8 [..., 3] -> uint8 [..., 4] six-bit codes."""
    mask = np.uint8(0x3F)
    first = b[..., 0] & mask
    second = ((b[..., 0] >> np.uint8(6)) | (b[..., 1] << np.uint8(2))) & mask
    third = ((b[..., 1] >> np.uint8(4)) | (b[..., 2] << np.uint8(4))) & mask
    fourth = b[..., 2] >> np.uint8(2)
    return np.stack([first, second, third, fourth], axis=-1)
