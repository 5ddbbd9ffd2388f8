"""Sums of floats along axes of an array, with an error that does not grow with their length.

At most CHAIN terms are added one after another in the terms' own type; what such runs give is added
in f64, and rounded once. With u the unit roundoff of the type (2^-24 of f32) and n terms:

    |sum - exact| <= (CHAIN u + n 2^-53) sum |x_i| + u |exact|

Higham 1993, "The accuracy of floating point summation", doi:10.1137/0914050, section 3. NumPy adds
in pairs along the innermost axis only: along any other one it takes one term after another, and a
sum of 5 x 10^7 equal f32 numbers is off by 58 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

CHAIN = 128  # additions one after another; NumPy's own runs, between which it adds in pairs


def blocked_sum(x: np.ndarray, axis: Sequence[int], keepdims: bool = False) -> np.ndarray:
    """Sum of x along axes, in x's type. x: [...] f32 or f64   axis: not negative, in any order"""
    axis = tuple(axis)
    if math.prod(x.shape[a] for a in axis) <= CHAIN:
        return np.sum(x, axis=axis, keepdims=keepdims, dtype=x.dtype)
    inner = _inner_run(x, axis)
    if len(inner) == len(axis):
        return np.sum(x, axis=axis, keepdims=keepdims, dtype=x.dtype)
    if inner:  # in pairs, for what is next to each other in memory
        total = _sum64(np.sum(x, axis=inner, keepdims=True, dtype=x.dtype), axis, keepdims)
    else:
        total = _along_longest(x, axis, keepdims)
    return np.asarray(total, x.dtype)


def _along_longest(x: np.ndarray, axis: tuple[int, ...], keepdims: bool) -> np.ndarray:
    """Runs of CHAIN terms along the longest axis, all others in f64."""
    long = max(axis, key=lambda a: x.shape[a])
    length = min(CHAIN, x.shape[long])
    blocks = x.shape[long] // length
    before = (slice(None),) * long
    whole = x[(*before, slice(blocks * length))]
    # Splitting an axis never copies.
    whole = whole.reshape(*x.shape[:long], blocks, length, *x.shape[long + 1:])
    total = _sum64(np.add.reduce(whole, axis=long + 1), axis, keepdims)
    if blocks * length < x.shape[long]:
        rest = np.add.reduce(x[(*before, slice(blocks * length, None))], axis=long, keepdims=True)
        total = total + _sum64(rest, axis, keepdims)
    return total


def running_sum(x: np.ndarray, axis: int) -> np.ndarray:
    """Sums of the elements up to each one, added in f64 and rounded once: x's type and shape."""
    return np.cumsum(x, axis=axis, dtype=np.float64).astype(x.dtype, copy=False)


def _sum64(x: np.ndarray, axis: tuple[int, ...], keepdims: bool) -> np.ndarray:
    return np.asarray(np.sum(x, axis=axis, keepdims=keepdims, dtype=np.float64))


def _inner_run(x: np.ndarray, axis: tuple[int, ...]) -> tuple[int, ...]:
    """Those of the axes that lie in memory as one run, inside of every other axis: along it NumPy
    adds in pairs. () when an axis that stays is the innermost, or something is repeated."""
    steps = sorted((abs(x.strides[a]), a) for a in range(x.ndim) if x.shape[a] > 1)
    run, end = list[int](), 0
    for step, a in steps:
        if a not in axis or step == 0 or (run and step != end):
            break
        run.append(a)
        end = step * x.shape[a]
    return (*run, *(a for a in axis if x.shape[a] == 1)) if run else ()


__all__ = ["CHAIN", "blocked_sum", "running_sum"]
