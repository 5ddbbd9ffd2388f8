"""Losses of classes, from logits and from log-probabilities; and the mean squared error."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...dims import show_shape, size_of
from ...errors import ArgumentError, DTypeError, ShapeError
from ...numerics import DType, NumericType, as_type
from ...tensor import Tensor, as_tensor
from .. import functions as F
from ..op import FLAT_VIEW, Aval, GraphOp, sample
from ..operand import convert, floating, holds_integers, literal, promote, public, store, to_compute
from ..trace import Tracer, apply
from .broadcasting import broadcast_shapes
from .elementwise import exp, log, neg, where
from .norms import row_mean
from .reduce import MAX, SUM, accumulate_dtype, sum_ref
from .softmax import row_max, row_sum

F32 = as_type("f32").dtype
INT32 = as_type("int32")
REDUCTIONS = ("mean", "sum", "none")


# --- negative log-likelihood of a label -------------------------------------------------------
def _nll_shape(x: Aval, label: Aval, smoothing: float, accum: DType) -> Aval:
    if label.shape != (*x.shape[:-1], 1):
        raise ShapeError(f"labels {show_shape(label.shape)} for logits {show_shape(x.shape)}")
    return MAX.shape(x, axis=(x.ndim - 1,), keepdims=True)


def _nll_ref(x: np.ndarray, label: np.ndarray, smoothing: float, accum: DType) -> np.ndarray:
    n = x.shape[-1]
    inside = (label >= 0) & (label < n)
    rows = x.reshape(-1, n)  # take_along_axis makes an index of all axes
    picked = rows[np.arange(len(rows)), np.where(inside, label, 0).reshape(-1)].reshape(label.shape)
    m = x.max(axis=-1, keepdims=True)
    y = m - picked
    if smoothing:
        mean = sum_ref(x, (x.ndim - 1,), True, accum) / n
        y = m - ((1 - smoothing) * picked + smoothing * mean)
    y = y + np.log(sum_ref(np.exp(x - m), (x.ndim - 1,), True, accum))
    return np.where(inside, y, np.nan).astype(x.dtype)


def _classes(x: Tensor) -> Tensor:
    return F.arange(x.shape[-1], dtype=INT32)


def _nll_expand(x: Tensor, label: Tensor, smoothing: float, accum: DType) -> Tensor:
    zero, label = literal(0.0, x), convert(label, INT32)
    picked = row_sum(where(F.equal(_classes(x), label), x, zero), -1, accum)
    if smoothing:
        picked = (1.0 - smoothing) * picked + smoothing * row_mean(x, accum)
    m = row_max(x)
    y = (m - picked) + log(row_sum(exp(x - m), -1, accum))
    inside = F.logical_and(label >= 0, F.less(label, x.shape[-1]))
    return where(inside, y, literal(float("nan"), x))


def _nll_slope(x: Tensor, label: Tensor, smoothing: float, accum: DType) -> Tensor:
    """softmax(x) - q, where q is the smoothed distribution of the label.

    Spelled otherwise than forwards (+ -m, !=), so that a compiled step computes these again in the
    backward loop and keeps only m and the sum of each row.
    """
    m = row_max(x)
    total = row_sum(exp(x - m), -1, accum)
    p = exp((x + neg(m)) + neg(log(total)))
    p = p - smoothing / x.shape[-1] if smoothing else p
    other = F.not_equal(_classes(x), convert(label, INT32))
    return where(other, p, p - (1.0 - smoothing))


NLL = GraphOp(
    "label_loss",
    shape=_nll_shape,
    ref=_nll_ref,
    vjp=lambda g, y, x, label, **a: (g * _nll_slope(x, label, **a), None),
    jvp=lambda ts, y, x, label, **a: row_sum(ts[0] * _nll_slope(x, label, **a)),
    batch=lambda size, batched, x, label, **a: (
        apply(NLL, *(
            v if b else F.broadcast_to(F.expand_dims(v, 0), (size, *v.shape))
            for v, b in zip((x, label), batched, strict=True)
        ), **a),
        True,
    ),
    expand=_nll_expand,
    drops_inf=(0,),
    samples=(
        sample((2, 5), ((2, 1), "index:5"), smoothing=0.0, accum=F32),
        sample((2, 3, 4), ((2, 3, 1), "index:4"), smoothing=0.1, accum=F32),
    ),
    hint="a label outside the classes? ignore_index= leaves rows out; or an infinite logit",
    doc="log sum exp(x) - x[label] along the last axis; NaN for a label outside the classes",
)


# --- reductions -------------------------------------------------------------------------------
def _check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ArgumentError(f"reduction {reduction!r}", hint=f"one of {', '.join(REDUCTIONS)}")


def _reduce(rows: Tensor, reduction: str, numeric: NumericType) -> Tensor:
    if reduction == "none":
        return store(rows, numeric)
    return store(F.sum(rows) if reduction == "sum" else F.mean(rows), numeric)


# --- public functions -------------------------------------------------------------------------
@public
def mse(prediction: Any, target: Any, *, reduction: str = "mean") -> Tensor:
    """mean((prediction - target)^2) over all elements: a scalar of the operands' common type.

    The shapes must be equal. reduction: "mean", "sum" or "none". Raises ShapeError, DTypeError.
    """
    _check_reduction(reduction)
    (a, b), numeric = promote(prediction, target)
    if numeric.dtype.kind != "float":
        raise DTypeError(f"mse needs floats, got {numeric}")
    if a.shape != b.shape:
        raise ShapeError(
            f"prediction {show_shape(a.shape)} and target {show_shape(b.shape)} differ",
            hint="broadcasting here is nearly always a mistake: reshape one of them",
        )
    d = a - b
    if reduction == "none":
        return store(d * d, numeric)
    total = apply_sum(d * d, accumulate_dtype(numeric))
    count = size_of(d.shape)
    if reduction == "mean":
        total = total / count if isinstance(count, int) and count else F.mean(d * d)
    return store(total, numeric)


def apply_sum(x: Tensor, accum: DType) -> Tensor:
    """Sum of all elements in the accumulate type."""
    axes = tuple(range(x.ndim))
    return apply(SUM, x, axis=axes, keepdims=False, accum=accum) if axes else x


@public
def cross_entropy(logits: Any, target: Any, *, weight: Any = None, reduction: str = "mean",
                  label_smoothing: float = 0.0, ignore_index: int | None = None) -> Tensor:
    """-sum_j w_j q_j log softmax(logits)_j along the last axis, from logits, stable.

    logits: [..., V]   target: [...] integers, or [..., V] probabilities   y: scalar, or [...] for
    reduction "none"   weight: [V], of the classes, 1 when None
    q is the target, mixed with the uniform distribution: (1 - s) q + s / V. Rows whose label is
    `ignore_index` count neither in the sum nor in the mean. The mean of labels divides by the sum
    of their weights, that of probabilities by the number of rows (torch.nn.functional's rule; its
    classes lie on axis 1). Computed in the compute type, rounded once to the logits' type. A label
    outside 0 .. V-1 raises ArgumentError; where labels are only traced it makes the loss NaN.
    """
    _check_reduction(reduction)
    if not 0.0 <= label_smoothing < 1.0:
        raise ArgumentError(f"label_smoothing is in [0, 1), got {label_smoothing}")
    x, numeric = floating(logits)
    t, accum = as_tensor(target), accumulate_dtype(numeric)
    w = None if weight is None else _class_weights(weight, x)
    smoothing = float(label_smoothing)
    if t.dtype.kind == "float":
        return _reduce(_soft_rows(x, t, smoothing, w), reduction, numeric)
    _check_labels(x, t, ignore_index)
    if w is None:
        rows = apply(NLL, x, F.expand_dims(t, -1), smoothing=smoothing, accum=accum)
        return _reduce_labels(F.squeeze(rows, -1), t, None, ignore_index, reduction,
                              numeric)
    rows = apply(NLL, x, F.expand_dims(t, -1), smoothing=0.0, accum=accum)
    own = _weight_of(w, t)
    rows = F.squeeze(rows, -1) * own
    if smoothing:
        spread = neg(F.sum(w * F.log_softmax(x), axis=-1)) / x.shape[-1]
        rows = (1.0 - smoothing) * rows + smoothing * spread
    return _reduce_labels(rows, t, own, ignore_index, reduction, numeric)


@public
def nll_loss(log_probabilities: Any, target: Any, *, weight: Any = None, reduction: str = "mean",
             ignore_index: int | None = None) -> Tensor:
    """-w_t x_t for the label t of each row: what is left of cross_entropy after log_softmax.

    log_probabilities: [..., V]   target: [...] integers   weight, reduction, ignore_index: as of
    `ts.cross_entropy`. Raises ArgumentError for a label outside; AxisError, when it runs, where
    labels are only traced.
    """
    _check_reduction(reduction)
    x, numeric = floating(log_probabilities)
    t = as_tensor(target)
    _check_labels(x, t, ignore_index)
    label = t if ignore_index is None else where(F.equal(t, ignore_index), 0, t)
    rows = neg(F.take_along_axis(x, F.expand_dims(label, -1), axis=-1))
    rows = F.squeeze(rows, -1)
    own = None if weight is None else _weight_of(_class_weights(weight, x), t)
    return _reduce_labels(rows if own is None else rows * own, t, own, ignore_index, reduction,
                          numeric)


def _class_weights(weight: Any, x: Tensor) -> Tensor:
    w = convert(to_compute(as_tensor(weight)), x.type)
    if tuple(w.shape) != tuple(x.shape[-1:]):
        raise ShapeError(f"weights {show_shape(w.shape)} for {x.shape[-1]} classes")
    return w


def _weight_of(w: Tensor, label: Tensor) -> Tensor:
    """The weight of each row's class; any where the label is outside."""
    inside = F.clip(label, 0, w.shape[0] - 1)
    return F.take(w, inside)


