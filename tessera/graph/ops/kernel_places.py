"""Elements of tensors of the graph at places that a kernel's loads name, see kernel_meaning.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...numerics import DType, NumericType, as_type, f32
from ...tensor import Tensor, as_tensor
from .. import functions as F
from .kernel_masks import known_tensor


def take_blocks(x: Tensor, axis: int, starts: np.ndarray, size: int, fill: Any) -> Tensor:
    """Along an axis of x the `size` elements from each start on, one block behind the other; `fill`
    outside."""
    at, x = (starts[..., None] + np.arange(size)).ravel(), _wide(x, fill)
    n, lo = x.shape[axis], int(at.min()) if at.size else 0
    if not n:
        return F.cast(F.full((*x.shape[:axis], at.size, *x.shape[axis + 1:]), fill), x.type)
    if np.array_equal(at, np.arange(lo, lo + at.size)):
        return _cut(x, axis, lo, at.size, fill)
    inside = (at >= 0) & (at < n)
    y = F.take(x, as_tensor(np.clip(at, 0, n - 1)), axis)
    if inside.all():
        return y
    return where_else(inside.reshape(-1, *(1,) * (x.ndim - axis - 1)), y, fill)


def overhangs(starts: np.ndarray, size: int, extent: int) -> bool:
    """Whether blocks lie one behind the other from the start of an axis past its end."""
    at = (starts[..., None] + np.arange(size)).ravel()
    return 0 < extent < at.size and np.array_equal(at, np.arange(at.size))


def _cut(x: Tensor, axis: int, lo: int, count: int, fill: Any) -> Tensor:
    """`count` elements from lo on along an axis."""
    n, hi = x.shape[axis], lo + count
    first, last = max(0, min(lo, n)), max(0, min(hi, n))
    y = x[(slice(None),) * axis + (slice(first, max(first, last)),)] if (first, last) != (0, n) \
        else x
    before = min(max(0, -lo), hi - lo)
    after = hi - lo - before - max(0, last - first)
    if not before and not after:
        return y
    pairs = [(0, 0)] * x.ndim
    pairs[axis] = (before, after)
    return F.pad(y, pairs, fill)


def elements(x: Tensor) -> Tensor:
    """The elements of a tensor, without the policy of its type."""
    return as_dtype(x, x.type.dtype)


def as_dtype(x: Tensor, dtype: DType) -> Tensor:
    return x if x.type == as_type(dtype) else F.cast(x, as_type(dtype))


def as_numeric(x: Tensor, numeric: NumericType) -> Tensor:
    return x if x.type == numeric else F.cast(x, numeric)


def where_else(mask: Any, x: Tensor, fill: float) -> Tensor:
    """x where the mask holds, else a number."""
    x = _wide(x, fill)
    if mask is True:
        return x
    mask = known_tensor(mask) if isinstance(mask, np.ndarray) else mask
    return F.where(mask, x, F.cast(as_tensor(np.float32(fill)), x.type))


def _wide(x: Tensor, fill: float) -> Tensor:
    """x in a type that holds what stands for elements that do not exist: fp8_e4m3 has no inf."""
    narrow = x.dtype.kind == "float" and x.dtype.bits <= 8 and not np.isfinite(fill)
    return F.cast(x, f32) if narrow else x


__all__ = ["as_dtype", "as_numeric", "elements", "overhangs", "take_blocks", "where_else"]
