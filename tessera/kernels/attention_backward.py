"""Attention's gradient without scores in memory: weights are made again from what forward saved.

Two kernels and no atomics, so that two runs give the same bits: one for the cotangents of keys and
values, which runs over queries, one for those of queries, which runs over keys. Seven products
instead of the five that sums in order of arrival would need. The first works on transposed scores,
K Q' and V G': their weights are the first operand of the products that they feed, from registers.
lse holds each query's log2 of its sum of exp2(scores); delta the sum over a row of result times
cotangent, which is sum_t p_t dp_t. Weights and their cotangents are rounded to the type of the
operands in front of their products.
Where the columns of a cotangent are summed, as a bias in front of heads wants it, each warp sums
its own rows while it has them in registers: of what is stored, rounded as it is. Sums of a whole
block would wait for all of its warps, 50 us where the kernel takes 210 (H100, 384 heads of 1024
queries, 2026-11-25).
Dao 2023, arXiv:2307.08691, algorithm 2.
"""

from __future__ import annotations

from ..numerics import DType, f32, i32, uint32
from ..runtime.generations import Generation
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.kernel.decorator import kernel
from .attention_scores import (
    ALONE,
    dropped,
    head_of,
    in_spans,
    kept,
    key_limits,
    line,
    linear_score,
    linear_terms,
    loaded,
    mask_place,
    mask_unit,
    near_keys,
    near_of_columns,
    near_of_rows,
    near_queries,
    places,
    query_limits,
    scored,
    sharing_head,
    sloped,
    span_rows,
    with_mask,
)

SHORT = 1024  # queries
LONG = 16384


SUMMED_ROWS = 16  # of a warp


