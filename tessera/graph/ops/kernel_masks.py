"""Arrays that follow from a launch alone as values of the graph: large masks from small arrays.

A mask at a tensor's edge, or a causal one, is in each line an interval of places. So it is told as
two comparisons with the numbers along its last axis, which run where the mask is read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...tensor import Tensor, as_tensor

SMALL = 1024  # elements of a constant that is kept as it is


def known_tensor(x: np.ndarray) -> Tensor:
    """A constant; a mask whose lines are intervals, or all but intervals, from their ends."""
    x = np.ascontiguousarray(x)
    if x.dtype != np.bool_ or x.size <= SMALL or not x.ndim:
        return as_tensor(x)
    x, axis = _narrowed(x), x.ndim - 1
    for mask, flipped in ((x, False), (~x, True)):
        ends = _intervals(mask)
        if ends is not None:
            made = _inside(*ends, x.shape[axis])
            return ~made if flipped else made
    return as_tensor(np.ascontiguousarray(x))


def _narrowed(x: np.ndarray) -> np.ndarray:
    """With extent 1 along axes where all are alike."""
    for axis in range(x.ndim):
        first = np.take(x, [0], axis)
        if x.shape[axis] > 1 and np.array_equal(np.broadcast_to(first, x.shape), x):
            x = first
    return x


def _intervals(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """[..., 1] where each line's elements that hold begin, and end; None if they are apart."""
    count = mask.sum(axis=-1, keepdims=True)
    lo = mask.argmax(axis=-1)[..., None]
    at = np.arange(mask.shape[-1])
    hi = lo + count
    return (lo, hi) if np.array_equal((at >= lo) & (at < hi), mask) else None


def _inside(lo: np.ndarray, hi: np.ndarray, size: int) -> Any:
    """Which places of a line lie between its ends."""
    at = as_tensor(np.arange(size, dtype=np.int32))
    lo, hi = _narrowed(lo.astype(np.int32)), _narrowed(hi.astype(np.int32))
    below = at < as_tensor(hi)
    return below if not lo.any() else below & (at >= as_tensor(lo))


__all__ = ["known_tensor"]
