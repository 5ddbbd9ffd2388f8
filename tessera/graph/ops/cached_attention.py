"""Attention over the entries of caches, whose numbers are data.

Ops of their own, because kernels of few queries then read no entry beyond these numbers, and those
in pages where they lie. Elsewhere they are attention with spans of keys: blocks of keys that no
query sees are left out there too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...tensor import Tensor
from .. import functions as F
from ..op import Arg, Aval, GraphOp, Sample
from ..operand import convert
from ..trace import apply
from .attention_op import ATTENTION, F32


def _shape(q: Aval, k: Aval, v: Aval, *rest: Aval, **attrs: Any) -> Aval:
    return ATTENTION.shape(q, k, v, **attrs)


def _visibility_mask(count: np.ndarray, S: int, T: int, causal: bool, window: int) -> np.ndarray:
    """Whether query i sees key j of the first `count`.   [..., 1, S, T]"""
    count = count[..., None, None, None]
    own, keys = count - S + np.arange(S)[:, None], np.arange(T)
    seen = np.broadcast_to(keys <= (own if causal else count - 1), (*count.shape[:-2], S, T))
    return seen & (abs(own - keys) < window) if window else seen


def _ref(q: np.ndarray, k: np.ndarray, v: np.ndarray, count: np.ndarray, *, causal: bool,
         window: int = 0, **attrs: Any) -> np.ndarray:
    seen = _visibility_mask(count.reshape(-1), q.shape[-2], k.shape[-2], causal, window)
    return ATTENTION.ref(q, k, v, seen, causal=False, **attrs)


def _paged_ref(q: np.ndarray, K: np.ndarray, V: np.ndarray, table: np.ndarray, count: np.ndarray,
               **attrs: Any) -> np.ndarray:
    def whole(pool: np.ndarray) -> np.ndarray:
        made = np.swapaxes(pool[table], 1, 2)  # [B, Hk, L, P, D]
        return made.reshape(*made.shape[:2], -1, pool.shape[-1])

    return _ref(q, whole(K), whole(V), count, **attrs)


def _spans(count: Tensor, S: Any, T: Any, causal: bool, window: int) -> Tensor:
    """The first key that each query sees and the first behind it.   [1 or B, 1, 2, S] int32"""
    count = F.reshape(count, (-1, 1))
    own = F.arange(S, dtype="int64") + (F.cast(count, "int64") - S)
    end = own + 1 if causal else F.broadcast_to(F.cast(count, "int64"), own.shape)
    end = F.minimum(end, own + window) if window and not causal else end
    end = F.clip(end, 0, T)
    first = F.clip(own - (window - 1), 0, end) if window else F.zeros(own.shape, "int64")
    return F.cast(F.expand_dims(F.stack([first, end], axis=1), 1), "int32")


def _expand(q: Tensor, k: Tensor, v: Tensor, count: Tensor, *, causal: bool, window: int = 0,
            **attrs: Any) -> Tensor:
    spans = _spans(count, q.shape[-2], k.shape[-2], causal, window)
    k, v = (convert(x, q.type) for x in (k, v))  # of 8 bits, which few queries read as they are
    return apply(ATTENTION, q, k, v, spans, causal=False, **attrs)


def gathered_pages(pool: Tensor, table: Tensor) -> Tensor:
    """[N, H, P, D] and [B, L] -> [B, H, L P, D]"""
    (B, L), (_, H, P, D) = table.shape, pool.shape
    picked = F.reshape(F.take(pool, F.reshape(table, (B * L,)), axis=0), (B, L, H, P, D))
    return F.reshape(F.swapaxes(picked, 1, 2), (B, H, L * P, D))


def _paged_expand(q: Tensor, K: Tensor, V: Tensor, table: Tensor, count: Tensor, **attrs: Any
                  ) -> Tensor:
    return _expand(q, gathered_pages(K, table), gathered_pages(V, table), count, **attrs)


def _sample(heads: int, S: int, causal: bool, **rule: Any) -> Sample:
    count = Arg((), "index:6", False)
    return Sample((Arg((2, heads, S, 2)), Arg((2, 2, 5, 2)), Arg((2, 2, 5, 3)), count),
                  {"scale": 0.7, "causal": causal, "accum": F32, **rule})


def _paged_sample(heads: int, S: int, causal: bool, **rule: Any) -> Sample:
    rows = Arg((3, 2), "index:4", False), Arg((3,), "index:7", False)
    return Sample((Arg((3, heads, S, 2)), Arg((4, 2, 3, 2)), Arg((4, 2, 3, 3)), *rows),
                  {"scale": 0.7, "causal": causal, "accum": F32, **rule})


CACHED_ATTENTION = GraphOp(
    "cached_attention", shape=_shape, ref=_ref, expand=_expand, drops=(1, 2), drops_inf=(0,),
    samples=(_sample(2, 1, True), _sample(4, 3, True), _sample(4, 2, False),
             _sample(4, 2, True, window=2, cap=0.8), _sample(2, 2, False, window=2)),
    hint="scores beyond the range of the type",
    doc="attention over the first `count` keys; causal: query i of S sees those up to "
        "count - S + i; window: those fewer than as many from it")

PAGED_ATTENTION = GraphOp(
    "paged_attention", shape=_shape, ref=_paged_ref, expand=_paged_expand, drops=(1, 2),
    drops_inf=(0,), samples=(_paged_sample(2, 1, True), _paged_sample(4, 3, True),
                             _paged_sample(4, 2, False, window=2, cap=0.8)),
    hint="scores beyond the range of the type",
    doc="cached_attention of sequences whose keys and values lie in pages of pools [N, H, P, D]: "
        "their pages are rows of a table [B, L], their counts [B]")

__all__ = ["CACHED_ATTENTION", "PAGED_ATTENTION", "gathered_pages"]
