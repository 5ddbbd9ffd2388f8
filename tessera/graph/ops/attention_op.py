"""Attention as one op, and its gradient as another: a GPU has kernels that keep no scores.

The operands are q, k, v, a mask if there is one, and a key if weights are dropped. A mask has as
many axes as the queries, each of its extent or 1: bools (seen), or floats in the type of the
scores, which are added to them and have a cotangent. What is dropped is a function of the key and
of a weight's place, so the gradient makes the same draws again, and nobody stores them.

Without a kernel they are compositions (attention_blocks.py). Those of the gradient begin with the
same ops as those of the result, and where both are in one graph these run once.

Attention that drops weights has records of its own, made as the others, since under vmap it is its
composition: rows of a batch draw apart, where rows of heads draw on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import numerics
from ...errors import ArgumentError
from ...numerics import DType, as_type
from ...tensor import Tensor, as_tensor
from .. import functions as F
from ..op import OPS, Arg, Aval, GraphOp, Sample
from ..operand import as_stored
from ..trace import apply
from .attention_blocks import (
    AttentionRule,
    Extras,
    QueryBlock,
    gradients_in_blocks,
    in_blocks,
    query_blocks,
)
from .contract import is_multiplied_as_stored, matmul_ref, wide_type, widened_array
from .score_function import with_slope
from .softmax import LOGSUMEXP, SOFTMAX

F32 = as_type("f32").dtype
ONE = np.ones((), np.float32)


# --- types ------------------------------------------------------------------------------------
def _wide(x: Aval) -> Any:
    return wide_type(x.dtype) if is_multiplied_as_stored(x.dtype) else x.type


def _shape(q: Aval, k: Aval, v: Aval, *rest: Aval, **attrs: Any) -> Aval:
    return Aval((*q.shape[:-1], v.shape[-1]), _wide(q))


def _lse_shape(*xs: Aval, **attrs: Any) -> tuple[Aval, Aval]:
    y = _shape(*xs, **attrs)
    return y, Aval(y.shape[:-1], y.type)


def _vjp_shape(g: Aval, q: Aval, k: Aval, v: Aval, *rest: Aval, dropout: float = 0.0, **attrs: Any
               ) -> tuple[Aval, ...]:
    mask = Extras.of(rest, dropout).mask
    made = tuple(Aval(x.shape, _wide(x)) for x in (q, k, v))
    return made if mask is None or mask.dtype.kind == "bool" else (*made, mask)


# --- meaning ----------------------------------------------------------------------------------
def _scores_ref(q: np.ndarray, k: np.ndarray, extras: Extras, x: QueryBlock, rule: AttentionRule
                ) -> tuple[np.ndarray, np.ndarray, bool]:
    """Of one block, [..., S, T], the slope of a cap, and whether a query may see no key; heads of
    keys are repeated already."""
    s, slope = matmul_ref(q, k.swapaxes(-1, -2), rule.accum) * q.dtype.type(rule.scale), ONE
    mask, spans = extras.mask, extras.spans
    if rule.cap:
        t = np.tanh(s / q.dtype.type(rule.cap))
        s, slope = t * q.dtype.type(rule.cap), 1 - t * t
    if rule.score is not None:
        found = with_slope(rule.score.fn, as_tensor(s), *map(as_tensor, _places_ref(s.shape, x)))
        s, slope = found[0].numpy(), found[1].numpy() * slope
    if mask is not None:
        s = np.where(mask, s, -np.inf).astype(s.dtype) if mask.dtype == bool else s + mask
    rows, columns = np.arange(s.shape[-2])[:, None], np.arange(s.shape[-1]) + x.first
    if rule.reach is not None:
        s = np.where(columns <= rows + (x.last + rule.reach), s, -np.inf).astype(s.dtype)
    if rule.window:
        s = np.where(columns > rows + (x.last - rule.window), s, -np.inf).astype(s.dtype)
    if spans is not None:
        first, end = spans[..., 0, :, None], spans[..., 1, :, None]
        s = np.where((first <= columns) & (columns < end), s, -np.inf).astype(s.dtype)
    safe = not rule.nan and (rule.reach is not None or any(
        x is not None for x in (mask, spans, rule.score)))
    return s, slope, safe


def _softmax_ref(s: np.ndarray, safe: bool, accum: DType) -> np.ndarray:
    return s if s.shape[-1] == 0 else SOFTMAX.ref(s, axis=s.ndim - 1, safe=safe, accum=accum)


def _logs_ref(s: np.ndarray, accum: DType) -> np.ndarray:
    """The log of the sum of exp of each row, [..., S]; -inf of one that sees no key."""
    if s.shape[-1] == 0:
        return np.full(s.shape[:-1], -np.inf, s.dtype)
    return LOGSUMEXP.ref(s, axis=(s.ndim - 1,), keepdims=False, accum=accum)


def _places_ref(shape: tuple[int, ...], x: QueryBlock) -> tuple[np.ndarray, ...]:
    """Numbers of the sequence, the head, the query and the key of scores [B, H, S, T], [N, S, T] or
    [S, T], as their axes lie."""
    lead = (1, 1, *shape[:-2])[-2:]
    return (np.arange(lead[0], dtype=np.int32).reshape(-1, 1, 1, 1)[(0,) * (len(shape) < 4)],
            np.arange(lead[1], dtype=np.int32).reshape(-1, 1, 1)[(0,) * (len(shape) < 3)],
            np.arange(shape[-2], dtype=np.int32)[:, None] + np.int32(x.last),
            np.arange(shape[-1], dtype=np.int32) + np.int32(x.first))


def _kept_ref(key: np.ndarray | None, shape: tuple[int, ...], x: QueryBlock, blocks: int,
              dropout: float) -> np.ndarray | None:
    """Whether each weight of a block of queries is kept; None where all are."""
    if key is None:
        return None
    own = key if blocks == 1 else numerics.fold_in(key, x.start)
    return numerics.uniform(own, int(np.prod(shape))).reshape(shape) >= np.float32(dropout)


def _dropped(x: np.ndarray, keep: np.ndarray | None, dropout: float) -> np.ndarray:
    grown = x.dtype.type(1 / (1 - dropout))
    return x if keep is None else np.where(keep, x * grown, x.dtype.type(0))


def _repeated_heads(x: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Heads of keys or values, one for each head of queries, wide."""
    x = widened_array(x)
    return np.repeat(x, q.shape[1] // x.shape[1], 1) if q.ndim == 4 else x


def _summed_heads(x: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Cotangents of repeated heads, added up."""
    if x.shape == like.shape:
        return x
    B, H, T, D = x.shape
    return x.reshape(B, like.shape[1], H // like.shape[1], T, D).sum(2)


def _ref(*xs: np.ndarray, **attrs: Any) -> np.ndarray:
    return _attended(*xs, rule=AttentionRule(**attrs))


def _lse_ref(*xs: np.ndarray, **attrs: Any) -> tuple[np.ndarray, np.ndarray]:
    logs = np.empty(xs[0].shape[:-1], widened_array(xs[0]).dtype)
    return _attended(*xs, rule=AttentionRule(**attrs), logs=logs), logs


def _attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, *rest: np.ndarray, rule: AttentionRule,
              logs: np.ndarray | None = None) -> np.ndarray:
    """The result. logs [..., S]: where the logs of sums are written, where they are wanted."""
    extras = Extras.of(rest, rule.dropout)
    a, b, c = widened_array(q), _repeated_heads(k, q), _repeated_heads(v, q)
    y = np.empty((*a.shape[:-1], c.shape[-1]), a.dtype)
    blocks = list(query_blocks(a.shape[-2], b.shape[-2], rule))
    for x in blocks:
        rows, seen = slice(x.start, x.stop), slice(x.first, x.seen)
        s, _, safe = _scores_ref(a[..., rows, :], b[..., seen, :], extras.of_block(x, len(blocks)),
                                 x, rule)
        if logs is not None:
            logs[..., rows] = _logs_ref(s, rule.accum)
        p = _softmax_ref(s, safe, rule.accum)
        p = _dropped(p, _kept_ref(extras.key, p.shape, x, len(blocks), rule.dropout), rule.dropout)
        if rule.dropout and v.dtype.itemsize == 2:
            p = p.astype(v.dtype).astype(p.dtype)
        y[..., rows, :] = matmul_ref(p, c[..., seen, :], rule.accum)
    return y


def _vjp_ref(g: np.ndarray, *xs: np.ndarray, **attrs: Any) -> tuple[np.ndarray, ...]:
    return _lse_vjp_ref(g, None, *xs, **attrs)


def _lse_vjp_ref(g: np.ndarray, h: np.ndarray | None, q: np.ndarray, k: np.ndarray, v: np.ndarray,
                 *rest: np.ndarray, **attrs: Any) -> tuple[np.ndarray, ...]:
    """h: the cotangent of the logs of sums, None without."""
    rule = AttentionRule(**attrs)
    extras, accum, dropout = Extras.of(rest, rule.dropout), rule.accum, rule.dropout
    a, b, c, g = widened_array(q), _repeated_heads(k, q), _repeated_heads(v, q), widened_array(g)
    dq, dk, dv = np.zeros_like(a), np.zeros_like(b), np.zeros_like(c)
    mask = extras.mask
    added = mask is not None and mask.dtype != bool
    dm = np.zeros((*a.shape[:-1], b.shape[-2]) if added else 0, a.dtype)
    blocks = list(query_blocks(a.shape[-2], b.shape[-2], rule))
    for x in blocks:
        rows, seen = slice(x.start, x.stop), slice(x.first, x.seen)
        own, cot, keys = a[..., rows, :], g[..., rows, :], b[..., seen, :]
        s, slope, safe = _scores_ref(own, keys, extras.of_block(x, len(blocks)), x, rule)
        p = _softmax_ref(s, safe, accum)
        keep = _kept_ref(extras.key, p.shape, x, len(blocks), dropout)
        dp = _dropped(matmul_ref(cot, c[..., seen, :].swapaxes(-1, -2), accum), keep, dropout)
        lower = np.sum(dp * p, -1, keepdims=True)
        part = p * (dp - (lower if h is None else lower - h[..., rows, None]))
        ds = part * slope * a.dtype.type(rule.scale)
        if added:
            dm[..., rows, seen] = part
        dq[..., rows, :] = matmul_ref(ds, keys, accum)
        dk[..., seen, :] += matmul_ref(ds.swapaxes(-1, -2), own, accum)
        dv[..., seen, :] += matmul_ref(_dropped(p, keep, dropout).swapaxes(-1, -2), cot, accum)
    made = dq, _summed_heads(dk, k), _summed_heads(dv, v)
    if not added:
        return made
    along = tuple(i for i, n in enumerate(mask.shape) if n != dm.shape[i])
    return *made, dm.sum(along, keepdims=True) if along else dm


# --- rules ------------------------------------------------------------------------------------
def _expand(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **attrs: Any) -> Tensor:
    extras = Extras.of(rest, attrs.get("dropout", 0.0))
    return in_blocks(q, k, v, AttentionRule(**attrs, key=extras.key), extras)[0]


def _vjp_expand(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **attrs: Any
                ) -> tuple[Tensor, ...]:
    extras = Extras.of(rest, attrs.get("dropout", 0.0))
    return gradients_in_blocks(g, q, k, v, AttentionRule(**attrs, key=extras.key), extras)


def _lse_expand(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **attrs: Any
                ) -> tuple[Tensor, ...]:
    return in_blocks(q, k, v, AttentionRule(**attrs), Extras.of(rest, 0.0), sums=True)


def _lse_vjp_expand(g: Tensor, h: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor,
                    **attrs: Any) -> tuple[Tensor, ...]:
    return gradients_in_blocks(g, q, k, v, AttentionRule(**attrs), Extras.of(rest, 0.0), h)


def _axes(operands: str, results: str) -> Any:
    """Sequences and heads may be split, queries and keys are needed whole. operands, results: a
    letter of `qkv` for what lies as these, `s` for a number of each query; behind operands there
    may be a mask and spans. An axis is
    whole where its cotangent is a sum along it, of one head of keys or of one mask for all."""
    def rule(*xs: Aval, **attrs: Any) -> str:
        q, k = xs[operands.index("q")], xs[operands.index("k")]
        added = [x for x in xs[len(operands):] if x.dtype.kind == "float"]
        lead = "".join("_" if any(x.shape[i] == 1 != q.shape[i] for x in (k, *added)) else letter
                       for i, letter in enumerate("bh"[4 - len(q.shape):]))

        def letters(x: Aval) -> str:
            return "".join("1" if n == 1 != whole and letter != "_" else letter
                           for letter, n, whole in zip(lead, x.shape, q.shape, strict=False)
                           ) + "_" * (len(x.shape) - len(lead))

        rows = Aval(q.shape[:-1], q.type)
        made = [rows if x == "s" else xs[operands.index(x)] for x in results]
        made += added if results == "qkv" else []
        return f"{','.join(map(letters, xs))}->{','.join(map(letters, made))}"

    return rule


def _stored_cotangent(g: Tensor, q: Tensor) -> tuple[Tensor, float]:
    """(z, factor), the cotangent as it is stored where it was rounded to the type of the
    operands."""
    z, factor = as_stored(g)
    return (z, factor) if z.dtype is q.dtype else (g, 1.0)


def _vjp(op: str) -> Any:
    def rule(g: Tensor, y: Tensor, *xs: Tensor, **attrs: Any) -> tuple:
        z, factor = _stored_cotangent(g, xs[0])
        made = apply(OPS[op], z, *xs, **attrs)
        made = made if factor == 1.0 else tuple(x * factor for x in made)
        return (*made, *(None,) * (len(xs) - len(made)))

    return rule


def _lse_vjp(g: tuple[Tensor | None, ...], y: tuple[Tensor, ...], *xs: Tensor, **attrs: Any
             ) -> tuple:
    of_result, of_sums = g
    if of_sums is None:
        assert of_result is not None and ATTENTION.vjp is not None
        return ATTENTION.vjp(of_result, y[0], *xs, **attrs)
    z = F.zeros(y[0].shape, xs[0].type)
    if of_result is not None:
        stored, factor = _stored_cotangent(of_result, xs[0])
        z = stored if factor == 1.0 else of_result
    made = apply(ATTENTION_LSE_VJP, z, of_sums, *xs, **attrs)
    return (*made, *(None,) * (len(xs) - len(made)))


def _batch(op: str, values: int) -> Any:
    """A batch is heads of sequences that have none, or further sequences; a mask and spans of all
    sequences are one of each then. values: the position of v, behind which there may be these."""
    def rule(size: Any, batched: tuple, *xs: Tensor, **attrs: Any) -> tuple:
        if "score" in attrs and attrs["score"].reads_sequence:
            raise ArgumentError("a score function that reads its sequence's number, under vmap",
                                hint="those of a batch would be numbered through")
        full = [x if b else F.broadcast_to(x, (size, *x.shape))
                for x, b in zip(xs, batched, strict=True)]
        if full[0].ndim <= 4:
            return apply(OPS[op], *full, **attrs), True
        count, mask = full[0].shape[1], Extras.of(tuple(full[values + 1:]), 0.0).mask
        full[values + 1:] = [F.broadcast_to(x, (size, count, *x.shape[2:]))
                             for x in full[values + 1:]]
        made = apply(OPS[op], *(F.reshape(x, (size * count, *x.shape[2:])) for x in full), **attrs)
        outs = [F.reshape(y, (size, count, *y.shape[1:]))
                for y in (made if isinstance(made, tuple) else (made,))]
        if len(outs) == 4 and mask is not None and mask.shape[1] == 1:
            outs[3] = F.sum(outs[3], axis=1, keepdims=True)
        return tuple(outs) if isinstance(made, tuple) else outs[0], True

    return rule


# --- records ----------------------------------------------------------------------------------
# leading axes of queries and of keys, numbers of queries and keys, mask, causal, other attributes
PLAIN_SAMPLES: tuple[tuple[Any, ...], ...] = (
    ((2,), (2,), 3, 4, None, False), ((2,), (2,), 3, 3, None, True),
    ((1, 4), (1, 2), 2, 3, None, True))
SCORED_SAMPLES: tuple[tuple[Any, ...], ...] = (
    ((2,), (2,), 3, 4, None, False, {"window": 2}),
    ((1, 2), (1, 2), 4, 4, None, True, {"window": 2}),
    ((1, 4), (1, 2), 2, 3, None, True, {"cap": 0.8}))
MASKED_SAMPLES: tuple[tuple[Any, ...], ...] = (
    ((2,), (2,), 3, 4, Arg((1, 3, 4)), False), ((1, 4), (1, 2), 2, 3, Arg((1, 4, 2, 3)), True,
                                                      {"window": 1, "cap": 2.0}),
    ((1, 2), (1, 2), 3, 4, Arg((1, 1, 1, 4), "bool", False), False))


def _samples(cases: tuple[tuple[Any, ...], ...], dropout: float, backward: bool,
             sums: bool = False) -> tuple[Sample, ...]:
    """backward: with the result's cotangent in front, and that of sums behind it."""
    made = []
    for lead, keys, S, T, mask, causal, *rest in cases:
        args = [Arg(s) for s in ([(*lead, S, 3)] * backward + [(*lead, S)] * sums + [
            (*lead, S, 2), (*keys, T, 2), (*keys, T, 3)])]
        args += [mask] * (mask is not None) + [Arg((2,), "key", False)] * bool(dropout)
        attrs = {"scale": 0.7, "causal": causal, "accum": F32}
        attrs |= {"dropout": dropout} if dropout else {}
        made.append(Sample(tuple(args), attrs | (rest[0] if rest else {})))
    return tuple(made)


def _records(name: str, cases: tuple[tuple[Any, ...], ...], formula: str, *, batch: bool = True,
             dropout: float = 0.0) -> tuple[GraphOp, GraphOp]:
    """An op and its gradient. dropout: of its samples."""
    gradient = f"{name}_vjp"
    common: dict[str, Any] = {"hint": "scores beyond the range of the type"}
    forward = GraphOp(
        name, shape=_shape, ref=_ref, vjp=_vjp(gradient), expand=_expand,
        axes=None if dropout else _axes("qkv", "q"),
        batch=_batch(name, 2) if batch else None, drops=(3,), drops_inf=(0, 1),
        samples=_samples(cases, dropout, False), doc=formula, **common)
    backward = GraphOp(
        gradient, shape=_vjp_shape, ref=_vjp_ref, expand=_vjp_expand, multi=True,
        axes=None if dropout else _axes("gqkv", "qkv"),
        batch=_batch(gradient, 3) if batch else None, drops=(4,), drops_inf=(1, 2),
        samples=_samples(cases, dropout, True),
        doc=f"cotangents of q, k, v and a mask of floats, from that of {name}'s result", **common)
    return forward, backward


ATTENTION, ATTENTION_VJP = _records(
    "attention", (*PLAIN_SAMPLES, *SCORED_SAMPLES, *MASKED_SAMPLES),
    "softmax(cap(scale q k') + mask) v, a head of keys for a group of heads; 0 where no key "
    "is seen")
DROPOUT_ATTENTION, DROPOUT_ATTENTION_VJP = _records(
    "dropout_attention", (PLAIN_SAMPLES[0], *MASKED_SAMPLES[1:]),
    "dropout(softmax(cap(scale q k') + mask)) v, its draws by a key and a weight's place",
    batch=False, dropout=0.3)

LSE_CASES = (*PLAIN_SAMPLES[1:], *SCORED_SAMPLES[1:], *MASKED_SAMPLES)
ATTENTION_LSE = GraphOp(
    "attention_lse", shape=_lse_shape, ref=_lse_ref, vjp=_lse_vjp, expand=_lse_expand, multi=True,
    axes=_axes("qkv", "qs"), batch=_batch("attention_lse", 2), drops=(3,), drops_inf=(0, 1),
    samples=_samples(LSE_CASES, 0.0, False), hint="scores beyond the range of the type",
    doc="attention, and log sum_j exp(s_j) of each query's scores s; -inf where it sees no key")
ATTENTION_LSE_VJP = GraphOp(
    "attention_lse_vjp", shape=lambda g, h, *xs, **a: _vjp_shape(g, *xs, **a), ref=_lse_vjp_ref,
    expand=_lse_vjp_expand, multi=True, axes=_axes("gsqkv", "qkv"),
    batch=_batch("attention_lse_vjp", 4), drops=(5,), drops_inf=(2, 3),
    samples=_samples(LSE_CASES, 0.0, True, sums=True), hint="scores beyond the range of the type",
    doc="cotangents of q, k, v and a mask of floats, from those of attention_lse's results")

__all__ = ["ATTENTION", "ATTENTION_LSE", "ATTENTION_LSE_VJP", "ATTENTION_VJP",
           "DROPOUT_ATTENTION", "DROPOUT_ATTENTION_VJP"]
