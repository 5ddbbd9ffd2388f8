"""How rows are shared out: how many a group has, in how many warps, and which are gone through in
passes. The library's routines of rows ask here, and so do the rows that a graph fuses.

Measured with softmax, layer norm and their gradients of 2^26 elements of bf16 (H100, 2026-11-25;
a copy takes 91.5 us). Rows of 1024: 92.8 us with 16 elements a lane, 93.7 with 32. Layer norm of
16384 columns: 92 us in passes over shared memory, 117 in registers, which one group fills. Softmax
of 65536: 104 us where one group has a row in shared memory, 118 where it reads it again from the
L1 cache; layer norm 113 and 126. Of 131072, by L1: 138 and 141.
On an H200, 2026-11-26, in shares of a copy's rate, shared by the groups of a cluster and not:
softmax of 65536 0.93 and 0.80, of 131072 0.91 and 0.66; its gradient of 131072 0.98.
RMS norm of 131072 0.96 and 0.80. Layer norm of 65536 0.85 with its weights in shared memory for
two rows, 0.76 for one, 0.75 with them from L2, and 0.69; of 131072, where two groups have room for
them, 0.68, with them from L2 0.73, and 0.66; a graph's in strips, where they come once, 0.77. Rows
of 16384 in groups of two that read each weight once for both: 0.86 in place of 0.90.
"""

from __future__ import annotations

import itertools

from ..lazy_dataclass import dataclass
from ..runtime.generations import Generation
from ..tile import MODULE as tile
from ..tile.kernel.decorator import kernel
from ..tile.tuning.gpus import DEFAULT
from .cards import clusters_for, multiprocessors_of

LONGEST = 4095  # columns of a row that a group holds in registers
WARPS = 4  # of a group of short rows
SHARE = 16  # elements of a lane
# Of rows of which only statistics are kept, several, and which a warp holds so: they meet in no
# memory. Cross entropy of rows of 1024, 2^26 elements of bf16, takes 48.3 us in place of 52.6
# (H100, 2026-11-26).
STATISTICS_SHARE = 32
# Of rows that leave a quarter of their power of two empty, or more: the lanes that stand there load
# nothing. Layer norm of 640 columns takes 73.2 us in place of 89.7, of 1500 68.1 and 73.5, softmax
# of 700 66.0 and 70.2; with registers for seven groups layer norm of 640 70.1, of 513 84.3 in place
# of 94.4 (2^26 elements of bf16, H200, 2026-11-27, in turn).
PADDED_SHARE, PADDED_CLOSE = 32, 7
STEPS = {4096: (2048, 4)}  # columns of a pass and its warps, by the longest rows they are for
STEP, PASS_WARPS = 4096, 8  # of longer ones
ALONE = 8192  # columns of a pass of the one group of a multiprocessor
STREAMED = 16384  # of one whose rows come from memory: two accesses of 16 bytes for each thread
HELD_BYTES = 96 << 10  # of a row in shared memory: any GPU has them, of a Hopper two groups
REDUCED_BYTES = 4096  # of shared memory, for reductions
# Of longer rows each group of a cluster has a part in shared memory, and a multiprocessor has three
# groups, of which some compute while others wait for memory; or two.
SHARE_BYTES, SHARE_ALIGNED = 72 << 10, 64  # of a group's part; what its columns are multiples of
SHARE_ROWS = 2  # for which what is the same for all rows, such as a norm's weights, comes once
FEW_COLUMNS, FEW_GROUPS = 1024, 128  # of a group's part of few rows; of all parts
SHARE_STEP, SHARE_WARPS = 4096, 8  # elements at once, of all of a group's rows


