"""Attention with a mask, dropout, or both, forward and backward, without scores in memory.

out = drop(softmax(capped(scale Q K') + M)) V. What is done to scores and weights, and how a
ScoreRule says it, is in attention_scores.py. M, W and N are the mask, the keys of draws and spans
of keys, of `heads` heads one after another each; None without them.
A query that sees no key gives 0; its sum is kept as HIGHEST, so that its weights are 0 in the
gradient too. Or it gives NaN, and has NaN there. Draws are made again in the gradient; with
dp = drop(G V') the sum sum_j w_j dp_j over the keys of a query is that of result times cotangent,
which is delta, with dropout as without.
"""

from __future__ import annotations

import math

from ..numerics import DType, f32, i32, uint32
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.kernel.decorator import kernel
from .attention_scores import (
    ALONE,
    HIGHEST,
    ScoreRule,
    dropped,
    kept,
    mask_block,
    near_keys,
    near_queries,
    scores_of_columns,
    scores_of_rows,
    sharing_head,
    sloped,
    spanned_columns,
    spanned_rows,
)

PLAIN = ScoreRule()


@kernel(grid=lambda S, B, BM: (-(-S // BM), B))
def modified_attention(Q: Tensor["B", "S", "D"], K: Tensor["C", "T", "D"],
                       V: Tensor["C", "T", "E"], M: Tensor["Z", "SM", "TM"] | None,
                       W: Tensor["R", 2, uint32] | None, out: Tensor["B", "S", "E"],
                       lse: Tensor["B", "S", f32], scale: f32,
                       N: Tensor["Y", 2, "S", i32] | None = None, heads=1,
                       group=1, BM=64, BN=64, rule=PLAIN):
    """The result, and each query's log2 of its sum of exp2(scores)."""
    q0, h = tile.group_id(0) * BM, tile.group_id(1)
    q = tile.load(Q[h, q0:q0+BM, :])
    m, z, o = tile.full((BM,), -HIGHEST), tile.zeros((BM,)), tile.zeros((BM, E))
    first, end = near_keys(rule.causal, rule.window, q0, BM, S, T)
    for k0 in range(first // BN * BN, end, BN):
        k = tile.load(K[h // group, k0:k0+BN, :])
        mask = mask_block(rule, M, h, q0, k0, BM, BN)
        s, _ = scores_of_rows(rule, q, k, mask, h, q0, k0, S, T, scale)
        s = spanned_rows(s, N, h // heads, q0, k0)
        keep = kept(rule, W, h, q0, k0, S, T, BM, BN)
        m_new = tile.maximum(m, tile.row_max(s))
        alpha = tile.exp2(m - m_new)
        p = tile.exp2(s - m_new[:, None])
        z = z * alpha + tile.row_sum(p)
        v = tile.load(V[h // group, k0:k0+BN, :])
        p = dropped(rule, p, keep)
        o = tile.dot(tile.cast(p, V.dtype), v, o * alpha[:, None])
        m = m_new
    seen = z > 0.0
    sums = tile.where(seen, z, 1.0)
    y = o / sums[:, None]
    out[h, q0:q0+BM, :] = tile.where(seen[:, None], y, math.nan) if rule.nan else y
    lse[h, q0:q0+BM] = tile.where(seen, m + tile.log2(sums), math.nan if rule.nan else HIGHEST)


@kernel(grid=lambda T, C, BN: (-(-T // BN), C))
def modified_attention_keys(Q: Tensor["B", "S", "D"], K: Tensor["C", "T", "D"],
                            V: Tensor["C", "T", "E"], M: Tensor["Z", "SM", "TM"] | None,
                            W: Tensor["R", 2, uint32] | None, G: Tensor["B", "S", "E"],
                            lse: Tensor["B", "S", f32], delta: Tensor["B", "S", f32],
                            dK: Tensor["C", "T", "D"], dV: Tensor["C", "T", "E"], scale: f32,
                            N: Tensor["Y", 2, "S", i32] | None = None, heads=1,
                            group=1, BM=64, BN=64, rule=PLAIN):
    """dV = drop(P)' G and dK = scale dS' Q, where dS = P (dP - delta), over the queries of a group.

    Scores have keys down the rows, so that neither P nor dS is transposed.
    """
    k0, c = tile.group_id(0) * BN, tile.group_id(1)
    k, v = tile.load(K[c, k0:k0+BN, :]), tile.load(V[c, k0:k0+BN, :])
    dk, dv = tile.zeros((BN, D)), tile.zeros((BN, E))
    for h in range(c * group, c * group + group):
        first, end = near_queries(rule.causal, rule.window, k0, BN, S, T)
        for q0 in range(first // BM * BM, end, BM):
            q, g = tile.load(Q[h, q0:q0+BM, :]), tile.load(G[h, q0:q0+BM, :])
            mask = mask_block(rule, M, h, q0, k0, BM, BN)
            s, slope = scores_of_columns(rule, q, k, mask, h, q0, k0, S, T, scale)
            s = spanned_columns(s, N, h // heads, q0, k0)
            keep = kept(rule, W, h, q0, k0, S, T, BM, BN, keys=0)
            p = tile.exp2(s - tile.load(lse[h, q0:q0+BM])[None, :])
            dp = dropped(rule, tile.dot(v, g.T), keep)
            ds = p * (dp - tile.load(delta[h, q0:q0+BM])[None, :])
            p = dropped(rule, p, keep)
            dv = tile.dot(tile.cast(p, G.dtype), g, dv)
            dk = tile.dot(tile.cast(sloped(ds, slope), Q.dtype), q, dk)
    dK[c, k0:k0+BN, :] = dk * scale
    dV[c, k0:k0+BN, :] = dv


@kernel(grid=lambda S, B, BM: (-(-S // BM), B))
def modified_attention_queries(Q: Tensor["B", "S", "D"], K: Tensor["C", "T", "D"],
                               V: Tensor["C", "T", "E"], M: Tensor["Z", "SM", "TM"] | None,
                               W: Tensor["R", 2, uint32] | None, G: Tensor["B", "S", "E"],
                               lse: Tensor["B", "S", f32], delta: Tensor["B", "S", f32],
                               dQ: Tensor["B", "S", "D"], scale: f32,
                               N: Tensor["Y", 2, "S", i32] | None = None, heads=1,
                               group=1, BM=64, BN=64, rule=PLAIN):
    """dQ = scale dS K, over the keys that a query sees."""
    q0, h = tile.group_id(0) * BM, tile.group_id(1)
    q, g = tile.load(Q[h, q0:q0+BM, :]), tile.load(G[h, q0:q0+BM, :])
    sums, own = tile.load(lse[h, q0:q0+BM]), tile.load(delta[h, q0:q0+BM])
    dq = tile.zeros((BM, D))
    first, end = near_keys(rule.causal, rule.window, q0, BM, S, T)
    for k0 in range(first // BN * BN, end, BN):
        k, v = tile.load(K[h // group, k0:k0+BN, :]), tile.load(V[h // group, k0:k0+BN, :])
        mask = mask_block(rule, M, h, q0, k0, BM, BN)
        s, slope = scores_of_rows(rule, q, k, mask, h, q0, k0, S, T, scale)
        s = spanned_rows(s, N, h // heads, q0, k0)
        keep = kept(rule, W, h, q0, k0, S, T, BM, BN)
        dp = dropped(rule, tile.dot(g, v.T), keep)
        ds = tile.exp2(s - sums[:, None]) * (dp - own[:, None])
        dq = tile.dot(tile.cast(sloped(ds, slope), K.dtype), k, dq)
    dQ[h, q0:q0+BM, :] = dq * scale


@kernel
def modified_mask_cotangents(Q, K, V, M, W, G, lse, delta, scale, N, heads, group, rule, h, q0, k0,
                             BM, BN):
    """P (dP - delta) of a block of the scores of head h."""
    S, T = Q.shape[1], K.shape[1]
    q, g = tile.load(Q[h, q0:q0+BM, :]), tile.load(G[h, q0:q0+BM, :])
    k, v = tile.load(K[h // group, k0:k0+BN, :]), tile.load(V[h // group, k0:k0+BN, :])
    mask = mask_block(rule, M, h, q0, k0, BM, BN)
    s, _ = scores_of_rows(rule, q, k, mask, h, q0, k0, S, T, scale)
    s = spanned_rows(s, N, h // heads, q0, k0)
    keep = kept(rule, W, h, q0, k0, S, T, BM, BN)
    p = tile.exp2(s - tile.load(lse[h, q0:q0+BM])[:, None])
    dp = dropped(rule, tile.dot(g, v.T), keep)
    return p * (dp - tile.load(delta[h, q0:q0+BM])[:, None])


@kernel(grid=lambda S, T, Y, BM, BN: (-(-T // BN), -(-S // BM), Y))
def modified_attention_scores(Q: Tensor["B", "S", "D"], K: Tensor["C", "T", "D"],
                              V: Tensor["C", "T", "E"], M: Tensor["Z", "SM", "TM"] | None,
                              W: Tensor["R", 2, uint32] | None, G: Tensor["B", "S", "E"],
                              lse: Tensor["B", "S", f32], delta: Tensor["B", "S", f32],
                              dM: Tensor["Y", "S", "T"], scale: f32,
                              N: Tensor["X", 2, "S", i32] | None = None, heads=1,
                              group=1, BM=64, BN=64, rule=PLAIN, share=ALONE):
    """dM[y] = the sum of P (dP - delta) over the heads of part y % parts of those that have mask
    y // parts: the mask's cotangent, before its parts are summed."""
    k0, q0, y = tile.group_id(0) * BN, tile.group_id(1) * BM, tile.group_id(2)
    part, z, few = y % share.parts, y // share.parts, share.heads // share.parts
    if few == 1:
        dM[y, q0:q0+BM, k0:k0+BN] = modified_mask_cotangents(
            Q, K, V, M, W, G, lse, delta, scale, N, heads, group, rule,
            sharing_head(share, z, part, Z), q0, k0, BM, BN)
    else:
        total = tile.zeros((BM, BN))
        for j in range(part * few, part * few + few):
            total = total + modified_mask_cotangents(
                Q, K, V, M, W, G, lse, delta, scale, N, heads, group, rule,
                sharing_head(share, z, j, Z), q0, k0, BM, BN)
        dM[y, q0:q0+BM, k0:k0+BN] = total


def modified_blocks(dtype: DType, width: int, draws: bool) -> tuple[int, int, int]:
    """Rows of a block, and rows of an iteration of the result and of the gradient: as many as
    leave a thread's numbers in registers on sm_90a, but for four."""
    rows = 32 if dtype.bits > 16 or width > 128 else 64
    return rows, 32 if width > 64 and draws else rows, 32 if width > 64 or draws else rows


__all__ = ["modified_attention", "modified_attention_keys", "modified_attention_queries",
           "modified_attention_scores", "modified_blocks"]
