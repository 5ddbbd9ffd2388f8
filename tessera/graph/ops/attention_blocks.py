"""Attention as a composition: scores, weights and values, a block of queries at a time.

What the ops of attention mean, and what a target without a kernel for them runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...dims import divide
from ...numerics import DType
from ...tensor import Tensor
from .. import functions as F
from ..operand import convert, literal
from ..trace import apply
from .contract import matmul_compute, stored_product, widened
from .elementwise import unbroadcast, where
from .round_cotangent import ROUND_COTANGENT
from .softmax import row_sum, softmax_compute

BLOCK_ROWS = 512  # queries at a time when there are more: the scores are then [..., 512, T]


@dataclass(frozen=True)
class AttentionRule:
    """What is the same for every block of queries."""

    scale: float
    causal: bool
    accum: DType
    dropout: float = 0.0
    key: Any = None


@dataclass(frozen=True)
class QueryBlock:
    """Queries [start:stop], which see the first `seen` keys; when causal the first of them sees the
    keys up to `last`."""

    start: int
    stop: Any
    seen: Any
    last: Any


def query_blocks(S: Any, T: Any, causal: bool) -> Iterator[QueryBlock]:
    """All queries at once when they are few, else by blocks; a causal block reads only the keys
    that it sees."""
    if not isinstance(S, int) or not isinstance(T, int) or S <= BLOCK_ROWS:
        yield QueryBlock(0, S, T, T - S)
        return
    for start in range(0, S, BLOCK_ROWS):
        stop = min(S, start + BLOCK_ROWS)
        yield QueryBlock(start, stop, max(min(T, stop + T - S), 0) if causal else T, start + T - S)


def _rows(x: Tensor, blocks: list[QueryBlock]) -> list[Tensor]:
    if len(blocks) == 1:
        return [x]
    return list(F.split(x, [b.stop - b.start for b in blocks], axis=-2))


def _mask_rows(mask: Tensor | None, b: QueryBlock, blocks: int) -> Tensor | None:
    """What a mask says of a block."""
    if mask is None or blocks == 1:
        return mask
    part = mask if mask.shape[-2] == 1 else mask[..., b.start:b.stop, :]
    return part if part.shape[-1] == 1 else part[..., :b.seen]


def _seen(x: Tensor, b: QueryBlock) -> Tensor:
    return x if b.seen == x.shape[-2] else x[..., :b.seen, :]


def in_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: AttentionRule) -> Tensor:
    """softmax(scale q k' + mask) v, in the wide type of the operands."""
    blocks = list(query_blocks(q.shape[-2], k.shape[-2], rule.causal))
    parts = []
    for b, rows in zip(blocks, _rows(q, blocks), strict=True):
        part = _mask_rows(mask, b, len(blocks))
        own = _block_rule(rule, b, blocks)
        heads = _Heads.of(rows, k)
        p = _block_weights(heads.grouped(rows), _seen(k, b), part, own, b.last, heads)
        p = F.dropout(p, own.dropout, key=own.key)
        y = _weighted(heads.grouped(p), _seen(v, b), rule)
        parts.append(heads.apart(y))
    return parts[0] if len(parts) == 1 else F.concatenate(parts, axis=-2)


def _block_rule(rule: AttentionRule, b: QueryBlock, blocks: list[QueryBlock]) -> AttentionRule:
    """With the key by which a block of queries draws."""
    if rule.key is None or len(blocks) == 1:
        return rule
    return replace(rule, key=F.fold_in(rule.key, b.start))


def _weighted(p: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
    """The sum of values by weights. With dropout weights are rounded to values of 16 bits, and so
    are the cotangents of scores: all matmuls are on tensor cores."""
    if rule.dropout and v.dtype.bits == 16:
        return matmul_compute(convert(p, v.type), v, rule.accum)
    return matmul_compute(p, widened(v), rule.accum)


def gradients_in_blocks(g: Tensor, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule,
                        mask: Tensor | None = None) -> tuple[Tensor, ...]:
    """The cotangents of q, k and v, from that of the result, in the wide type; of a mask of floats
    too, at the end.

    p = softmax(scale q k' + mask), dv = drop(p)' g, dp = drop(g v'), ds = scale dmask,
    dmask = p (dp - sum_t p_t dp_t), dq = ds k, dk = ds' q; drop draws the same both times.
    """
    T = k.shape[-2]
    blocks = list(query_blocks(q.shape[-2], T, rule.causal))
    queries, keys, values, masks = [], list[Tensor](), list[Tensor](), list[Tensor]()
    for b, rows, cotangent in zip(blocks, _rows(q, blocks), _rows(g, blocks), strict=True):
        heads = _Heads.of(rows, k)
        own_q, own_g, own_k = heads.grouped(rows), heads.grouped(cotangent), _seen(k, b)
        part, own = _mask_rows(mask, b, len(blocks)), _block_rule(rule, b, blocks)
        p = _block_weights(own_q, own_k, part, own, b.last, heads)  # [..., S, T]
        dp = heads.scores(stored_product(own_g, _mT(_seen(v, b)), rule.accum))
        dp = F.dropout(dp, own.dropout, key=own.key)
        dm = p * (dp - row_sum(dp * p))
        if mask is not None and mask.dtype.kind == "float":
            whole = _from_seen(_mT(F.reshape(dm, (*heads.heads, *dm.shape[-2:]))), T)
            masks.append(_mT(whole))
        ds = heads.grouped(dm * rule.scale)
        queries.append(heads.apart(stored_product(ds, own_k, rule.accum)))
        keys.append(_from_seen(stored_product(_mT(ds), own_q, rule.accum), T))
        kept = heads.grouped(F.dropout(p, own.dropout, key=own.key))
        values.append(_from_seen(stored_product(_mT(kept), own_g, rule.accum), T))
    dq = queries[0] if len(blocks) == 1 else F.concatenate(queries, axis=-2)
    made = dq, sum(keys[1:], start=keys[0]), sum(values[1:], start=values[0])
    if not masks:
        return made
    dm = masks[0] if len(blocks) == 1 else F.concatenate(masks, axis=-2)
    return *made, unbroadcast(dm, tuple(mask.shape))  # type: ignore[union-attr]


def _mT(x: Tensor) -> Tensor:
    return F.swapaxes(x, -1, -2)


def _from_seen(x: Tensor, T: Any) -> Tensor:
    """Cotangents of the keys that a block saw as those of all keys."""
    seen = x.shape[-2]
    return x if seen == T else F.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, T - seen), (0, 0)])