# Rows of 16 bits that groups of clusters take one after another, so that weights come once: strips
# by the groups of a cluster, no more than run at one time, as a second wave takes as long as the
# first. Each group has a multiprocessor, and a cluster's are neighbours; chips differ in which are
# there. These are sure to run on any with 132; of an H200's 30 clusters of four do and 15 of eight:
# gradients of rows of 131072 take 121.0 us with 14 strips and 115.9 with 15 (layer norm), have 0.59
# of a copy's rate with 16 (RMS norm; H200, 2026-11-26). So the card is asked: see strip_count.
# Of other numbers of multiprocessors there are as many in proportion.
STRIPS = {1: 132, 2: 66, 4: 28, 8: 14}
ASKED = (4, 8)  # groups of clusters whose number differs from chip to chip; to what, of 132:
CLUSTER_COUNTS = tuple(((4, 28 + i), (8, 14 + i % 3)) for i in range(6))
STRIP_STEP, STRIP_WARPS, STRIP_STEPS = 4096, 16, 4  # columns at once; how often at most


@dataclass(frozen=True)
class RowBlocks:
    """rows: of a group.  columns: at once, fewer than a row has where it is gone through in passes.
    warps: of a group.  held: whether such a row is in shared memory meanwhile.  groups: of a
    cluster, each with a part of its rows.  brings: see RowShare.  strips: of rows that each cluster
    takes one after another, 0 where each has its own."""

    rows: int
    columns: int
    warps: int
    held: bool = False
    groups: int = 1
    brings: bool = False
    strips: int = 0


