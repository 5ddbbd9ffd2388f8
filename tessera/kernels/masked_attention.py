"""Attention with a mask, forward and backward, without scores in memory.

M holds bools (seen) or floats (added to the scores) for each matrix of scores, each row of one and
each key, or one of them for all: MaskForm says which. A query that sees no key gives 0; its sum is
kept as HIGHEST, so that its weights are 0 in the gradient too.
"""

from __future__ import annotations

import math

from ..numerics import DType, f32
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.kernel.decorator import kernel

LOG2E = math.log2(math.e)
HIGHEST = 3e38


@kernel
def mask_block(M, h, q0, k0, heads, per_batch, per_head, rows, columns, BM, BN, floats):
    """The mask of queries [q0:q0+BM] and keys [k0:k0+BN] of head h.

    per_batch, per_head: how far apart the masks of neighbouring sequences and heads are, 0 for one.
    rows, columns: whether queries and keys have masks of their own
    """
    z = h // heads * per_batch + h % heads * per_head
    if rows and columns:
        return tile.load(M[z, q0:q0+BM, k0:k0+BN], fill=0)
    if rows:
        return tile.load(M[z, q0:q0+BM, 0], fill=0)[:, None]
    if columns:
        return tile.load(M[z, 0, k0:k0+BN], fill=0)[None, :]
    one = tile.broadcast(tile.full((1, 1), 0.0) + M[z, 0, 0], (BM, BN))
    return one if floats else one != 0.0


@kernel
def masked_scores(products, mask, last, keys, count, scale, causal, floats):
    """Scores in base 2 of products of queries and keys; -inf where a key is not seen.

    keys: the number of each product's key, along one axis.  last: along the other, the last that
    its query sees.  count: keys in all
    """
    s = products * (scale * LOG2E)
    s = s + mask * LOG2E if floats else tile.where(mask, s, -math.inf)
    s = tile.where(keys < count, s, -math.inf)
    return tile.where(keys <= last, s, -math.inf) if causal else s


@kernel
def scores_of_rows(q, k, mask, q0, k0, ahead, count, scale, BM, BN, causal, floats):
    """Of queries down the rows. ahead: keys before the first query's own."""
    last, keys = tile.arange(0, BM) + q0 + ahead, tile.arange(0, BN) + k0
    return masked_scores(tile.dot(q, k.T), mask, last[:, None], keys[None, :], count, scale,
                         causal, floats)


@kernel
def scores_of_columns(q, k, mask, q0, k0, ahead, count, scale, BM, BN, causal, floats):
    """Of keys down the rows: what is made of these is the first operand of a matmul as it lies."""
    last, keys = tile.arange(0, BM) + q0 + ahead, tile.arange(0, BN) + k0
    return masked_scores(tile.dot(k, q.T), mask.T, last[None, :], keys[:, None], count, scale,
                         causal, floats)


