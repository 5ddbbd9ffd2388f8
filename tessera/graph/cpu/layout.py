"""Shapes and strides of one launch, reduced to the table of words the generated loops read."""

from __future__ import annotations

from math import prod

import numpy as np

from ...lazy_dataclass import dataclass
from ..schedule.loop_dtypes import item_bytes
from .emit import HEADER, Stream

FLAT_WIDTH = 4096  # columns of a row when the whole space is one flat line
CHUNK_WORK = 1 << 16  # f32 additions a chunk should hold: a few microseconds
COLUMN_CHUNKS = 16  # at most; each has its own partial column sums
NARROW = 16  # an innermost axis shorter than this gives way to a longer one
# Columns of a tile where an input runs across the rows (a transpose). With extents that are powers
# of two its elements share few cache sets; 32 lines stay in a 16-way L2 and a 12-way L1 nearly.
TILE_WIDTHS = (32, 64, 48, 40, 24, 16)


@dataclass(frozen=True)
class LoopAxis:
    """An extent and the stride of each stream along it, in elements."""

    extent: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class LoopLayout:
    """`words` is the table, `pattern` the inner strides the code is specialised for."""

    words: np.ndarray
    pattern: str
    chunks: int
    width: int
    count: int


def element_strides(array: np.ndarray) -> tuple[int, ...]:
    """Strides of an array in elements."""
    return tuple(s // array.itemsize for s in array.strides)


def lay_out(
    streams: tuple[Stream, ...], axes: list[LoopAxis], *, elementwise: bool, columns: bool,
    work: int,
    movable: bool = True,
) -> LoopLayout:
    """Merge axes, choose the row, and cut the rows into chunks.

    axes: one for each axis of the space, outermost first. The cut depends on shape and program
    alone, never on the number of threads. movable: another axis than the last may become the row.
    """
    axes = axes or [LoopAxis(1, (0,) * len(streams))]
    if elementwise:
        leading, row = _rows_of_elementwise(axes, movable)
    else:
        leading, row = merge(axes[:-1]), axes[-1]
    line = leading.pop() if leading else LoopAxis(1, (0,) * len(streams))
    rows = line.extent * prod(a.extent for a in leading)
    width, count = row.extent, rows * row.extent
    if elementwise and rows == 1 and count > FLAT_WIDTH:
        rows, width = -(-count // FLAT_WIDTH), FLAT_WIDTH
        line = LoopAxis(rows, tuple(s * FLAT_WIDTH for s in row.strides))
    chunk_rows = _chunk_rows(rows, width * work, columns)
    chunks = -(-rows // chunk_rows) if count or not elementwise else 0
    chunks = max(chunks, 1) if columns else chunks
    keep_bytes = (8 * (width + 8) + 63) // 64 * 64
    header = (chunks, chunk_rows, rows, width, count, line.extent, len(leading), keep_bytes)
    assert len(header) == len(HEADER)
    words = [*header, *(a.extent for a in reversed(leading))]
    for i, s in enumerate(streams):
        unit = 1 if s.kind == "index" else item_bytes(s.dtype)
        words += [row.strides[i], line.strides[i] * unit]
        words += [a.strides[i] * unit for a in reversed(leading)]
    pattern = "".join(_pattern(s, row, i) for i, s in enumerate(streams))
    return LoopLayout(np.array(words, np.int64), pattern, chunks, width, count)


def _pattern(s: Stream, row: LoopAxis, i: int) -> str:
    stride = 0 if row.extent == 1 else row.strides[i]
    if s.kind in ("row", "count", "row_count"):
        return "0"
    if s.kind in ("full", "column_sum") and row.extent == 1:
        return "1"
    return {0: "0", 1: "1"}.get(stride, "s")


def _chunk_rows(rows: int, row_work: int, columns: bool) -> int:
    wanted = max(1, CHUNK_WORK // max(row_work, 1))
    return max(wanted, -(-rows // COLUMN_CHUNKS)) if columns else wanted


def merge(axes: list[LoopAxis]) -> list[LoopAxis]:
    """Drop axes of extent 1 and join neighbours that all streams step through as one."""
    merged: list[LoopAxis] = []
    for axis in axes:
        if axis.extent == 1:
            continue
        if merged and all(
            o == i * axis.extent for o, i in zip(merged[-1].strides, axis.strides, strict=True)
        ):
            merged[-1] = LoopAxis(merged[-1].extent * axis.extent, axis.strides)
        else:
            merged.append(axis)
    return merged


def _rows_of_elementwise(axes: list[LoopAxis], movable: bool) -> tuple[list[LoopAxis], LoopAxis]:
    """Leading axes and the row of a program that does not care which axis is the last."""
    if any(a.extent == 0 for a in axes):
        return [], LoopAxis(0, axes[0].strides)
    merged = merge(axes)
    if not merged:
        return [], LoopAxis(1, axes[0].strides)
    longest = max(range(len(merged)), key=lambda k: merged[k].extent)
    if movable and merged[-1].extent < NARROW and merged[longest].extent >= 4 * NARROW:
        merged.append(merged.pop(longest))
    return _tiled(merged[:-1], merged[-1])


def _tiled(leading: list[LoopAxis], row: LoopAxis) -> tuple[list[LoopAxis], LoopAxis]:
    """Cut rows into tiles, walked down the leading axis that a transposed stream runs along.

    That stream's cache lines are then used for all their elements before they are evicted.
    """
    across = [i for i, s in enumerate(row.strides) if abs(s) > 1]
    along = [k for k, a in enumerate(leading) if any(abs(a.strides[i]) == 1 for i in across)]
    width = next((w for w in TILE_WIDTHS if row.extent % w == 0 and row.extent > w), None)
    if not along or width is None or leading[along[-1]].extent < NARROW:
        return leading, row
    line = leading.pop(along[-1])
    tiles = LoopAxis(row.extent // width, tuple(s * width for s in row.strides))
    return [*leading, tiles, line], LoopAxis(width, row.strides)
