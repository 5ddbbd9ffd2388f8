"""Softmax and its logarithms. Each is one record for its derivative, which needs the result only,
and expands into a chain that runs as one loop over the rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...numerics import DType, as_type
from ...tensor import Tensor
from .. import functions as F
from ..op import GraphOp, sample
from ..operand import axes_tuple, axis_index, floating, literal, public, scalar_line, store
from ..trace import apply
from .elementwise import exp, log, where
from .reduce import MAX, SUM, accumulate_dtype, reduced_shape, sum_ref

F32 = as_type("f32").dtype


# --- rows -------------------------------------------------------------------------------------
def row_sum(x: Tensor, axis: int | tuple[int, ...] = -1, accum: DType | None = None) -> Tensor:
    """Sum along axes, kept with extent 1; in x's own type unless `accum` says otherwise."""
    return apply(SUM, x, axis=axes_tuple(axis, x.ndim), keepdims=True, accum=accum or x.dtype)


def row_max(x: Tensor, axis: int | tuple[int, ...] = -1) -> Tensor:
    """Maximum along axes, kept with extent 1."""
    return apply(MAX, x, axis=axes_tuple(axis, x.ndim), keepdims=True)


def _shift(x: Tensor, axis: Any, safe: bool) -> Tensor:
    """What is subtracted before exp: the maximum, or 0 where `safe` finds it infinite."""
    m = row_max(x, axis)
    return where(F.isfinite(m), m, literal(0.0, m)) if safe else m


def _shift_ref(x: np.ndarray, axis: Any, safe: bool) -> np.ndarray:
    m = np.max(x, axis=axis, keepdims=True)
    return np.where(np.isfinite(m), m, 0).astype(x.dtype) if safe else m


# --- softmax ----------------------------------------------------------------------------------
def _softmax_ref(x: np.ndarray, axis: int, safe: bool, accum: DType) -> np.ndarray:
    e = np.exp(x - _shift_ref(x, axis, safe))
    total = sum_ref(e, (axis,), True, accum)
    return e / (np.where(total == 0, 1, total).astype(x.dtype) if safe else total)


def _softmax_expand(x: Tensor, axis: int, safe: bool, accum: DType) -> Tensor:
    e = exp(x - _shift(x, axis, safe))
    total = row_sum(e, axis, accum)
    if safe:
        total = where(F.equal(total, 0.0), literal(1.0, total), total)
    return e / total


def _along(y: Tensor, t: Tensor, axis: int) -> Tensor:
    """The derivative is symmetric: J t = y (t - sum_j t_j y_j), and J' g the same of g."""
    return y * (t - row_sum(t * y, axis))


SOFTMAX = GraphOp(
    "softmax",
    shape=lambda x, axis, safe, accum: x,
    ref=_softmax_ref,
    vjp=lambda g, y, x, axis, **a: (_along(y, g, axis),),
    jvp=lambda ts, y, x, axis, **a: _along(y, ts[0], axis),
    batch=lambda size, batched, x, axis, **a: (apply(SOFTMAX, x, axis=axis + 1, **a), True),
    expand=_softmax_expand,
    axes="...->...",
    drops_inf=(0,),
    samples=(
        sample((2, 3), axis=1, safe=False, accum=F32),
        sample((3, 2), axis=0, safe=True, accum=F32),
        sample((4,), axis=0, safe=True, accum=F32),
    ),
    hint="a row whose elements are all -inf (masked)? ts.softmax_safe gives zeros there",
    doc="exp(x_i) / sum_j exp(x_j) along an axis",
)


def softmax_compute(x: Tensor, axis: int, safe: bool, accum: DType) -> Tensor:
    """The op on a tensor of a compute type; axis counts from 0. An axis of extent 0 is left."""
    return x if x.shape[axis] == 0 else apply(SOFTMAX, x, axis=axis, safe=safe, accum=accum)


@public
@scalar_line
def softmax(x: Any, axis: int = -1) -> Tensor:
    """y_i = exp(x_i) / sum_j exp(x_j) along an axis, after subtracting the maximum.

    Computed in the compute type, rounded once to x's type. A row of -inf gives NaN;
    `ts.softmax_safe` gives zeros there. Raises AxisError.
    """
    c, numeric = floating(x)
    a = axis_index(axis, c.ndim)
    return store(softmax_compute(c, a, False, accumulate_dtype(numeric)), numeric)


# --- log softmax ------------------------------------------------------------------------------
def _log_softmax_ref(x: np.ndarray, axis: int, accum: DType) -> np.ndarray:
    z = x - _shift_ref(x, axis, False)
    return z - np.log(sum_ref(np.exp(z), (axis,), True, accum))