@kernel
def stored_columns(x, dtype):
    """Sums over the rows of each warp, as they are stored: [M, N] -> [M / SUMMED_ROWS, N]."""
    x = tile.cast(tile.cast(x, dtype), f32)
    parts = tile.reshape(x, (x.shape[0] // SUMMED_ROWS, SUMMED_ROWS, x.shape[1]))
    return tile.reduce_sum(parts, axis=1)


@kernel
def row_products(x, y):
    """sum_j x_ij y_ij, as the diagonal of X Y': where operands of matmuls lie anyway, the rest of
    it costs less than to read x and y once more."""
    products = tile.dot(x, y.T)
    below = tile.causal_mask(products, 0, 0)
    return tile.row_max(tile.causal_mask(below, 0, 0, keys=0))


@kernel(grid=lambda T, C, BM: (-(-T // BM), C))
def attention_keys(Q: Tensor["B", "S", "D"], K: Tensor["C", "T", "D"], V: Tensor["C", "T", "E"],
                   G: Tensor["B", "S", "E"], lse: Tensor["B", "S", f32],
                   delta: Tensor["B", "S", f32], dK: Tensor["C", "T", "D"],
                   dV: Tensor["C", "T", "E"], scale: f32,
                   sums_k: Tensor["NK", "C", "D", f32] | None = None,
                   sums_v: Tensor["NV", "C", "E", f32] | None = None,
                   spans: Tensor["Z", 2, "T", i32] | None = None,
                   M: Tensor["X", "T", "S"] | None = None, L: Tensor["Y", "T", f32] | None = None,
                   W: Tensor["R", 2, uint32] | None = None, draws=None, heads=1, group=1,
                   BM=128, BN=64, causal=False, window=0, cap=0.0,
                   score=None, mask=None, SKIP=True, STAGES=2, TURNS=False):
    """dV = P' G and dK = scale dS' Q, where dS = P (G V' - delta), over the queries of a group.

    sums_k, sums_v: of the columns of SUMMED_ROWS rows of dK and dV each, where they are wanted
    spans: the queries that see a key, of `heads` heads of keys one after another each
    M, L: what is added to scores, of a key and a query, and of a key; mask: where a head's lies
    W, draws: keys of blocks of queries, and which weights they drop
    BM: keys of a block.  BN: queries of an iteration.  SKIP: warpgroups leave out what their keys
    do not see.  STAGES: iterations whose operands are brought ahead.  TURNS: warpgroups issue the
    matmuls of an iteration one after another
    """
    k0, c = tile.group_id(0) * BM, head_of(mask, tile.group_id(1), group)
    k, v = tile.load(K[c, k0:k0+BM, :]), tile.load(V[c, k0:k0+BM, :])
    dk, dv = tile.zeros((BM, D)), tile.zeros((BM, E))
    key = None if score is None else places(k0, BM, 0)
    for h in range(c * group, c * group + group):
        first, end = near_queries(causal, window, k0, BM, S, T)
        first, end, rows = span_rows(spans, c // heads, k0, BM, T, first, end)
        limits = query_limits(causal, window, k0, T - S)
        terms = linear_terms(scale, cap, score, h, k0)
        if terms is not None:
            own = tile.ramp(terms[3], terms[2], BM)
        if L is not None:
            of_keys = tile.load(L[mask_place(mask, h), k0:k0+BM]) * mask_unit(scale, cap, score)
        step = 8 if W is None else BN  # copies of lse begin at 16 bytes, and draws anew somewhere
        for q0 in range(first // step * step, end, BN):
            q, g = tile.load(Q[h, q0:q0+BN, :]), tile.load(G[h, q0:q0+BN, :])
            s, dp = tile.dot(k, q.T), tile.dot(v, g.T)
            if terms is None:
                query = None if score is None else places(q0 + (T - S), BN, 1)
                s, factor, slope = scored(s, scale, cap, score, h, query, key)
            else:
                s, slope = linear_score(s, scale, cap, terms, own[:, None])
            if M is not None:
                part = M[mask_place(mask, h), k0:k0+BM, q0:q0+BN]
                s = with_mask(s, part, mask_unit(scale, cap, score))
            if L is not None:
                s = s + of_keys[:, None]
            s = in_spans(near_of_columns(s, causal, window, limits, k0, q0), rows, q0, held=False)
            if terms is None:
                p = tile.exp2(s * factor - tile.load(lse[h, q0:q0+BN])[None, :])
            else:
                added = line(terms[1], q0 + (T - S) - k0, BN)
                p = tile.exp2(s - (tile.load(lse[h, q0:q0+BN]) - added)[None, :])
            keep = kept(draws, W, h, q0, k0, S, T, BN, BM, keys=0)
            dp = dropped(draws, dp, keep)
            dv = tile.dot(tile.cast(dropped(draws, p, keep), G.dtype), g, dv)
            ds = sloped(p, slope) * (dp - tile.load(delta[h, q0:q0+BN])[None, :])
            dk = tile.dot(tile.cast(ds, Q.dtype), q, dk)
    dk = dk * scale
    dK[c, k0:k0+BM, :] = dk
    dV[c, k0:k0+BM, :] = dv
    part = tile.group_id(0) * (BM // SUMMED_ROWS)
    if sums_k is not None:
        sums_k[part:part+BM//SUMMED_ROWS, c, :] = stored_columns(dk, dK.dtype)
    if sums_v is not None:
        sums_v[part:part+BM//SUMMED_ROWS, c, :] = stored_columns(dv, dV.dtype)


@kernel(grid=lambda S, B, BM: (-(-S // BM), B))
def attention_queries(Q: Tensor["B", "S", "D"], K: Tensor["C", "T", "D"], V: Tensor["C", "T", "E"],
                      G: Tensor["B", "S", "E"], lse: Tensor["B", "S", f32],
                      delta: Tensor["B", "S", f32], dQ: Tensor["B", "S", "D"], scale: f32,
                      sums_q: Tensor["NQ", "B", "D", f32] | None = None,
                      spans: Tensor["Z", 2, "S", i32] | None = None,
                      Y: Tensor["B", "S", "E"] | None = None,
                      M: Tensor["X", "S", "T"] | None = None,
                      L: Tensor["F", "T", f32] | None = None,
                      W: Tensor["R", 2, uint32] | None = None, draws=None, heads=1,
                      group=1, BM=128, BN=64, causal=False, window=0, cap=0.0,
                      score=None, mask=None, SKIP=True, STAGES=2, CLUSTER=1, TURNS=False):
    """dQ = scale dS K, over the keys that a query sees.

    sums_q: of the columns of SUMMED_ROWS rows of dQ each, where they are wanted
    Y: the result, of which delta is made here and written, where it is not there yet
    spans: the keys that a query sees, of `heads` heads one after another each
    M, L: what is added to scores, of a query and a key, and of a key; mask: where a head's lies
    W, draws: keys of blocks of queries, and which weights they drop
    BM: queries of a block.  BN: keys of an iteration.  SKIP: warpgroups without a query leave the
    block out.  STAGES: iterations whose operands are brought ahead.  CLUSTER: blocks of a head that
    bring keys and values for each other.  TURNS: warpgroups issue the matmuls of an iteration one
    after another
    """
    q0, h = tile.group_id(0) * BM, head_of(mask, tile.group_id(1), 1)
    q, g = tile.load(Q[h, q0:q0+BM, :]), tile.load(G[h, q0:q0+BM, :])
    sums = tile.load(lse[h, q0:q0+BM])
    if Y is None:
        own = tile.load(delta[h, q0:q0+BM])
    else:
        own = row_products(g, tile.load(Y[h, q0:q0+BM, :]))
        delta[h, q0:q0+BM] = own
    dq = tile.zeros((BM, D))
    query = None if score is None else places(q0 + (T - S), BM, 0)
    terms = linear_terms(scale, cap, score, h, q0 + (T - S))
    sums = sums if terms is None else sums - tile.ramp(terms[3], terms[1], BM)
    first, end = near_keys(causal, window, q0, BM, S, T)
    first, end, rows = span_rows(spans, h // heads, q0, BM, S, first, end)
    if L is not None or W is not None:
        first = first // 8 * 8
    limits, rows = key_limits(causal, window, q0, T - S), loaded(rows)
    for k0 in range(first, end, BN):
        k, v = tile.load(K[h // group, k0:k0+BN, :]), tile.load(V[h // group, k0:k0+BN, :])
        s, dp = tile.dot(q, k.T), tile.dot(g, v.T)
        if terms is None:
            key = None if score is None else places(k0, BN, 1)
            s, factor, slope = scored(s, scale, cap, score, h, query, key)
        else:
            added = line(terms[2], k0 - (q0 + (T - S)), BN)
            s, slope = linear_score(s, scale, cap, terms, added[None, :])
            factor = 1.0
        if M is not None:
            part = M[mask_place(mask, h), q0:q0+BM, k0:k0+BN]
            s = with_mask(s, part, mask_unit(scale, cap, score))
        if L is not None:
            of_keys = tile.load(L[mask_place(mask, h), k0:k0+BN]) * mask_unit(scale, cap, score)
            s = s + of_keys[None, :]
        s = in_spans(near_of_rows(s, causal, window, limits, k0), rows, k0)
        p = tile.exp2(s * factor - sums[:, None])
        dp = dropped(draws, dp, kept(draws, W, h, q0, k0, S, T, BM, BN))
        ds = sloped(p, slope) * (dp - own[:, None])
        dq = tile.dot(tile.cast(ds, K.dtype), k, dq)
    dq = dq * scale
    dQ[h, q0:q0+BM, :] = dq
    part = tile.group_id(0) * (BM // SUMMED_ROWS)
    if sums_q is not None:
        sums_q[part:part+BM//SUMMED_ROWS, h, :] = stored_columns(dq, dQ.dtype)


@kernel
def mask_cotangents(Q, K, V, G, lse, delta, M, scale, spans, W, draws, heads, group, causal, window,
                    cap, score, mask, h, q0, k0, BM, BN):
    """P (G V' - delta) of a block of the scores of head h."""
    S, T = Q.shape[1], K.shape[1]
    q, g = tile.load(Q[h, q0:q0+BM, :]), tile.load(G[h, q0:q0+BM, :])
    k, v = tile.load(K[h // group, k0:k0+BN, :]), tile.load(V[h // group, k0:k0+BN, :])
    s, dp = tile.dot(q, k.T), tile.dot(g, v.T)
    query = None if score is None else places(q0 + (T - S), BM, 0)
    key = None if score is None else places(k0, BN, 1)
    s, factor, _ = scored(s, scale, cap, score, h, query, key)
    part = M[mask_place(mask, h), q0:q0+BM, k0:k0+BN]
    s = with_mask(s, part, mask_unit(scale, cap, score))
    _, _, rows = span_rows(spans, h // heads, q0, BM, S, 0, T)
    s = near_of_rows(s, causal, window, key_limits(causal, window, q0, T - S), k0)
    p = tile.exp2(in_spans(s, loaded(rows), k0) * factor - tile.load(lse[h, q0:q0+BM])[:, None])
    dp = dropped(draws, dp, kept(draws, W, h, q0, k0, S, T, BM, BN))
    return p * (dp - tile.load(delta[h, q0:q0+BM])[:, None])


@kernel(grid=lambda S, T, Y, BM, BN: (-(-T // BN), -(-S // BM), Y))
def attention_mask(Q: Tensor["B", "S", "D"], K: Tensor["C", "T", "D"], V: Tensor["C", "T", "E"],
                   G: Tensor["B", "S", "E"], lse: Tensor["B", "S", f32],
                   delta: Tensor["B", "S", f32], M: Tensor["X", "S", "T"],
                   dM: Tensor["Y", "S", "T"], scale: f32,
                   spans: Tensor["Z", 2, "S", i32] | None = None,
                   W: Tensor["R", 2, uint32] | None = None, draws=None, heads=1, group=1, BM=128,
                   BN=64, causal=False, window=0, cap=0.0, score=None, mask=None, share=ALONE):
    """dM[y] = the sum of P (G V' - delta) over the heads of part y % parts of those that have mask
    y // parts: a mask's cotangent, before its parts are summed."""
    k0, q0, y = tile.group_id(0) * BN, tile.group_id(1) * BM, tile.group_id(2)
    part, z, few = y % share.parts, y // share.parts, share.heads // share.parts
    if few == 1:
        dM[y, q0:q0+BM, k0:k0+BN] = mask_cotangents(
            Q, K, V, G, lse, delta, M, scale, spans, W, draws, heads, group, causal, window, cap,
            score, mask, sharing_head(share, z, part, X), q0, k0, BM, BN)
    else:
        total = tile.zeros((BM, BN))
        for j in range(part * few, part * few + few):
            total = total + mask_cotangents(
                Q, K, V, G, lse, delta, M, scale, spans, W, draws, heads, group, causal, window,
                cap, score, mask, sharing_head(share, z, j, X), q0, k0, BM, BN)
        dM[y, q0:q0+BM, k0:k0+BN] = total


def keys_block(dtype: DType, width: int, chip: Generation, keys: int | None = None,
               cap: bool = False, spans: bool = False, causal: bool = False, mask: str = "",
               linear: bool = False) -> dict[str, int]:
    """Keys of a block and queries of an iteration: two sums in registers. Of narrow heads three
    warpgroups are quicker than two: 1292 us in place of 1635 of 96 heads of 4096 by 64, causal 746
    in place of 814; of 384 heads of 1024, causal, 246 in place of 263 (H100, 2026-11-25, five
    launches in a row, medians of four). Of wide heads 48 queries of an iteration are: 1475 us in
    place of 1519 of 64 heads of 4096 by 128 (H200, 2026-11-26). Under a causal mask warpgroups of
    narrow heads begin apart, and three stages are quicker: 136.6 us in place of 141.9 of 256 heads
    of 1024; without one slower, 879.6 in place of 871.0 of 64 of 4096 (H200, 2026-11-26, medians of
    seven CUDA graphs in turn). With spans and narrow heads three warpgroups of 48 queries: 64 heads
    of 8192 in four sequences with lengths 2319 us in place of 2396, documents 1298 in place of
    1336; with 64 queries 2232 and 1271, but they spill. With ALiBi, causal, and wide heads 48
    queries for 32: result and gradient of 64 heads of 8192 by 128 7.91 ms in place of 8.18 (H200,
    2026-11-28, medians of calls in turn).

    Turns where they were quicker, as in queries_block.

    cap: or a score.  linear: a score that is, without a cap
    """
    if dtype.bits > 16:
        return {"BM": 32, "BN": 32}
    if mask:
        if cap or mask not in ("line", "tile"):
            return {"BM": 128, "BN": 32}
        return {"BM": 128, "BN": 64 if width <= 64 else 48} | (
            {"TURNS": True} if mask == "line" and width <= 64 else {})
    narrow = 32 < width <= 64 and (keys is None or keys > 128)
    if by_warpgroups(dtype, width, chip) and (narrow or 64 < width <= 128 and (cap or spans)):
        if spans and not cap:
            block = {"BM": 128, "BN": 64} if narrow and causal else {
                "BM": 192 if narrow else 128, "BN": 48}
            return block | ({"TURNS": True} if narrow else {})
        capped = 48 if linear and not narrow and not spans else 32
        block = {"BM": 192 if narrow else 128, "BN": capped if cap else 64}
        return block | ({"STAGES": 3} if narrow and causal and not cap else {})
    if by_warpgroups(dtype, width, chip) and 64 < width <= 128 and not causal:
        return {"BM": 128, "BN": 48}
    if width > 128:
        return _fitting(((64, 32) if width <= 192 else (64, 16), (32, 32)), dtype, width, chip)
    many = 64 if width <= 64 or by_warpgroups(dtype, width, chip) else 32
    return _fitting(((128, many), (64, 32)), dtype, width, chip)


def queries_block(dtype: DType, width: int, chip: Generation, queries: int | None = None,
                  causal: bool = False, spans: bool = False, mask: str = "", score: bool = False,
                  cap: bool = False) -> dict[str, int]:
    """Queries of a block and keys of an iteration: one sum in registers. Of narrow heads three
    warpgroups hide more of each other's waits than two with larger tiles; of few queries under a
    causal mask their blocks compute too much beyond the diagonal: 180 us in place of 188 of 384
    heads of 1024 (H100, 2026-11-25, five launches in a row, medians of four). Three stages:
    122.9 us in place of 127.4 of 256 heads of 1024, causal, 670.4 in place of 677.2 of 64 of 4096
    (H200, 2026-11-26, medians of seven CUDA graphs in turn). Of many queries without a mask pairs
    of blocks: result and gradient of 16 heads of 16384 8.17 ms in place of 8.44, in another run
    8.26 in place of 8.54 (H200, 2026-11-26, medians of rounds in turn). With spans they are quicker
    than two warpgroups, too: 64 heads of 8192 in four sequences with lengths 1504 us in place of
    1756, documents 906 in place of 998 (H200, 2026-11-28, medians of calls in turn). Turns where
    they were quicker: docs/internals/measured.md#turns-of-warpgroups."""
    if dtype.bits > 16:
        return {"BM": 32, "BN": 32}
    if mask:
        if width > 64 or spans or score or mask in ("tile", "draws"):
            turns = width > 64 and mask in ("line", "tile")
            return {"BM": 128, "BN": 64} | ({"TURNS": True} if turns else {})
        return {"BM": 192, "BN": 80, "STAGES": 3, "TURNS": True} if mask == "line" else {
            "BM": 192, "BN": 64}
    if by_warpgroups(dtype, width, chip):
        if width <= 64:
            if score:
                return {"BM": 128, "BN": 64}
            many = queries or 0
            few = causal and 0 < many <= SHORT
            return {"BM": 128 if few else 192, "BN": 80, "STAGES": 3, "TURNS": not few,
                    "CLUSTER": 2 if many >= LONG and not causal else 1}
        return {"BM": 128, "BN": 64 if width <= 128 else 32} | (
            {"TURNS": True} if cap and width <= 128 else {})
    return _fitting(((128, 64), (128, 32)) if width <= 128 else ((64, 32),), dtype, width, chip)


def sums_products(dtype: DType, width: int, chip: Generation, rows: int) -> bool:
    """Whether the kernel of queries makes delta itself, of blocks of so many queries: operands of
    narrow heads are in registers by then, and others would have no room for the next tile's."""
    return rows == 128 and width <= 64 and dtype.bits == 16 and by_warpgroups(dtype, width, chip)


def by_warpgroups(dtype: DType, width: int, chip: Generation) -> bool:
    """Whether a chip's warpgroups multiply rows as wide."""
    form = chip.warpgroup_matmul
    return form is not None and dtype.name in form.operands and (
        width * dtype.bits % (8 * form.step_bytes) == 0)


def _fitting(blocks: tuple[tuple[int, int], ...], dtype: DType, width: int, chip: Generation
             ) -> dict[str, int]:
    """The first of which two operands each lie in shared memory once, else a small one."""
    row_bytes = 2 * width * dtype.bits // 8
    m, n = next((b for b in blocks if sum(b) * row_bytes <= chip.group_shared_bytes), (32, 32))
    return {"BM": m, "BN": n}


__all__ = ["SUMMED_ROWS", "attention_keys", "attention_mask", "attention_queries", "by_warpgroups",
           "keys_block", "queries_block", "sums_products"]
