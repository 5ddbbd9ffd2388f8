"""Blocks, stages and warps of a group's kernel; of matmuls see matmul_form.py."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from ...kernels import row_blocks as blocks_of_rows
from ...kernels.attention import attention_block, tile_knobs
from ...kernels.cards import multiprocessors_of
from ...kernels.row_blocks import ALONE, RowShare, row_blocks
from ...numerics import NumericType
from ...runtime.generations import Generation
from ...tile.ir.schedule import Schedule

LANES = 128  # of a group that streams: four warps, one access of 16 bytes in each thread
SECTOR = 32  # bytes that memory gives at once
LINE = 32  # numbers of 32 bits in a line of L2
RUN_BYTES = 128  # of a tile that is transposed, in either direction
IDS = 4096  # that a group looks through at once
AHEAD = 8  # slices that are read before the first of them is added
KEPT_BYTES = 2048  # of shared memory: what the driver takes of each group, and reductions
# Groups, about those that run at one time, whose rows of several operands come to L2 while the
# kernel in front ends: softmax's gradient of 256, 1024, 4096, 16384 and 65536 columns 92.4 us in
# place of 93.5, 92.7 and 93.7, 92.8 and 94.1, 94.8 and 96.3, 96.1 and 97.2; with 1024 groups 92.1,
# 92.3, 93.1, 95.0 and 96.6, with all of 1024 columns 97.1. Of one operand it gains no more than it
# loses: layer norm of 16384 68.7 and 69.6, softmax of 65536 69.1 and 68.4 (2^26 elements of bf16,
# H200, 2026-11-27, in turn, medians of three times seven rounds).
NEAR_GROUPS = 512
BUSY = 264  # groups, two for each multiprocessor of an H200: not every kernel sees its chip
GROUPS = 1024  # enough for every GPU: eight for each of 128 multiprocessors
COPIED = "a copy, because kernels take elements in row-major order"


def power(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def chosen(m: int | None, n: int, k: int | None = None, *, warps: int, stages: int = 1) -> Schedule:
    values = {"m": m, "n": n, "k": k}
    return Schedule(**{a: b for a, b in values.items() if b is not None}, warps=warps,
                    stages=stages)


def for_loop(extents: tuple[int, ...], bits: int) -> Schedule:
    """One access of 16 bytes for each lane, along the last axis first."""
    total = LANES * max(1, 128 // max(bits, 8))
    n = min(power(extents[-1]), total)
    if len(extents) > 1:
        n = full_block(extents[-1], n, bits)
    m = min(power(extents[-2]), max(1, total // n)) if len(extents) > 1 else None
    return chosen(m, n, warps=max(1, min(4, n * (m or 1) * 4 // total)))


def full_block(extent: int, most: int, bits: int) -> int:
    """The size of blocks of columns that has the fewest beyond the end, of 64 bytes or more: lanes
    beyond it do nothing. Batch norm's gradient behind SiLU of [200704, 288] takes 88.7 us by blocks
    of 32 columns, 156.9 by one of 512 (bf16, H200, 2026-11-28)."""
    sizes = [n for n in (most >> i for i in range(most.bit_length())) if n * bits >= 16 * SECTOR]
    return min(sizes or [most], key=lambda n: blocks(extent, n) * n)


def for_many(bits: int) -> Schedule:
    """Of a loop over arrays of any length in one launch: two accesses of 16 bytes for each lane, as
    a block first has to find out which array it works on."""
    return chosen(None, 2 * LANES * max(1, 128 // max(bits, 8)), warps=4)


def dividing(extent: int, most: int, bits: int) -> int:
    """The size of blocks that end where an extent does, because behind it lies something else: a
    power of two of 32 bytes or more, else the largest divisor."""
    even = min(extent & -extent, most)
    if even == extent or even * bits >= 8 * SECTOR:
        return even
    return next(n for n in range(min(extent, most), 0, -1) if extent % n == 0)


def for_rows(extents: tuple[int, ...], statistics: int = 0) -> Schedule:
    """Short rows share a group, long ones are gone through in passes; see kernels/row_blocks.py.
    statistics: how many there are, where nothing else is kept."""
    (rows, columns), share = extents[-2:], blocks_of_rows.SHARE
    if statistics > 1 and 32 * share < columns <= 32 * blocks_of_rows.STATISTICS_SHARE:
        share = blocks_of_rows.STATISTICS_SHARE
    b = row_blocks(rows, columns, share)
    return chosen(b.rows, b.columns, warps=b.warps)


def for_padded(s: Schedule) -> Schedule:
    """The schedule of rows of one operand, with registers for as many groups as have enough on its
    way, where rows leave lanes empty."""
    held = (s.m or 1) * power(s.n) == 32 * blocks_of_rows.PADDED_SHARE * s.value("warps_")
    if not held or 4 * s.n > 3 * power(s.n) or s.value("warps_") != blocks_of_rows.WARPS:
        return s
    return replace(s, extra=(("RESIDENT", blocks_of_rows.PADDED_CLOSE),))


def for_passes(s: Schedule, columns: int, row_bytes: int, shared_bytes: int, laid: bool
               ) -> tuple[Schedule, int]:
    """The schedule of passes over rows, and the room for what is read again. row_bytes: of all
    that is. laid: some operand does not lie densely, and was looked at in blocks of s.

    Two groups on a multiprocessor, of which one computes while the other waits; else one with more
    warps, and without room one that fills the multiprocessor and reads again what is not held.
    Softmax of 65536 columns, 2^26 elements: 101 us in shared memory, 118 by the L1 cache, and 180
    in groups that go to L2 (H100, 2026-11-25; a copy takes 91.5).
    """
    half, whole = (shared_bytes // n - KEPT_BYTES for n in (2, 1))
    if row_bytes <= half or laid:
        return s, half
    if row_bytes <= whole:
        return chosen(1, min(ALONE, power(columns) // 2), warps=ALONE // 512), whole
    return chosen(1, min(blocks_of_rows.STREAMED, power(columns) // 2), warps=32), whole


def for_share(share: RowShare, shared_bytes: int) -> tuple[Schedule, int]:
    """As for_passes, of a group that has a part of its rows."""
    step = min(share.step, power(share.columns) // 2)
    return chosen(share.rows, step, warps=share.warps), shared_bytes // 2 - KEPT_BYTES


def for_columns(extents: tuple[int, ...], ends: bool = False) -> Schedule:
    """Blocks of rows, added up while they stream through; as narrow as the rows are many, so that
    there are groups enough. ends: something lies behind the sums."""
    rows = power(extents[-2])
    n = min(power(extents[-1]), max(32, 4096 // rows))
    n = dividing(extents[-1], n, 32) if ends else n
    return chosen(min(rows, 4096 // power(n)), n, warps=8)


def for_attention(numeric: NumericType, S: int, width: int, chip: Generation,
                  causal: bool, heads: int = 1, spans: bool = False, **rule: Any) -> Schedule:
    """A warp for 16 queries, of three warpgroups two. spans: queries see keys by them."""
    m, n = attention_block(numeric.dtype, S, width, causal, chip, spans=spans, **rule)
    if numeric.dtype.bits > 16:
        return chosen(m, n, warps=4, stages=1)
    knobs = {"stages": 2} | tile_knobs(
        S, heads, width, m, causal, spans=spans, multiprocessors=multiprocessors_of(chip), **rule)
    return Schedule(m=m, n=n, warps=min(8, m // 16), **knobs)


def for_move(extents: tuple[int, ...], tiles: tuple[int, ...], why: str = "",
             ends: Collection[int] = (), bits: int = 8, turned: bool = False) -> Schedule:
    """Squares where the order of elements changes, so that both sides move in runs: of 128 bytes
    where elements are narrow. why: it is a copy.  ends: axes behind whose end something lies that
    must stay as it is.  turned: the axes of the tile change places."""
    note = f"a copy, because {why}" if why else COPIED
    if not tiles:
        return chosen(None, 1, warps=1).with_notes(note)

    def size(axis: int, most: int) -> int:
        if axis not in ends:
            return min(power(extents[axis]), most)
        return dividing(extents[axis], most, bits)

    side = RUN_BYTES * 8 // max(8, bits) if turned else 0
    n = size(tiles[-1], max(side, 64) if len(tiles) > 1 else 1024)
    m = size(tiles[0], max(side, 32)) if len(tiles) > 1 else None
    most = 8 if n * (m or 1) > 8192 else 4
    return chosen(m, n, warps=max(1, min(most, n * (m or 1) // 128))).with_notes(note)


def for_gather(extents: tuple[int, ...], bits: int) -> Schedule:
    """As a loop, in blocks of columns that come out even where a warp is busy with one."""
    s, even = for_loop(extents, bits), extents[-1] & -extents[-1]
    n, total = s.n, s.n * (s.m or 1)
    if extents[-1] % n and even * bits >= 32 * 128:
        n = even
    return chosen(min(power(extents[-2]), total // n), n, warps=s.value("warps_"))


def for_segments(sums: int, ids: int, columns: int) -> Schedule:
    """Wide blocks of columns, as every group looks through all ids; narrower ones where there are
    few sums of slices."""
    n = min(power(columns), 1024)
    while n > 32 and sums * blocks(columns, n) < GROUPS:
        n //= 2
    return chosen(min(AHEAD, power(ids)), n, min(IDS, power(ids)), warps=4)


def blocks(extent: int, size: int) -> int:
    return -(-extent // size)


def grid_of(extents: tuple[int, ...], m: int | None, n: int) -> tuple[int, ...]:
    """Groups per axis: single elements of outer axes, blocks of the last two."""
    if m is None:
        return (*extents[:-1], blocks(extents[-1], n))
    return (*extents[:-2], blocks(extents[-2], m), blocks(extents[-1], n))


__all__ = ["SECTOR", "blocks", "chosen", "dividing", "for_attention", "for_columns", "for_gather",
           "for_loop", "for_many", "for_move", "for_padded", "for_passes", "for_rows",
           "for_segments", "for_share", "full_block", "grid_of"]
