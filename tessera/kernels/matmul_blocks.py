"""The block of a matmul's result that a group makes, and in how many parts K is summed.

Tensor cores of a warpgroup reach their speed in blocks of 128 x 256, but a result is seldom a
multiple of 132 such blocks, and in the last wave of groups many multiprocessors have nothing to do:
a quarter of the time with 192 blocks on 132. Small blocks give all of them something to do, and
few rows are the columns of a block of the transposed result. A weight's gradient has few blocks and
a long K: there groups for other multiprocessors sum other parts of K, and a sum of partial results
follows, which costs their bytes. The time of each choice is estimated from what was measured of
each block.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from ..numerics import DType, NumericType
from ..tile.ir.schedule import shares_rows
from .cards import PLAIN_CARD, Card

MOST_PARTS = 16
PARTS_OF_EACH = 2  # numbers of them, where blocks are ranked
STEP_BYTES = 128  # of K, that a block takes at once
USUAL = 128, 256
FP8_COLUMNS = 128  # most of a block
# What another block, and a sum in parts, has to gain: estimates are not better, and partial results
# take memory and a launch. And of what a block has beyond the result, for each time the result:
# where bytes decide, a block of 64 rows for 16 takes up to 9 % longer than one of 16.
OTHER_BLOCK, IN_PARTS, BEYOND = 0.015, 0.03, 0.01
PAIRED = 1e-4  # where nothing else decides, blocks in pairs go first

# Microseconds of a step of K, and of the store of 16-bit results, which overlaps with nothing, by
# rows and columns of a block. Of large blocks: H200, products of GPT-2's extents, 2026-11-23; of
# others and the figures below: fitted to 420 times of 36 products in four layouts (H100, launches
# in CUDA graphs, 2026-11-25), which they tell to 5 %; of the blocks that were timed the one chosen
# is 0.6 % slower than the best, on average. 192 rows are three warpgroups, whose threads have
# registers for 128 sums less.
BLOCK_US: Mapping[tuple[int, int], tuple[float, float]] = {
    (128, 256): (0.65, 1.25), (192, 192): (0.73, 1.41), (128, 192): (0.503, 0.94),
    (192, 128): (0.503, 0.94), (128, 128): (0.375, 0.62), (64, 256): (0.38, 0.49),
    (64, 128): (0.225, 0.56), (128, 64): (0.268, 0.25), (64, 64): (0.144, 0.62),
    (64, 32): (0.108, 1.1), (64, 16): (0.108, 0.75), (64, 8): (0.108, 0.75),
    (192, 160): (0.65, 1.2), (192, 96): (0.41, 0.7)}
# Of blocks of the transposed result where that is no narrow one: 512 x 3136 from 2048 are 132 of
# these, one for each multiprocessor, and 98 of 64 x 256. 17 products with as many rows as columns
# or more, a first operand along K, 2048 of K or less and two waves or one took 0.66 to 0.92 of the
# time of the other choice. Of seven with more columns three took 1.06 to 1.09, and of seven with
# 4096 of K, three waves or a first operand across K six took 1.02 to 1.28 (H100, two runs, operands
# that L2 does not hold, 2026-11-26).
TRANSPOSED_US: Mapping[tuple[int, int], tuple[float, float]] = {(128, 96): (0.31, 0.6)}
TRANSPOSED_STEPS, TRANSPOSED_WAVES = 32, 2  # most of them
# Blocks in pairs alone: of two that lie side by side across K one begins in the middle of a line,
# and copies of whole panels bring more than the block has. 6144 x 7168 from 8192 are 12 waves of
# these in 912 us, 11 of 128 x 256 in 949; alone they take 1136 (H100, 2026-11-27).
PAIRS_US: Mapping[tuple[int, int], tuple[float, float]] = {(128, 224): (0.575, 1.1)}
# Blocks of the transposed result with as many columns as leave less of the last wave empty, timed
# by what fits the times above. 2632 x 9176 from 4952 are six waves of 240 x 128, in 318 to 321 us
# in nt, tn and tt and 337 in nn, and of 128 x 256 six too, in 327 to 333 and 350. 4097 x 4097 from
# 4097, operands copied to whole lines, are five waves of 208 x 128, in 276 and 271 us (nt, nn), and
# of 128 x 224 five, in 315 and 320; across K, where whole panels of columns are brought, they take
# 316 alone and 299 in pairs. Columns of pairs are multiples of 16: 248 take 445 us for 319. Fewer
# are not better: 1536 x 1536 x 1536 are one wave of 144 x 128 in 12.5 us and of 192 x 96 in 11.9
# (H200, 2026-11-27).
FITTED_US: Mapping[tuple[int, int], tuple[float, float]] = {
    (128, 240): (0.6125, 1.17), (128, 208): (0.5375, 1.02)}
# Of small ones, which are measured and which no estimate chooses: 768 x 768 x 768 takes 3.61 us in
# nn and 4.26 in tn, in blocks of 64 x 128 4.02 and 4.03 (H200, 2026-11-27).
SMALL_US: Mapping[tuple[int, int], tuple[float, float]] = {(64, 96): (0.19, 0.6)}
FITTED = 0.025  # of the time of other blocks, that these have to gain
# Of a row of 128 bytes that is brought, if it is one line of L2: 1.3 to 1.55 ns in 30 products
# whose rows lie otherwise (H100, 2026-11-25). Rows that begin at odd multiples of 64 bytes are two
# lines half of the time, and so on: by what the distance of rows is a multiple of, in bytes.
LINE_US = 1.45e-3
LINES: Mapping[int, float] = {128: 1.0, 64: 1.3, 32: 1.75, 16: 1.875}
CLUSTER = 2  # blocks that share columns, or rows where these are more (shares_rows)
BEGIN_US = 1.33  # of a kernel
WORD_US = 2.5  # of 128 x 256 results of 32 bits, more
SUM_US = 1.0  # of the sum of partial results, besides its bytes
MEMORY = 0.83  # of the rate in the data sheet, at which bytes come and go
BUSY = 7e8  # flops in a us: what takes less than twice its bytes does not gain by pairs
SHARPNESS = 5.4  # steps and bytes hide each other the less, the nearer their times are
# Of fp8, whose short sums threads add to others: from cubes of 4096 and 8192, where in one run
# 192 x 128 took 113 and 849 us, 128 x 128 105 and 900, 128 x 192 117 and 894, in pairs that share
# columns 119 and 875, and widths between them more (H200, 2026-11-26).
FP8_BLOCK_US = {(128, 128): (0.40, 0.62), (192, 128): (0.56, 0.94), (128, 192): (0.59, 0.94),
                (64, 128): (0.32, 0.56), (64, 64): (0.235, 0.62)}
FP8_BLOCKS = tuple(FP8_BLOCK_US)
# Of results that are no strips, and read in whole lines however they lie.
BLOCKS = tuple(b for b in BLOCK_US if b[1] % 64 == 0)
LARGE = tuple(b for b in BLOCK_US if min(b) >= 128)
# Where what follows needs registers beside the sums: 128 x 256 and 192 x 192 leave none to spare.
CROWDED = tuple(b for b in LARGE if prod(b) <= 128 * 192)
# Where tiles come with the results that meet them, as residuals do: two of 16 bits and a mask have
# room twice. With 192 x 128 products of [8192, 4096] and [4096, 1024] and a residual take 109.2 us
# for 98.4, of [200704, 128] and [128, 256] with a mask too 81.0 for 78.8 (H200, 2026-11-28).
BESIDE_TILES = ((128, 128),)


@dataclass(frozen=True)
class MatmulBlocks:
    """rows, columns: of a block.  parts: of K, of `depth` elements each but for the last; 1 and 0
    where it is summed whole.  us: the estimate.  swapped: the operands are, transposed: the columns
    are the rows that tensor cores take 64 at a time.  cluster: blocks that bring for each other
    what they share.  tuned: where a table has chosen, why."""

    rows: int
    columns: int
    parts: int = 1
    depth: int = 0
    us: float = 0.0
    swapped: bool = False
    cluster: int = 1
    tuned: str = ""

    @property
    def choice(self) -> str:
        """As tables of tuned choices spell it."""
        words = ["swapped"] * self.swapped + [f"parts={self.parts}"] * (self.parts > 1)
        return " ".join([f"{self.rows}x{self.columns}", *words,
                         *[f"cluster={self.cluster}"] * (self.cluster > 1)])


@dataclass(frozen=True)
class MatmulExtents:
    """Of `matrices` results [M, N] with sums over K. bits: of an element of an operand, and of one
    of the result.  short: whether short sums are added to others (see short_sums).  lines: of L2,
    that a row of 128 bytes of either operand is.  read: elements of both operands in memory, where
    these are fewer: of unfolded images."""

    M: int
    N: int
    K: int
    bits: int
    result_bits: int
    matrices: int = 1
    short: bool = False
    lines: tuple[float, float] = (1.0, 1.0)
    read: int = 0

    @property
    def operands(self) -> int:
        """Elements that are read."""
        return self.read or self.matrices * self.K * (self.M + self.N)

    @property
    def steps(self) -> int:
        return -(-self.K * self.bits // (8 * STEP_BYTES))


def short_sums(numeric: NumericType | DType) -> bool:
    """Whether tensor cores keep too few digits of long sums, so that short ones are added to others
    beside them: of fp8. Registers are left for blocks of FP8_COLUMNS."""
    dtype = numeric if isinstance(numeric, DType) else numeric.dtype
    return dtype.kind == "float" and dtype.bits == 8


@functools.lru_cache(maxsize=4096)  # layers of a model ask for the same
def choose_blocks(extents: MatmulExtents, blocks: tuple[tuple[int, int], ...], split: bool = False,
                  card: Card = PLAIN_CARD) -> MatmulBlocks:
    """The quickest of some blocks by the estimate, the first where others are hardly quicker."""
    return rank_blocks(extents, blocks, split, card)[0]


def rank_blocks(extents: MatmulExtents, blocks: tuple[tuple[int, int], ...], split: bool = False,
                card: Card = PLAIN_CARD) -> list[MatmulBlocks]:
    """All choices, from the quickest by the estimate on.

    blocks: of BLOCK_US and PAIRS_US.  split: whether K may be summed in parts.
    """
    parts = range(1, MOST_PARTS + 1) if split else (1,)
    alone = [(b, 1) for b in blocks if b not in PAIRS_US]
    shared = [(b, CLUSTER) for b in blocks if max(extents.lines) > 1 or b in PAIRS_US
              or _in_pairs(extents, b, card)]

    def cost(b: MatmulBlocks) -> float:
        other = (b.rows, b.columns) != blocks[0]
        beyond = prod(-(-n // size) * size / max(n, 1) for n, size in (
            (extents.M, b.rows), (extents.N, b.columns))) - 1
        return b.us * (1 + other * OTHER_BLOCK + (b.parts > 1) * IN_PARTS + beyond * BEYOND
                       - (b.cluster > 1) * PAIRED)

    return sorted((estimate(extents, b, p, card, c) for b, c in (*alone, *shared)
                   for p in parts), key=cost)


def _in_pairs(x: MatmulExtents, block: tuple[int, int], card: Card) -> bool:
    """Whether pairs of blocks bring their columns for each other although each could read its own,
    which takes power off the second-level cache: steps of training take 1 % less (H200, 2026-11-26,
    docs/internals/measured.md). Where memory decides, one waits for the other: 256 x 14336 from
    4096 take 53.3 us in pairs and 50.8 without (H100, 2026-11-27)."""
    busy = 2 * x.matrices * x.M * x.N * x.K / BUSY
    bytes_us = x.operands * x.bits / 8 / (MEMORY * card.memory_gbps * 1e3)
    return (block == USUAL and x.bits == 16 and -(-x.M // block[0]) % CLUSTER == 0
            and busy >= 2 * bytes_us)


def choose_either_way(extents: MatmulExtents, blocks: Sequence[tuple[int, int]], layout: str,
                      card: Card = PLAIN_CARD, split: bool = True) -> MatmulBlocks:
    """The same, of blocks of the result or of its transpose.

    layout: of the operands, as of kernels.gemm.product.
    """
    x = extents
    plain = or_transposed(choose_blocks(x, _readable(blocks, layout[1] == "t", x.bits), split,
                                        card), x, layout, card, x.result_bits)
    if not _narrow(x, layout, blocks):
        fitted = next(iter(_fitted(x, layout, card)), plain)
        return fitted if fitted.us < (1 - FITTED) * plain.us else plain
    return or_narrow(plain, x, layout, card, split, blocks)


def _narrow(x: MatmulExtents, layout: str, blocks: Iterable[tuple[int, int]]
            ) -> list[tuple[int, int]]:
    """Blocks of the transposed result that are as narrow as its rows are few."""
    return [b for b in _readable(tuple(blocks), layout[0] == "n", x.bits) if x.M <= b[1] < 64]


def or_narrow(plain: MatmulBlocks, x: MatmulExtents, layout: str, card: Card, split: bool,
              blocks: Iterable[tuple[int, int]] = tuple(BLOCK_US)) -> MatmulBlocks:
    """The choice, or where rows are few a narrow block of the transposed result, unless the
    estimate of that is worse."""
    narrow = _narrow(x, layout, blocks)
    if not narrow:
        return plain
    turned = choose_blocks(replace(x, M=x.N, N=x.M, lines=x.lines[::-1]),
                           (min(narrow, key=prod),), split, card)
    if (1 + OTHER_BLOCK) * plain.us < turned.us:
        return plain
    return replace(turned, rows=turned.columns, columns=turned.rows, swapped=True)


def or_transposed(plain: MatmulBlocks, x: MatmulExtents, layout: str, card: Card,
                  stored_bits: int) -> MatmulBlocks:
    """The choice, or one of TRANSPOSED_US where that is quicker. stored_bits: of a result where it
    leaves: of 16, in rows that TMA writes, panels of the transposed one leave as others do."""
    if x.bits != 16 or stored_bits != 16 or x.N % 16 or x.M < x.N or layout[0] == "t" or (
            x.steps > TRANSPOSED_STEPS):
        return plain
    other = _transposed(x, layout, card)[0]
    blocks = -(-x.M // other.rows) * -(-x.N // other.columns)
    many = blocks > TRANSPOSED_WAVES * card.multiprocessors
    return plain if many or (1 - OTHER_BLOCK) * plain.us < other.us else other


def _transposed(x: MatmulExtents, layout: str, card: Card,
                blocks: Mapping[tuple[int, int], tuple[float, float]] = TRANSPOSED_US
                ) -> list[MatmulBlocks]:
    found = rank_blocks(replace(x, M=x.N, N=x.M, lines=x.lines[::-1]), _readable(
        tuple(blocks), layout[0] == "n", x.bits), False, card)
    return [replace(b, rows=b.columns, columns=b.rows, swapped=True) for b in found]


def _fitted(x: MatmulExtents, layout: str, card: Card) -> list[MatmulBlocks]:
    """Blocks of FITTED_US, alone and in pairs, from the quickest by the estimate on. Operands and
    results are of 16 bits. Columns that lie across K are brought for each other."""
    if x.bits != 16 or x.result_bits != 16:
        return []
    turned = replace(x, M=x.N, N=x.M, lines=x.lines[::-1])
    return sorted((replace(e, rows=e.columns, columns=e.rows, swapped=True) for e in (
        estimate(turned, b, 1, card, n) for b in FITTED_US
        for n in ((CLUSTER, 1) if layout[0] == "n" else (CLUSTER,)))), key=lambda b: b.us)


def rank_either_way(extents: MatmulExtents, blocks: Sequence[tuple[int, int]], layout: str,
                    card: Card = PLAIN_CARD, split: bool = True) -> list[MatmulBlocks]:
    """All of them, the choice first and then from the quickest by the estimate on, with the two
    best numbers of parts of each block. Of the transposed result narrow blocks for few rows, those
    whose columns cannot be read otherwise, and all where rows of results begin anywhere: a store of
    whole rows is slow then (16384 x 50257 x 768 nn: 4.66 -> 2.70 ms, H200, 2026-11-26)."""
    x, first = extents, choose_either_way(extents, blocks, layout, card, split)
    plain, anywhere = _readable(blocks, layout[1] == "t", x.bits), x.N * x.result_bits % 128 > 0
    other = tuple(b for b in _readable(blocks, layout[0] == "n", x.bits)
                  if b not in plain or x.M < 64 > b[1] or (anywhere and b[1] >= 64))
    found = rank_blocks(x, plain, split, card)
    found += [replace(b, rows=b.columns, columns=b.rows, swapped=True) for b in rank_blocks(
        replace(x, M=x.N, N=x.M, lines=x.lines[::-1]), other, split, card)] if other else []
    if x.bits == x.result_bits == 16 and x.N % 16 == 0:
        found += _transposed(x, layout, card)
        found += _transposed(x, layout, card, SMALL_US) if x.steps <= TRANSPOSED_STEPS else []
    found += _fitted(x, layout, card)
    taken, ranked = Counter[tuple](), [first]
    for b in sorted(found, key=lambda b: b.us):
        block = b.rows, b.columns, b.swapped, b.cluster
        if b.choice != first.choice and taken[block] < PARTS_OF_EACH:
            ranked.append(b)
        taken[block] += 1
    return ranked


def _readable(blocks: Sequence[tuple[int, int]], along: bool, bits: int
              ) -> tuple[tuple[int, int], ...]:
    """Those whose columns TMA brings: rows of 32 bytes or more, where they lie along the columns
    and not along K, and of whole halves of lines where there is more than one."""
    return tuple(b for b in blocks if along or b[1] * bits >= 256 and (
        b[1] * bits <= 1024 or b[1] * bits % 512 == 0))


def estimate(x: MatmulExtents, block: tuple[int, int], parts: int = 1, card: Card = PLAIN_CARD,
             cluster: int = 1) -> MatmulBlocks:
    """What a choice takes: steps of all waves of groups beside the bytes, then the sum of parts. A
    step is the matmuls', or the copies' where these take longer."""
    (m, n), steps = block, -(-x.steps // parts)
    own = next(us[block] for us in (BLOCK_US, TRANSPOSED_US, PAIRS_US, FITTED_US, SMALL_US)
               if block in us)
    step, store = FP8_BLOCK_US.get(block, own) if x.short else own
    down, across = (1, cluster) if shares_rows(block) else (cluster, 1)  # blocks of a cluster
    if max(x.lines) > 1:
        step = max(step, LINE_US * (m * x.lines[0] / across + n * x.lines[1] / down))
    groups = x.matrices * -(-x.M // (m * down)) * down * -(-x.N // (n * across)) * across * parts
    bits = x.result_bits if parts == 1 else 32
    word = WORD_US * (bits > 16) * m * n / (128 * 256)
    waves = -(-groups // card.multiprocessors) * (steps * step + store + word)
    results, rate = x.matrices * x.M * x.N, MEMORY * card.memory_gbps * 1e3  # bytes in a us
    moved = (x.operands * x.bits + parts * results * bits) / 8 / rate
    us = BEGIN_US + (waves**SHARPNESS + moved**SHARPNESS)**(1 / SHARPNESS)
    if parts == 1:
        return MatmulBlocks(m, n, us=us, cluster=cluster)
    us += SUM_US + results * (4 * parts + x.result_bits / 8) / rate
    return MatmulBlocks(m, n, parts, steps * 8 * STEP_BYTES // x.bits, us, cluster=cluster)


def lines_of(row_bytes: int) -> float:
    """Of L2, that a row of 128 bytes of an operand is, whose own rows are so far apart. Others are
    copied first."""
    return next((n for by, n in LINES.items() if row_bytes % by == 0), 1.0)


@dataclass(frozen=True)
class ThreadBlock:
    """Of a matmul by threads. us: of 32 of K, where `resident` groups share a multiprocessor, for
    each of them.  begin_us: more, for all together."""

    rows: int
    columns: int
    depth: int
    warps: int
    resident: int
    us: float
    begin_us: float


# Products of f32 of 1024, 2048 and 4096 cubed (H200, 2026-11-26); large ones 16 deep take 3 to 5 %
# longer, and small ones 32 deep leave shared memory for four groups alone.
THREAD_BLOCKS = (
    ThreadBlock(128, 256, 32, 8, 1, 5.6, 0.0), ThreadBlock(128, 128, 32, 4, 2, 2.8, 0.1),
    ThreadBlock(64, 64, 16, 2, 8, 0.77, 0.3))


def choose_thread_block(M: int, N: int, card: Card) -> ThreadBlock:
    """The quickest for a product of f32."""
    def us(b: ThreadBlock) -> float:
        groups = -(-(-(-M // b.rows) * -(-N // b.columns)) // card.multiprocessors)
        rounds, rest = divmod(groups, b.resident)
        return rounds * (b.resident * b.us + b.begin_us) + bool(rest) * (rest * b.us + b.begin_us)

    return min(THREAD_BLOCKS, key=us)


def default_block(numeric: NumericType | DType, M: int, N: int) -> tuple[int, int, int]:
    """Rows, columns and depth of a group's block.

    Tensor cores take 128 x 256 (two consumer warpgroups of 64 rows each); steps are rows of 128
    bytes, the widest swizzle. Small products get blocks that leave less of them empty. Threads
    that multiply and add keep sums and operands in registers: 64 x 64.
    """
    bits = (numeric if isinstance(numeric, DType) else numeric.dtype).bits
    if bits > 16:
        return 64, 64, 1024 // bits // 2
    columns = 256 if N >= 256 and M >= 128 else 128 if N >= 128 else 64
    return (128 if M >= 128 else 64), columns, 1024 // max(bits, 8)


__all__ = ["BESIDE_TILES", "BLOCKS", "BLOCK_US", "CROWDED", "FITTED_US", "FP8_BLOCKS",
           "FP8_COLUMNS", "LARGE", "PAIRS_US", "SMALL_US", "TRANSPOSED_US", "USUAL",
           "MatmulBlocks", "MatmulExtents", "ThreadBlock", "choose_blocks", "choose_either_way",
           "choose_thread_block", "default_block", "estimate", "lines_of",
           "or_narrow", "or_transposed", "rank_blocks", "rank_either_way", "short_sums"]
