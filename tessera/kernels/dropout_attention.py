"""Attention with dropout, forward and backward, without weights in memory.

out = (K softmax(scale Q K' + M) / (1 - p)) V: K keeps a weight with probability 1 - p. It is drawn
where it is needed, three times, by the key of the graph and the weight's place: word
(h rows + i) seen + j of the stream of a block of queries, for its i-th query of head h and key j,
as the composition draws it (graph/ops/attention_blocks.py). The words of four neighbouring keys are
one computation where rows of words begin at multiples of four: runs.
The mask M and the rest are as in masked_attention.py. With dp = K (G V') / (1 - p) the sum
sum_j w_j dp_j is still that of result times cotangent, so the saved sums are the same.
"""

from __future__ import annotations

from ..numerics import f32, uint32
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.kernel.decorator import kernel
from .masked_attention import HIGHEST, mask_block, scores_of_columns, scores_of_rows


@kernel
def kept(W, h, q0, k0, S, T, BM, BN, causal, block, runs, least):
    """Whether queries [q0:q0+BM] of head h keep their weights of keys [k0:k0+BN].

    W: the keys of the blocks of queries.  least: the smallest word that keeps
    """
    start = q0 // block * block
    rows = min(block, S - start)
    seen = min(T, start + rows + T - S) if causal and S > block else T
    row = tile.cast(tile.arange(0, BM) + (h * rows + q0 - start), "int64")[:, None]
    column = tile.cast(tile.arange(0, BN) + k0, "int64")[None, :]
    index = row * tile.cast(tile.full((1, 1), seen, "int32"), "int64") + column
    words = W[q0 // block, 0], W[q0 // block, 1]
    return tile.random_bits(index, seed=words, runs=runs) >= least


@kernel(grid=lambda S, B, BM: (-(-S // BM), B))
def dropout_attention(Q: Tensor["B", "S", "D"], K: Tensor["C", "T", "D"], V: Tensor["C", "T", "E"],
                      M: Tensor["Z", "SM", "TM"], W: Tensor["R", 2, uint32],
                      out: Tensor["B", "S", "E"], lse: Tensor["B", "S", f32], scale: f32, heads=1,
                      group=1, BM=64, BN=64, causal=False, floats=False, per_batch=0, per_head=0,
                      rows=False, columns=False, block=1, runs=False, least=0, grown=1.0):
    """The result, and each query's log2 of its sum of exp2(scores). grown: 1 / (1 - p)"""
    q0, h = tile.group_id(0) * BM, tile.group_id(1)
    q = tile.load(Q[h, q0:q0+BM, :])
    m, z, o = tile.full((BM,), -HIGHEST), tile.zeros((BM,)), tile.zeros((BM, E))
    for k0 in range(0, min(T, q0 + BM + T - S) if causal else T, BN):
        k = tile.load(K[h // group, k0:k0+BN, :])
        mask = mask_block(M, h, q0, k0, heads, per_batch, per_head, rows, columns, BM, BN,
                          floats)
        s = scores_of_rows(q, k, mask, q0, k0, T - S, T, scale, BM, BN, causal, floats)
        keep = kept(W, h, q0, k0, S, T, BM, BN, causal, block, runs, least)
        m_new = tile.maximum(m, tile.row_max(s))
        alpha = tile.exp2(m - m_new)
        p = tile.exp2(s - m_new[:, None])
        z = z * alpha + tile.row_sum(p)
        v = tile.load(V[h // group, k0:k0+BN, :])
        p = tile.where(keep, p * grown, 0.0)
        o = tile.dot(tile.cast(p, V.dtype), v, o * alpha[:, None])
        m = m_new
    seen = z > 0.0
    sums = tile.where(seen, z, 1.0)
    out[h, q0:q0+BM, :] = o / sums[:, None]
    lse[h, q0:q0+BM] = tile.where(seen, m + tile.log2(sums), HIGHEST)


@kernel(grid=lambda T, C, BN: (-(-T // BN), C))
def dropout_attention_keys(Q: Tensor["B", "S", "D"], K: Tensor["C", "T", "D"],
                           V: Tensor["C", "T", "E"], M: Tensor["Z", "SM", "TM"],
                           W: Tensor["R", 2, uint32], G: Tensor["B", "S", "E"],
                           lse: Tensor["B", "S", f32], delta: Tensor["B", "S", f32],
                           dK: Tensor["C", "T", "D"], dV: Tensor["C", "T", "E"], scale: f32,
                           heads=1, group=1, BM=64, BN=64, causal=False, floats=False, per_batch=0,
                           per_head=0, rows=False, columns=False, block=1, runs=False, least=0,
                           grown=1.0):
    """dV = P' G of the weights that were kept, dK = scale dS' Q with dS = P (dP - delta)."""
    k0, c = tile.group_id(0) * BN, tile.group_id(1)
    k, v = tile.load(K[c, k0:k0+BN, :]), tile.load(V[c, k0:k0+BN, :])
    dk, dv = tile.zeros((BN, D)), tile.zeros((BN, E))
    for h in range(c * group, c * group + group):
        for q0 in range(max(0, k0 - (T - S)) // BM * BM if causal else 0, S, BM):
            q, g = tile.load(Q[h, q0:q0+BM, :]), tile.load(G[h, q0:q0+BM, :])
            mask = mask_block(M, h, q0, k0, heads, per_batch, per_head, rows, columns, BM, BN,
                              floats)
            s = scores_of_columns(q, k, mask, q0, k0, T - S, T, scale, BM, BN, causal, floats)
            keep = kept(W, h, q0, k0, S, T, BM, BN, causal, block, runs, least).T
            p = tile.exp2(s - tile.load(lse[h, q0:q0+BM])[None, :])
            dp = tile.where(keep, tile.dot(v, g.T) * grown, 0.0)
            ds = p * (dp - tile.load(delta[h, q0:q0+BM])[None, :])
            p = tile.where(keep, p * grown, 0.0)
            dv = tile.dot(tile.cast(p, G.dtype), g, dv)
            dk = tile.dot(tile.cast(ds, Q.dtype), q, dk)
    dK[c, k0:k0+BN, :] = dk * scale
    dV[c, k0:k0+BN, :] = dv


@kernel(grid=lambda S, B, BM: (-(-S // BM), B))
def dropout_attention_queries(Q: Tensor["B", "S", "D"], K: Tensor["C", "T", "D"],
                              V: Tensor["C", "T", "E"], M: Tensor["Z", "SM", "TM"],
                              W: Tensor["R", 2, uint32], G: Tensor["B", "S", "E"],
                              lse: Tensor["B", "S", f32], delta: Tensor["B", "S", f32],
                              dQ: Tensor["B", "S", "D"], scale: f32, heads=1, group=1, BM=64,
                              BN=64, causal=False, floats=False, per_batch=0, per_head=0,
                              rows=False, columns=False, block=1, runs=False, least=0, grown=1.0):
    """dQ = scale dS K, over the keys that a query sees."""
    q0, h = tile.group_id(0) * BM, tile.group_id(1)
    q, g = tile.load(Q[h, q0:q0+BM, :]), tile.load(G[h, q0:q0+BM, :])
    sums, own = tile.load(lse[h, q0:q0+BM]), tile.load(delta[h, q0:q0+BM])
    dq = tile.zeros((BM, D))
    for k0 in range(0, min(T, q0 + BM + T - S) if causal else T, BN):
        k, v = tile.load(K[h // group, k0:k0+BN, :]), tile.load(V[h // group, k0:k0+BN, :])
        mask = mask_block(M, h, q0, k0, heads, per_batch, per_head, rows, columns, BM, BN,
                          floats)
        s = scores_of_rows(q, k, mask, q0, k0, T - S, T, scale, BM, BN, causal, floats)
        keep = kept(W, h, q0, k0, S, T, BM, BN, causal, block, runs, least)
        dp = tile.where(keep, tile.dot(g, v.T) * grown, 0.0)
        ds = tile.exp2(s - sums[:, None]) * (dp - own[:, None])
        dq = tile.dot(tile.cast(ds, K.dtype), k, dq)
    dQ[h, q0:q0+BM, :] = dq * scale


@kernel(grid=lambda S, T, B, BM, BN: (-(-T // BN), -(-S // BM), B))
def dropout_attention_scores(Q: Tensor["B", "S", "D"], K: Tensor["C", "T", "D"],
                             V: Tensor["C", "T", "E"], M: Tensor["Z", "SM", "TM"],
                             W: Tensor["R", 2, uint32], G: Tensor["B", "S", "E"],
                             lse: Tensor["B", "S", f32], delta: Tensor["B", "S", f32],
                             dM: Tensor["B", "S", "T"], scale: f32, heads=1, group=1, BM=64, BN=64,
                             causal=False, floats=False, per_batch=0, per_head=0, rows=False,
                             columns=False, block=1, runs=False, least=0, grown=1.0):
    """dM = P (dP - delta) of every matrix of scores: the mask's cotangent before it is summed."""
    k0, q0, h = tile.group_id(0) * BN, tile.group_id(1) * BM, tile.group_id(2)
    q, g = tile.load(Q[h, q0:q0+BM, :]), tile.load(G[h, q0:q0+BM, :])
    k, v = tile.load(K[h // group, k0:k0+BN, :]), tile.load(V[h // group, k0:k0+BN, :])
    mask = mask_block(M, h, q0, k0, heads, per_batch, per_head, rows, columns, BM, BN,
                      floats)
    s = scores_of_rows(q, k, mask, q0, k0, T - S, T, scale, BM, BN, causal, floats)
    keep = kept(W, h, q0, k0, S, T, BM, BN, causal, block, runs, least)
    p = tile.exp2(s - tile.load(lse[h, q0:q0+BM])[:, None])
    dp = tile.where(keep, tile.dot(g, v.T) * grown, 0.0)
    dM[h, q0:q0+BM, k0:k0+BN] = p * (dp - tile.load(delta[h, q0:q0+BM])[:, None])


__all__ = ["dropout_attention", "dropout_attention_keys", "dropout_attention_queries",
           "dropout_attention_scores"]
