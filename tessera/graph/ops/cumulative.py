"""Running products, extrema, log-sum-exps and linear recurrences along an axis."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...dims import show_shape
from ...errors import DTypeError, ShapeError
from ...numerics import as_type
from ...tensor import OPERATORS, Tensor, as_tensor
from .. import flops
from .. import functions as F
from ..op import OPS, Aval, GraphOp, sample
from ..operand import axis_index, countable, floating, literal, promote, public, scalar_line, store
from ..trace import apply
from .shape import PAD

INT64 = as_type("int64")


def shift(x: Tensor, axis: int, fill: float, back: bool = False) -> Tensor:
    """x moved by one place along an axis, towards its end (`back`: its start); `fill` enters."""
    zeros = [0] * x.ndim
    before, after = list(zeros), list(zeros)
    before[axis], after[axis] = (-1, 1) if back else (1, -1)
    return apply(PAD, x, literal(fill, x), before=tuple(before), after=tuple(after),
                 holes=tuple(zeros))


def line_axes(x: Aval, axis: int, operands: int = 1) -> str:
    """Index letters of an op on whole lines along an axis."""
    names = "abcdefghijklmnopqrstuvwxyz"[: len(x.shape)]
    names = f"{names[:axis]}_{names[axis + 1:]}"
    return ",".join([names] * operands) + f"->{names}"


# --- linear recurrence ------------------------------------------------------------------------
def _recurrence_shape(a: Aval, b: Aval, axis: int) -> Aval:
    if a.shape != b.shape:
        raise ShapeError(f"factors {show_shape(a.shape)} and terms {show_shape(b.shape)} differ")
    if a.dtype is not b.dtype:
        raise DTypeError(f"operands of one type needed, got {a.type} and {b.type}")
    return b


def _recurrence_ref(a: np.ndarray, b: np.ndarray, axis: int) -> np.ndarray:
    out = b.copy()
    h, factors = np.moveaxis(out, axis, 0), np.moveaxis(a, axis, 0)
    for t in range(1, len(h)):
        h[t] += factors[t] * h[t - 1]
    return out


def _backwards(x: Tensor, g: Tensor, axis: int) -> Tensor:
    """The adjoint recurrence l_t = g_t + x_(t+1) l_(t+1)."""
    flip = F.flip
    factors = flip(shift(x, axis, 0.0, back=True), axis)
    return flip(apply(LINEAR_RECURRENCE, factors, flip(g, axis), axis=axis), axis)


def _recurrence_vjp(g: Tensor, y: Tensor, a: Tensor, b: Tensor, axis: int) -> tuple:
    db = _backwards(a, g, axis)
    return db * shift(y, axis, 0.0), db


def _recurrence_jvp(ts: tuple, y: Tensor, a: Tensor, b: Tensor, axis: int) -> Tensor:
    term = None if ts[0] is None else ts[0] * shift(y, axis, 0.0)
    term = ts[1] if term is None else term if ts[1] is None else term + ts[1]
    return apply(LINEAR_RECURRENCE, a, term, axis=axis)


def _recurrence_batch(size: Any, batched: tuple, a: Tensor, b: Tensor, axis: int) -> tuple:
    full = [x if flag else F.broadcast_to(x, (size, *x.shape))
            for x, flag in zip((a, b), batched, strict=True)]
    return apply(LINEAR_RECURRENCE, *full, axis=axis + 1), True


LINEAR_RECURRENCE = GraphOp(
    "linear_recurrence",
    shape=_recurrence_shape,
    ref=_recurrence_ref,
    vjp=_recurrence_vjp,
    jvp=_recurrence_jvp,
    batch=_recurrence_batch,
    axes=lambda a, b, axis: line_axes(a, axis, 2),
    lines="running recurrence",
    samples=(sample((4,), (4,), axis=0), sample((2, 3), (2, 3), axis=1)),
    flops=lambda ins, outs, **attrs: 2.0 * math.prod(outs[0]),
    doc="h_t = a_t h_(t-1) + b_t along an axis, h_(-1) = 0",
)

CUMPROD = GraphOp(
    "cumprod",
    shape=lambda x, axis: x,
    ref=lambda x, axis: np.cumprod(x, axis=axis, dtype=x.dtype),
    vjp=lambda g, y, x, axis: (shift(y, axis, 1.0) * _backwards(x, g, axis),),
    jvp=lambda ts, y, x, axis: apply(
        LINEAR_RECURRENCE, x, ts[0] * shift(y, axis, 1.0), axis=axis
    ),
    batch=lambda size, batched, x, axis: (apply(CUMPROD, x, axis=axis + 1), True),
    axes=line_axes,
    lines="running prod",
    samples=(sample((4,), axis=0), sample((2, 3), axis=1)),
    flops=flops.per_operand,
    doc="running products along an axis; the derivative divides by nothing, so zeros are exact",
)


def _reached(x: np.ndarray, axis: int, extremum: np.ufunc, beyond: np.ufunc) -> np.ndarray:
    """Where the running extremum was first reached; a NaN stays the extremum."""
    if x.shape[axis] == 0:
        return np.zeros(x.shape, np.int64)
    lines = np.moveaxis(x, axis, -1)
    top = extremum.accumulate(lines, axis=-1)
    new = np.ones(lines.shape, bool)
    nan = np.isnan(top) if x.dtype.kind == "f" else np.zeros(top.shape, bool)
    new[..., 1:] = beyond(lines[..., 1:], top[..., :-1]) | (nan[..., 1:] & ~nan[..., :-1])
    places = np.where(new, np.arange(lines.shape[-1]), 0)
    return np.moveaxis(np.maximum.accumulate(places, axis=-1), -1, axis)


def _running(name: str, extremum: np.ufunc, beyond: np.ufunc, word: str, way: str) -> GraphOp:
    return GraphOp(
        name,
        lines=f"running {way}",
        shape=lambda x, axis: Aval(x.shape, INT64),
        ref=lambda x, axis: _reached(x, axis, extremum, beyond),
        batch=lambda size, batched, x, axis: (apply(OPS[name], x, axis=axis + 1), True),
        axes=line_axes,
        differentiable=False,
        drops_inf=(0,),
        flops=flops.per_operand,
        samples=(sample(((4,), "distinct"), axis=0), sample(((2, 5), "distinct"), axis=1)),
        doc=f"index of the running {word}; ties give the lowest index",
    )


CUMARGMAX = _running("cumargmax", np.maximum, np.greater, "maximum", "largest")
CUMARGMIN = _running("cumargmin", np.minimum, np.less, "minimum", "smallest")

# --- log of running sums of exponentials ------------------------------------------------------
def _lcse_ref(x: np.ndarray, axis: int) -> np.ndarray:
    """f32 through f64, so that the errors of the steps do not add up."""
    return np.logaddexp.accumulate(x, axis=axis, dtype=np.float64).astype(x.dtype)


def _decays(y: Tensor, x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """exp(y_(i-1) - y_i) and exp(x_i - y_i), both at most 1; 0 where nothing was added so far."""
    exp, where = F.exp, F.where
    before, least, zero = shift(y, axis, float("-inf")), float("-inf"), literal(0.0, y)
    held = where(F.equal(before, least), zero, exp(before - y))
    return held, where(F.equal(x, least), zero, exp(x - y))


def _lcse_jvp(ts: tuple, y: Tensor, x: Tensor, axis: int) -> Tensor:
    held, own = _decays(y, x, axis)
    return apply(LINEAR_RECURRENCE, held, own * ts[0], axis=axis)


def _lcse_vjp(g: Tensor, y: Tensor, x: Tensor, axis: int) -> tuple:
    held, own = _decays(y, x, axis)
    return (own * _backwards(held, g, axis),)


LOGCUMSUMEXP = GraphOp(
    "logcumsumexp",
    shape=lambda x, axis: x,
    ref=_lcse_ref,
    vjp=_lcse_vjp,
    jvp=_lcse_jvp,
    batch=lambda size, batched, x, axis: (apply(LOGCUMSUMEXP, x, axis=axis + 1), True),
    axes=line_axes,
    lines="running logsumexp",
    drops_inf=(0,),
    samples=(sample((4,), axis=0), sample((2, 3), axis=1)),
    doc="log of the running sums of exp(x) along an axis",
)


# --- public functions -------------------------------------------------------------------------
@public
def linear_recurrence(a: Any, b: Any, axis: int = 0) -> Tensor:
    """h_t = a_t h_(t-1) + b_t along an axis, with h_(-1) = 0.

    a, b: one shape   h: the same. One NumPy step per position. Raises ShapeError, DTypeError.
    """
    (x, y), numeric = promote(a, b)
    return store(apply(LINEAR_RECURRENCE, x, y, axis=axis_index(axis, y.ndim)), numeric)


@public
@scalar_line
def cumprod(x: Any, axis: int = 0) -> Tensor:
    """Running products along an axis; narrow integers as in `ts.sum`. The gradient is exact where
    elements are 0."""
    x = as_tensor(x)
    if x.dtype.kind == "bool":
        raise DTypeError("cumprod of bools", hint="cast to int64 first")
    (c,), numeric = promote(countable(x))
    return store(apply(CUMPROD, c, axis=axis_index(axis, c.ndim)), numeric)


@public
@scalar_line
def cummax(x: Any, axis: int = 0) -> Tensor:
    """Running maxima along an axis; NaN stays. The gradient goes to the first that reached it."""
    (c,), numeric = promote(x)
    a = axis_index(axis, c.ndim)
    return store(F.take_along_axis(c, apply(CUMARGMAX, c, axis=a), axis=a), numeric)


@public
@scalar_line
def cummin(x: Any, axis: int = 0) -> Tensor:
    """Running minima along an axis; NaN stays. The gradient goes to the first that reached it."""
    (c,), numeric = promote(x)
    a = axis_index(axis, c.ndim)
    return store(F.take_along_axis(c, apply(CUMARGMIN, c, axis=a), axis=a), numeric)


@public
@scalar_line
def logcumsumexp(x: Any, axis: int = 0) -> Tensor:
    """y_i = log sum_(j <= i) exp(x_j) along an axis, without overflow; -inf where all are -inf.

    Integers become f32. Added up in f64, rounded once. Raises AxisError.
    """
    c, numeric = floating(x)
    return store(apply(LOGCUMSUMEXP, c, axis=axis_index(axis, c.ndim)), numeric)


OPERATORS.update(cumprod=cumprod)
