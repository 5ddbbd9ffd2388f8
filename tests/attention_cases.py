"""Attention and its gradient in f64, for the tests of every target."""

from __future__ import annotations

import math

import numpy as np


def attention64(q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, causal: bool,
                mask: np.ndarray | None = None) -> list:
    """The result and the cotangents of q, k and v. mask: bools (seen), or added to the scores; its
    cotangent comes last then."""
    groups = q.shape[-3] // k.shape[-3]
    keys, values = (np.repeat(x, groups, -3) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1])
    s = q @ keys.swapaxes(-1, -2) * scale
    if mask is not None:
        s = np.where(mask, s, -np.inf) if mask.dtype == bool else s + mask
    if causal:
        s = np.where(np.tril(np.ones(s.shape[-2:], bool), s.shape[-1] - s.shape[-2]), s, -np.inf)
    m = s.max(-1, keepdims=True)
    e = np.exp(s - np.where(np.isfinite(m), m, 0))
    z = e.sum(-1, keepdims=True)
    p = e / np.where(z == 0, 1, z)
    dp = g @ values.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True))

    def over_groups(x: np.ndarray) -> np.ndarray:
        return x.reshape(*k.shape[:-2], groups, *x.shape[-2:]).sum(-3)

    out = [p @ values, ds @ keys * scale, over_groups(ds.swapaxes(-1, -2) @ q) * scale,
           over_groups(p.swapaxes(-1, -2) @ g)]
    return out if mask is None or mask.dtype == bool else [*out, ds]


__all__ = ["attention64"]