def _reduce_labels(rows: Tensor, label: Tensor, own: Tensor | None, ignore_index: int | None,
                   reduction: str, numeric: NumericType) -> Tensor:
    """Rows without those whose label is ignored; the mean divides by the weight of the others."""
    if ignore_index is None and (own is None or reduction != "mean"):
        return _reduce(rows, reduction, numeric)
    one = literal(1.0, rows)
    counts = F.broadcast_to(one, rows.shape) if own is None else own
    if ignore_index is not None:
        counted = F.not_equal(label, ignore_index)
        rows = where(counted, rows, literal(0.0, rows))
        counts = where(counted, counts, literal(0.0, rows))
    if reduction != "mean":
        return _reduce(rows, reduction, numeric)
    total = F.sum(counts)
    return store(F.sum(rows) / where(F.equal(total, 0.0), one, total), numeric)


def _soft_rows(x: Tensor, t: Tensor, smoothing: float, weight: Tensor | None) -> Tensor:
    if t.shape != x.shape:
        raise ShapeError(f"probabilities {show_shape(t.shape)} for logits {show_shape(x.shape)}",
                         hint="class labels are integers: ts.cast(target, ts.int64)")
    q = convert(to_compute(t), x.type)
    if smoothing:
        n: Any = x.shape[-1]
        q = q * (1.0 - smoothing) + smoothing / n
    q = q if weight is None else q * weight
    terms = q * F.log_softmax(x)
    terms = where(F.equal(q, 0.0), literal(0.0, terms), terms)  # 0 log 0 = 0
    return neg(F.sum(terms, axis=-1))


