"""Where the elements of a shared buffer lie.

A row-major buffer of rows x columns is cut into 16-byte chunks. A swizzle keeps the rows where they
are and permutes the chunks of a row by the number of its 128-byte line, so that reading a column
meets different banks:

    chunk' = chunk ^ (line % 8 % chunks of a row)        line = row, or row // 2, row // 4 for
                                                         rows of 64 and 32 bytes (as TMA does)

Where the chunks are no power of two, those of 128 bytes are permuted, or of 64 or 32 where the row
is a multiple of that alone.

'xor' also permutes elements of 4 bytes and more inside the chunk, word' = word ^ (row // 8 % 4): a
column of 32 rows then touches 32 different banks. 'chunks' keeps the chunks of every type whole,
which is what 16-byte copies and ldmatrix need; 16-bit elements keep them with either.
"""

from __future__ import annotations

from math import prod

import numpy as np

from tessera.lazy_dataclass import dataclass
from tessera.tile.ir.types import Buffer

CHUNK_BYTES = 16
WORD_BYTES = 4
BANKS = 32  # of WORD_BYTES each; CUDA C++ Programming Guide, "Shared Memory"


@dataclass(frozen=True)
class SharedLayout:
    """Offsets in elements: `offset(row, column)`; a bijection of rows x columns onto itself."""

    rows: int
    columns: int
    itemsize: int
    swizzle: str | None

    @staticmethod
    def of(buffer: Buffer) -> SharedLayout:
        """Leading extents of the buffer count as rows."""
        columns = buffer.shape[-1] if buffer.shape else 1
        return SharedLayout(prod(buffer.shape) // max(columns, 1), columns,
                            max(1, buffer.dtype.bits // 8), buffer.swizzle)

    @property
    def chunk(self) -> int:
        """Elements of a chunk."""
        return max(1, CHUNK_BYTES // self.itemsize)

    @property
    def chunks(self) -> int:
        """Chunks of a row that are permuted; 1 where no xor permutes them."""
        count = self.columns // self.chunk
        whole = count * self.chunk == self.columns
        return count if self.swizzle is not None and whole and count % 2 == 0 and count else 1

    @property
    def line_shift(self) -> int:
        """log2 of the rows of a 128-byte line."""
        return max(0, 4 - self.permuted.bit_length())

    @property
    def permuted(self) -> int:
        """Chunks among which a row's chunk moves: 8, or all of a short row."""
        return min(8, self.chunks & -self.chunks)

    @property
    def inner(self) -> int:
        """Elements among which one moves inside its chunk."""
        moves = self.swizzle == "xor" and self.itemsize >= WORD_BYTES and self.chunks > 1
        return self.chunk if moves else 1

    @property
    def whole_chunks(self) -> bool:
        """Whether 16 neighbouring bytes of a row stay neighbours."""
        return self.inner == 1

    @property
    def period(self) -> int:
        """Rows after which the permutation repeats."""
        return 8 * self.inner if self.chunks > 1 else 1

    def offset(self, row: np.ndarray, column: np.ndarray) -> np.ndarray:
        if self.chunks == 1:
            return row * self.columns + column
        chunk, inside = column // self.chunk, column % self.chunk
        chunk = chunk ^ ((row >> self.line_shift) % self.permuted)
        inside = inside ^ (row // 8 % self.inner)
        return row * self.columns + chunk * self.chunk + inside

    def word(self, row: np.ndarray, column: np.ndarray) -> np.ndarray:
        """The 4-byte word of an element; its bank is word % BANKS."""
        return self.offset(row, column) * self.itemsize // WORD_BYTES
