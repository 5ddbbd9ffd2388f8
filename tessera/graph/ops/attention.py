"""Attention: softmax(scale q k' + mask) v, with grouped heads, and rows that may see nothing."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from ... import wide_arrays
from ...dims import divide, show_shape
from ...errors import ArgumentError, DTypeError, ShapeError
from ...numerics import NumericType, result_type
from ...tensor import Tensor, as_tensor
from .. import functions as F
from ..operand import compute_type, convert, public, store, to_compute
from ..trace import apply
from .attention_op import ATTENTION, ATTENTION_LSE, DROPOUT_ATTENTION
from .broadcasting import broadcast_shapes
from .cached_attention import CACHED_ATTENTION, PAGED_ATTENTION
from .contract import matmul_type, operand_as
from .random import next_key
from .reduce import accumulate_dtype
from .score_function import ScoreFunction
from .segment_spans import SEGMENT_SPANS

# What stands for keys and values in flash_attention(q, cache): type -> attend(q, cache, causal=,
# scale=, mask=, dropout=, key=, window=, soft_cap=). Filled by state.
HELD: dict[type, Callable[..., Tensor]] = {}


@public
def attention(q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None,
              mask: Any = None, dropout: float = 0.0, key: Any = None, window: int | None = None,
              soft_cap: float | None = None, segments: Any = None, lengths: Any = None,
              score: Callable | None = None, return_lse: bool = False) -> Any:
    """y = softmax(scale q k' + mask) v, softmax along the keys.

    q: [B, H, S, D]   k: [B, Hk, T, D]   v: [B, Hk, T, Dv]   y: [B, H, S, Dv] of the operands'
    common type. Or 3-D, [N, S, D], [N, T, D], [N, T, Dv]; or 2-D without N.
    H is a multiple of Hk: query head h reads key head h // (H / Hk).
    scale    1 / sqrt(D) when None
    causal   query i sees the keys up to i + T - S: the last query sees every key
    mask     broadcasts to [B, H, S, T]: bool_ (true: seen), or floats added to the scores
    dropout  probability with which a weight is zeroed (the others are divided by 1 - p)
    window   query i sees the keys that are fewer than `window` from i + T - S; causal: the last
             `window` up to its own
    soft_cap c: scores s = scale q k' become c tanh(s / c), in front of masks
    score    f(s, b, h, i, j) makes another of each score s, behind a cap and in front of masks,
             from the numbers of its sequence, head of queries, query (so that its own key is i) and
             key: elementwise functions of them, `lambda s, b, h, i, j: s - 0.1 * (i - j)`
    segments [B, S] or [S] integers, where S = T: a query sees the keys of its own run of equal
             numbers, as of documents that lie one behind another
    lengths  [B] integers, or one: only the first lengths[b] keys are seen
    return_lse  (y, lse) in place of y: lse [B, H, S] is log sum_j exp(s_j) over the scores s that a
             query sees, in the accumulate type; -inf of one that sees none. It has a derivative,
             and attentions over parts of the keys add up by it: with l = logaddexp(l1, l2) the
             whole is exp(l1 - l) y1 + exp(l2 - l) y2. Not beside dropout
    On a GPU blocks of keys that no query sees by causal, window, segments or lengths are left out.
    A query that sees no key gives 0. Computes in the accumulate type and rounds once, at the end;
    with dropout of types of 16 bits, weights too are rounded to the type of the values.
    On a GPU no scores lie in memory; else more than 512 queries go in blocks of 512, and the scores
    take [B, H, 512, T].
    Raises ShapeError, DTypeError.
    """
    if held := next((x for x in (k, v) if type(x) in HELD), None):
        raise ArgumentError(f"attention takes keys and values, got a {type(held).__name__}",
                            hint="ts.flash_attention(q, cache); or cache.K and cache.V")
    a, b, c, numeric = _operands(q, k, v)
    _check_operands(a, b, c)
    scale = 1.0 / math.sqrt(a.shape[-1]) if scale is None else float(scale)
    accum = accumulate_dtype(numeric)
    hidden = None if mask is None else _mask_operand(mask, a, b)
    attrs: dict[str, Any] = {"scale": scale, "causal": bool(causal), "accum": accum,
                             **_score_rule(window, soft_cap)}
    if score is not None:
        attrs["score"] = ScoreFunction(score)
    spans = None if segments is None and lengths is None else key_spans(a, b, segments, lengths)
    xs = [a, b, c, *(x for x in (hidden, spans) if x is not None)]
    if return_lse:
        if dropout:
            raise ArgumentError("return_lse beside dropout", hint="the sums are those of all "
                                "weights, and would add up parts that have dropped some")
        y, lse = apply(ATTENTION_LSE, *xs, **attrs)
        return store(y, numeric), lse
    if not dropout:
        return store(apply(ATTENTION, *xs, **attrs), numeric)
    if not 0 < dropout < 1:
        raise ArgumentError(f"dropout needs 0 <= p < 1, got {dropout}")
    own = next_key() if key is None else as_tensor(key)
    return store(apply(DROPOUT_ATTENTION, *xs, own, **attrs, dropout=float(dropout)), numeric)


def _score_rule(window: Any, soft_cap: Any) -> dict[str, Any]:
    """The attributes that are not those of plain attention."""
    found: dict[str, Any] = {}
    if window is not None:
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ArgumentError(f"window={window!r} is no number of keys",
                                hint="1 or more: 1 is the query's own key alone; None: all")
        found["window"] = window
    if soft_cap is not None:
        if not 0 < float(soft_cap) < math.inf:
            raise ArgumentError(f"soft_cap={soft_cap!r}", hint="a positive number; None: no cap")
        found["cap"] = float(soft_cap)
    return found


def key_spans(q: Tensor, k: Tensor, segments: Any, lengths: Any) -> Tensor:
    """The first key that each query sees by its segment and the sequence's length, and the first
    behind it, int32.   [B, 1, 2, S], or [N, 2, S], [2, S], as many axes as q; 1 in place of B or N
    where they are the same for all."""
    S, T = q.shape[-2], k.shape[-2]
    lead = tuple(q.shape[:1]) if q.ndim > 2 else ()
    made: Any = None
    if segments is not None:
        ids = as_tensor(segments)
        _check_rows(ids, "segments", (S,), lead)
        if S != T:
            raise ShapeError(f"segments of {S} queries and {T} keys", hint="they number the "
                             "places of one sequence: S = T; a mask says more")
        made = apply(SEGMENT_SPANS, F.reshape(ids, (-1, S)))
    if lengths is not None:
        most = as_tensor(lengths)
        _check_rows(most, "lengths", (), lead)
        end = F.cast(F.clip(F.reshape(most, (-1, 1)), 0, T), "int32")
        if made is None:
            whole = F.minimum(F.full((1, S), T, "int32"), end)
            made = F.stack([F.minimum(F.zeros((1, S), "int32"), whole), whole], axis=1)
        else:
            made = F.minimum(made, end[:, None])
    return F.reshape(made, (*made.shape[:1], 1, 2, S) if q.ndim == 4 else made.shape if lead else (
        2, S))


def _check_rows(x: Tensor, name: str, own: tuple[Any, ...], lead: tuple[Any, ...]) -> None:
    if x.dtype.kind not in ("int", "uint"):
        raise DTypeError(f"{name} are integers, got {x.type}")
    if tuple(x.shape) not in (own, (*lead, *own)):
        raise ShapeError(f"{name} {show_shape(x.shape)} of queries with leading axis "
                         f"{show_shape(lead)}", hint=f"{show_shape((*lead, *own))}, one for each, "
                         f"or {show_shape(own)} for all")


def attention_of_first(q: Any, k: Any, v: Any, count: Tensor, *, causal: bool = False,
                       scale: float | None = None, window: int | None = None,
                       soft_cap: float | None = None) -> Tensor:
    """`attention` over the first `count` of the keys, an int64: query i of S sees key j < count,
    where causal j <= count - S + i, and those of a window around count - S + i.

    q: [B, H, S, D]   k: [B, Hk, T, D]   v: [B, Hk, T, Dv]   y: [B, H, S, Dv]
    """
    a, b, c, numeric = _over_entries(q, k, v)
    _check_operands(a, b, c)
    scale = 1.0 / math.sqrt(a.shape[-1]) if scale is None else float(scale)
    y = apply(CACHED_ATTENTION, a, b, c, count, scale=scale, causal=bool(causal),
              accum=accumulate_dtype(numeric), **_score_rule(window, soft_cap))
    return store(y, numeric)


def attention_of_pages(q: Any, K: Tensor, V: Tensor, table: Tensor, count: Tensor, *,
                       causal: bool = False, scale: float | None = None,
                       window: int | None = None, soft_cap: float | None = None) -> Tensor:
    """`attention_of_first` of sequences whose keys and values lie in pages of P entries.

    q: [B, H, S, D]   K: [N, Hk, P, D]   V: [N, Hk, P, Dv]   table: [B, L] int32, the pages of each
    sequence   count: [B] int32, its entries   y: [B, H, S, Dv]
    """
    a, K, V, numeric = _over_entries(q, K, V)
    if a.ndim != 4 or a.shape[0] != table.shape[0] or a.shape[-1] != K.shape[-1] or (
            divide(a.shape[1], K.shape[1]) is None):
        raise ShapeError(f"queries {show_shape(a.shape)} over {table.shape[0]} sequences of "
                         f"{K.shape[1]} heads of {K.shape[-1]}", hint="[B, H, S, D], H a multiple")
    scale = 1.0 / math.sqrt(a.shape[-1]) if scale is None else float(scale)
    y = apply(PAGED_ATTENTION, a, K, V, table, count, scale=scale, causal=bool(causal),
              accum=accumulate_dtype(numeric), **_score_rule(window, soft_cap))
    return store(y, numeric)


def _over_entries(q: Any, K: Tensor, V: Tensor) -> tuple[Tensor, Tensor, Tensor, NumericType]:
    """As _operands, but entries of a cache stay as they are where they are of 8 bits and queries of
    16: all of them, used or not, would be made wider."""
    xs = as_tensor(q), K, V
    operand, numeric = _operand_type(xs)
    a = operand_as(xs[0], operand)
    if operand.dtype.bits == 16 and all(x.dtype.bits == 8 and x.scale is None for x in (K, V)):
        return a, K, V, numeric
    return a, operand_as(K, operand), operand_as(V, operand), numeric


def _operands(*given: Any) -> tuple[Tensor, Tensor, Tensor, NumericType]:
    """Queries, keys and values in one type, as they are stored where matmuls take them so, and the
    type of the result."""
    xs = tuple(as_tensor(x) for x in given)
    operand, numeric = _operand_type(xs)
    q, k, v = (operand_as(x, operand) for x in xs)
    return q, k, v, numeric


def _operand_type(xs: tuple[Tensor, ...]) -> tuple[NumericType, NumericType]:
    """In which queries, keys and values are multiplied, and that of the result."""
    numeric = functools.reduce(result_type, (x.type for x in xs))
    if numeric.dtype.kind != "float":
        raise DTypeError(f"attention needs floats, got {numeric}")
    if numeric.dtype.bits == 64 and wide_arrays.UNSTATED:
        wide_arrays.check_widening(xs)
    if any(x.scale is not None for x in xs):
        return compute_type(numeric), numeric
    return matmul_type(numeric, numeric)[0], numeric


def _check_operands(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = ", ".join(show_shape(x.shape) for x in (q, k, v))
    if not q.ndim == k.ndim == v.ndim or q.ndim not in (2, 3, 4):
        raise ShapeError(f"attention needs three tensors of 2, 3 or 4 axes, got {shapes}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ShapeError(f"keys and values differ in more than the last axis: {shapes}")
    if q.shape[-1] != k.shape[-1]:
        raise ShapeError(f"queries and keys differ in the last axis: {shapes}")
    if q.ndim == 4 and q.shape[0] != k.shape[0]:
        raise ShapeError(f"queries of {q.shape[0]} sequences and keys of {k.shape[0]}: {shapes}",
                         hint="[B, H, S, D] of each, with one B")
    if q.ndim == 4 and divide(q.shape[1], k.shape[1]) is None:
        raise ShapeError(f"the number of query heads must be a multiple of the key heads: {shapes}",
                         hint="heads are the second axis, [B, H, S, D]")
    if q.ndim == 3 and q.shape[0] != k.shape[0]:
        raise ShapeError(f"the leading axes differ: {shapes}",
                         hint="grouped heads need 4 axes, [B, H, S, D]")


def _mask_operand(mask: Any, q: Tensor, k: Tensor) -> Tensor:
    """bool_, or floats in the type of the scores; as many axes as q."""
    m = as_tensor(mask)
    want = (*q.shape[:-1], k.shape[-2])
    if m.dtype.kind not in ("bool", "float"):
        raise DTypeError(f"a mask holds bools (seen) or floats (added), got {m.type}")
    if m.ndim > q.ndim or broadcast_shapes(tuple(m.shape), want) != want:
        raise ShapeError(f"mask {show_shape(m.shape)} does not broadcast to {show_shape(want)}")
    m = m if m.dtype.kind == "bool" else convert(to_compute(m), compute_type(q.type))
    return F.reshape(m, (1,) * (q.ndim - m.ndim) + tuple(m.shape))


@public
def flash_attention(q: Any, k: Any, v: Any = None, *, causal: bool | None = None,
                    is_causal: bool | None = None, scale: float | None = None, mask: Any = None,
                    dropout: float = 0.0, key: Any = None, window: int | None = None,
                    soft_cap: float | None = None, segments: Any = None, lengths: Any = None,
                    score: Callable | None = None, return_lse: bool = False) -> Any:
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
        _score_rule(window, soft_cap)  # fails where they are no numbers
        if not (segments is None and lengths is None and score is None):
            raise ArgumentError("segments, lengths and score over a cache",
                                hint="a cache knows its own length, and holds one sequence of each "
                                "row; ts.attention(q, cache.K, cache.V) takes them")
        if return_lse:
            raise ArgumentError("return_lse over a cache",
                                hint="ts.attention(q, cache.K, cache.V, return_lse=True)")
        return HELD[type(k)](q, k, causal=chosen, scale=scale, mask=mask, dropout=dropout, key=key,
                             window=window, soft_cap=soft_cap)
    if v is None:
        raise ArgumentError(
            f"flash_attention takes queries, keys and values, got queries and a "
            f"{type(k).__name__}", hint="flash_attention(q, k, v), three tensors "
            "[B, H, S, D]; or a KVCache for both")
    return attention(q, k, v, causal=chosen, scale=scale, mask=mask, dropout=dropout, key=key,
                     window=window, soft_cap=soft_cap, segments=segments, lengths=lengths,
                     score=score, return_lse=return_lse)
