"""Losses of numbers and of distributions: absolute error, its smooth forms, and divergence."""

from __future__ import annotations

from typing import Any

from ...dims import show_shape
from ...errors import ArgumentError, DTypeError, ShapeError
from ...numerics import NumericType
from ...tensor import Tensor
from .. import functions as F
from ..operand import literal, promote, public, store
from .elementwise import abs_, exp, log, where
from .loss import REDUCTIONS


def _pair(a: Any, b: Any) -> tuple[Tensor, Tensor, NumericType]:
    (x, y), numeric = promote(a, b)
    if numeric.dtype.kind != "float":
        raise DTypeError(f"a loss needs floats, got {numeric}")
    if x.shape != y.shape:
        raise ShapeError(
            f"shapes {show_shape(x.shape)} and {show_shape(y.shape)} differ",
            hint="broadcasting here is nearly always a mistake: reshape one of them",
        )
    return x, y, numeric


def _reduced(rows: Tensor, reduction: str, numeric: NumericType) -> Tensor:
    if reduction not in REDUCTIONS:
        raise ArgumentError(f"reduction {reduction!r}", hint=f"one of {', '.join(REDUCTIONS)}")
    if reduction == "none":
        return store(rows, numeric)
    return store(F.sum(rows) if reduction == "sum" else F.mean(rows), numeric)


@public
def l1_loss(prediction: Any, target: Any, *, reduction: str = "mean") -> Tensor:
    """mean |prediction - target| over all elements; the derivative is 0 where they are equal.

    The shapes must be equal. reduction: "mean", "sum" or "none". Raises ShapeError, DTypeError.
    """
    a, b, numeric = _pair(prediction, target)
    return _reduced(abs_(a - b), reduction, numeric)


@public
def smooth_l1_loss(prediction: Any, target: Any, *, beta: float = 1.0,
                   reduction: str = "mean") -> Tensor:
    """mean of d^2 / (2 beta) where |d| < beta, else |d| - beta / 2, with d = prediction - target.

    beta = 0 is `ts.l1_loss`. Girshick 2015, arXiv:1504.08083, eq. 3, with torch's beta.
    """
    if not beta >= 0:
        raise ArgumentError(f"smooth_l1_loss needs beta >= 0, got {beta}")
    if beta == 0:
        return l1_loss(prediction, target, reduction=reduction)
    a, b, numeric = _pair(prediction, target)
    d = a - b
    size = abs_(d)
    rows = where(size < beta, d * d * (0.5 / beta), size - 0.5 * beta)
    return _reduced(rows, reduction, numeric)


@public
def huber_loss(prediction: Any, target: Any, *, delta: float = 1.0,
               reduction: str = "mean") -> Tensor:
    """mean of d^2 / 2 where |d| < delta, else delta (|d| - delta / 2): delta times smooth L1."""
    if not delta > 0:
        raise ArgumentError(f"huber_loss needs delta > 0, got {delta}")
    a, b, numeric = _pair(prediction, target)
    d = a - b
    size = abs_(d)
    rows = where(size < delta, 0.5 * (d * d), delta * (size - 0.5 * delta))
    return _reduced(rows, reduction, numeric)


@public
def kl_div(log_q: Any, p: Any, *, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """p (log p - log q), elementwise and reduced: the divergence KL(p | q) when summed over q.

    log_q: log-probabilities   p: probabilities, or their logarithms when log_target   shapes equal
    reduction: "mean" divides by all elements, "batchmean" by the first extent, as in
    torch.nn.functional.kl_div; "sum", "none". Where p is 0 the term is 0.
    """
    a, b, numeric = _pair(log_q, p)
    if log_target:
        rows = where(F.equal(b, float("-inf")), literal(0.0, b), exp(b) * (b - a))
    else:
        some = F.greater(b, 0.0)
        rows = where(some, b * (log(where(some, b, literal(1.0, b))) - a), literal(0.0, b))
    if reduction != "batchmean":
        return _reduced(rows, reduction, numeric)
    if rows.ndim == 0:
        raise ShapeError("batchmean of a scalar")
    return store(F.sum(rows) / rows.shape[0], numeric)
