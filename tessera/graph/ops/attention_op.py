"""Attention as one op, and its gradient as another: a GPU has kernels that keep no scores.

Without a kernel they are compositions (attention_blocks.py). Those of the gradient begin with the
same ops as those of the result, and where both are in one graph these run once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...numerics import DType, as_type
from ...tensor import Tensor
from .. import functions as F
from ..op import OPS, Aval, GraphOp, Sample, sample
from ..operand import as_stored
from ..trace import apply
from .attention_blocks import AttentionRule, gradients_in_blocks, in_blocks, query_blocks
from .contract import is_multiplied_as_stored, matmul_ref, wide_type, widened_array
from .softmax import SOFTMAX


def _wide(x: Aval) -> Any:
    return wide_type(x.dtype) if is_multiplied_as_stored(x.dtype) else x.type


def _shape(q: Aval, k: Aval, v: Aval, **attrs: Any) -> Aval:
    return Aval((*q.shape[:-1], v.shape[-1]), _wide(q))


# --- meaning ----------------------------------------------------------------------------------
def _weights_ref(q: np.ndarray, k: np.ndarray, last: int, scale: float, causal: bool, accum: DType
                 ) -> np.ndarray:
    """Of one block, [..., S, T]; heads of keys are repeated already."""
    s = matmul_ref(q, k.swapaxes(-1, -2), accum) * q.dtype.type(scale)
    if causal:
        rows, columns = np.arange(s.shape[-2])[:, None], np.arange(s.shape[-1])
        s = np.where(columns <= rows + last, s, -np.inf).astype(s.dtype)
    return s if s.shape[-1] == 0 else SOFTMAX.ref(s, axis=s.ndim - 1, safe=causal, accum=accum)


def repeated_heads(x: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Heads of keys or values, one for each head of queries, wide."""
    x = widened_array(x)
    return np.repeat(x, q.shape[1] // x.shape[1], 1) if q.ndim == 4 else x


def _ref(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, causal: bool, accum: DType
         ) -> np.ndarray:
    a, b, c = widened_array(q), repeated_heads(k, q), repeated_heads(v, q)
    y = np.empty((*a.shape[:-1], c.shape[-1]), a.dtype)
    for x in query_blocks(a.shape[-2], b.shape[-2], causal):
        p = _weights_ref(a[..., x.start:x.stop, :], b[..., :x.seen, :], x.last, scale, causal,
                         accum)
        y[..., x.start:x.stop, :] = matmul_ref(p, c[..., :x.seen, :], accum)
    return y


def _vjp_ref(g: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float,
             causal: bool, accum: DType) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    a, b, c, g = widened_array(q), repeated_heads(k, q), repeated_heads(v, q), widened_array(g)
    dq, dk, dv = np.zeros_like(a), np.zeros_like(b), np.zeros_like(c)
    for x in query_blocks(a.shape[-2], b.shape[-2], causal):
        rows, seen = slice(x.start, x.stop), slice(0, x.seen)
        own, cot, keys = a[..., rows, :], g[..., rows, :], b[..., seen, :]
        p = _weights_ref(own, keys, x.last, scale, causal, accum)
        dp = matmul_ref(cot, c[..., seen, :].swapaxes(-1, -2), accum)
        ds = p * (dp - np.sum(dp * p, -1, keepdims=True)) * a.dtype.type(scale)
        dq[..., rows, :] = matmul_ref(ds, keys, accum)
        dk[..., seen, :] += matmul_ref(ds.swapaxes(-1, -2), own, accum)
        dv[..., seen, :] += matmul_ref(p.swapaxes(-1, -2), cot, accum)
    return dq, summed_heads(dk, k), summed_heads(dv, v)


def summed_heads(x: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Cotangents of repeated heads, added up."""
    if x.shape == like.shape:
        return x
    B, H, T, D = x.shape
    return x.reshape(B, like.shape[1], H // like.shape[1], T, D).sum(2)


# --- rules ------------------------------------------------------------------------------------
def _vjp(g: Tensor, y: Tensor, q: Tensor, k: Tensor, v: Tensor, **attrs: Any) -> tuple:
    """The cotangent as it is stored where it was rounded to the type of the operands."""
    z, factor = as_stored(g)
    if z.dtype is not q.dtype:
        z, factor = g, 1.0
    made = apply(ATTENTION_VJP, z, q, k, v, **attrs)
    return made if factor == 1.0 else tuple(x * factor for x in made)


def _leading_axes(size: Any, batched: tuple, xs: tuple[Tensor, ...]) -> tuple[list[Tensor], bool]:
    """Operands that all have the axis of a batch, as heads or as further sequences of a batch, and
    whether it was joined with another axis."""
    full = [x if b else F.broadcast_to(x, (size, *x.shape))
            for x, b in zip(xs, batched, strict=True)]
    joined = full[-1].ndim > 4  # the last operand is v
    if not joined:
        return full, False
    return [F.reshape(x, (size * x.shape[1], *x.shape[2:])) for x in full], True


def _batch(op: str) -> Any:
    def rule(size: Any, batched: tuple, *xs: Tensor, **attrs: Any) -> tuple:
        full, joined = _leading_axes(size, batched, xs)
        made = apply(OPS[op], *full, **attrs)
        if not joined:
            return made, True
        outs = tuple(F.reshape(y, (size, y.shape[0] // size, *y.shape[1:]))
                     for y in (made if isinstance(made, tuple) else (made,)))
        return outs if isinstance(made, tuple) else outs[0], True

    return rule


def _samples(backward: bool) -> tuple[Sample, ...]:
    """backward: with the result's cotangent in front."""
    made = []
    for lead, keys, S, T, causal in (((2,), (2,), 3, 4, False), ((2,), (2,), 3, 3, True),
                                     ((1, 4), (1, 2), 2, 3, True)):
        shapes = [(*lead, S, 3)] * backward + [(*lead, S, 2), (*keys, T, 2), (*keys, T, 3)]
        made.append(sample(*shapes, scale=0.7, causal=causal, accum=F32))
    return tuple(made)


F32 = as_type("f32").dtype
ATTENTION = GraphOp(
    "attention",
    shape=_shape,
    ref=_ref,
    vjp=_vjp,
    batch=_batch("attention"),
    expand=lambda q, k, v, **attrs: in_blocks(q, k, v, None, AttentionRule(**attrs)),
    drops_inf=(0, 1),
    samples=_samples(False),
    hint="scores beyond the range of the type",
    doc="softmax(scale q k') v, causal or not, each head of keys read by a group of heads",
)

ATTENTION_VJP = GraphOp(
    "attention_vjp",
    shape=lambda g, *xs, **attrs: tuple(Aval(x.shape, _wide(x)) for x in xs),
    ref=_vjp_ref,
    batch=_batch("attention_vjp"),
    expand=lambda g, q, k, v, **attrs: gradients_in_blocks(g, q, k, v, AttentionRule(**attrs)),
    multi=True,
    drops_inf=(1, 2),
    samples=_samples(True),
    hint="scores beyond the range of the type",
    doc="cotangents of q, k and v from that of attention's result",
)
