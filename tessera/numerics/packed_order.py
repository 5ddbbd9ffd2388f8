"""In which order the codes of a packed type lie on a GPU that is told what they meet.

`fp4_e2m1 @packed_for(bf16)` is for weights w of x @ w.T with x of bf16. Of every 64 codes of a row
each of four lanes of a warp has those of columns 8 r + 2 t and 8 r + 2 t + 1, r = 0 .. 7, for that
is how tensor cores take 16 bits (PTX ISA 9.7.15). So its codes lie together, lane after lane, in
two words, and of 6 bits in a third behind those of all lanes. Codes of the two columns of an r lie
at one place of both halves of a word, with as many bits between sign and rest as bf16 has there,
counted around the word: of some the sign is in the other half.

A row of 64 n codes has as many bytes in either order. Rows of other extents, numbers and what lies
on the host are in the order of `pack`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .dtypes import DType

if TYPE_CHECKING:
    from .policy import NumericType

UNIT = 64  # codes of a row
ORDERED = {"fp4_e2m1": ("bf16",), "fp6_e2m3": ("bf16",)}  # beside what
# Of each r where the bits of the code in the lower half are, from the lowest on: in a lane's words,
# of which each has 32. That in the upper half has them 16 further on, around the word.
_FOUR = [[32 * word + at for at in bits] for word in (0, 1) for bits in (
    (6, 7, 8, 15), (9, 10, 11, 18), (12, 13, 14, 21), (3, 4, 0, 1))]
_SIX = [*([32 * word + at for at in bits] for bits in ((4, 5, 6, 7, 8, 15), range(9, 15))
          for word in range(3)),
        [66, 0, 1, 2, 3, 67], [64, 32, 33, 34, 35, 65]]


def is_laid(numeric: NumericType, shape: Sequence[Any]) -> bool:
    """Whether a tensor on a GPU has that order: of a type that says so, with whole units."""
    return numeric.policy.packed_for is not None and len(shape) > 0 and isinstance(
        shape[-1], int) and shape[-1] % UNIT == 0


@functools.cache
def places(dtype: DType) -> np.ndarray:
    """Where each bit of a unit of packed codes lies, [64 * bits]."""
    bits, found = _FOUR if dtype.bits == 4 else _SIX, []
    for k in range(UNIT):
        half, lane, r = k % 2, k // 2 % 4, k // 8
        words = 2 * lane, 2 * lane + 1, 8 + lane
        found += [32 * words[at // 32] + (at + 16 * half) % 32 for at in bits[r]]
    return np.array(found)


def from_rows(raw: np.ndarray, numeric: NumericType, shape: Sequence[int]) -> np.ndarray:
    """Packed rows, [..., bytes], as they lie on a GPU."""
    if not is_laid(numeric, shape):
        return raw
    return _moved(raw, numeric.dtype, np.argsort(places(numeric.dtype)))


def in_rows(raw: np.ndarray, numeric: NumericType, shape: Sequence[int]) -> np.ndarray:
    """The inverse: what lies on a GPU in packed rows."""
    return _moved(raw, numeric.dtype, places(numeric.dtype)) if is_laid(numeric, shape) else raw


def _moved(raw: np.ndarray, dtype: DType, sources: np.ndarray) -> np.ndarray:
    """Rows whose bit i of each unit is bit sources[i] of what was given."""
    bits = np.unpackbits(raw.reshape(-1, UNIT * dtype.bits // 8), axis=1, bitorder="little")
    return np.packbits(bits[:, sources], axis=1, bitorder="little").reshape(raw.shape)
