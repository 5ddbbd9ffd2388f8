"""Attention over the first entries of a cache, whose number is data.

An op of its own, because kernels of few queries then read no entry beyond that number. Elsewhere it
is attention with a mask.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...tensor import Tensor
from .. import functions as F
from ..op import Arg, Aval, GraphOp, Sample
from ..trace import apply
from .attention_op import ATTENTION, F32


def _shape(q: Aval, k: Aval, v: Aval, count: Aval, **attrs: Any) -> Aval:
    return ATTENTION.shape(q, k, v, **attrs)


def _ref(q: np.ndarray, k: np.ndarray, v: np.ndarray, count: np.ndarray, *, causal: bool,
         window: int = 0, **attrs: Any) -> np.ndarray:
    S, T = q.shape[-2], k.shape[-2]
    own, keys = count - S + np.arange(S)[:, None], np.arange(T)
    seen = np.broadcast_to(keys <= (own if causal else count - 1), (S, T))
    seen = seen & (abs(own - keys) < window) if window else seen
    return ATTENTION.ref(q, k, v, seen[None, None], causal=False, **attrs)


def _expand(q: Tensor, k: Tensor, v: Tensor, count: Tensor, *, causal: bool, window: int = 0,
            **attrs: Any) -> Tensor:
    """With a mask, [1, 1, S, T] or [1, 1, 1, T]."""
    S, T, keys = q.shape[-2], k.shape[-2], F.arange(k.shape[-2], dtype="int64")
    own = F.expand_dims(F.arange(S, dtype="int64") + (count - S), -1)
    seen = F.less_equal(keys, own if causal else count - 1)
    if window:
        near = F.less(F.abs(own - keys), window)
        seen = F.logical_and(near, seen)
    mask = F.reshape(seen, (1, 1, S if causal or window else 1, T))
    return apply(ATTENTION, q, k, v, mask, causal=False, **attrs)


def _sample(heads: int, S: int, causal: bool, **rule: Any) -> Sample:
    count = Arg((), "index:6", False)
    return Sample((Arg((2, heads, S, 2)), Arg((2, 2, 5, 2)), Arg((2, 2, 5, 3)), count),
                  {"scale": 0.7, "causal": causal, "accum": F32, **rule})


CACHED_ATTENTION = GraphOp(
    "cached_attention", shape=_shape, ref=_ref, expand=_expand, drops=(1, 2), drops_inf=(0,),
    samples=(_sample(2, 1, True), _sample(4, 3, True), _sample(4, 2, False),
             _sample(4, 2, True, window=2, cap=0.8), _sample(2, 2, False, window=2)),
    hint="scores beyond the range of the type",
    doc="attention over the first `count` keys; causal: query i of S sees those up to "
        "count - S + i; window: those fewer than as many from it")

__all__ = ["CACHED_ATTENTION"]