def row_blocks(rows: int, columns: int, share: int = SHARE) -> RowBlocks:
    """Short rows share a group of WARPS, so that there are bytes enough on their way and few groups
    to start. Longer ones have a group of as many warps as hold them. share: elements of a lane."""
    if columns > LONGEST:
        step, warps = next((s for most, s in STEPS.items() if columns <= most), (STEP, PASS_WARPS))
        return RowBlocks(1, step, warps, True)
    wide = 1 << (columns - 1).bit_length()
    if wide > 32 * share and 4 * columns <= 3 * wide and share == SHARE:
        share = PADDED_SHARE
    most = 1 << max(0, rows - 1).bit_length()
    shared = min(most, max(1, 32 * WARPS * share // wide))
    return RowBlocks(shared, columns, max(1, shared * wide // (32 * share)))


@dataclass(frozen=True)
class RowShare:
    """groups: of a cluster, each with so many columns of so many rows.  brings: whether what is the
    same for all rows comes to shared memory as well."""

    groups: int
    rows: int
    columns: int
    brings: bool = False
    warps: int = SHARE_WARPS

    @property
    def step(self) -> int:
        """Columns at once."""
        return SHARE_STEP // self.rows


def row_share(rows: int, columns: int, row_bytes: int, all_bytes: int, chip: Generation
              ) -> RowShare | None:
    """How the groups of a cluster share rows of which several passes read so many bytes; None where
    two of them have room in a multiprocessor, or parts of them do not have. all_bytes: of what is
    the same for all rows: it comes to shared memory where three groups have room for it, else from
    L2 for each block of columns, by as many groups as there may be."""
    half = chip.group_shared_bytes // 2 - REDUCED_BYTES // 2
    if row_bytes + all_bytes <= half:
        return None
    sizes = [n for n in (2, 4, 8)
             if n <= chip.cluster_groups and columns % (SHARE_ALIGNED * n) == 0]
    for many, n in itertools.product((SHARE_ROWS, 1) if all_bytes else (1,), sizes):
        if rows % many == 0 and many * row_bytes + all_bytes <= n * SHARE_BYTES:
            return RowShare(n, many, columns // n, all_bytes > 0)
    for most, n in itertools.product((SHARE_BYTES, half), sizes[::-1] if all_bytes else sizes):
        if row_bytes <= n * most:
            return RowShare(n, 1, columns // n)
    return None


def few_row_share(rows: int, columns: int, chip: Generation) -> RowShare | None:
    """How the groups of a cluster share rows that are read once for a number each and are fewer
    than multiprocessors; None where there are enough of them, or parts would be short."""
    return next((RowShare(n, 1, columns // n) for n in (8, 4, 2)
                 if n <= chip.cluster_groups and columns % (SHARE_ALIGNED * n) == 0
                 and columns >= n * FEW_COLUMNS and rows * n <= FEW_GROUPS), None)


def routine_blocks(rows: int, columns: int, bits: int, chip: Generation | None,
                   all_bits: int = 0) -> RowBlocks:
    """As row_blocks, of one operand with elements of so many bits. The longest rows are shared by
    the groups of a cluster, else a group fills a multiprocessor, with a row in its shared memory
    where that is large enough, else in its L1 cache. chip: None where it is not known.  all_bits:
    of a column of what is the same for all rows"""
    if columns <= LONGEST or columns * bits <= 8 * HELD_BYTES:
        return row_blocks(rows, columns)
    share = chip and row_share(rows, columns, columns * bits // 8, columns * all_bits // 8,
                               chip)
    in_turn = share and bits <= 16 and all_bits and (not share.brings or share.groups == 8)
    if chip and in_turn and (strips := strip_blocks(rows, columns, chip)) is not None:
        return strips
    if share and share.columns % share.step == 0:
        return RowBlocks(share.rows, share.step, share.warps, True, share.groups, share.brings)
    room = HELD_BYTES if chip is None else chip.group_shared_bytes - REDUCED_BYTES
    if -(-columns // ALONE) * ALONE * bits <= 8 * room:
        return RowBlocks(1, ALONE, 16, True)
    return RowBlocks(1, STREAMED, 32)


def strip_count(groups: int, chip: Generation) -> int:
    """Strips of rows that clusters of so many groups take, a strip each: as many as run at one time
    on the card, or are sure to."""
    asked = clusters_for(chip.warpgroup_matmul, groups) if groups in ASKED else None
    return asked or STRIPS[groups] * multiprocessors_of(chip) // DEFAULT.multiprocessors


def strip_blocks(rows: int, columns: int, chip: Generation) -> RowBlocks | None:
    """Strips of rows that the groups of a cluster share, one after another, in whole blocks: four
    where that is enough, else eight; None where strips are few or shorter, or there is no such
    number."""
    for n in ASKED:
        if n <= chip.cluster_groups and columns % (n * STRIP_STEP) == 0 and (
                columns <= n * STRIP_STEPS * STRIP_STEP):
            strips = strip_count(n, chip)
            return RowBlocks(1, STRIP_STEP, STRIP_WARPS, True, n, True,
                             strips) if rows >= 2 * strips else None
    return None


@kernel
def own_part(N, BM, groups):
    """The first of a group's BM rows, and the first of its columns, of N / groups."""
    g = tile.group_id(0)
    if groups == 1:
        return g * BM, 0
    return g // groups * BM, g % groups * (N // groups)


@kernel
def bring_row(x, m, first, N, BM, BN):
    """N columns of BM rows in shared memory, in blocks of BN that come all at once; 0 behind the
    ends of rows."""
    row = tile.alloc_shared((BM, BN), x.dtype, stages=(N + BN - 1) // BN)
    for k in range(0, N, BN):
        tile.cp_async(row[k // BN], x[m:m+BM, first+k:first+k+BN])
    tile.cp_wait_group(0)
    tile.barrier()
    return row


@kernel
def bring_part(w, first, N, BN):
    """N elements in shared memory, as bring_row brings those of rows; not waited for."""
    part = tile.alloc_shared((BN,), w.dtype, stages=(N + BN - 1) // BN)
    for k in range(0, N, BN):
        tile.cp_async(part[k // BN], w[first+k:first+k+BN])
    return part


@kernel
def block_of(x, row, m, k, N, BN, fill, held):
    """Columns [k:k+BN] of row m, or of what was brought, with `fill` behind the end, N."""
    if not held:
        return tile.load(x[m:m+1, k:k+BN], fill=fill)
    if N % BN == 0:  # of rows behind the last one, which nobody stores, anything will do
        return tile.load(row[k // BN])
    s = tile.load(row[k // BN], fill=0)
    return tile.where(tile.arange(0, BN)[None, :] < N - k, s, fill)


__all__ = ["ALONE", "LONGEST", "STREAMED", "RowBlocks", "RowShare", "block_of", "bring_part",
           "bring_row", "few_row_share", "own_part", "routine_blocks", "row_blocks", "row_share",
           "strip_blocks", "strip_count"]
