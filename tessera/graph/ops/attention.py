"""Attention: softmax(scale q k' + mask) v, with grouped heads, and rows that may see nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ...dims import divide, show_shape
from ...errors import ArgumentError, DTypeError, ShapeError
from ...numerics import DType
from ...tensor import Tensor, as_tensor
from .. import functions as F
from ..operand import convert, literal, promote, public, store, to_compute
from .contract import matmul_compute
from .elementwise import broadcast_shapes, where
from .reduce import accumulate_dtype
from .softmax import softmax_compute

# What stands for keys and values in flash_attention(q, cache): type -> attend(q, cache, causal=,
# scale=, mask=, dropout=, key=). Filled by state.
HELD: dict[type, Callable[..., Tensor]] = {}
BLOCK_ROWS = 512  # queries at a time when there are more: the scores are then [..., 512, T]


@dataclass(frozen=True)
class _Rule:
    """What is the same for every block of queries."""

    scale: float
    causal: bool
    dropout: float
    key: Any
    accum: DType


@public
def attention(q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None,
              mask: Any = None, dropout: float = 0.0, key: Any = None) -> Tensor:
    """y = softmax(scale q k' + mask) v, softmax along the keys.

    q: [B, H, S, D]   k: [B, Hk, T, D]   v: [B, Hk, T, Dv]   y: [B, H, S, Dv] of the operands'
    common type. Or 3-D, [N, S, D], [N, T, D], [N, T, Dv]; or 2-D without N.
    H is a multiple of Hk: query head h reads key head h // (H / Hk).
    scale    1 / sqrt(D) when None
    causal   query i sees the keys up to i + T - S: the last query sees every key
    mask     broadcasts to [B, H, S, T]: bool_ (true: seen), or floats added to the scores
    dropout  probability with which a weight is zeroed (the others are divided by 1 - p)
    A query that sees no key gives 0. Computes in the accumulate type and rounds once, at the end.
    More than 512 queries go in blocks of 512, so the scores take [B, H, 512, T] of memory.
    Raises ShapeError, DTypeError.
    """
    (a, b, c), numeric = promote(q, k, v)
    if numeric.dtype.kind != "float":
        raise DTypeError(f"attention needs floats, got {numeric}")
    _check_operands(a, b, c)
    scale = 1.0 / math.sqrt(a.shape[-1]) if scale is None else float(scale)
    rule = _Rule(scale, bool(causal), dropout, key, accumulate_dtype(numeric))
    hidden = None if mask is None else _mask_operand(mask, a, b)
    return store(_in_blocks(a, b, c, hidden, rule), numeric)


def _check_operands(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = ", ".join(show_shape(x.shape) for x in (q, k, v))
    if not q.ndim == k.ndim == v.ndim or q.ndim not in (2, 3, 4):
        raise ShapeError(f"attention needs three tensors of 2, 3 or 4 axes, got {shapes}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ShapeError(f"keys and values differ in more than the last axis: {shapes}")
    if q.shape[-1] != k.shape[-1]:
        raise ShapeError(f"queries and keys differ in the last axis: {shapes}")
    if q.ndim == 4 and (q.shape[0] != k.shape[0] or divide(q.shape[1], k.shape[1]) is None):
        raise ShapeError(f"the number of query heads must be a multiple of the key heads: {shapes}")
    if q.ndim == 3 and q.shape[0] != k.shape[0]:
        raise ShapeError(f"the leading axes differ: {shapes}",
                         hint="grouped heads need 4 axes, [B, H, S, D]")


def _mask_operand(mask: Any, q: Tensor, k: Tensor) -> Tensor:
    """bool_, or floats in q's type; as many axes as q."""
    m = as_tensor(mask)
    want = (*q.shape[:-1], k.shape[-2])
    if m.dtype.kind not in ("bool", "float"):
        raise DTypeError(f"a mask holds bools (seen) or floats (added), got {m.type}")
    if m.ndim > q.ndim or broadcast_shapes(tuple(m.shape), want) != want:
        raise ShapeError(f"mask {show_shape(m.shape)} does not broadcast to {show_shape(want)}")
    m = m if m.dtype.kind == "bool" else convert(to_compute(m), q.type)
    return F.reshape(m, (1,) * (q.ndim - m.ndim) + tuple(m.shape))


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: _Rule) -> Tensor:
    """All queries at once when they are few, else by blocks; a causal block reads only the keys
    that it sees."""
    S, T = q.shape[-2], k.shape[-2]
    if not isinstance(S, int) or not isinstance(T, int) or S <= BLOCK_ROWS:
        return _attend(q, k, v, mask, rule, T - S)
    starts = range(0, S, BLOCK_ROWS)
    sizes = [min(BLOCK_ROWS, S - i) for i in starts]
    parts = []
    for start, rows in zip(starts, F.split(q, sizes, axis=-2), strict=True):
        stop = start + rows.shape[-2]
        seen = max(min(T, stop + T - S), 0) if rule.causal else T
        part = mask if mask is None or mask.shape[-2] == 1 else mask[..., start:stop, :]
        part = part if part is None or part.shape[-1] == 1 else part[..., :seen]
        keys, values = (x if seen == T else x[..., :seen, :] for x in (k, v))
        own = rule if rule.key is None else replace(rule, key=F.fold_in(rule.key, start))
        parts.append(_attend(rows, keys, values, part, own, start + T - S))
    return F.concatenate(parts, axis=-2)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: _Rule,
            last: Any) -> Tensor:
    """One block of queries; the first of them sees the keys up to `last` when causal."""
    S, T = q.shape[-2], k.shape[-2]
    groups: Any = divide(q.shape[1], k.shape[1]) if q.ndim == 4 else 1
    lead: tuple = tuple(q.shape[:-2])
    rows: Any = S
    if groups != 1:  # the queries of a group are further rows of one product
        lead, rows = (q.shape[0], k.shape[1], groups), groups * S
        q = F.reshape(q, (*lead[:2], rows, q.shape[-1]))
        mask = None if mask is None else _group_mask(mask, lead)
    scores = matmul_compute(q, F.swapaxes(k, -1, -2), rule.accum)
    scores = F.reshape(scores, (*lead, S, T))
    p = _weights(scores, mask, rule, last)  # [..., S, T]
    p = F.dropout(p, rule.dropout, key=rule.key)
    y = matmul_compute(F.reshape(p, (*k.shape[:-2], rows, T)), v, rule.accum)
    heads = (lead[0], lead[1] * groups) if groups != 1 else lead
    return F.reshape(y, (*heads, S, v.shape[-1]))


