"""Addresses in a shared buffer, computed once per thread and moved on by constants.

The byte of element (row, column) is base + row * pitch + ((column * size) ^ term(row)), with term
below 128. So a thread that knows the address of one element reaches the others by an xor of a
constant (columns) and an addition of a constant (rows that keep the swizzle, whole 128 bytes):
both cost nothing, or one instruction for all k-blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tessera.lazy_dataclass import dataclass
from tessera.numerics import find_dtype
from tessera.tile.cuda.builder import Builder
from tessera.tile.ir.shared_layout import SharedLayout
from tessera.tile.ir.types import Buffer

LLVM = Any
ALIGNMENT = 128  # of a swizzled buffer: what its terms may reach


@dataclass(frozen=True)
class Panel:
    """A row-major shared buffer of one stage; `text` recreates it in emitted source."""

    rows: int
    columns: int
    dtype: str
    swizzle: str | None

    @staticmethod
    def of(buffer: Buffer) -> Panel:
        layout = SharedLayout.of(buffer)
        return Panel(layout.rows, layout.columns, buffer.dtype.name, buffer.swizzle)

    @property
    def text(self) -> str:
        return f"({self.rows}, {self.columns}, {self.dtype!r}, {self.swizzle!r})"

    @functools.cached_property
    def size(self) -> int:
        """Bytes of an element."""
        return max(1, find_dtype(self.dtype).bits // 8)

    @functools.cached_property
    def layout(self) -> SharedLayout:
        return SharedLayout(self.rows, self.columns, self.size, self.swizzle)

    @property
    def pitch(self) -> int:
        return self.columns * self.size

    def aligned(self, size_bytes: int) -> bool:
        """Whether accesses of that size, at columns that are multiples of it, are aligned."""
        chunks = self.layout.whole_chunks or size_bytes <= self.size
        return chunks and self.pitch % size_bytes == 0

    def ends(self, width: int) -> tuple[int, int]:
        """The last row, and the last column at which `width` whole elements begin."""
        return self.rows - 1, self.columns // width * width - width

    def term(self, b: Builder, row: LLVM) -> LLVM:
        """What a row xors to the byte of its columns; None: nothing."""
        at = self.layout
        if at.chunks == 1:
            return None
        line = b.lshr(row, b.i32(at.line_shift)) if at.line_shift else row
        term = b.shl(b.and_(line, b.i32(at.permuted - 1)), b.i32(4))
        if at.inner > 1:
            word = b.and_(b.lshr(row, b.i32(3)), b.i32(at.inner - 1))
            term = b.or_(term, b.mul(word, b.i32(self.size)))
        return term


def stage_bytes(buffer: Buffer) -> int:
    """Distance of the stages of a buffer: each begins at a 128-byte line."""
    one = buffer.bytes // buffer.stages
    return one if buffer.stages == 1 else -(-one // ALIGNMENT) * ALIGNMENT


class Addresses:
    """Of elements (row + dr, column + dc): row, column of the thread, dr, dc constants.

    place: base address, row and column.  zeros: mask of the bits of `column` that are surely 0.
    ends: the last row and column; what overhangs a small operand reads those. None where nothing
    does.
    """

    def __init__(self, b: Builder, panel: Panel, place: Sequence[LLVM], zeros: int,
                 ends: tuple[int, int] | None = None):
        self.b, self.panel, self.zeros, self.ends = b, panel, zeros, ends
        self.base, self.row, self.column = place
        self._starts: dict[int, LLVM] = {}
        self._moved: dict[tuple[int, int], LLVM] = {}

    def at(self, dr: int, dc: int) -> LLVM:
        if self.ends is not None:
            last_row, last_column = self.ends
            return self._full(self._least(self.row, dr, last_row),
                              self._least(self.column, dc, last_column))
        size, b = self.panel.size, self.b
        if self.panel.layout.chunks == 1:
            return self._plus(self._start(0), dr * self.panel.pitch + dc * size)
        phase = dr % self.panel.layout.period
        span = 16 * self.panel.layout.permuted - 1
        low = dc * size & span
        if low & ~(self.zeros * size | size - 1):
            column = b.add(self.column, b.i32(dc))
            return self._plus(self._from(phase, column), (dr - phase) * self.panel.pitch)
        key = (phase, low)
        if key not in self._moved:
            start = self._start(phase)
            self._moved[key] = b.xor(start, b.i32(low)) if low else start
        return self._plus(self._moved[key], (dr - phase) * self.panel.pitch + dc * size - low)

    def _plus(self, at: LLVM, constant: int) -> LLVM:
        return self.b.add(at, self.b.i32(constant)) if constant else at

    def _start(self, phase: int) -> LLVM:
        if phase not in self._starts:
            self._starts[phase] = self._from(phase, self.column)
        return self._starts[phase]

    def _from(self, phase: int, column: LLVM) -> LLVM:
        b = self.b
        row = b.add(self.row, b.i32(phase)) if phase else self.row
        return self._full(row, column)

    def _full(self, row: LLVM, column: LLVM) -> LLVM:
        b, panel = self.b, self.panel
        inside = b.mul(column, b.i32(panel.size)) if panel.size > 1 else column
        term = panel.term(b, row)
        if term is not None:
            inside = b.xor(inside, term)
        return b.add(self.base, b.add(b.mul(row, b.i32(panel.pitch)), inside))

    def _least(self, at: LLVM, move: int, last: int) -> LLVM:
        b = self.b
        at = b.add(at, b.i32(move)) if move else at
        return b.select(b.compare("<", at, b.i32(last)), at, b.i32(last))
