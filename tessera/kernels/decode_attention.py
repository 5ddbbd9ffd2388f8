"""Attention of few queries over many keys, whose time is that of reading keys and values once.

The queries of all heads of a group are the rows of one block, so that a key is read once for them.
Keys are split among blocks: each gives its result relative to its own sums, and log2 of these; a
second kernel weighs the parts, in a fixed order. Dao et al. 2023, Flash-Decoding.

Up to 16 rows are for single warps, four of which read at once on a multiprocessor. More rows are
for warpgroups, and so are few where a block has many keys: one that brings keys and values by TMA,
far ahead, and one that multiplies. Most of its 64 rows may be empty, since time is that of memory.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

from ..numerics import DType, f32, i32, int64
from ..runtime.generations import Generation
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.ir.schedule import Schedule
from ..tile.kernel.decorator import kernel
from ..tile.kernel.kernel import Kernel
from ..tile.tuning.gpus import DEFAULT
from .attention_scores import HIGHEST, LOG2E, both_kinds, score_value

MOST_QUERIES = 16  # of a head
WIDEST = 256  # of a head
WIDEST_OF_CODES = 192  # of a head, of keys of 8 bits
LEAST_STEP = 16  # keys of an iteration
LN2 = math.log(2.0)
SLACK = 8.0  # powers of two by which the running maximum may lag
# Blocks of a warp that are wanted. One query of 32 heads over 8192 keys of 8 takes 16.0 us with 33
# parts, with 16, 24 and 49 parts 16.9, 16.1 and 16.4 (H100, 2026-11-25). First keys that are
# asked for while the kernel in front ends, which weighs the parts of the call before, make it 11.6
# for 12.0, those of two iterations 12.2 (H200, 2026-11-27).
BLOCKS_PER_MULTIPROCESSOR = 2
# Codes of 8 bits do not come ahead, so that more warps have to wait side by side: 16 queries of 32
# heads over 8192 keys of 8 take 248 us with as many parts, 166 and 153 with two and four times as
# many, with bf16 126 (H200, 2026-11-26). Of four times as many, eight fit a multiprocessor, and one
# more part than fits waits for the others: one query of 32 heads of 16 sequences takes 135.8 us
# with 8 parts, 183.3 with 9, 136.0 and 139.2 with 16 and 33, with bf16 127.4 (H200, 2026-11-26).
# Of half as many keys an iteration and with as few registers as let sixteen run, it takes 122.4 us
# with 16 parts, in the same run as 135.9, and 124.8 with bf16 (H200, 2026-11-26).
# Fifteen, with 15 parts, take 111.0 us where sixteen take 105.3 (H100, 2026-11-27).
CLOSE = 16  # such blocks of a multiprocessor: of codes of heads of 128, one query of a head
# Blocks of warpgroups: one for each multiprocessor, beside which one of the next launch finds room;
# where there are more heads, each is a part, and a multiprocessor has two at a time. One query of
# 32 heads, 8 of keys of 128, takes, in us, by single warps and so (H200, 2026-11-26):
#   16 sequences of 8192 keys 125.4 and 122.6, of 1024 20.4 and 19.0; 64 of 4096 243.8 and 243.4;
#   in parts, 4 of 32768 127.1 and 124.1, one of 131072 126.6 and 124.8, of 32768 36.6 and 36.1, of
#   16384 20.5 and 20.8, 2 of 8192 20.3 and 21.4; of twice as many parts 4 of 32768 take 125.9 where
#   they took 121.3
# and of 1024 keys of more heads than multiprocessors: 24 sequences 28.2 and 30.5, 32 36.6 and 35.0,
# 48 54.9 and 50.2, 64 65.1 and 65.7, 128 124.6 and 126.1, of 2048 242.1 and 245.0.
EVEN = 1.69, 3.4  # blocks of a multiprocessor that two at a time do in about as long as they may
STREAM_WIDTH = 128  # of a head, at most
RING_BYTES = 96 << 10  # of keys and values that come ahead, in
MOST_SLOTS = 16
LEAST_KEYS = 64  # of a part
MANY_KEYS = 256
# Keys of a part of a cluster, three iterations: a sequence of 1024 keys, in one, takes 5.2 us in
# place of 5.5, one of 8192, in eight, 16.9 in place of 12.5 (H200, 2026-11-27)
LONG_PART = 192
AHEAD = 4
# Clusters of so many groups begin sooner than larger ones, and bring all keys and values at once. A
# sequence of 1024 keys takes 3.2 us by 8 groups and 4.5 by 16 in iterations, 5.1 before all lanes
# sent what is exchanged; cuDNN takes 7.5. An empty launch takes 0.95, one that loads the same keys
# and values 2.3, in clusters of 8 2.7 and of 16 2.9, and what joins the parts 1.45 and 1.8 alone
# (H200, 2026-11-27, in CUDA graphs, one behind the other)
USUAL_GROUPS = 8
ONCE_ELEMENTS = 128 * 128


class DecodePlan(NamedTuple):
    """How few queries are attended.

    kernel: its name.  rows, keys: of a block and of an iteration.  parts: of the keys.  close: how
    many blocks a multiprocessor has to have registers for, 0: as many as they leave.  slots:
    iterations whose keys and values warpgroups that specialise bring ahead, 0: another form.
    ahead: iterations that are brought near while the kernel in front ends.  once: of a cluster,
    whether a part is one iteration
    """

    kernel: str
    rows: int
    keys: int
    parts: int
    close: int = 0
    slots: int = 0
    ahead: int = 0
    once: bool = False

    @property
    def clustered(self) -> bool:
        """Whether the parts of a head are a cluster, and no second kernel weighs them."""
        return self.kernel.startswith("decode_cluster")

    @property
    def knobs(self) -> dict[str, Any]:
        """Of the kernel's schedule, where the kernel's own will not do."""
        if self.clustered:
            return {"warps": 4, "stages": 2}
        if self.slots:
            return {"stages": self.slots, "RESIDENT": 2, "DEPENDENT": True, "STREAMED": True}
        return {"warps": 1, "stages": 3, "RESIDENT": self.close} if self.close else {}

    def constants(self, rows: int) -> dict[str, int]:
        """What kernels are given beside the rest. rows: of a head of keys"""
        made = {"P": self.parts, "ROWS": rows, "ONCE": self.once} if self.clustered else {}
        return made | ({"AHEAD": self.ahead} if self.ahead else {})

    @property
    def together(self) -> int:
        """Parts that are weighed at once."""
        return min(64, 1 << (self.parts - 1).bit_length())


def takes_keys(keys: DType, queries: DType, width: int, page: int = 0) -> bool:
    """Whether these kernels read keys and values of this type: of that of queries, or codes of 8
    bits, which are made wider in registers. page: keys of one, 0 where they lie in none."""
    narrow = keys.kind == "float" and keys.bits == 8 and width <= WIDEST_OF_CODES
    return (keys is queries or narrow) and (not page or page % LEAST_STEP == 0)


def few_queries(dtype: DType, S: int, T: int, width: int) -> bool:
    """Whether these kernels are for so many queries of a head, keys, and heads as wide. dtype: of
    queries.

    Several queries of a head may have to be moved beside those of others, for which few keys do not
    pay.
    """
    return dtype.kind == "float" and dtype.bits == 16 and width <= WIDEST and (
        S == 1 or S <= MOST_QUERIES and T >= MANY_KEYS)


def streams(chip: Generation | None, *widths: int) -> bool:
    """Whether warpgroups that specialise take heads as wide."""
    return chip is not None and chip.warpgroup_matmul is not None and all(
        w % 16 == 0 and w <= STREAM_WIDTH for w in widths)


def decode_plan(heads: int, rows: int, T: int, width: int, *, codes: bool = False, page: int = 0,
                queries: int = 1, streamed: bool = False, groups: int = 1,
                multiprocessors: int = DEFAULT.multiprocessors) -> DecodePlan:
    """heads: of keys, in all sequences, as wide.  rows: queries that read one.  T: keys of each,
    those of a window where there is one.  codes: keys of 8 bits.  page: keys of one, or 0.
    queries: of a head.  streamed: whether warpgroups that specialise take such heads.  groups: of
    a cluster, at most.  multiprocessors: of the card.

    Single warps read codes, and pages of which 64 is no divisor: of pages of 16 an iteration has as
    many, and 16 sequences of 8192 keys take 248 us for 132 (H200, 2026-11-26). Of both they read a
    key once for 16 rows. Of pages of 16 a warp has half as many bytes under way, so that twice as
    many read at once: 288 blocks took 155.8 us for what 384 read in 132.4 (as above)."""
    if plan := _clustered_plan(heads, rows, T, width, groups, page, codes, multiprocessors):
        return plan
    if streamed and not codes and page % 64 == 0:
        plan = _streamed_plan(heads, rows, T, width, page, multiprocessors)
        if rows > 16 or T // plan.parts >= _least_stream(heads, plan.parts, multiprocessors):
            return plan
    if page or codes:
        heads, rows = heads * -(-rows // 16), min(rows, 16)
    name, BM, BN = ("decode_rows", 16, 32) if rows <= 16 else ("decode_many_rows", 64, 64)
    BN = BN if width <= 128 else BN // 2
    close = CLOSE if codes and width == 128 and queries == 1 else 0
    if close or codes and width not in (32, 64, 128) or page % BN:  # or registers would not do
        BN = LEAST_STEP
    blocks = heads * -(-rows // BM)
    usual = BLOCKS_PER_MULTIPROCESSOR * multiprocessors
    many = usual * (2 if page and BN < 32 and width <= 128 else 1)
    wanted = multiprocessors * (close or 8) // blocks if codes else -(-many // blocks)
    parts = _parts_of(T, BN, wanted)
    ahead = int(parts > 1 and name == "decode_rows" and not page and not codes)
    return DecodePlan("decode_pages" if page else name, BM, BN, parts, close, ahead=ahead)


def _clustered_plan(heads: int, rows: int, T: int, width: int, groups: int, page: int, codes: bool,
                    multiprocessors: int) -> DecodePlan | None:
    """Where all parts run at once and each is short, so that what takes the time is what follows
    each other: a launch, the first keys, the weights of parts."""
    most = 1 << (min(groups, multiprocessors // heads or 1).bit_length() - 1)
    if most < 2 or rows > 16 or page % 64:
        return None
    name = "decode_cluster_pages" if page else "decode_cluster"
    parts = most if page else min(most, USUAL_GROUPS)
    least = LEAST_KEYS if width <= 128 else LEAST_KEYS // 2
    BN = max(least, 1 << (-(-T // parts) - 1).bit_length())
    if not codes and 0 < T and BN <= (64 if page else 128) and BN * width <= ONCE_ELEMENTS:
        while parts > 1 and T <= parts // 2 * BN:  # half of them without keys
            parts //= 2
        return DecodePlan(name, 16, BN, parts, ahead=0 if page else 1, once=True
                          ) if parts > 1 else None
    parts, BN = most, least  # two blocks of a multiprocessor have room
    while parts > 1 and T <= (parts - 1) * BN * -(-T // (parts * BN)):  # a part without keys
        parts //= 2
    if parts < 2 or T > parts * LONG_PART:
        return None
    iterations = -(-T // (parts * BN))
    return DecodePlan(name, 16, BN, parts, ahead=0 if page else min(iterations, AHEAD))


def _streamed_plan(heads: int, rows: int, T: int, width: int, page: int, multiprocessors: int
                   ) -> DecodePlan:
    """In 128 keys of narrow heads 16 sequences of 8192 take 63.8 us, in 64 66.0, by single warps
    67.0; eight queries of each head 123.8 in place of 138.3 (H200, 2026-11-26, as above)."""
    BM, BN = 64, 128 if width <= 64 and page % 128 == 0 else 64
    slots = min(MOST_SLOTS, RING_BYTES // (2 * 2 * BN * -(-width // 64) * 64))
    parts = _parts_of(T, BN, multiprocessors // (heads * -(-rows // BM)))
    return DecodePlan("decode_many_pages" if page else "decode_many_rows", BM, BN, parts,
                      slots=slots)


def _least_stream(heads: int, parts: int, multiprocessors: int) -> int:
    """Keys of a part from which on warpgroups read those of few rows sooner than single warps."""
    if heads * parts <= multiprocessors:
        return 1024 if parts == 1 else 2048
    return 1024 if EVEN[0] <= heads / multiprocessors <= EVEN[1] else 4096


def _parts_of(T: int, BN: int, wanted: int) -> int:
    """At most so many, each with keys."""
    parts = max(1, min(wanted, T // LEAST_KEYS))
    span = -(-T // (parts * BN)) * BN
    return max(1, -(-T // max(1, span)))


@kernel
def place_of(table, c, heads, k0, size):
    """The matrix of keys that key k0 of head c lies in, and its row there.

    table [Z, L]: the pages of sequences that have `heads` heads of keys each, of `size` keys, which
    lie in matrices one head after another; None: a head has a matrix of its own
    """
    if table is None:
        return c, k0
    return table[c // heads, k0 // size] * heads + c % heads, k0 % size


@kernel
def keys_seen(K, count, spans, c, S, window, heads, table):
    """The number of keys, and the first and the end of those that any query sees.

    count: of the keys, the first so many are there; None: all.  spans [Z, 2, 1]: the keys that one
    query sees, of `heads` heads of keys one after another each.  window: 0 without one.  table: the
    pages that keys lie in, then count [Z] is that of each sequence
    """
    if count is None:
        keys = K.shape[1]
    elif table is None:
        keys = tile.cast(min(K.shape[1], count[0]), "int32")
    else:
        keys = min(K.shape[1] * table.shape[1], count[c // heads])
    first, end = max(0, keys - S - (window - 1)) if window else 0, keys
    if spans is not None:
        first, end = max(first, spans[c // heads, 0, 0]), min(keys, spans[c // heads, 1, 0])
    return keys, first, end


@kernel
def scores_seen(s, Q, k0, seen, c, r0, count, spans, scale, S, causal, window, cap, score):
    """Products of rows [r0:] of queries and keys [k0:] as scores, -inf of what a query does not
    see. seen: see keys_seen.  cap: 0 without one; score: None.

    Rows are S queries of each head of a group, one head after another.
    """
    keys, first, end = seen
    BM, BN = s.shape
    row = (tile.arange(0, BM) + r0)[:, None]
    query, head = row % S + (keys - S), c * (Q.shape[1] // S) + row // S
    key = (tile.arange(0, BN) + k0)[None, :]
    if cap or score is not None:
        s = score_value(s, scale / LOG2E, cap, score, head, both_kinds(query), both_kinds(key))
    if causal:
        s = tile.where(key <= query, s, -math.inf)
    elif count is not None:
        s = tile.where(key < keys, s, -math.inf)
    if window:
        s = tile.where(key > query - window, s, -math.inf)
    if window and S > 1 and not causal:
        s = tile.where(key < query + window, s, -math.inf)
    if spans is not None:
        s = tile.where((key >= first) & (key < end), s, -math.inf)
    return s


@kernel
def attend_keys(Q, K, V, count, spans, c, r0, part, parts, scale, S, BM, BN, causal, window, cap,
                heads, score, table=None):
    """Rows [r0:r0+BM] over one part of the keys: sums of values times exp2(score - m), m, and sums
    of exp2(score - m). See keys_seen and scores_seen."""
    seen = keys_seen(K, count, spans, c, S, window, heads, table)
    begin, end = seen[1] // BN * BN, seen[2]
    span = (end - begin + parts * BN - 1) // (parts * BN) * BN
    factor = LOG2E if cap or score is not None else scale
    q = tile.load(Q[c, r0:r0+BM, :])
    m, z, o = tile.full((BM,), -HIGHEST), tile.zeros((BM,)), tile.zeros((BM, V.shape[-1]))
    for k0 in range(begin + part * span, min(end, begin + part * span + span), BN):
        at, row0 = place_of(table, c, heads, k0, K.shape[1])
        k = tile.cast(tile.load(K[at, row0:row0+BN, :]), Q.dtype)
        s = scores_seen(tile.dot(q, k.T), Q, k0, seen, c, r0, count, spans, scale, S, causal,
                        window, cap, score)
        m_new = tile.running_max(m, tile.row_max(s) * factor, SLACK)
        alpha = tile.exp2(m - m_new)
        p = tile.exp2(s * factor - m_new)
        z = z * alpha + tile.row_sum(p)
        v = tile.cast(tile.load(V[at, row0:row0+BN, :]), Q.dtype)
        o = tile.dot(tile.cast(p, Q.dtype), v, o * alpha)
        m = m_new
    return o, m, z


@kernel
def attend_once(Q, K, V, count, spans, c, part, scale, S, BM, BN, causal, window, cap, heads, score,
                table=None):
    """The same of rows [0:BM] and a part of BN keys, all asked for at once: values arrive while
    scores are made."""
    seen = keys_seen(K, count, spans, c, S, window, heads, table)
    begin, end = seen[1] // BN * BN + part * BN, seen[2]
    factor = LOG2E if cap or score is not None else scale
    q = tile.alloc_shared((BM, Q.shape[-1]), Q.dtype, swizzle="xor")
    k = tile.alloc_shared((BN, K.shape[-1]), Q.dtype, swizzle="xor")
    v = tile.alloc_shared((BN, V.shape[-1]), Q.dtype, swizzle="xor")
    p_shared = tile.alloc_shared((BM, BN), Q.dtype, swizzle="xor")
    tile.cp_async(q, Q[c, 0:BM, :])
    m, z, o = tile.full((BM,), -HIGHEST), tile.zeros((BM,)), tile.zeros((BM, V.shape[-1]))
    for k0 in range(begin, min(end, begin + BN), BN):  # once, or never
        at, row0 = place_of(table, c, heads, k0, K.shape[1])
        tile.cp_async(k, K[at, row0:row0+BN, :])
        tile.cp_commit_group()
        tile.cp_async(v, V[at, row0:row0+BN, :])
        tile.cp_commit_group()
        tile.cp_wait_group(1)
        tile.barrier()
        s = factor * scores_seen(tile.dot(q[:, :], k[:, :].T), Q, k0, seen, c, 0, count, spans,
                                 scale, S, causal, window, cap, score)
        m = tile.maximum(tile.row_max(s), m)
        p = tile.exp2(s - m)
        p_shared[:, :] = p
        tile.cp_wait_group(0)
        tile.barrier()
        o = tile.dot(p_shared[:, :], v[:, :])
        z = tile.row_sum(p)
    return o, m, z


@kernel
def attend_part(Q, K, V, count, spans, c, r0, part, parts, scale, S, BM, BN, causal, window, cap,
                heads, score, table=None):
    """Rows [r0:r0+BM] of the result over one part of the keys, and log2 of sums of exp2(scores)."""
    o, m, z = attend_keys(Q, K, V, count, spans, c, r0, part, parts, scale, S, BM, BN, causal,
                          window, cap, heads, score, table)
    return o / z, m + tile.log2(z)


@kernel
def begin_with(K, V, c, part, parts, BN, AHEAD):
    """Brings the first AHEAD boxes of a part near while the kernel in front ends."""
    span = (K.shape[1] + parts * BN - 1) // (parts * BN) * BN
    for i in range(AHEAD):
        k0 = part * span + i * BN
        tile.prefetch_box(K[c, k0:k0+BN, :])
        tile.prefetch_box(V[c, k0:k0+BN, :])
    tile.grid_dependency_wait()
    tile.launch_dependents()


# A warp for 16 rows: four blocks of a multiprocessor read at once, and none waits for another.
@kernel(grid=lambda P, R, C, BM: (P, -(-R // BM), C), schedule=Schedule(warps=1, stages=3))
def decode_rows(Q: Tensor["C", "R", "D"], K: Tensor["C", "T", "D"], V: Tensor["C", "T", "E"],
                count: Tensor[1, int64] | None, out: Tensor["P", "C", "R", "E"],
                lse: Tensor["P", "C", "R", f32] | None, scale: f32,
                spans: Tensor["Z", 2, 1, i32] | None = None, heads=1, S=1, BM=16, BN=32, AHEAD=0,
                causal=False, window=0, cap=0.0, score=None):
    part, r0, c = tile.group_id(0), tile.group_id(1) * BM, tile.group_id(2)
    if AHEAD and count is None and spans is None and not window:
        begin_with(K, V, c, part, P, BN, AHEAD)
    o, sums = attend_part(Q, K, V, count, spans, c, r0, part, P, scale, S, BM, BN, causal, window,
                          cap, heads, score)
    out[part, c, r0:r0+BM, :] = o
    if lse is not None:
        lse[part, c, r0:r0+BM] = sums


@kernel(grid=lambda P, R, C, BM: (P, -(-R // BM), C))
def decode_many_rows(Q: Tensor["C", "R", "D"], K: Tensor["C", "T", "D"], V: Tensor["C", "T", "E"],
                     count: Tensor[1, int64] | None, out: Tensor["P", "C", "R", "E"],
                     lse: Tensor["P", "C", "R", f32] | None, scale: f32,
                     spans: Tensor["Z", 2, 1, i32] | None = None, heads=1, S=1, BM=64, BN=64,
                     causal=False, window=0, cap=0.0, score=None):
    part, r0, c = tile.group_id(0), tile.group_id(1) * BM, tile.group_id(2)
    o, sums = attend_part(Q, K, V, count, spans, c, r0, part, P, scale, S, BM, BN, causal, window,
                          cap, heads, score)
    out[part, c, r0:r0+BM, :] = o
    if lse is not None:
        lse[part, c, r0:r0+BM] = sums


@kernel(grid=lambda P, R, C, BM: (P, -(-R // BM), C), schedule=Schedule(warps=1, stages=3))
def decode_pages(Q: Tensor["C", "R", "D"], K: Tensor["N", "T", "D"], V: Tensor["N", "T", "E"],
                 table: Tensor["Z", "L", i32], count: Tensor["Z", i32],
                 out: Tensor["P", "C", "R", "E"], lse: Tensor["P", "C", "R", f32] | None,
                 scale: f32, heads=1, S=1, BM=16, BN=32, causal=False, window=0, cap=0.0):
    """Keys and values in pages of T, of which BN is a divisor: those of a page lie in `heads`
    matrices one after another, those of a sequence in the pages of its row of the table."""
    part, r0, c = tile.group_id(0), tile.group_id(1) * BM, tile.group_id(2)
    o, sums = attend_part(Q, K, V, count, None, c, r0, part, P, scale, S, BM, BN, causal, window,
                          cap, heads, None, table)
    out[part, c, r0:r0+BM, :] = o
    if lse is not None:
        lse[part, c, r0:r0+BM] = sums


@kernel(grid=lambda P, R, C, BM: (P, -(-R // BM), C))
def decode_many_pages(Q: Tensor["C", "R", "D"], K: Tensor["N", "T", "D"], V: Tensor["N", "T", "E"],
                      table: Tensor["Z", "L", i32], count: Tensor["Z", i32],
                      out: Tensor["P", "C", "R", "E"], lse: Tensor["P", "C", "R", f32] | None,
                      scale: f32, heads=1, S=1, BM=64, BN=64, causal=False, window=0, cap=0.0):
    part, r0, c = tile.group_id(0), tile.group_id(1) * BM, tile.group_id(2)
    o, sums = attend_part(Q, K, V, count, None, c, r0, part, P, scale, S, BM, BN, causal, window,
                          cap, heads, None, table)
    out[part, c, r0:r0+BM, :] = o
    if lse is not None:
        lse[part, c, r0:r0+BM] = sums


@kernel(grid=lambda M, C: (M, C))
def append_to_pages(x: Tensor["C", "M", "D"], table: Tensor["Z", "L", i32],
                    count: Tensor["Z", i32], pool: Tensor["N", "H", "T", "D"]):
    """M entries of each head behind the count that its sequence has, as decode_pages reads them."""
    i, c = tile.group_id(0), tile.group_id(1)
    at = count[c // H] + i
    pool[table[c // H, at // T], c % H, at % T, :] = tile.load(x[c, i, :])


@kernel(grid=lambda N: (N,))
def combine_parts(parts: Tensor["P", "N", "E", f32], lse: Tensor["P", "N", f32],
                  out: Tensor["N", "E"], logs: Tensor["N", f32] | None = None, BP=64):
    """Rows of a result from those of its parts, each weighed by exp2(lse). logs: of the sums of
    exp(scores) of the whole, -inf where no part has a key."""
    n = tile.group_id(0)
    m, z, o = tile.full((1,), -HIGHEST), tile.zeros((1,)), tile.zeros((1, E))
    for p0 in range(0, P, BP):
        rows = tile.load(parts[p0:p0+BP, n, :])  # under way while weights are made
        sums = tile.load(lse[p0:p0+BP, n:n+1], fill=-math.inf)
        m_new = tile.maximum(m, tile.reduce_max(sums, 0))
        weights, alpha = tile.exp2(sums - m_new), tile.exp2(m - m_new)
        z = z * alpha + tile.reduce_sum(weights, 0)
        o = o * alpha + tile.reduce_sum(weights * rows, 0)[None, :]
        m = m_new
    out[n:n+1, :] = o / z[:, None]
    if logs is not None:
        whole = (m + tile.log2(z)) * LN2
        logs[n:n+1] = tile.where(tile.abs(m) < HIGHEST / 2, whole, -math.inf)


# --- parts of a cluster -----------------------------------------------------------------------
@kernel
def join_parts(o, m, z, out, logs, c, part, P, ROWS, LANES):
    """Rows of a result from those that P groups of a cluster have, as combine_parts makes them:
    each group makes as many of their elements, which it gets from the others. LANES / P lanes send
    to each of them, all at one time.

    o, m, z: what attend_keys gave this group, of which the first ROWS rows count
    """
    BM, E = o.shape
    size, lane = ROWS * E, tile.local_id()
    each, senders = (size + P - 1) // P, LANES // P
    own, own_m, own_z = (tile.alloc_shared((BM, E), f32), tile.alloc_shared((BM,), f32),
                         tile.alloc_shared((BM,), f32))
    gathered, all_m, all_z = (tile.alloc_shared((P, each), f32), tile.alloc_shared((P, ROWS), f32),
                              tile.alloc_shared((P, ROWS), f32))
    own[:, :] = o
    own_m[:] = m
    own_z[:] = z
    to, first = lane // senders, lane % senders
    o_there, m_there, z_there = (tile.cluster_shared(gathered, to, P),
                                 tile.cluster_shared(all_m, to, P),
                                 tile.cluster_shared(all_z, to, P))
    tile.barrier()
    for i in range((each + senders - 1) // senders):
        e = i * senders + first
        if size % LANES == 0:  # nothing is left over, and all loads are under way at once
            o_there[part, e] = own[(to * each + e) // E, (to * each + e) % E]
        elif e < each and to * each + e < size:
            o_there[part, e] = own[(to * each + e) // E, (to * each + e) % E]
    for i in range((ROWS + senders - 1) // senders):
        row = i * senders + first
        if row < ROWS:
            m_there[part, row] = own_m[row]
            z_there[part, row] = own_z[row]
    tile.cluster_barrier(P, words=P * (each + 2 * ROWS) if size % P == 0 else 0)
    for i in range((each + LANES - 1) // LANES):
        e = i * LANES + lane
        if e < each and part * each + e < size:
            row, column = (part * each + e) // E, (part * each + e) % E
            top, total, x = -HIGHEST, 0.0, 0.0
            for p in range(P):
                top = max(top, all_m[p, row])
            for p in range(P):
                weight = tile.exp2(all_m[p, row] - top)
                total += weight * all_z[p, row]
                x += weight * gathered[p, e]
            out[c, row, column] = 0.0 if total == 0.0 else x / total  # a query that sees no key
            if logs is not None:
                if column == 0:
                    whole = (top + tile.log2(total)) * LN2
                    logs[c, row] = whole if abs(top) < HIGHEST / 2 else -math.inf


@kernel(grid=lambda P, C: (C, P), schedule=Schedule(warps=4))
def decode_cluster(Q: Tensor["C", "R", "D"], K: Tensor["C", "T", "D"], V: Tensor["C", "T", "E"],
                   count: Tensor[1, int64] | None, out: Tensor["C", "R", "E"],
                   logs: Tensor["C", "R", f32] | None, scale: f32,
                   spans: Tensor["Z", 2, 1, i32] | None = None, heads=1, S=1, BM=16, BN=64, P=8,
                   ROWS=16, AHEAD=1, ONCE=False, causal=False, window=0, cap=0.0, score=None):
    """The parts of a head are the groups of a cluster. ROWS: R, as a constant."""
    c, part = tile.group_id(0), tile.group_id(1)
    if count is None and spans is None and not window:
        begin_with(K, V, c, part, P, BN, AHEAD)
    if ONCE:
        o, m, z = attend_once(Q, K, V, count, spans, c, part, scale, S, BM, BN, causal, window, cap,
                              heads, score)
    else:
        o, m, z = attend_keys(Q, K, V, count, spans, c, 0, part, P, scale, S, BM, BN, causal,
                              window, cap, heads, score)
    join_parts(o, m, z, out, logs, c, part, P, ROWS, 128)


@kernel(grid=lambda P, C: (C, P), schedule=Schedule(warps=4))
def decode_cluster_pages(Q: Tensor["C", "R", "D"], K: Tensor["N", "T", "D"],
                         V: Tensor["N", "T", "E"], table: Tensor["Z", "L", i32],
                         count: Tensor["Z", i32], out: Tensor["C", "R", "E"],
                         logs: Tensor["C", "R", f32] | None, scale: f32, heads=1, S=1, BM=16,
                         BN=64, P=8, ROWS=16, ONCE=False, causal=False, window=0, cap=0.0):
    c, part = tile.group_id(0), tile.group_id(1)
    if ONCE:
        o, m, z = attend_once(Q, K, V, count, None, c, part, scale, S, BM, BN, causal, window, cap,
                              heads, None, table)
    else:
        o, m, z = attend_keys(Q, K, V, count, None, c, 0, part, P, scale, S, BM, BN, causal, window,
                              cap, heads, None, table)
    join_parts(o, m, z, out, logs, c, part, P, ROWS, 128)


# those of the library's routine
KERNELS = decode_rows, decode_many_rows, decode_cluster, combine_parts
PAGED = decode_pages, decode_many_pages, decode_cluster_pages


@cache
def planned(kernel: Kernel, plan: DecodePlan) -> Kernel:
    """The kernel with the schedule of a plan."""
    return kernel.with_schedule(Schedule(**plan.knobs)) if plan.knobs else kernel


__all__ = ["KERNELS", "PAGED", "DecodePlan", "append_to_pages", "combine_parts", "decode_cluster",
           "decode_cluster_pages", "decode_many_pages", "decode_many_rows", "decode_pages",
           "decode_plan", "decode_rows", "few_queries", "planned", "streams", "takes_keys"]
