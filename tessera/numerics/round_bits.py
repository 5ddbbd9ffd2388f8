"""Rounding a binary float to a narrower one, on bit patterns: the definition of every float cast.

With the source's significand m (hidden bit included) and the target's unit in the last place at
bit `drop` of m, the target's code is
    whole + up,   whole = base + (m >> drop),   fraction = the `drop` bits below, as bits / 2^W
where base is (exponent field - 1) << man, so a carry out of the mantissa moves into the exponent by
itself. `up` depends on the rounding:
    nearest_even   fraction > 1/2, or = 1/2 and the code `whole` is odd
    toward_zero    never
    stochastic     bits < floor(2^32 fraction), with uniform 32-bit words: P(up) = fraction
Signs are put aside first, so every rounding is symmetric. Evenness is that of the code, which for a
format without mantissa bits (e3m0) is the exponent's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.lazy_dataclass import dataclass
from tessera.numerics.counts import CastCounts
from tessera.numerics.dtypes import DType


@dataclass(frozen=True)
class SourceFormat:
    """A source format: its words and fields."""

    word: Any
    signed: Any
    width: int
    man: int
    bias: int

    @property
    def inf_bits(self) -> int:
        return (2 * self.bias + 1) << self.man


SOURCE_F32 = SourceFormat(np.uint32, np.int32, 32, 23, 127)
SOURCE_F64 = SourceFormat(np.uint64, np.int64, 64, 52, 1023)


def split(mag: np.ndarray, src: SourceFormat, dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    """Code of the value next below (or equal) and the fraction above it, as W-bit words.

    mag: source words without sign, [N]. Needs src.man > dtype.man. Codes beyond the format's range
    come out as larger numbers; inf and NaN do too.
    """
    word, width = src.word, src.width
    field = mag >> word(src.man)
    normal = np.minimum(field, word(1))
    m = mag & word((1 << src.man) - 1)
    m |= normal << word(src.man)
    field += word(1) - normal  # subnormals share the exponent of field 1
    t = field.view(src.signed) - src.signed(src.bias - dtype.bias + 1)  # target field - 1
    below = np.maximum(-t, 0).view(word)  # how far below the target's smallest normal
    base = np.maximum(t, 0, out=t).view(word)
    base <<= word(dtype.man)
    drop = below
    drop += word(src.man - dtype.man)
    near = np.minimum(drop, word(width - 1))  # a shift by the width or more is undefined
    base += m >> near
    drop -= near
    np.minimum(drop, word(width - 1), out=drop)
    m <<= word(width) - near
    m >>= drop
    return base, m


def round_up(
    whole: np.ndarray, fraction: np.ndarray, src: SourceFormat, rounding: str,
    bits: np.ndarray | None
) -> np.ndarray:
    """The code after rounding, in place in `whole`. bits: uint32 [N] for 'stochastic'."""
    word = src.word
    if rounding == "nearest_even":
        # Bit 0 of the fraction is 0 (m < 2^(W-1)), so adding the parity cannot wrap around.
        fraction += whole & word(1)
        whole += fraction > word(1 << (src.width - 1))
    elif rounding == "stochastic":
        whole += bits < (fraction >> word(src.width - 32))
    return whole


def encode_words(
    words: np.ndarray,
    src: SourceFormat,
    dtype: DType,
    rounding: str,
    saturate: bool,
    bits: np.ndarray | None,
    counts: CastCounts | None,
) -> np.ndarray:
    """Codes (sign in place, no padding) of source bit patterns: [N] words -> [N] words."""
    word = src.word
    sign = words >> word(src.width - 1)
    mag = words & word((1 << (src.width - 1)) - 1)
    code = round_up(*split(mag, src, dtype), src, rounding, bits)
    beyond = code > word(dtype.max_code)
    if counts is not None:
        _count(counts, mag, code, beyond, src, dtype)
    if beyond.any():
        _replace_beyond(code, sign, mag, beyond, src, dtype, rounding, saturate)
    sign <<= word(dtype.sign_shift)
    code |= sign
    return code


def _replace_beyond(
    code: np.ndarray,
    sign: np.ndarray,
    mag: np.ndarray,
    beyond: np.ndarray,
    src: SourceFormat,
    dtype: DType,
    rounding: str,
    saturate: bool,
) -> None:
    """Overflow, inf and NaN, in place.

    Toward zero never leaves the range: IEEE 754-2019 section 7.4 gives the largest finite value.
    A NaN has no code in the fp6 and fp4 formats; like ml_dtypes we store a zero of the other sign.
    """
    word = src.word
    out_of_range = _infinity(dtype, saturate)
    overflow = dtype.max_code if rounding == "toward_zero" else out_of_range
    np.copyto(code, word(overflow), where=beyond)
    if overflow != out_of_range:
        np.copyto(code, word(out_of_range), where=mag == word(src.inf_bits))
    is_nan = mag > word(src.inf_bits)
    if is_nan.any():
        np.copyto(code, word(dtype.nan_code or 0), where=is_nan)
        if dtype.nan_code is None:
            sign ^= is_nan


def _infinity(dtype: DType, saturate: bool) -> int:
    """Code that stands for +inf: inf, else NaN, else the largest value."""
    code = dtype.inf_code if dtype.inf_code is not None else dtype.nan_code
    return dtype.max_code if saturate or code is None else code


def _count(
    counts: CastCounts,
    mag: np.ndarray,
    code: np.ndarray,
    beyond: np.ndarray,
    src: SourceFormat,
    dtype: DType,
) -> None:
    inf = np.count_nonzero(mag == src.word(src.inf_bits))
    nan = np.count_nonzero(mag > src.word(src.inf_bits))
    zero = np.count_nonzero(code == 0)
    counts.add(
        overflow=np.count_nonzero(beyond) - inf - nan,
        underflow=zero - np.count_nonzero(mag == 0),
        nan=nan,
        inf=inf,
        subnormal=np.count_nonzero(code < src.word(1 << dtype.man)) - zero,
    )