def _check_labels_ref(t: np.ndarray, extent: int, ignore_index: int | None) -> np.ndarray:
    bad = (t < 0) | (t >= extent)
    bad = bad if ignore_index is None else bad & (t != ignore_index)
    if bad.any():
        raise ArgumentError(f"label {t[bad][0]} is outside 0 .. {extent - 1}",
                            hint="ignore_index= leaves rows out")
    return t


CHECK_LABELS = GraphOp(
    "check_labels",
    shape=lambda t, extent, ignore_index: t,
    ref=_check_labels_ref,
    batch=lambda size, batched, t, extent, ignore_index: (
        apply(CHECK_LABELS, t, extent=extent, ignore_index=ignore_index), True),
    axes="...->...",
    differentiable=False,
    memory=FLAT_VIEW,
    host="now",
    samples=(sample(((2, 3), "index:5"), extent=5, ignore_index=None),
             sample(((3,), "index:4"), extent=3, ignore_index=3)),
    doc="labels, each of 0 .. extent - 1 or ignore_index; an ArgumentError otherwise. Calls "
        "outside of traces have it",
)


def _check_labels(x: Tensor, t: Tensor, ignore_index: int | None) -> None:
    if not holds_integers(t):
        raise DTypeError(f"labels are integers (or probabilities, floats), got {t.type}")
    if not x.ndim or tuple(t.shape) != tuple(x.shape[:-1]):
        raise ShapeError(f"labels {show_shape(t.shape)} for logits {show_shape(x.shape)}: one "
                         "integer per row is needed")
    attrs: dict[str, Any] = {"extent": x.shape[-1], "ignore_index": ignore_index}
    if t.layout is not None and not isinstance(t, Tracer):
        for a in t._own_arrays():
            _check_labels_ref(a, **attrs)
    elif not isinstance(t, Tracer) or t.builder.checks:
        apply(CHECK_LABELS, t, **attrs)


@public
def binary_cross_entropy_with_logits(logits: Any, target: Any, *, weight: Any = None,
                                     pos_weight: Any = None, reduction: str = "mean") -> Tensor:
    """-w (p t log sigmoid(x) + (1 - t) log(1 - sigmoid(x))), elementwise, stable.

    logits, target: equal shapes, target in [0, 1]   weight w and pos_weight p: 1 when None; they
    broadcast to the shape of the logits. Rounded once to the logits' type.
    """
    _check_reduction(reduction)
    x, numeric = floating(logits)
    t = convert(to_compute(as_tensor(target)), x.type)
    if t.shape != x.shape:
        raise ShapeError(f"targets {show_shape(t.shape)} for logits {show_shape(x.shape)}")
    softplus = F.softplus
    if pos_weight is None:
        rows = softplus(x) - x * t
    else:
        p = _factor(pos_weight, x, "pos_weight")
        rows = (1.0 - t) * x + (1.0 + (p - 1.0) * t) * softplus(neg(x))
    return _reduce(rows if weight is None else rows * _factor(weight, x, "weight"), reduction,
                   numeric)


def _factor(value: Any, x: Tensor, name: str) -> Tensor:
    w = convert(to_compute(as_tensor(value)), x.type)
    if broadcast_shapes(tuple(w.shape), tuple(x.shape)) != tuple(x.shape):
        raise ShapeError(f"{name} {show_shape(w.shape)} for logits {show_shape(x.shape)}")
    return w