def _log_softmax_expand(x: Tensor, axis: int, accum: DType) -> Tensor:
    z = x - row_max(x, axis)
    return z - log(row_sum(exp(z), axis, accum))


LOG_SOFTMAX = GraphOp(
    "log_softmax",
    shape=lambda x, axis, accum: x,
    ref=_log_softmax_ref,
    vjp=lambda g, y, x, axis, accum: (g - exp(y) * row_sum(g, axis),),
    jvp=lambda ts, y, x, axis, accum: ts[0] - row_sum(exp(y) * ts[0], axis),
    batch=lambda size, batched, x, axis, accum: (
        apply(LOG_SOFTMAX, x, axis=axis + 1, accum=accum), True
    ),
    expand=_log_softmax_expand,
    axes="...->...",
    samples=(sample((2, 3), axis=1, accum=F32), sample((3, 2), axis=0, accum=F32)),
    doc="x_i - log sum_j exp(x_j) along an axis",
)


@public
@scalar_line
def log_softmax(x: Any, axis: int = -1) -> Tensor:
    """y_i = x_i - log sum_j exp(x_j) along an axis, stable, rounded once to x's type.

    Raises AxisError.
    """
    c, numeric = floating(x)
    a = axis_index(axis, c.ndim)
    if c.shape[a] == 0:
        return store(c, numeric)
    return store(apply(LOG_SOFTMAX, c, axis=a, accum=accumulate_dtype(numeric)), numeric)


# --- log-sum-exp ------------------------------------------------------------------------------
def _lse_ref(x: np.ndarray, axis: tuple, keepdims: bool, accum: DType) -> np.ndarray:
    m = _shift_ref(x, axis, True)
    y = m + np.log(sum_ref(np.exp(x - m), axis, True, accum))
    return y.reshape(reduced_shape(x.shape, axis, keepdims))


def _lse_expand(x: Tensor, axis: tuple, keepdims: bool, accum: DType) -> Tensor:
    m = _shift(x, axis, True)
    y = m + log(row_sum(exp(x - m), axis, accum))
    return F.reshape(y, reduced_shape(tuple(x.shape), axis, keepdims))


def _lse_weights(y: Tensor, x: Tensor, axis: tuple) -> Tensor:
    """exp(x - y): the softmax, zeros where all of a row is -inf. Of a row that holds +inf it is NaN
    at these and 0 elsewhere, of one that holds NaN it is NaN."""
    y = _keep_dims(y, x, axis)
    return exp(x - where(F.equal(y, -math.inf), literal(0.0, y), y))


def _keep_dims(v: Tensor, x: Tensor, axis: tuple) -> Tensor:
    return F.reshape(v, reduced_shape(tuple(x.shape), axis, True))


def _lse_jvp(ts: tuple, y: Tensor, x: Tensor, axis: tuple, keepdims: bool, accum: DType) -> Tensor:
    t = row_sum(ts[0] * _lse_weights(y, x, axis), axis)
    return F.reshape(t, y.shape)


LOGSUMEXP = GraphOp(
    "logsumexp",
    shape=lambda x, axis, keepdims, **a: MAX.shape(x, axis=axis, keepdims=keepdims),
    ref=_lse_ref,
    vjp=lambda g, y, x, axis, keepdims, accum: (
        _keep_dims(g, x, axis) * _lse_weights(y, x, axis),
    ),
    jvp=_lse_jvp,
    batch=lambda size, batched, x, axis, **a: (
        apply(LOGSUMEXP, x, axis=tuple(i + 1 for i in axis), **a), True
    ),
    expand=_lse_expand,
    drops_inf=(0,),
    samples=(
        sample((2, 3), axis=(1,), keepdims=True, accum=F32),
        sample((2, 3, 2), axis=(0, 2), keepdims=False, accum=F32),
    ),
    doc="log sum exp(x) along axes",
)


@public
def logsumexp(x: Any, axis: Any = -1, keepdims: bool = False) -> Tensor:
    """max + log sum exp(x - max) along axes (all when None), rounded once to x's type.

    A row of -inf gives -inf and a gradient of zeros, one that holds +inf gives +inf, and NaN as the
    gradient of that element. Raises AxisError, and ShapeError on an axis of extent 0.
    """
    c, numeric = floating(x)
    axes = axes_tuple(axis, c.ndim)
    if not axes:
        return store(c, numeric)
    y = apply(LOGSUMEXP, c, axis=axes, keepdims=bool(keepdims), accum=accumulate_dtype(numeric))
    return store(y, numeric)