@dataclass(frozen=True)
class _Heads:
    """A block of queries [*heads, S, D] whose groups of heads read one head of keys.

    lead: the axes of its scores before S and T: those of keys, and the heads of a group if grouped
    """

    heads: tuple
    lead: tuple
    keys: tuple
    S: Any

    @staticmethod
    def of(q: Tensor, k: Tensor) -> _Heads:
        heads, keys, S = tuple(q.shape[:-2]), tuple(k.shape[:-2]), q.shape[-2]
        groups: Any = divide(q.shape[1], k.shape[1]) if q.ndim == 4 else 1
        return _Heads(heads, heads if groups == 1 else (*keys, groups), keys, S)

    def grouped(self, x: Tensor) -> Tensor:
        """x, of queries or scores, as [*keys, rows, ...]: the queries of a group are further rows
        of one product."""
        if self.lead == self.heads:
            return x
        return F.reshape(x, (*self.keys, self.lead[-1] * self.S, x.shape[-1]))

    def scores(self, x: Tensor) -> Tensor:
        """[*keys, rows, T] as [*lead, S, T]"""
        return F.reshape(x, (*self.lead, self.S, x.shape[-1]))

    def apart(self, x: Tensor) -> Tensor:
        """[*keys, rows, E] as [*heads, S, E]"""
        return F.reshape(x, (*self.heads, self.S, x.shape[-1]))

    def mask(self, mask: Tensor) -> Tensor:
        """[B, H or 1, S, T] as [B, Hk, G, S, T]"""
        if self.lead == self.heads:
            return mask
        B, H, S, T = mask.shape
        return F.reshape(mask, (B, 1, 1, S, T) if H == 1 else (B, *self.lead[1:], S, T))


def _block_weights(q: Tensor, k: Tensor, mask: Tensor | None, rule: AttentionRule, last: Any,
                   heads: _Heads) -> Tensor:
    """Softmax of the scaled and masked scores: one chain of elementwise ops and row reductions."""
    s = matmul_compute(q, _mT(k), rule.accum)
    if rule.dropout and q.dtype.bits == 16:
        s = apply(ROUND_COTANGENT, s, to=q.type)
    s = heads.scores(s) * rule.scale
    mask = None if mask is None else heads.mask(mask)
    if mask is not None and mask.dtype.kind == "float":
        s, mask = s + mask, None
        safe = True
    else:
        safe = mask is not None
    if rule.causal:
        seen = _causal(s.shape[-2], s.shape[-1], last)
        mask = seen if mask is None else F.logical_and(mask, seen)
        safe = True
    if mask is not None:
        s = where(mask, s, literal(-math.inf, s))
    return softmax_compute(s, s.ndim - 1, safe, rule.accum)


def _causal(S: Any, T: Any, last: Any) -> Tensor:
    """Whether query i sees key j: j <= i + last.   [S, T] bool_"""
    rows = F.arange(S, dtype="int32") + last
    return F.less_equal(F.arange(T, dtype="int32"), F.expand_dims(rows, -1))


__all__ = ["BLOCK_ROWS", "AttentionRule", "gradients_in_blocks", "in_blocks", "query_blocks"]
