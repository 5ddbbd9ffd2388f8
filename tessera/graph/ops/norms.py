"""Layer norm and RMS norm along the last axis, one record each for their derivatives.

In the derivative rules the values along a row are recomputed from x and the row's statistics, in
another order than forwards (x * r, and g * x * r): a compiled step then keeps two numbers per row
for the backward pass instead of a second copy of x.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...dims import show_shape
from ...errors import ShapeError
from ...numerics import DType, as_type
from ...tensor import Tensor, as_tensor
from .. import functions as F
from ..op import OPS, Aval, GraphOp, sample
from ..operand import convert, floating, public, store, to_compute
from ..trace import apply
from .broadcasting import broadcast_shapes, pad_batch_axes, unbroadcast
from .elementwise import neg, rsqrt
from .reduce import accumulate_dtype, apply_count, sum_ref
from .softmax import row_sum

F32 = as_type("f32").dtype


def row_mean(x: Tensor, accum: DType | None = None) -> Tensor:
    """Mean along the last axis, kept with extent 1."""
    n = x.shape[-1]
    total = row_sum(x, -1, accum)
    if not isinstance(n, int):
        return total / apply_count(n, x)
    return total / n


def _norm_shape(x: Aval, *weight: Aval, eps: float, accum: DType) -> Aval:
    shape = broadcast_shapes(x.shape, *(w.shape for w in weight))
    if shape != tuple(x.shape):
        raise ShapeError(f"a weight of {show_shape(weight[0].shape)} does not fit x "
                         f"{show_shape(x.shape)}")
    return x


def _norm_batch(name: str) -> Any:
    def rule(size: Any, batched: tuple, x: Tensor, *weight: Tensor, **attrs: Any) -> tuple:
        if not batched[0]:
            x = F.broadcast_to(F.expand_dims(x, 0), (size, *x.shape))
        aligned = [
            pad_batch_axes(w, x.ndim - 1) if b else w
            for w, b in zip(weight, batched[1:], strict=True)
        ]
        return apply(OPS[name], x, *aligned, **attrs), True

    return rule


def _norm_letters(x: Aval, *weight: Aval, **attrs: Any) -> str:
    return ",".join(["...n"] + ["n"] * len(weight)) + "->...n"


_SAMPLES = (
    sample((2, 5), eps=1e-5, accum=F32),
    sample((2, 3, 5), (5,), eps=1e-5, accum=F32),
)


# --- RMS norm ---------------------------------------------------------------------------------
def _rms_ref(x: np.ndarray, *weight: np.ndarray, eps: float, accum: DType) -> np.ndarray:
    mean = sum_ref(x * x, (x.ndim - 1,), True, accum) / max(x.shape[-1], 1)
    y = x * (1 / np.sqrt(mean + eps)).astype(x.dtype)
    return y * weight[0] if weight else y


def _rms_factor(x: Tensor, eps: float, accum: DType) -> Tensor:
    """r = 1 / sqrt(mean x^2 + eps)   [..., 1]"""
    return rsqrt(row_mean(x * x, accum) + eps)


def _rms_expand(x: Tensor, *weight: Tensor, eps: float, accum: DType) -> Tensor:
    y = x * _rms_factor(x, eps, accum)
    return y * weight[0] if weight else y


def _rms_vjp(g: Tensor, y: Tensor, x: Tensor, *weight: Tensor, eps: float, accum: DType) -> tuple:
    """dx = r g w - x r^3 mean(g w x);  dw = sum g x r.  Both share g x and run as one loop."""
    r, gx = _rms_factor(x, eps, accum), g * x
    h, hx = (g * weight[0], gx * weight[0]) if weight else (g, gx)
    dx = h * r - x * (r * r * r * row_mean(hx))
    return (dx, *(unbroadcast(gx * r, tuple(w.shape)) for w in weight))


def _rms_jvp(ts: tuple, y: Tensor, x: Tensor, *weight: Tensor, eps: float, accum: DType) -> Any:
    r = _rms_factor(x, eps, accum)
    t = None
    if ts[0] is not None:
        t = ts[0] * r - x * (r * r * r * row_mean(ts[0] * x))
        t = t * weight[0] if weight else t
    if weight and ts[1] is not None:
        extra = (x * r) * ts[1]
        t = extra if t is None else t + extra
    return t


RMSNORM = GraphOp(
    "rmsnorm",
    shape=_norm_shape,
    ref=_rms_ref,
    vjp=_rms_vjp,
    jvp=_rms_jvp,
    batch=_norm_batch("rmsnorm"),
    expand=_rms_expand,
    axes=_norm_letters,
    samples=_SAMPLES,
    doc="x / sqrt(mean x^2 + eps) * weight along the last axis",
)


# --- layer norm -------------------------------------------------------------------------------
def _layer_ref(x: np.ndarray, *weight: np.ndarray, eps: float, accum: DType) -> np.ndarray:
    n, last = max(x.shape[-1], 1), (x.ndim - 1,)
    c = x - sum_ref(x, last, True, accum) / n
    y = c * (1 / np.sqrt(sum_ref(c * c, last, True, accum) / n + eps)).astype(x.dtype)
    return y * weight[0] if weight else y


def _layer_statistics(x: Tensor, eps: float, accum: DType) -> tuple[Tensor, Tensor, Tensor]:
    """x - mean [..., N], and per row the mean and r = 1 / sqrt(var + eps) [..., 1]"""
    mean = row_mean(x, accum)
    c = x - mean
    return c, mean, rsqrt(row_mean(c * c, accum) + eps)


def _layer_expand(x: Tensor, *weight: Tensor, eps: float, accum: DType) -> Tensor:
    c, _, r = _layer_statistics(x, eps, accum)
    return c * r * weight[0] if weight else c * r


def _layer_vjp(g: Tensor, y: Tensor, x: Tensor, *weight: Tensor, eps: float,
               accum: DType) -> tuple:
    """dx = r (h - mean h - c r^2 mean(h c)) with c = x - mean, h = g w;  dw = sum g c r.

    The mean of h c is taken beside the variance: it does not wait for r.
    """
    _, mean, r = _layer_statistics(x, eps, accum)
    c = x + neg(mean)  # not x - mean, which the forward pass computes: see the module's text
    h = g * weight[0] if weight else g
    dx = r * (h - row_mean(h) - c * (r * r * row_mean(h * c)))
    return (dx, *(unbroadcast(g * (c * r), tuple(w.shape)) for w in weight))


def _layer_jvp(ts: tuple, y: Tensor, x: Tensor, *weight: Tensor, eps: float,
               accum: DType) -> Any:
    c, _, r = _layer_statistics(x, eps, accum)
    z, t = c * r, None
    if ts[0] is not None:
        t = r * (ts[0] - row_mean(ts[0]) - z * row_mean(ts[0] * z))
        t = t * weight[0] if weight else t
    if weight and ts[1] is not None:
        t = z * ts[1] if t is None else t + z * ts[1]
    return t


LAYERNORM = GraphOp(
    "layernorm",
    shape=_norm_shape,
    ref=_layer_ref,
    vjp=_layer_vjp,
    jvp=_layer_jvp,
    batch=_norm_batch("layernorm"),
    expand=_layer_expand,
    axes=_norm_letters,
    samples=_SAMPLES,
    doc="(x - mean) / sqrt(var + eps) * weight along the last axis",
)


# --- public functions -------------------------------------------------------------------------
def row_weight(weight: Any, x: Tensor, name: str) -> Tensor:
    """A weight per element of the last axis, in x's type. Raises ShapeError."""
    w = as_tensor(weight)
    if tuple(w.shape) != tuple(x.shape[-1:]):
        raise ShapeError(f"{name} has shape {show_shape(w.shape)}, the last axis of x needs "
                         f"{show_shape(x.shape[-1:])}")
    return convert(to_compute(w), x.type)


