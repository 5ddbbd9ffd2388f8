"""Quantiles and medians, by sorting."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...errors import ArgumentError, ShapeError
from ...numerics import as_type
from ...tensor import Tensor, as_tensor
from .. import functions as F
from ..operand import axes_tuple, convert, floating, public, store, to_compute
from ..trace import Tracer
from .elementwise import where
from .maths import lerp

F64 = as_type("f64")
METHODS = ("linear", "lower", "higher", "nearest", "midpoint")


@public
def quantile(x: Any, q: Any, axis: Any = None, keepdims: bool = False,
             method: str = "linear") -> Tensor:
    """The value at position q (n - 1) of the n sorted elements along axes, all when None.

    q: in [0, 1], a number, a list or a tensor   y: [*q.shape, ...] of x's type; integers give f32
    method: between two elements "linear", "lower", "higher", "nearest" (of two the even position)
    or "midpoint". NaN among the elements gives NaN. np.quantile; torch.quantile. The gradient goes
    to the elements read, and to q.
    Raises ArgumentError for a q outside, ShapeError for an axis without elements.
    """
    if method not in METHODS:
        raise ArgumentError(f"method {method!r}", hint="one of " + ", ".join(METHODS))
    c, numeric = floating(x)
    lines, kept = _lines(c, axis)
    ordered, n = F.sort(lines, axis=-1), lines.shape[-1]
    at = _positions(q) * (n - 1)  # [*q]
    below = F.floor(at)
    low, high = (F.cast(v, "int64") for v in (below, F.ceil(at)))
    if method in ("lower", "higher", "nearest"):
        place = {"lower": low, "higher": high}.get(method)
        place = F.cast(F.round(at), "int64") if place is None else place
        y = F.take(ordered, place, axis=-1)
    else:
        a, b = (F.take(ordered, i, axis=-1) for i in (low, high))  # [..., *q]
        w = convert(at - below, c.type)
        if method == "midpoint":
            w = where(F.equal(w, 0.0), w, 0.5)
        far = F.logical_or(F.isinf(a), F.isinf(b))  # between them their sum is: NaN of -inf, inf
        y = where(F.equal(a, b), a, where(far, a + b, lerp(a, b, w)))
    worst = F.reshape(ordered[..., -1:], (*lines.shape[:-1], *(1,) * at.ndim))
    y = where(F.isnan(worst), math.nan, y)
    order = (*range(lines.ndim - 1, y.ndim), *range(lines.ndim - 1))
    y = F.transpose(y, order)
    return store(F.reshape(y, (*at.shape, *kept)) if keepdims else y, numeric)


@public
def median(x: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
    """The middle of the sorted elements along axes, all when None; the mean of two for even counts.

    As np.median and jax.numpy.median; torch.median gives the lower of the two, which is
    ts.quantile(x, 0.5, axis, method="lower"). NaN propagates. Integers give f32.
    """
    return quantile(x, 0.5, axis, keepdims)


def _lines(x: Tensor, axis: Any) -> tuple[Tensor, tuple]:
    """x with the axes as one line at the end, and its extents with 1 in their place."""
    axes = axes_tuple(axis, x.ndim)
    others = [d for d in range(x.ndim) if d not in axes]
    kept = tuple(1 if d in axes else n for d, n in enumerate(x.shape))
    moved = F.transpose(x, (*others, *axes))
    count = math.prod(x.shape[d] for d in axes)
    if not isinstance(count, int) or count == 0:
        raise ShapeError(f"a quantile needs a known number of elements, got {count}")
    return F.reshape(moved, (*(x.shape[d] for d in others), count)), kept


def _positions(q: Any) -> Tensor:
    """q in f64: f32 would move q (n - 1) off the whole numbers."""
    given = as_tensor(q)  # refuses what is no number
    t = convert(to_compute(given), F64) if given is q else Tensor(np.asarray(q, np.float64), F64)
    if not isinstance(t, Tracer) and not ((t.numpy() >= 0) & (t.numpy() <= 1)).all():
        raise ArgumentError(f"quantiles are in [0, 1], got {q!r}")
    return t
