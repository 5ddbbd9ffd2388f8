"""Where the elements of a shared buffer lie.

A row-major buffer of rows x columns is cut into 16-byte chunks. `swizzle='xor'` keeps the rows
where they are and permutes the chunks of a row by its number, so that reading a column meets
different
banks: chunk' = chunk ^ (row % 8). Elements of 4 bytes and more also permute inside the
chunk,
word' = word ^ (row // 8 % 4): a column of 32 rows then touches 32 different banks. 16-bit
elements keep their chunks whole, which is what 16-byte copies and ldmatrix need.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from tessera.tile.types import Buffer

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

    def offset(self, row: np.ndarray, column: np.ndarray) -> np.ndarray:
        if self.swizzle is None:
            return row * self.columns + column
        per_chunk = max(1, CHUNK_BYTES // self.itemsize)
        chunks = self.columns // per_chunk
        if chunks * per_chunk != self.columns or chunks & (chunks - 1):
            return row * self.columns + column  # extents that no xor permutes
        chunk, inside = column // per_chunk, column % per_chunk
        chunk = chunk ^ (row % min(8, chunks))
        if self.itemsize >= WORD_BYTES:
            inside = inside ^ (row // 8 % per_chunk)
        return row * self.columns + chunk * per_chunk + inside

    def word(self, row: np.ndarray, column: np.ndarray) -> np.ndarray:
        """The 4-byte word of an element; its bank is word % BANKS."""
        return self.offset(row, column) * self.itemsize // WORD_BYTES