def norm_operand(x: Any) -> tuple[Tensor, Any]:
    c, numeric = floating(x)
    if c.ndim == 0:
        raise ShapeError("a norm needs an axis, got a scalar", hint="x[None] makes a row of it")
    return c, numeric


@public
def rmsnorm(x: Any, weight: Any = None, *, eps: float = 1e-6) -> Tensor:
    """y_i = x_i / sqrt(mean_j x_j^2 + eps) * weight_i, along the last axis.

    x: [..., N]   weight: [N]   y: shape and type of x
    Accumulates in x's accumulate type and rounds once. Squares overflow for |x| > 1e19 in f32;
    `ts.rmsnorm_safe` scales them. Raises ShapeError when weight's extent is not N.
    Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4.
    """
    c, numeric = norm_operand(x)
    weights = () if weight is None else (row_weight(weight, c, "weight"),)
    return store(apply(RMSNORM, c, *weights, eps=float(eps), accum=accumulate_dtype(numeric)),
                 numeric)


@public
def layernorm(x: Any, gamma: Any = None, beta: Any = None, *, eps: float = 1e-5) -> Tensor:
    """y_i = (x_i - mean) / sqrt(var + eps) * gamma_i + beta_i, along the last axis.

    x: [..., N]   gamma, beta: [N]   y: shape and type of x
    The variance is the mean of (x - mean)^2, a second pass over the row. Accumulates in x's
    accumulate type and rounds once. Raises ShapeError when gamma's or beta's extent is not N.
    Ba, Kiros and Hinton 2016, arXiv:1607.06450, eq. 4.
    """
    c, numeric = norm_operand(x)
    weights = () if gamma is None else (row_weight(gamma, c, "gamma"),)
    y = apply(LAYERNORM, c, *weights, eps=float(eps), accum=accumulate_dtype(numeric))
    return store(y if beta is None else y + row_weight(beta, c, "beta"), numeric)