@kernel(grid=lambda S, B, BM: (-(-S // BM), B))
def masked_attention(Q: Tensor["B", "S", "D"], K: Tensor["C", "T", "D"], V: Tensor["C", "T", "E"],
                     M: Tensor["Z", "SM", "TM"], out: Tensor["B", "S", "E"],
                     lse: Tensor["B", "S", f32], scale: f32, heads=1, group=1, BM=64, BN=64,
                     causal=False, floats=False, per_batch=0, per_head=0, rows=False,
                     columns=False):
    """out = softmax(scale Q K' + M) V, and each query's log2 of its sum of exp2(scores)."""
    q0, h = tile.group_id(0) * BM, tile.group_id(1)
    q = tile.load(Q[h, q0:q0+BM, :])
    m, z, o = tile.full((BM,), -HIGHEST), tile.zeros((BM,)), tile.zeros((BM, E))
    for k0 in range(0, min(T, q0 + BM + T - S) if causal else T, BN):
        k = tile.load(K[h // group, k0:k0+BN, :])
        mask = mask_block(M, h, q0, k0, heads, per_batch, per_head, rows, columns, BM, BN,
                          floats)
        s = scores_of_rows(q, k, mask, q0, k0, T - S, T, scale, BM, BN, causal, floats)
        m_new = tile.maximum(m, tile.row_max(s))
        alpha = tile.exp2(m - m_new)
        p = tile.exp2(s - m_new[:, None])
        z = z * alpha + tile.row_sum(p)
        v = tile.load(V[h // group, k0:k0+BN, :])
        o = tile.dot(tile.cast(p, V.dtype), v, o * alpha[:, None])
        m = m_new
    seen = z > 0.0
    sums = tile.where(seen, z, 1.0)
    out[h, q0:q0+BM, :] = o / sums[:, None]
    lse[h, q0:q0+BM] = tile.where(seen, m + tile.log2(sums), HIGHEST)


@kernel(grid=lambda T, C, BN: (-(-T // BN), C))
def masked_attention_keys(Q: Tensor["B", "S", "D"], K: Tensor["C", "T", "D"],
                          V: Tensor["C", "T", "E"], M: Tensor["Z", "SM", "TM"],
                          G: Tensor["B", "S", "E"], lse: Tensor["B", "S", f32],
                          delta: Tensor["B", "S", f32], dK: Tensor["C", "T", "D"],
                          dV: Tensor["C", "T", "E"], scale: f32, heads=1, group=1, BM=64, BN=64,
                          causal=False, floats=False, per_batch=0, per_head=0, rows=False,
                          columns=False):
    """dV = P' G and dK = scale dS' Q, where dS = P (G V' - delta), over the queries of a group.

    Scores have keys down the rows, so that neither P nor dS is transposed.
    """
    k0, c = tile.group_id(0) * BN, tile.group_id(1)
    k, v = tile.load(K[c, k0:k0+BN, :]), tile.load(V[c, k0:k0+BN, :])
    dk, dv = tile.zeros((BN, D)), tile.zeros((BN, E))
    for h in range(c * group, c * group + group):
        for q0 in range(max(0, k0 - (T - S)) // BM * BM if causal else 0, S, BM):
            q, g = tile.load(Q[h, q0:q0+BM, :]), tile.load(G[h, q0:q0+BM, :])
            mask = mask_block(M, h, q0, k0, heads, per_batch, per_head, rows, columns, BM, BN,
                          floats)
            s = scores_of_columns(q, k, mask, q0, k0, T - S, T, scale, BM, BN, causal, floats)
            p = tile.exp2(s - tile.load(lse[h, q0:q0+BM])[None, :])
            ds = p * (tile.dot(v, g.T) - tile.load(delta[h, q0:q0+BM])[None, :])
            dv = tile.dot(tile.cast(p, G.dtype), g, dv)
            dk = tile.dot(tile.cast(ds, Q.dtype), q, dk)
    dK[c, k0:k0+BN, :] = dk * scale
    dV[c, k0:k0+BN, :] = dv


@kernel(grid=lambda S, B, BM: (-(-S // BM), B))
def masked_attention_queries(Q: Tensor["B", "S", "D"], K: Tensor["C", "T", "D"],
                             V: Tensor["C", "T", "E"], M: Tensor["Z", "SM", "TM"],
                             G: Tensor["B", "S", "E"], lse: Tensor["B", "S", f32],
                             delta: Tensor["B", "S", f32], dQ: Tensor["B", "S", "D"], scale: f32,
                             heads=1, group=1, BM=64, BN=64, causal=False, floats=False,
                             per_batch=0, per_head=0, rows=False, columns=False):
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
        ds = tile.exp2(s - sums[:, None]) * (tile.dot(g, v.T) - own[:, None])
        dq = tile.dot(tile.cast(ds, K.dtype), k, dq)
    dQ[h, q0:q0+BM, :] = dq * scale


@kernel(grid=lambda S, T, B, BM, BN: (-(-T // BN), -(-S // BM), B))
def masked_attention_scores(Q: Tensor["B", "S", "D"], K: Tensor["C", "T", "D"],
                            V: Tensor["C", "T", "E"], M: Tensor["Z", "SM", "TM"],
                            G: Tensor["B", "S", "E"], lse: Tensor["B", "S", f32],
                            delta: Tensor["B", "S", f32], dM: Tensor["B", "S", "T"], scale: f32,
                            heads=1, group=1, BM=64, BN=64, causal=False, floats=False,
                            per_batch=0, per_head=0, rows=False, columns=False):
    """dM = P (G V' - delta) of every matrix of scores: the mask's cotangent before it is summed."""
    k0, q0, h = tile.group_id(0) * BN, tile.group_id(1) * BM, tile.group_id(2)
    q, g = tile.load(Q[h, q0:q0+BM, :]), tile.load(G[h, q0:q0+BM, :])
    k, v = tile.load(K[h // group, k0:k0+BN, :]), tile.load(V[h // group, k0:k0+BN, :])
    mask = mask_block(M, h, q0, k0, heads, per_batch, per_head, rows, columns, BM, BN,
                      floats)
    s = scores_of_rows(q, k, mask, q0, k0, T - S, T, scale, BM, BN, causal, floats)
    p = tile.exp2(s - tile.load(lse[h, q0:q0+BM])[:, None])
    dM[h, q0:q0+BM, k0:k0+BN] = p * (tile.dot(g, v.T) - tile.load(delta[h, q0:q0+BM])[:, None])


def masked_blocks(dtype: DType, width: int, draws: bool) -> tuple[int, int, int]:
    """Rows of a block, and rows of an iteration of the result and of the gradient: as many as
    leave a thread's numbers in registers on sm_90a, but for four."""
    rows = 32 if dtype.bits > 16 or width > 128 else 64
    return rows, 32 if width > 64 and draws else rows, 32 if width > 64 or draws else rows


__all__ = ["masked_attention", "masked_attention_keys", "masked_attention_queries",
           "masked_attention_scores", "masked_blocks"]
