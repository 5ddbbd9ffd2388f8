"""Attention as a composition: scores, weights and values, a block of queries at a time.

What the ops of attention mean, and what a target without a kernel for them runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from ...dims import divide
from ...lazy_dataclass import dataclass
from ...numerics import DType
from ...tensor import Tensor
from .. import functions as F
from ..operand import convert, literal
from ..trace import apply
from .broadcasting import unbroadcast
from .contract import matmul_compute, stored_product, widened
from .elementwise import where
from .round_cotangent import ROUND_COTANGENT
from .score_function import ScoreFunction, with_slope
from .softmax import LOGSUMEXP, row_sum, softmax_compute

BLOCK_ROWS = 512  # queries at a time when there are more: the scores are then [..., 512, T]


@dataclass(frozen=True)
class AttentionRule:
    """What is the same for every block of queries. window, cap, dropout: 0 without one; score,
    key: None.  together: all queries are one block, so that weights are dropped as by one draw for
    all of them.  nan: of a query that sees no key, as the softmax of its scores has it, in place
    of 0."""

    scale: float
    causal: bool
    accum: DType
    dropout: float = 0.0
    window: int = 0
    cap: float = 0.0
    score: ScoreFunction | None = None
    key: Any = None
    together: bool = False
    nan: bool = False

    @property
    def reach(self) -> int | None:
        """How far behind its own key a query sees at most; None: to the end."""
        return 0 if self.causal else self.window - 1 if self.window else None


class Extras(NamedTuple):
    """The operands behind queries, keys and values, None where one is not given.

    mask: bools (seen), or floats that are added.  spans [..., 2, S] int32: the first key that a
    query sees and the first behind it, neither falling from query to query.  key: of dropout
    """

    mask: Any = None
    spans: Any = None
    key: Any = None

    @staticmethod
    def of(rest: tuple, dropout: float) -> Extras:
        rest, key = (rest[:-1], rest[-1]) if dropout else (rest, None)
        spans = rest[-1] if rest and rest[-1].dtype.kind in ("int", "i") else None
        return Extras(rest[0] if len(rest) > (spans is not None) else None, spans, key)

    def of_block(self, b: QueryBlock, blocks: int) -> Extras:
        """What mask and spans say of a block of queries."""
        mask, spans = self.mask, self.spans
        if mask is not None and blocks > 1:
            mask = mask if mask.shape[-2] == 1 else mask[..., b.start:b.stop, :]
            mask = mask if mask.shape[-1] == 1 else mask[..., b.first:b.seen]
        if spans is not None and blocks > 1:
            spans = spans[..., b.start:b.stop]
        return Extras(mask, spans, self.key)


@dataclass(frozen=True)
class QueryBlock:
    """Queries [start:stop], which see keys [first:seen]; the first of them sees those up to
    `last` and what is within reach behind it."""

    start: int
    stop: Any
    first: int
    seen: Any
    last: Any


def query_blocks(S: Any, T: Any, rule: AttentionRule) -> Iterator[QueryBlock]:
    """All queries at once when they are few, else by blocks, each of which reads only the keys that
    it sees. What is dropped is drawn for all keys that a window hides."""
    if not isinstance(S, int) or not isinstance(T, int) or S <= BLOCK_ROWS or rule.together:
        yield QueryBlock(0, S, 0, T, T - S)
        return
    window = 0 if rule.dropout else rule.window
    for start in range(0, S, BLOCK_ROWS):
        stop, first, seen = min(S, start + BLOCK_ROWS), 0, T
        if window:
            first = max(0, start + T - S - (window - 1))
        if window or rule.causal:
            seen = max(min(T, stop + T - S + (rule.reach or 0)), first)
        yield QueryBlock(start, stop, first, seen, start + T - S)


def _rows(x: Tensor, blocks: list[QueryBlock]) -> list[Tensor]:
    if len(blocks) == 1:
        return [x]
    return list(F.split(x, [b.stop - b.start for b in blocks], axis=-2))


def _visible_keys(x: Tensor, b: QueryBlock) -> Tensor:
    return x if b.seen == x.shape[-2] and not b.first else x[..., b.first:b.seen, :]


def in_blocks(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, extras: Extras,
              sums: bool = False) -> tuple[Tensor, ...]:
    """softmax(capped(scale q k') + mask) v, in the wide type of the operands; with `sums` the
    log of the sum of exp of a query's scores too."""
    blocks = list(query_blocks(q.shape[-2], k.shape[-2], rule))
    parts, logs = list[Tensor](), list[Tensor]()
    for b, rows in zip(blocks, _rows(q, blocks), strict=True):
        part = extras.of_block(b, len(blocks))
        own = _block_rule(rule, b, blocks)
        heads = _Heads.of(rows, k)
        s, _, safe = _block_scores(heads.grouped(rows), _visible_keys(k, b), part, own, b, heads)
        p = F.dropout(_softmax(s, safe, rule), own.dropout, key=own.key)
        y = _weighted(heads.grouped(p), _visible_keys(v, b), rule)
        parts.append(heads.apart(y))
        if sums:
            logs.append(F.reshape(_row_logs(s, rule), rows.shape[:-1]))
    if len(blocks) == 1:
        return *parts, *logs
    return F.concatenate(parts, axis=-2), *(F.concatenate(x, axis=-1) for x in [logs] if x)


def _softmax(s: Tensor, safe: bool, rule: AttentionRule) -> Tensor:
    return softmax_compute(s, s.ndim - 1, safe, rule.accum)


def _row_logs(s: Tensor, rule: AttentionRule) -> Tensor:
    """-inf of a row that sees no key."""
    if s.shape[-1] == 0:
        return F.full(s.shape[:-1], -math.inf, s.type)
    return apply(LOGSUMEXP, s, axis=(s.ndim - 1,), keepdims=False, accum=rule.accum)


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
                        extras: Extras, of_sums: Tensor | None = None) -> tuple[Tensor, ...]:
    """The cotangents of q, k and v, from that of the result, in the wide type; of a mask of floats
    too, at the end. of_sums: the cotangent of the logs of sums, h, which is added to that of each
    score of a query by its weight.

    p = softmax(capped(scale q k') + mask), dv = drop(p)' g, dp = drop(g v'),
    dmask = p (dp - sum_t p_t dp_t + h), ds = scale slope dmask with the slope of the cap,
    dq = ds k, dk = ds' q; drop draws the same both times.
    """
    T, mask = k.shape[-2], extras.mask
    blocks = list(query_blocks(q.shape[-2], T, rule))
    queries, keys, values, masks = [], list[Tensor](), list[Tensor](), list[Tensor]()
    for b, rows, cotangent in zip(blocks, _rows(q, blocks), _rows(g, blocks), strict=True):
        heads = _Heads.of(rows, k)
        own_q, own_g, own_k = heads.grouped(rows), heads.grouped(cotangent), _visible_keys(k, b)
        part, own = extras.of_block(b, len(blocks)), _block_rule(rule, b, blocks)
        s, slope, safe = _block_scores(own_q, own_k, part, own, b, heads)
        p = _softmax(s, safe, rule)  # [..., S, T]
        dp = heads.scores(stored_product(own_g, _mT(_visible_keys(v, b)), rule.accum))
        dp = F.dropout(dp, own.dropout, key=own.key)
        lower = row_sum(dp * p)
        if of_sums is not None:
            own_h = of_sums if len(blocks) == 1 else of_sums[..., b.start:b.stop]
            lower = lower - F.reshape(own_h, lower.shape)
        dm = p * (dp - lower)
        if mask is not None and mask.dtype.kind == "float":
            whole = _from_seen(_mT(F.reshape(dm, (*heads.heads, *dm.shape[-2:]))), b, T)
            masks.append(_mT(whole))
        ds = heads.grouped((dm if slope is None else dm * slope) * rule.scale)
        queries.append(heads.apart(stored_product(ds, own_k, rule.accum)))
        keys.append(_from_seen(stored_product(_mT(ds), own_q, rule.accum), b, T))
        kept = heads.grouped(F.dropout(p, own.dropout, key=own.key))
        values.append(_from_seen(stored_product(_mT(kept), own_g, rule.accum), b, T))
    dq = queries[0] if len(blocks) == 1 else F.concatenate(queries, axis=-2)
    made = dq, sum(keys[1:], start=keys[0]), sum(values[1:], start=values[0])
    if not masks:
        return made
    dm = masks[0] if len(blocks) == 1 else F.concatenate(masks, axis=-2)
    return *made, unbroadcast(dm, tuple(mask.shape))


def _mT(x: Tensor) -> Tensor:
    return F.swapaxes(x, -1, -2)


def _from_seen(x: Tensor, b: QueryBlock, T: Any) -> Tensor:
    """Cotangents of the keys that a block saw as those of all keys."""
    if x.shape[-2] == T:
        return x
    return F.pad(x, [(0, 0)] * (x.ndim - 2) + [(b.first, T - b.seen), (0, 0)])


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


def _block_scores(q: Tensor, k: Tensor, extras: Extras, rule: AttentionRule, b: QueryBlock,
                  heads: _Heads) -> tuple[Tensor, Tensor | None, bool]:
    """Scaled, capped and masked scores, in front of their softmax one chain of elementwise ops and
    row reductions; the slope of the cap, None without one; whether a query may see no key."""
    s, slope = matmul_compute(q, _mT(k), rule.accum), None
    if rule.dropout and q.dtype.bits == 16:
        s = apply(ROUND_COTANGENT, s, to=q.type)
    s = heads.scores(s) * rule.scale
    if rule.cap:
        t = F.tanh(s * (1 / rule.cap))
        s, slope = t * rule.cap, 1 - t * t
    if rule.score is not None:
        s, own = with_slope(rule.score.fn, s, *_score_indices(s, b))
        slope = own if slope is None else own * slope
    mask, seen = extras.mask, _seen_by_place(s.shape[-2], s.shape[-1], rule, b)
    mask = None if mask is None else heads.mask(mask)
    some = rule.score is not None or extras.spans is not None
    safe = not rule.nan and (some or not (mask is None and seen is None))
    if mask is not None and mask.dtype.kind == "float":
        s, mask = s + mask, None
    if extras.spans is not None:
        seen = _combined_mask(seen, heads.mask(_inside(extras.spans, s.shape[-1], b)))
    mask = _combined_mask(mask, seen)
    if mask is not None:
        s = where(mask, s, literal(-math.inf, s))
    return s, slope, safe


def _score_indices(s: Tensor, b: QueryBlock) -> tuple[Tensor, ...]:
    """Numbers of the sequence, the head, the query and the key of scores [B, *H, S, T], [N, S, T]
    or [S, T], as their axes lie."""
    lead = tuple(s.shape[:-2])
    heads = lead[1:] if len(lead) > 1 else lead
    B, H = lead[0] if len(lead) > 1 else 1, prod(heads)
    return (F.reshape(F.arange(B, dtype="int32"), (B, *(1,) * (len(heads) + 2))),
            F.reshape(F.arange(H, dtype="int32"), (*heads, 1, 1)),
            F.expand_dims(F.arange(s.shape[-2], dtype="int32") + b.last, -1),
            F.arange(s.shape[-1], dtype="int32") + b.first)


def _combined_mask(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else F.logical_and(a, b)


def _seen_by_place(S: Any, T: Any, rule: AttentionRule, b: QueryBlock) -> Tensor | None:
    """Whether query i sees key j: j <= i + last + reach, and j > i + last - window where there is
    one. None: each does.   [S, T] bool_"""
    if rule.reach is None:
        return None
    rows = F.expand_dims(F.arange(S, dtype="int32") + (b.last + rule.reach), -1)
    keys = F.arange(T, dtype="int32") + b.first if b.first else F.arange(T, dtype="int32")
    seen = F.less_equal(keys, rows)
    if not rule.window:
        return seen
    return F.logical_and(seen, F.greater(keys, rows - (rule.window + rule.reach)))


def _inside(spans: Tensor, T: Any, b: QueryBlock) -> Tensor:
    """Whether keys lie in the spans of queries.   [..., 2, S] -> [..., S, T] bool_"""
    keys = F.arange(T, dtype="int32") + b.first
    first, end = F.expand_dims(spans[..., 0, :], -1), F.expand_dims(spans[..., 1, :], -1)
    return F.logical_and(F.less_equal(first, keys), F.less(keys, end))


__all__ = ["BLOCK_ROWS", "AttentionRule", "Extras", "QueryBlock", "gradients_in_blocks",
           "in_blocks", "query_blocks"]
