"""Distances from the mean and the variance, one record for their derivative.

    c = x - mean x,  s = sum c^2 / (n - ddof)        g, h: their cotangents
    dx = g - mean g + 2 h c / (n - ddof)

By the rules of its parts the variance would also pull the mean of its own gradient, 2 h mean c,
back through the mean: 0, for which a batch norm read all its elements once more.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...dims import size_of
from ...errors import ShapeError
from ...numerics import DType, as_type
from ...tensor import Tensor
from ..op import Aval, GraphOp, sample
from ..trace import apply
from .reduce import SUM, apply_count, reduced_shape, sum_ref

F32 = as_type("f32").dtype


def _shape(x: Aval, axis: tuple, ddof: int, accum: DType) -> tuple[Aval, Aval]:
    count = size_of([x.shape[a] for a in axis])
    if ddof and not isinstance(count, int):
        raise ShapeError(f"ddof needs a known number of elements, got {count}")
    return x, Aval(reduced_shape(x.shape, axis, True), x.type)


def _ref(x: np.ndarray, axis: tuple, ddof: int, accum: DType) -> tuple:
    count = prod(x.shape[a] for a in axis)
    c = x - _sum_ref(x, axis, accum) / x.dtype.type(count)
    return c, _sum_ref(c * c, axis, accum) / x.dtype.type(max(count - ddof, 0))


def _sum_ref(x: np.ndarray, axis: tuple, accum: DType) -> np.ndarray:
    return sum_ref(x, axis, True, accum) if axis else x


def _sum(x: Tensor, axis: tuple, accum: DType) -> Tensor:
    return apply(SUM, x, axis=axis, keepdims=True, accum=accum) if axis else x


def _divided(total: Tensor, x: Tensor, axis: tuple, ddof: int = 0) -> Tensor:
    """By the number of elements along the axes less ddof; 0 / 0 of one element: NaN."""
    count = size_of([x.shape[a] for a in axis])
    return total / (max(count - ddof, 0) if isinstance(count, int) else apply_count(count, total))


def _expand(x: Tensor, axis: tuple, ddof: int, accum: DType) -> tuple[Tensor, Tensor]:
    c = x - _divided(_sum(x, axis, accum), x, axis)
    return c, _divided(_sum(c * c, axis, accum), x, axis, ddof)


def _vjp(g: tuple, y: tuple, x: Tensor, axis: tuple, ddof: int, accum: DType) -> tuple:
    c, (of_c, of_s) = y[0], g
    dx = None if of_c is None else of_c - _divided(_sum(of_c, axis, accum), x, axis)
    if of_s is None:
        return (dx,)
    more = c * _divided(of_s + of_s, x, axis, ddof)
    return (more if dx is None else dx + more,)


def _jvp(ts: tuple, y: tuple, x: Tensor, axis: tuple, ddof: int, accum: DType) -> tuple:
    (t,), product = ts, ts[0] * y[0]
    moved = t - _divided(_sum(t, axis, accum), x, axis)
    return moved, _divided(_sum(product + product, axis, accum), x, axis, ddof)


def _letters(x: Aval, axis: tuple, **attrs: Any) -> str:
    whole = ["_" if i in axis else c for i, c in enumerate("abcdefgh"[:x.ndim])]
    kept = ["1" if i in axis else c for i, c in enumerate(whole)]
    return f"{''.join(whole)}->{''.join(whole)},{''.join(kept)}"


CENTER = GraphOp(
    "center",
    shape=_shape,
    ref=_ref,
    vjp=_vjp,
    jvp=_jvp,
    batch=lambda size, batched, x, axis, **a: (
        apply(CENTER, x, axis=tuple(d + 1 for d in axis), **a), True),
    expand=_expand,
    axes=_letters,
    multi=True,
    samples=(sample((2, 3), axis=(1,), ddof=0, accum=F32),
             sample((3, 2), axis=(0,), ddof=1, accum=F32),
             sample((2, 3, 2), axis=(0, 2), ddof=0, accum=F32)),
    doc="x less its mean along axes, and the sum of the squares of that, over n - ddof",
)


__all__ = ["CENTER"]