def _group_mask(mask: Tensor, lead: tuple) -> Tensor:
    """[B, H or 1, S, T] as [B, Hk, G, S, T]"""
    B, H, S, T = mask.shape
    return F.reshape(mask, (B, 1, 1, S, T) if H == 1 else (B, *lead[1:], S, T))


def _weights(scores: Tensor, mask: Tensor | None, rule: _Rule, last: Any) -> Tensor:
    """Softmax of the scaled and masked scores: one chain of elementwise ops and row reductions."""
    s = scores * rule.scale
    if mask is not None and mask.dtype.kind == "float":
        s, mask = s + mask, None
        safe = True
    else:
        safe = mask is not None
    if rule.causal:
        seen = _causal(scores.shape[-2], scores.shape[-1], last)
        mask = seen if mask is None else F.logical_and(mask, seen)
        safe = True
    if mask is not None:
        s = where(mask, s, literal(-math.inf, s))
    return softmax_compute(s, s.ndim - 1, safe, rule.accum)


def _causal(S: Any, T: Any, last: Any) -> Tensor:
    """Whether query i sees key j: j <= i + last.   [S, T] bool_"""
    rows = F.arange(S, dtype="int32") + last
    return F.less_equal(F.arange(T, dtype="int32"), F.expand_dims(rows, -1))


@public
def flash_attention(q: Any, k: Any, v: Any = None, *, causal: bool | None = None,
                    is_causal: bool | None = None, scale: float | None = None, mask: Any = None,
                    dropout: float = 0.0, key: Any = None) -> Tensor:
    """Causal attention by default: `flash_attention(q, k, v)`. See `ts.attention` for shapes.

    With a cache, `flash_attention(q, cache)`, the queries are the last of its entries, and the
    heads come back side by side: [B, S, H D].
    causal and is_causal are one option; true when neither is given. Raises ArgumentError when they
    contradict each other, or when keys and values are missing.
    """
    if causal is not None and is_causal is not None and causal != is_causal:
        raise ArgumentError(f"causal={causal} and is_causal={is_causal} contradict each other")
    chosen = next((c for c in (causal, is_causal) if c is not None), True)
    if v is None and type(k) in HELD:
        return HELD[type(k)](q, k, causal=chosen, scale=scale, mask=mask, dropout=dropout, key=key)
    if v is None:
        raise ArgumentError(
            f"flash_attention takes queries, keys and values, got queries and a "
            f"{type(k).__name__}", hint="flash_attention(q, k, v), three tensors "
            "[B, H, S, D]; or a KVCache for both")
    return attention(q, k, v, causal=chosen, scale=scale, mask=mask, dropout=dropout, key=key)
