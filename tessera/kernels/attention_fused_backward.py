"""Attention's gradient in one kernel of five products, whose sums for queries have a fixed order.

A group has 256 keys of a head and goes over its queries. What it finds for a block of queries is
added to sums in memory when it is its turn there, in the order of the keys: a word of memory counts
the groups that have added. So two runs give the same bits. The first group stores, and the last
one rounds the sums to the result.
A group takes its number when it begins, and waits for lower ones only. So whoever waits does so for
groups that run or have ended, and the first of these waits for none: they need not run at one time,
and other kernels beside them may take multiprocessors for as long as they want. Groups of some
heads have neighbouring numbers, so many that they run side by side, each a block of queries behind
the one it waits for; those of the next heads begin as these end, so that this time is lost once.
Sums of later heads take the place of those of earlier ones, so that they stay in the second-level
cache.
Dao 2023, arXiv:2307.08691, algorithm 2, in an order of its own.
"""

from __future__ import annotations

from ..numerics import DType, f32, i32
from ..runtime.generations import Generation
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.ir.modes import FUSED_BACKWARD
from ..tile.kernel.decorator import kernel
from .attention_scores import LOG2E

KEYS, QUERIES, WIDTH = 256, 64, 128  # of a group, of a block, of a head


@kernel(grid=lambda C, T, BM: C * (T // BM), overwrites=("dQ", "dK", "dV", "sums"))
def attention_fused_backward(Q: Tensor["C", "S", "D"], K: Tensor["C", "T", "D"],
                             V: Tensor["C", "T", "D"], G: Tensor["C", "S", "D"],
                             lse: Tensor["C", "S", f32], delta: Tensor["C", "S", f32],
                             sums: Tensor["Z", "S", "D", f32], turns: Tensor["W", i32],
                             dQ: Tensor["C", "S", "D"], dK: Tensor["C", "T", "D"],
                             dV: Tensor["C", "T", "D"], scale: f32, heads=1, slots=1, BM=KEYS,
                             BN=QUERIES):
    """dV = P' G, dK = scale dS' Q and dQ = scale dS K, where dS = P (G V' - delta).

    heads: side by side, which divides their number
    sums, turns: of `slots` heads, as many as side by side or more, each followed by the one so many
    behind it; turns are zeros, two for each block of queries, as its columns come in halves, and
    one in which groups are counted as they begin
    S, T: multiples of BN and BM, and a head has two groups or more
    """
    M, N = min(BM, T), min(BN, S)  # so that S and T are constants of the code
    groups, blocks = T // M, S // N
    number = tile.group_max(tile.atomic_add(turns, 2 * slots * blocks, 1))
    strip, rest = number // (heads * groups), number % (heads * groups)
    n, c = rest // heads, strip * heads + rest % heads
    k0, slot, before = n * M, c % slots, c // slots * groups
    k, v = tile.load(K[c, k0:k0+M, :]), tile.load(V[c, k0:k0+M, :])
    dk, dv = tile.zeros((M, D)), tile.zeros((M, D))
    for i in range(0, blocks):
        q0 = i * N
        q, g = tile.load(Q[c, q0:q0+N, :]), tile.load(G[c, q0:q0+N, :])
        s, dp = tile.dot(k, q.T), tile.dot(v, g.T)
        p = tile.exp2(s * (scale * LOG2E) - tile.load(lse[c, q0:q0+N])[None, :])
        dv = tile.dot(tile.cast(p, G.dtype), g, dv)
        ds = tile.cast(p * (dp - tile.load(delta[c, q0:q0+N])[None, :]), Q.dtype)
        dk = tile.dot(ds, q, dk)
        dq = tile.dot(ds.T, k)
        turn = 2 * (slot * blocks + i)
        while tile.group_max(tile.atomic_add(turns, turn, 0)) < before + n:
            pass
        if n == 0:
            sums[slot, q0:q0+N, :] = dq
        elif n < groups - 1:
            sums[slot, q0:q0+N, :] = tile.load(sums[slot, q0:q0+N, :]) + dq
        else:
            dQ[c, q0:q0+N, :] = (tile.load(sums[slot, q0:q0+N, :]) + dq) * scale
        tile.atomic_add(turns, turn, 1, release=True)
    dK[c, k0:k0+M, :] = dk * scale
    dV[c, k0:k0+M, :] = dv


attention_fused_backward.modes = (FUSED_BACKWARD,)

SHORTEST = 1024  # queries and keys
# Of the time that multiprocessors have, pairs of blocks work so much at least: the last wave is not
# full, and the first one begins late. 64, 32 and 16 heads of 4096 use 0.96, 0.94 and 0.91 of it and
# take 0.89, 0.91 and 0.96 of the two kernels' time; 128 and 32 of 2048 0.86 and 0.88, 256 of 1024
# 0.92, 32 and 8 of 8192 0.85 and 0.93, 16 and 4 of 16384 0.85 and 0.92 (H200, 2026-11-26).
LEAST_USED = 0.9


def fused_backward_plan(dtype: DType, queries: int, keys: int, width: int, heads: int,
                        chip: Generation, multiprocessors: int) -> dict[str, int] | None:
    """How many heads lie side by side, and have sums in memory, twice as many, so that a head does
    not wait for the one whose place it takes. None where two kernels are as quick."""
    if dtype.name not in ("bf16", "f16") or chip.warpgroup_matmul is None or width != WIDTH or (
            queries % QUERIES or keys % KEYS or min(queries, keys) < SHORTEST):
        return None
    groups, blocks, at_once = keys // KEYS, queries // QUERIES, multiprocessors // 2
    most = max(1, at_once // groups)
    beside = next(n for n in range(min(most, heads), 0, -1) if heads % n == 0)
    waves = -(-heads * groups // at_once)
    used = heads * groups * blocks / at_once / (waves * blocks + groups)
    if used < LEAST_USED or 2 * beside < most:
        return None
    return {"heads": beside, "slots": min(heads, 2 * beside)}


__all__ = ["KEYS", "QUERIES", "WIDTH", "attention_fused_backward", "fused_backward_plan"]
