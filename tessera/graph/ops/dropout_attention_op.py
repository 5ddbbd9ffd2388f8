"""Attention with dropout as one op, and its gradient as another: what is drawn is never stored.

The key is an operand: draws are a function of it and of a weight's place, as in the composition
(attention_blocks.py), so the gradient makes the same ones again. The operands are q, k, v, a mask
if there is one (masked_attention_op.py says what it may be), and the key.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import numerics
from ...numerics import DType
from ...tensor import Tensor
from ..op import Arg, Aval, GraphOp, Sample
from ..operand import as_stored
from ..trace import apply
from .attention_blocks import (
    AttentionRule,
    QueryBlock,
    gradients_in_blocks,
    in_blocks,
    query_blocks,
)
from .attention_op import ATTENTION, ATTENTION_VJP, F32, repeated_heads, summed_heads
from .contract import matmul_ref, widened_array
from .softmax import SOFTMAX


# --- meaning ----------------------------------------------------------------------------------
def kept_ref(key: np.ndarray, shape: tuple[int, ...], block: QueryBlock, blocks: int,
             dropout: float) -> np.ndarray:
    """Whether each weight of a block of queries is kept."""
    own = key if blocks == 1 else numerics.fold_in(key, block.start)
    drawn = numerics.uniform(own, int(np.prod(shape))).reshape(shape)
    return drawn >= np.float32(dropout)


def _weights_ref(q: np.ndarray, k: np.ndarray, mask: np.ndarray, last: int, scale: float,
                 causal: bool, accum: DType) -> np.ndarray:
    """Of one block, [..., S, T]; heads of keys are repeated already."""
    s = matmul_ref(q, k.swapaxes(-1, -2), accum) * q.dtype.type(scale)
    s = np.where(mask, s, -np.inf).astype(s.dtype) if mask.dtype == bool else s + mask
    if causal:
        rows, columns = np.arange(s.shape[-2])[:, None], np.arange(s.shape[-1])
        s = np.where(columns <= rows + last, s, -np.inf).astype(s.dtype)
    return s if s.shape[-1] == 0 else SOFTMAX.ref(s, axis=s.ndim - 1, safe=True, accum=accum)


def _part(mask: np.ndarray | None, x: QueryBlock) -> np.ndarray:
    if mask is None:
        return np.array(True)
    mask = mask if mask.shape[-2] == 1 else mask[..., x.start:x.stop, :]
    return mask if mask.shape[-1] == 1 else mask[..., :x.seen]


def _ref(q: np.ndarray, k: np.ndarray, v: np.ndarray, *rest: np.ndarray, scale: float,
         causal: bool, accum: DType, dropout: float) -> np.ndarray:
    mask, key = _split(rest)
    a, b, c = widened_array(q), repeated_heads(k, q), repeated_heads(v, q)
    y = np.empty((*a.shape[:-1], c.shape[-1]), a.dtype)
    blocks = list(query_blocks(a.shape[-2], b.shape[-2], causal))
    for x in blocks:
        p = _weights_ref(a[..., x.start:x.stop, :], b[..., :x.seen, :], _part(mask, x), x.last,
                         scale, causal, accum)
        keep = kept_ref(key, p.shape, x, len(blocks), dropout)
        p = np.where(keep, p * p.dtype.type(1 / (1 - dropout)), p.dtype.type(0))
        if v.dtype.itemsize == 2:
            p = p.astype(v.dtype).astype(p.dtype)
        y[..., x.start:x.stop, :] = matmul_ref(p, c[..., :x.seen, :], accum)
    return y


def _vjp_ref(g: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, *rest: np.ndarray,
             scale: float, causal: bool, accum: DType, dropout: float) -> tuple[np.ndarray, ...]:
    mask, key = _split(rest)
    a, b, c, g = widened_array(q), repeated_heads(k, q), repeated_heads(v, q), widened_array(g)
    dq, dk, dv = np.zeros_like(a), np.zeros_like(b), np.zeros_like(c)
    dm = np.zeros((*a.shape[:-1], b.shape[-2]), a.dtype)
    blocks = list(query_blocks(a.shape[-2], b.shape[-2], causal))
    for x in blocks:
        rows, seen = slice(x.start, x.stop), slice(0, x.seen)
        own, cot, keys = a[..., rows, :], g[..., rows, :], b[..., seen, :]
        p = _weights_ref(own, keys, _part(mask, x), x.last, scale, causal, accum)
        factor = kept_ref(key, p.shape, x, len(blocks), dropout) * p.dtype.type(1 / (1 - dropout))
        dp = matmul_ref(cot, c[..., seen, :].swapaxes(-1, -2), accum) * factor
        part = p * (dp - np.sum(dp * p, -1, keepdims=True))
        ds = part * a.dtype.type(scale)
        dm[..., rows, seen] = part
        dq[..., rows, :] = matmul_ref(ds, keys, accum)
        dk[..., seen, :] += matmul_ref(ds.swapaxes(-1, -2), own, accum)
        dv[..., seen, :] += matmul_ref((p * factor).swapaxes(-1, -2), cot, accum)
    made = dq, summed_heads(dk, k), summed_heads(dv, v)
    if mask is None or mask.dtype == bool:
        return made
    along = tuple(i for i, n in enumerate(mask.shape) if n != dm.shape[i])
    return *made, dm.sum(along, keepdims=True) if along else dm


# --- rules ------------------------------------------------------------------------------------
def _vjp(g: Tensor, y: Tensor, *xs: Tensor, **attrs: Any) -> tuple:
    """The cotangent as it is stored where it was rounded to the type of the operands."""
    z, factor = as_stored(g)
    if z.dtype is not xs[0].dtype:
        z, factor = g, 1.0
    made = apply(DROPOUT_ATTENTION_VJP, z, *xs, **attrs)
    made = made if factor == 1.0 else tuple(x * factor for x in made)
    return (*made, *(None,) * (len(xs) - len(made)))


def _vjp_shape(g: Aval, q: Aval, k: Aval, v: Aval, *rest: Aval, **attrs: Any) -> tuple[Aval, ...]:
    mask, _ = _split(rest)
    made = ATTENTION_VJP.shape(g, q, k, v)
    return made if mask is None or mask.dtype.kind == "bool" else (*made, mask)


def _split(rest: tuple) -> tuple[Any, Any]:
    """(the mask or None, the key) of what follows the values."""
    return (None, *rest) if len(rest) == 1 else rest


def _expand(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **attrs: Any) -> Tensor:
    mask, key = _split(rest)
    return in_blocks(q, k, v, mask, AttentionRule(**attrs, key=key))


def _vjp_expand(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **attrs: Any
                ) -> tuple[Tensor, ...]:
    mask, key = _split(rest)
    return gradients_in_blocks(g, q, k, v, AttentionRule(**attrs, key=key), mask)


def _samples(backward: bool) -> tuple[Sample, ...]:
    """backward: with the result's cotangent in front."""
    made = []
    for lead, keys, S, T, mask, causal in (
            ((2,), (2,), 3, 4, (), False),
            ((1, 4), (1, 2), 2, 3, (Arg((1, 4, 2, 3)),), True),
            ((1, 2), (1, 2), 3, 4, (Arg((1, 1, 1, 4), "bool", False),), False)):
        args = [Arg(s) for s in ([(*lead, S, 3)] * backward + [
            (*lead, S, 2), (*keys, T, 2), (*keys, T, 3)])]
        made.append(Sample((*args, *mask, Arg((2,), "key", False)),
                           {"scale": 0.7, "causal": causal, "accum": F32, "dropout": 0.3}))
    return tuple(made)


DROPOUT_ATTENTION = GraphOp(
    "dropout_attention",
    shape=lambda q, k, v, *rest, **attrs: ATTENTION.shape(q, k, v),
    ref=_ref,
    vjp=_vjp,
    expand=_expand,
    drops=(3,),
    drops_inf=(0, 1),
    samples=_samples(False),
    hint="scores beyond the range of the type",
    doc="dropout(softmax(scale q k' + mask)) v, its draws by a key and a weight's place",
)

DROPOUT_ATTENTION_VJP = GraphOp(
    "dropout_attention_vjp",
    shape=_vjp_shape,
    ref=_vjp_ref,
    expand=_vjp_expand,
    multi=True,
    drops=(4,),
    drops_inf=(1, 2),
    samples=_samples(True),
    hint="scores beyond the range of the type",
    doc="cotangents of q, k, v and a mask of floats, from that of dropout_attention's result",
)

__all__ = ["DROPOUT_ATTENTION", "DROPOUT_ATTENTION_VJP"]
