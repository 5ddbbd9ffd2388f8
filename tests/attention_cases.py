"""Attention and its gradient in f64, for the tests of every target."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import tessera as ts
from tessera import numerics


def attention64(q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, causal: bool,
                mask: np.ndarray | None = None, factor: np.ndarray | float = 1.0,
              cap: float = 0.0) -> list:
    """The result and the cotangents of q, k and v. mask: bools (seen), or added to the scores; its
    cotangent comes last then. factor: of dropout, 0 or 1 / (1 - p) for each weight. cap: scores s
    are cap tanh(s / cap)."""
    keys, values = _to_heads(q, k, v)
    scale = 1 / math.sqrt(q.shape[-1])
    p = _weights(q, keys, causal, mask, cap)
    dp = g @ values.swapaxes(-1, -2) * factor
    ds = p * (dp - (dp * p).sum(-1, keepdims=True))
    t = np.tanh(q @ keys.swapaxes(-1, -2) * scale / cap) if cap else 0.0
    of_product = ds * (1 - np.square(t)) * scale
    out = [(p * factor) @ values, of_product @ keys,
           _over_groups(of_product.swapaxes(-1, -2) @ q, k),
           _over_groups((p * factor).swapaxes(-1, -2) @ g, k)]
    return out if mask is None or mask.dtype == bool else [*out, ds]


def sizes64(q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, causal: bool,
            mask: np.ndarray | None = None, factor: np.ndarray | float = 1.0) -> list:
    """The size of the terms behind each element of attention64: the root of the sum of their
    squares, for an error is relative to these where they cancel.

    A score's cotangent is p (dp - delta), two sums over D that are equal where a query sees one
    key; that of q sums those over the keys. An error of a score, relative to the largest of its
    row, is one of the weights, relative to them.
    """
    keys, values = _to_heads(q, k, v)
    scale = 1 / math.sqrt(q.shape[-1])
    p, factor = _weights(q, keys, causal, mask) ** 2, np.square(factor)
    s = np.sqrt(q**2 @ (keys**2).swapaxes(-1, -2)) * scale
    if mask is not None and mask.dtype != bool:
        s = s + np.abs(mask)
    p = p * (1 + s.max(-1, keepdims=True)) ** 2
    dp = g**2 @ (values**2).swapaxes(-1, -2) * factor
    ds = p * (dp + (dp * p).sum(-1, keepdims=True))
    out = [(p * factor) @ values**2, ds @ keys**2 * scale**2,
           _over_groups(ds.swapaxes(-1, -2) @ q**2, k) * scale**2,
           _over_groups((p * factor).swapaxes(-1, -2) @ g**2, k)]
    return [np.sqrt(x) for x in (out if mask is None or mask.dtype == bool else [*out, ds])]


def dropout_factors(key: Any, shape: tuple[int, ...], causal: bool, p: float) -> np.ndarray:
    """0 or 1 / (1 - p) for the weights [..., S, T]; of more than 512 queries by blocks of 512."""
    *lead, S, T = shape
    made = np.zeros(shape)
    for start in range(0, S, 512 if S > 512 else S):
        stop = min(S, start + 512) if S > 512 else S
        seen = min(T, stop + T - S) if causal and S > 512 else T
        own = numerics.fold_in(key, start) if S > 512 else key
        words = numerics.random_bits(own, int(np.prod(lead)) * (stop - start) * seen)
        kept = (words >> 8).reshape(*lead, stop - start, seen) * 2.0**-24 >= np.float32(p)
        made[..., start:stop, :seen] = kept / (1 - p)
    return made


def _to_heads(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> list:
    return [np.repeat(x, q.shape[-3] // k.shape[-3], -3) for x in (k, v)]


def _over_groups(x: np.ndarray, k: np.ndarray) -> np.ndarray:
    return x.reshape(*k.shape[:-2], -1, *x.shape[-2:]).sum(-3)


def seen_keys(B: int, S: int, T: int, window: int | None = None,
              segments: np.ndarray | None = None, lengths: np.ndarray | None = None) -> np.ndarray:
    """[B, 1, S, T]: whether a query sees a key by the arguments of ts.attention."""
    rows, columns = np.arange(S)[:, None] + T - S, np.arange(T)
    seen = np.ones((B, 1, S, T), bool)
    if window is not None:
        seen &= abs(rows - columns) < window
    if segments is not None:
        ids = np.broadcast_to(segments, (B, S))
        runs = np.cumsum(np.diff(ids, axis=1, prepend=ids[:, :1]) != 0, 1)
        seen &= (runs[:, :, None] == runs[:, None, :])[:, None]
    if lengths is not None:
        seen &= columns < np.reshape(lengths, (-1, 1, 1, 1))
    return seen


def attended64(q: Any, k: Any, v: Any, causal: bool = False, mask: Any = None,
               scale: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """softmax(scale q k' + mask) v, 0 of rows that see nothing, and the size of its terms: weights
    are rounded one by one, where scores are sums in f32 of exact products."""
    q, k, v = (np.asarray(ts.cast(x, "f64") if isinstance(x, ts.Tensor) else x, np.float64)
               for x in (q, k, v))
    k, v = _to_heads(q, k, v) if q.ndim > 2 else (k, v)
    p = _weights(q, k, causal, None if mask is None else np.asarray(mask), scale=scale)
    return p @ v, np.sqrt(p**2 @ v**2)


def result_and_cotangents(**rule: Any) -> Any:
    """ts.attention by a rule: the result, and the cotangents of q, k and v."""
    def f(q: Any, k: Any, v: Any, g: Any) -> Any:
        y, pull = ts.vjp(lambda *xs: ts.attention(*xs, **rule), q, k, v)
        return y, *pull(g)

    return f


def _weights(q: np.ndarray, keys: np.ndarray, causal: bool, mask: np.ndarray | None,
             cap: float = 0.0, scale: float | None = None) -> np.ndarray:
    s = q @ keys.swapaxes(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    s = cap * np.tanh(s / cap) if cap else s
    if mask is not None:
        s = np.where(mask, s, -np.inf) if mask.dtype == bool else s + mask.astype(np.float64)
    if causal:
        s = np.where(np.tril(np.ones(s.shape[-2:], bool), s.shape[-1] - s.shape[-2]), s, -np.inf)
    m = s.max(-1, keepdims=True, initial=-np.inf)
    e = np.exp(s - np.where(np.isfinite(m), m, 0))
    z = e.sum(-1, keepdims=True)
    return e / np.where(z == 0, 1, z)


def numbers(rng, dtype, *shape):
    return rng.standard_normal(shape).astype(dtype.numpy)


def truth(q, k, v, g, causal):
    """(lse in base 2, delta, dQ, dK, dV) in f64."""
    q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
    group, scale = len(q) // len(k), q.shape[-1] ** -0.5
    keys, values = np.repeat(k, group, 0), np.repeat(v, group, 0)
    s = q @ keys.swapaxes(1, 2) * scale
    S, T = s.shape[1:]
    if causal:
        s = np.where(np.tril(np.ones((S, T), bool), T - S), s, -np.inf)
    m = s.max(-1, keepdims=True)
    e = np.exp(s - m)
    z = e.sum(-1, keepdims=True)
    p = e / z
    delta = (p @ values * g).sum(-1)
    ds = p * (g @ values.swapaxes(1, 2) - delta[..., None]) * scale

    def summed(x):
        return x.reshape(len(k), group, *x.shape[1:]).sum(1)

    lse = ((m + np.log(z)) * np.log2(np.e))[..., 0]
    return (lse.astype(np.float32), delta.astype(np.float32), ds @ keys,
            summed(ds.swapaxes(1, 2) @ q), summed(p.swapaxes(1, 2) @ g))
