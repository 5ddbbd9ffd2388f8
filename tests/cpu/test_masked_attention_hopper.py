"""Masks in memory in attention's fastest kernels: as warp-specialised programs against f64, and as
a graph lowers them. Results begin as NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest

from attention_cases import numbers
from hopper_lowering import Known, distance, program, run
from tessera import bf16, f32
from tessera.kernels.attention import attention, cross_attention
from tessera.kernels.attention_backward import attention_keys, attention_mask, attention_queries
from tessera.kernels.attention_scores import MaskRule

FACTS = Known(frozenset("SDTEBC"), frozenset("QKVGML") | {"lse", "delta", "dQ", "dK", "dV", "out"})


# By the kind of a mask: what TMA brings of it. Threads that have a key each load its number.
MASKS: dict = {
    "line": {attention: {"of_keys"}, cross_attention: {"of_keys"}, attention_queries: {"l"}},
    "tile": {k: {"m"} for k in (attention, cross_attention, attention_queries, attention_keys,
                                attention_mask)}}


@pytest.mark.parametrize("kind, T, causal, dtype", [
    ("line", 136, False, f32), ("line", 200, True, f32), ("tile", 136, False, bf16),
    ("tile", 200, True, bf16), ("tile", 136, False, f32)])
def test_kernels_against_f64(kind, T, causal, dtype, rng):
    """136 queries of four heads, two of which share keys, in two sequences; one query sees nothing
    of a matrix. Tiles come with the keys or queries whose products they meet."""
    B, H, S, D = 2, 2, 136, 64
    q, g = numbers(rng, bf16, B * H, S, D), numbers(rng, bf16, B * H, S, D)
    k, v = numbers(rng, bf16, B, T, D), numbers(rng, bf16, B, T, D)
    M = rng.standard_normal((H, S, T) if kind == "tile" else (B, T)).astype(dtype.numpy)
    M[rng.random(M.shape) < 0.3] = -math.inf
    M[..., 1] = 0.0
    rule = MaskRule(True, H, 0, 1, True, True, B) if kind == "tile" else MaskRule(
        True, H, 1, 0, False, True)
    if kind == "tile":
        M[:, 5] = -math.inf
    wide = [x.astype(np.float64).reshape(B, -1, *x.shape[1:]) for x in (q, k, v, g)]
    full = M.astype(np.float64)[None] if kind == "tile" else M.astype(np.float64)[:, None, None]
    full = np.broadcast_to(full, (B, H, S, T))
    seen = np.isfinite(full) & (np.arange(T) <= np.arange(S)[:, None] + T - S if causal else True)
    s = wide[0] @ wide[1].swapaxes(-1, -2) * D ** -0.5 + np.where(seen, full, 0)
    z = np.where(seen, np.exp(s), 0).sum(-1)
    p = np.where(seen, np.exp(s), 0) / np.where(z, z, 1)[..., None]
    dp = wide[3] @ np.swapaxes(wide[2], -1, -2)
    delta = (p * dp).sum(-1)
    ds = p * (dp - delta[..., None])
    want = [p @ wide[2], ds @ wide[1] * D ** -0.5,
            (ds.swapaxes(-1, -2) @ wide[0]).sum(1) * D ** -0.5,
            (p.swapaxes(-1, -2) @ wide[3]).sum(1), ds]
    lse = np.where(z > 0, np.log2(np.where(z > 0, z, 1)), -3e38).astype(np.float32).reshape(-1, S)
    rows = lse, delta.astype(np.float32).reshape(-1, S)
    made = [np.full(x.shape, np.nan, bf16.numpy) for x in (q, q, k, v)]
    logs = np.full(lse.shape, np.nan, np.float32)
    line = {"L" if kind == "line" else "M": M, "mask": rule, "group": 2, "causal": causal}
    turned = line | ({} if kind == "line" else {"M": M.swapaxes(-1, -2).copy()})
    forward = attention if S == T else cross_attention
    calls = [(forward, (2, B * H), (q, k, v, made[0], D ** -0.5 / math.log(2)),
              line | {"logs": logs}),
             (attention_queries, (2, B * H), (q, k, v, g, *rows, made[1], D ** -0.5), line),
             (attention_keys, (-(-T // 128), B), (q, k, v, g, *rows, *made[2:], D ** -0.5),
              turned)]
    if kind == "tile":
        dM = np.full((B * H, S, T), np.nan, np.float32)
        made.append(dM)
        of_scores = {name: x for name, x in line.items() if name != "M"}
        calls.append((attention_mask, (-(-T // 64), 2, B * H),
                      (q, k, v, g, *rows, M, dM, D ** -0.5), of_scores))
    for kernel, grid, args, options in calls:
        lowered = program(kernel, *args, facts=FACTS, BM=128, BN=64, **options)
        brought = {x.name.rstrip("_0123456789") for r in lowered.rings for x in r.loads}
        assert brought - {"q", "k", "v", "g", "lse", "delta"} == MASKS[kind].get(kernel, set())
        run(kernel, lowered, grid, *args, BM=128, BN=64, **options)
    for got, x in zip(made, want[:len(made)], strict=True):
        assert distance(got, x.reshape(got.shape)) < 8e-3
    assert distance(logs[z.reshape(logs.shape) > 0],
                    np.log(z[z > 0])) < 1e-5
