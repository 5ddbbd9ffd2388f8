"""Blocks of loops over operands that lie in larger arrays, or in another order.

A block has columns along the last axis of the frame and rows along another: the one before it,
unless that is too short to fill a block, or some operand has no boxes along it; no rows where none
has boxes for all. Where a result is a part of a larger array no block may reach beyond it: what
lies beside is another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ....tile.ir.argument_layout import ArgumentLayout
from ....tile.ir.schedule import Schedule
from ...schedule.ir import GroupOperand
from ...schedule.layouts import argument_layout
from ...schedule.loop_axes import Frame
from ...schedule.region_copies import RegionCopy
from .. import choose_schedule
from ..choose_schedule import (
    GROUPS,
    LANES,
    SECTOR,
    blocks,
    chosen,
    dividing,
    full_block,
    power,
)

# A batch norm's loop over [200704, 256] reads 16 bytes of numbers of columns for 2 of an element:
# it takes 52.1 us for two rows at once, 65.0 for one, 55.3 for four (H200, 2026-11-27, in turn).
VECTOR_ROWS = 2


class LaidOperand:
    """An operand with a layout, and what it says of the axes of a frame."""

    def __init__(self, operand: GroupOperand, frame: Frame):
        along = frame.pattern(operand.shape)
        assert along is not None and operand.layout is not None
        self.axes = [a for a, p in enumerate(along) if p]
        shape = tuple(frame.extents[a] for a in self.axes) or (1,)
        lies = argument_layout(operand.layout, shape)
        assert lies is not None
        self.shape, self.lies = shape, lies

    def has_boxes(self, axis: int) -> bool:
        """Whether boxes along an axis of the frame are boxes of its memory."""
        return axis not in self.axes or self.lies.place_of(self.axes.index(axis)) is not None

    def ends_inside(self, axis: int) -> bool:
        """Whether something else lies behind it along an axis."""
        return axis in self.axes and is_part(self.lies, self.shape, self.axes.index(axis))


def is_part(lies: ArgumentLayout, shape: Sequence[int], axis: int) -> bool:
    """Whether an axis is a part of one of the memory."""
    at = lies.place_of(axis)
    return at is None or lies.extents[at] != shape[axis]


def loop_blocks(frame: Frame, reads: Sequence[GroupOperand], writes: Sequence[GroupOperand],
                bits: int) -> tuple[Schedule, int]:
    """The blocks of a loop, and the axis of its rows, counted from the end, 0 for none. bits: of
    the narrowest element."""
    extents = frame.extents
    plain = choose_schedule.for_loop(extents, bits)
    made = [LaidOperand(o, frame) for o in writes if o.layout]
    laid = [*made, *(LaidOperand(o, frame) for o in reads if o.layout)]
    last, total = len(extents) - 1, LANES * max(1, 128 // max(bits, 8))

    def size(axis: int, most: int) -> int:
        if any(o.ends_inside(axis) for o in made):
            return dividing(extents[axis], most, bits if axis == last else 8 * SECTOR)
        return min(power(extents[axis]), most)

    n = size(last, total)
    if last and not any(o.ends_inside(last) for o in made):
        n = full_block(extents[last], n, bits)
    if last == 0:
        return (plain if n == plain.n else chosen(None, n, warps=_warps(n, total))), -2
    wanted = max(1, total // n)
    fits = [a for a in range(last) if all(o.has_boxes(a) for o in laid)]
    along = last - 1
    if along not in fits or 2 * size(along, wanted) <= wanted and n * bits >= 8 * SECTOR:
        along = max(fits, key=lambda a: (size(a, wanted), a), default=last + 1)
    if along > last:
        return chosen(None, n, warps=_warps(n, total)), 0
    m = size(along, wanted)
    if (m, n, along) == (plain.m, plain.n, last - 1):
        return plain, -2
    return chosen(m, n, warps=_warps(m * n, total)), along - last - 1


def for_vectors(s: Schedule, frame: Frame, reads: Sequence[GroupOperand],
                writes: Sequence[GroupOperand]) -> Schedule:
    """The blocks with more rows, where more is read of rows that are the same for all than of
    elements: a lane has these for VECTOR_ROWS rows at once then."""
    if len(frame.members) < 2 or any(o.layout for o in (*reads, *writes)):
        return s
    *outer, R, C = frame.extents
    m = s.m or 1
    along = {o: tuple(frame.pattern(o.shape) or ())[-2:] for o in reads}
    bits = {p: sum(o.type.dtype.bits for o in reads if along[o] == p)
            for p in ((True, True), (False, True))}
    groups = prod(outer) * blocks(R, VECTOR_ROWS * m) * blocks(C, s.n)
    if bits[False, True] < 2 * bits[True, True] or groups < GROUPS:
        return s
    return chosen(VECTOR_ROWS * m, s.n, warps=s.value("warps_"))


def flat_rows(frame: Frame, reads: Sequence[GroupOperand], writes: Sequence[GroupOperand],
              bits: int) -> int:
    """The columns of rows that a loop goes over as one run of elements, 0 where it does not: rows
    that do not begin at 16 bytes, in operands that lie densely. What has a number for each row, or
    column, is read by where an element stands. bits: of the narrowest element"""
    if len(frame.members) != 2 or any(o.layout or o.type.dtype.packed for o in (*reads, *writes)):
        return 0
    R, C = frame.extents
    whole = all(frame.pattern(o.shape) == (True, True) for o in writes)
    return C if whole and 1 < C and C * bits % 128 and R * C < 1 << 31 else 0


def _warps(elements: int, total: int) -> int:
    return max(1, min(4, elements * 4 // total))


def row_block(frame: Frame, writes: Sequence[GroupOperand], most: int) -> int:
    """Rows of a block of whole rows: none reaches beyond a result."""
    axis = len(frame.extents) - 2
    inside = any(LaidOperand(o, frame).ends_inside(axis) for o in writes if o.layout)
    return dividing(frame.extents[axis], most, 8 * SECTOR) if inside else most


def loop_grid(extents: tuple[int, ...], s: Schedule, along: int) -> tuple[int, ...]:
    """Groups per axis: single elements, but of the two of a block."""
    sizes = {len(extents) - 1: s.n}
    if len(extents) > 1:
        sizes[len(extents) + along] = s.m or 1
    return tuple(blocks(e, sizes.get(a, 1)) for a, e in enumerate(extents))


def region_ends(move: RegionCopy, result: GroupOperand) -> frozenset[int]:
    """The axes of a copied region behind which something else lies."""
    inside = {a for a, n in enumerate(move.region) if n != result.shape[a]}
    if result.layout is not None:
        lies = argument_layout(result.layout, result.shape)
        assert lies is not None
        inside |= {a for a, n in enumerate(result.shape)
                   if n > 1 and is_part(lies, result.shape, a)}
    return frozenset(inside)


__all__ = ["LaidOperand", "flat_rows", "for_vectors", "is_part", "loop_blocks", "loop_grid",
           "region_ends", "row_block"]
