"""Attention's gradient without scores in memory: weights are made again from what forward saved.

Two kernels and no atomics: one for the cotangents of keys and values, which runs over queries, one
for those of queries, which runs over keys. lse holds each query's log2 of its sum of exp2(scores);
delta the sum over a row of result times cotangent, which is sum_t p_t dp_t.
Weights and their cotangents are rounded to the type of the operands in front of their products.
Dao 2023, arXiv:2307.08691, algorithm 2.
"""

from __future__ import annotations

import math

from ..numerics import DType, f32
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.kernel.decorator import kernel

LOG2E = math.log2(math.e)


@kernel
def weights(q, k, m0, n0, lse, ahead, keys, scale, causal, BM, BN):
    """exp2(scores - lse) of queries [m0:m0+BM] and keys [n0:n0+BN]; 0 where a key is not seen.

    ahead: keys before the first query's own.  keys: how many there are
    """
    s = tile.dot(q, k.T) * (scale * LOG2E)
    rows, columns = tile.arange(0, BM) + m0 + ahead, tile.arange(0, BN) + n0
    p = tile.exp2(s - lse[:, None])
    p = tile.where(columns[None, :] < keys, p, 0.0)
    return tile.where(columns[None, :] <= rows[:, None], p, 0.0) if causal else p


@kernel(grid=lambda T, C, BN: (-(-T // BN), C))
def attention_keys(Q: Tensor["B", "S", "D"], K: Tensor["C", "T", "D"], V: Tensor["C", "T", "E"],
                   G: Tensor["B", "S", "E"], lse: Tensor["B", "S", f32],
                   delta: Tensor["B", "S", f32], dK: Tensor["C", "T", "D", f32],
                   dV: Tensor["C", "T", "E", f32], scale: f32, group=1, BM=64, BN=64, causal=False):
    """dV = P' G and dK = scale dS' Q, where dS = P (G V' - delta), over the queries of a group."""
    n0, c = tile.group_id(0) * BN, tile.group_id(1)
    k, v = tile.load(K[c, n0:n0+BN, :]), tile.load(V[c, n0:n0+BN, :])
    dk, dv = tile.zeros((BN, D)), tile.zeros((BN, E))
    for h in range(c * group, c * group + group):
        for m0 in range(max(0, n0 - (T - S)) // BM * BM if causal else 0, S, BM):
            q, g = tile.load(Q[h, m0:m0+BM, :]), tile.load(G[h, m0:m0+BM, :])
            p = weights(q, k, m0, n0, tile.load(lse[h, m0:m0+BM]), T - S, T, scale, causal, BM, BN)
            ds = p * (tile.dot(g, v.T) - tile.load(delta[h, m0:m0+BM])[:, None])
            dv = tile.dot(tile.cast(p, G.dtype).T, g, dv)
            dk = tile.dot(tile.cast(ds, Q.dtype).T, q, dk)
    dK[c, n0:n0+BN, :] = dk * scale
    dV[c, n0:n0+BN, :] = dv


@kernel(grid=lambda S, B, BM: (-(-S // BM), B))
def attention_queries(Q: Tensor["B", "S", "D"], K: Tensor["C", "T", "D"], V: Tensor["C", "T", "E"],
                      G: Tensor["B", "S", "E"], lse: Tensor["B", "S", f32],
                      delta: Tensor["B", "S", f32], dQ: Tensor["B", "S", "D", f32], scale: f32,
                      group=1, BM=64, BN=64, causal=False):
    """dQ = scale dS K, over the keys that a query sees."""
    m0, h = tile.group_id(0) * BM, tile.group_id(1)
    q, g = tile.load(Q[h, m0:m0+BM, :]), tile.load(G[h, m0:m0+BM, :])
    sums, own = tile.load(lse[h, m0:m0+BM]), tile.load(delta[h, m0:m0+BM])
    dq = tile.zeros((BM, D))
    for n0 in range(0, min(T, m0 + BM + T - S) if causal else T, BN):
        k, v = tile.load(K[h // group, n0:n0+BN, :]), tile.load(V[h // group, n0:n0+BN, :])
        p = weights(q, k, m0, n0, sums, T - S, T, scale, causal, BM, BN)
        ds = p * (tile.dot(g, v.T) - own[:, None])
        dq = tile.dot(tile.cast(ds, K.dtype), k, dq)
    dQ[h, m0:m0+BM, :] = dq * scale


def backward_block(dtype: DType, width: int) -> tuple[int, int]:
    """Queries and keys of a block: four operands of them lie in shared memory, two sums in
    registers."""
    if dtype.bits > 16:
        return 32, 32
    return (64, 64) if width <= 128 else (32, 64)


__all__ = ["attention_keys", "attention_queries", "backward_block"]
