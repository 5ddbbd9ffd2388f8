"""In which order the codes of a packed type lie on a GPU that is told what they meet.

`fp4_e2m1 @packed_for(bf16)` is for weights w of x @ w.T with x of bf16. Of every 64 codes of a row
each of four lanes of a warp has 16, those that tensor cores take from it (PTX ISA 9.7.15): beside
16 bits columns 8 r + 2 t and the next one, r = 0 .. 7, beside fp8 columns 16 r + 4 t to 16 r + 4 t
+ 3, r = 0 .. 3. These lie together, lane after lane, in two words, and of 6 bits in a third behind
those of all lanes. Codes of an r lie at one place of both halves, or all bytes, of a word, as many
bits between sign and rest as the wide type has there. Beside 16 bits that is counted around the
word: of some the sign is in the other half. The last code's bits are where others leave room.

A row of 64 n codes has as many bytes in either order. Rows of other extents, numbers and what lies
on the host are in the order of `pack`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from .dtypes import DType
from .policy import NumericType

UNIT = 64  # codes of a row
# Of each r where the bits of the first code are, from the lowest on, in a lane's words of 32 bits.
# The next ones have them further on in the same words: beside 16 bits by 16, beside fp8 by 8.
PLACES = {
    (4, "bf16"): [[32 * word + at for at in bits] for word in (0, 1) for bits in (
        (6, 7, 8, 15), (9, 10, 11, 18), (12, 13, 14, 21), (3, 4, 0, 1))],
    (6, "bf16"): [*([32 * word + at for at in bits] for bits in (
        (4, 5, 6, 7, 8, 15), (9, 10, 11, 12, 13, 14)) for word in range(3)),
        [66, 0, 1, 2, 3, 67], [64, 32, 33, 34, 35, 65]],
    (4, "fp8_e4m3"): [[32 * word + at for at in bits] for word in (0, 1) for bits in (
        (2, 3, 4, 7), (0, 1, 6, 5))],
    (6, "fp8_e4m3"): [*([32 * word + at for at in (0, 1, 2, 3, 4, 7)] for word in range(3)),
                      [69, 37, 38, 5, 6, 70]]}


def order_of(numeric: NumericType, shape: Sequence[Any]) -> str:
    """Beside what the codes of a tensor on a GPU lie, "" for rows: in whole units, of a type that
    says so."""
    beside = numeric.policy.packed_for
    whole = len(shape) > 0 and isinstance(shape[-1], int) and shape[-1] % UNIT == 0
    return beside.name if beside is not None and whole else ""


@functools.cache
def places(dtype: DType, beside: str) -> np.ndarray:
    """Where each bit of a unit of packed codes lies, [64 * bits]."""
    bits, found = PLACES[dtype.bits, beside], []
    each, step = UNIT // 4 // len(bits), 2 * len(bits)  # codes of an r; bits from one to the next
    for k in range(UNIT):
        r, rest = divmod(k, 4 * each)
        lane, i = divmod(rest, each)
        words = 2 * lane, 2 * lane + 1, 8 + lane
        found += [32 * words[at // 32] + (at + step * i) % 32 for at in bits[r]]
    return np.array(found)


def from_rows(raw: np.ndarray, numeric: NumericType, shape: Sequence[int]) -> np.ndarray:
    """Packed rows, [..., bytes], as they lie on a GPU."""
    beside = order_of(numeric, shape)
    return _moved(raw, numeric.dtype, np.argsort(places(numeric.dtype, beside))) if beside else raw


def in_rows(raw: np.ndarray, numeric: NumericType, shape: Sequence[int]) -> np.ndarray:
    """The inverse: what lies on a GPU in packed rows."""
    beside = order_of(numeric, shape)
    return _moved(raw, numeric.dtype, places(numeric.dtype, beside)) if beside else raw


def _moved(raw: np.ndarray, dtype: DType, sources: np.ndarray) -> np.ndarray:
    """Rows whose bit i of each unit is bit sources[i] of what was given."""
    bits = np.unpackbits(raw.reshape(-1, UNIT * dtype.bits // 8), axis=1, bitorder="little")
    return np.packbits(bits[:, sources], axis=1, bitorder="little").reshape(raw.shape)
