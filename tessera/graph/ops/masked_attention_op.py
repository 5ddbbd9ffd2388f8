"""Attention with a mask as one op, and its gradient as another; attention_op.py has those without.

A mask has as many axes as the queries, each of its extent or 1: bools (seen), or floats in the type
of the scores, which are added to them and have a cotangent.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...numerics import DType, as_type
from ...tensor import Tensor
from .. import functions as F
from ..op import Aval, GraphOp, Sample, sample
from ..operand import as_stored
from ..trace import apply
from .attention_blocks import AttentionRule, gradients_in_blocks, in_blocks
from .attention_op import ATTENTION, ATTENTION_VJP, repeated_heads, summed_heads
from .contract import matmul_ref, widened_array
from .softmax import SOFTMAX

F32 = as_type("f32").dtype


# --- meaning ----------------------------------------------------------------------------------
def _weights_ref(q: np.ndarray, k: np.ndarray, mask: np.ndarray, scale: float, causal: bool,
                 accum: DType) -> np.ndarray:
    """[..., S, T]; heads of keys are repeated already."""
    s = matmul_ref(q, k.swapaxes(-1, -2), accum) * q.dtype.type(scale)
    s = np.where(mask, s, -np.inf).astype(s.dtype) if mask.dtype == bool else s + mask
    if causal:
        rows, columns = np.arange(s.shape[-2])[:, None], np.arange(s.shape[-1])
        s = np.where(columns <= rows + s.shape[-1] - s.shape[-2], s, -np.inf).astype(s.dtype)
    return s if s.shape[-1] == 0 else SOFTMAX.ref(s, axis=s.ndim - 1, safe=True, accum=accum)


def _ref(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, scale: float, causal: bool,
         accum: DType) -> np.ndarray:
    a, b, c = widened_array(q), repeated_heads(k, q), repeated_heads(v, q)
    return matmul_ref(_weights_ref(a, b, mask, scale, causal, accum), c, accum)


def _vjp_ref(g: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray,
             scale: float, causal: bool, accum: DType) -> tuple[np.ndarray, ...]:
    a, b, c, g = widened_array(q), repeated_heads(k, q), repeated_heads(v, q), widened_array(g)
    p = _weights_ref(a, b, mask, scale, causal, accum)
    dp = matmul_ref(g, c.swapaxes(-1, -2), accum)
    dm = p * (dp - np.sum(dp * p, -1, keepdims=True))
    ds = dm * a.dtype.type(scale)
    made = (matmul_ref(ds, b, accum), summed_heads(matmul_ref(ds.swapaxes(-1, -2), a, accum), k),
            summed_heads(matmul_ref(p.swapaxes(-1, -2), g, accum), v))
    if mask.dtype == bool:
        return made
    along = tuple(i for i, n in enumerate(mask.shape) if n != dm.shape[i])
    return *made, dm.sum(along, keepdims=True) if along else dm


# --- rules ------------------------------------------------------------------------------------
def _vjp(g: Tensor, y: Tensor, *xs: Tensor, **attrs: Any) -> tuple:
    """The cotangent as it is stored where it was rounded to the type of the operands."""
    z, factor = as_stored(g)
    if z.dtype is not xs[0].dtype:
        z, factor = g, 1.0
    made = apply(MASKED_ATTENTION_VJP, z, *xs, **attrs)
    made = made if factor == 1.0 else tuple(x * factor for x in made)
    return made if len(made) == 4 else (*made, None)


def _vjp_shape(g: Aval, q: Aval, k: Aval, v: Aval, mask: Aval, **attrs: Any) -> tuple[Aval, ...]:
    made = ATTENTION_VJP.shape(g, q, k, v)
    return made if mask.dtype.kind == "bool" else (*made, mask)


def _batch(op: str) -> Any:
    """A batch is further sequences; a mask of all sequences is one of each then."""
    def rule(size: Any, batched: tuple, *xs: Tensor, **attrs: Any) -> tuple:
        full = [x if b else F.broadcast_to(x, (size, *x.shape))
                for x, b in zip(xs, batched, strict=True)]
        if full[0].ndim <= 4:
            return apply(MASKED[op], *full, **attrs), True
        mask, count = full[-1], full[0].shape[1]
        full[-1] = F.broadcast_to(mask, (size, count, *mask.shape[2:]))
        made = apply(MASKED[op], *(F.reshape(x, (size * count, *x.shape[2:])) for x in full),
                     **attrs)
        outs = tuple(F.reshape(y, (size, count, *y.shape[1:]))
                     for y in (made if isinstance(made, tuple) else (made,)))
        if len(outs) == 4 and mask.shape[1] == 1:
            outs = (*outs[:3], F.sum(outs[3], axis=1, keepdims=True))
        return outs if isinstance(made, tuple) else outs[0], True

    return rule


def _samples(backward: bool) -> tuple[Sample, ...]:
    """backward: with the result's cotangent in front."""
    made = []
    for lead, keys, S, T, mask, causal in (
            ((2,), (2,), 3, 4, ((1, 3, 4), "normal"), False),
            ((1, 4), (1, 2), 2, 3, ((1, 4, 2, 3), "normal"), True),
            ((1, 2), (1, 2), 3, 4, ((1, 1, 1, 4), "bool"), False)):
        shapes = [(*lead, S, 3)] * backward + [(*lead, S, 2), (*keys, T, 2), (*keys, T, 3), mask]
        made.append(sample(*shapes, scale=0.7, causal=causal, accum=F32))
    return tuple(made)


MASKED_ATTENTION = GraphOp(
    "masked_attention",
    shape=lambda q, k, v, mask, **attrs: ATTENTION.shape(q, k, v),
    ref=_ref,
    vjp=_vjp,
    batch=_batch("masked_attention"),
    expand=lambda q, k, v, mask, **attrs: in_blocks(q, k, v, mask, AttentionRule(**attrs)),
    drops=(3,),
    drops_inf=(0, 1),
    samples=_samples(False),
    hint="scores beyond the range of the type",
    doc="softmax(scale q k' + mask) v; a query that sees no key gives 0",
)

MASKED_ATTENTION_VJP = GraphOp(
    "masked_attention_vjp",
    shape=_vjp_shape,
    ref=_vjp_ref,
    batch=_batch("masked_attention_vjp"),
    expand=lambda g, q, k, v, mask, **attrs: gradients_in_blocks(g, q, k, v, AttentionRule(**attrs),
                                                                mask),
    multi=True,
    drops=(4,),
    drops_inf=(1, 2),
    samples=_samples(True),
    hint="scores beyond the range of the type",
    doc="cotangents of q, k and v, and of a mask of floats, from that of masked attention's result",
)
MASKED = {op.name: op for op in (MASKED_ATTENTION, MASKED_ATTENTION_VJP)}
