"""encode and decode: casts between NumPy arrays of numbers and arrays of a format's elements.

round_bits.py, on bit patterns, is the definition for every format and rounding. The casts that
compiled code does several times faster with the same bits (f32 -> bf16, f64 -> f32, and integers to
f32 and f64, to nearest) go there; a test compares both ways.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from tessera.errors import ArgumentError, DTypeError, PolicyError
from tessera.numerics.codec_int import encode_bool, encode_int
from tessera.numerics.counts import CastCounts
from tessera.numerics.dtypes import DType, bf16, dtype_of_numpy, f32, f64, tf32
from tessera.numerics.exact import exact_float, long_to_f64
from tessera.numerics.philox import as_key, random_bits, random_bits_at
from tessera.numerics.policy import ROUNDINGS, NumericType, as_dtype
from tessera.numerics.round_bits import SOURCE_F32, SOURCE_F64, encode_words

_CHUNK = 1 << 15  # elements per pass: about ten word arrays stay in a 2 MiB second-level cache


# A cast defines its result for NaN, inf and overflow: NumPy has nothing to warn of.
_QUIET = np.errstate(over="ignore", under="ignore", invalid="ignore")


@_QUIET
def encode(
    x: Any,
    dtype: DType | str,
    *,
    rounding: str = "nearest_even",
    saturate: bool = False,
    key: Any = None,
    offset: int = 0,
    index: Any = None,
    words: Any = None,
    counts: CastCounts | None = None,
) -> np.ndarray:
    """Elements of `dtype` nearest to x under a rounding: array of dtype.numpy, same shape.

    x: [...] numbers of any float, int or bool type. An f64 or integer is rounded once, never
    through f32. rounding: 'nearest_even' | 'toward_zero' | 'stochastic'. saturate: beyond the
    range gives +-max; otherwise inf, or NaN in fp8_e4m3, or +-max in fp6 and fp4 (and with
    'toward_zero', for finite x, always +-max: IEEE 754-2019 section 7.4).
    'stochastic' draws word `offset + flat index` of random_bits(key); `index` (int64, shape of x)
    replaces offset + flat index, so that a part of a tensor rounds as the whole does; `words`
    (uint32, shape of x) are the drawn words themselves, in place of a key.
    Integer targets saturate always, truncate floats toward zero unless 'stochastic', and store 0
    for NaN; bool_ stores x != 0. counts: a CastCounts to add to.
    Raises ArgumentError for a missing key, PolicyError for an unknown rounding, DTypeError for
    input that is not numeric.
    """
    dtype = as_dtype(dtype)
    _check_rounding(rounding)
    x = _as_numbers(x)
    flat = x.reshape(-1)
    if rounding == "stochastic" and key is None and words is None:
        raise ArgumentError(
            "stochastic rounding needs a key", hint="pass key=seed, or key=fold_in(key, step)"
        )
    if dtype.kind == "bool":
        return encode_bool(flat, counts).reshape(x.shape)
    if _has_fast_path(flat, dtype, rounding, counts):
        return _encode_fast(flat, dtype, saturate).reshape(x.shape)
    draw: _Draw | None = None
    if rounding == "stochastic" and words is None:
        draw = _Draw(key, offset, index, x.shape)
    drawn = None if words is None else np.broadcast_to(words, x.shape).reshape(-1)
    out = np.empty(flat.shape, dtype.numpy)
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        bits = draw(start, part.size) if draw else None
        bits = bits if drawn is None else drawn[start : start + _CHUNK]
        if dtype.kind == "float":
            result = _encode_float(part, dtype, rounding, saturate, bits, counts)
        else:
            result = encode_int(part, dtype, bits, counts)
        out[start : start + _CHUNK] = result
    return out.reshape(x.shape)


def encode_as(
    x: Any,
    ntype: NumericType,
    *,
    key: Any = None,
    offset: int = 0,
    index: Any = None,
    counts: CastCounts | None = None,
) -> np.ndarray:
    """encode() with the storage, rounding and saturation of a numeric type."""
    policy = ntype.policy
    return encode(
        x,
        ntype.dtype,
        rounding=policy.rounding,
        saturate=policy.saturate,
        key=key,
        offset=offset,
        index=index,
        counts=counts,
    )


@_QUIET
def decode(a: Any, dtype: DType | str) -> np.ndarray:
    """Values of a format's elements: f32 (exact), f64 for f64; integers and bool as they are, int4
    as int8.

    a: [...] of dtype.numpy, or its codes as unsigned integers of the same size.
    Raises DTypeError for an array of another element type.
    """
    dtype = as_dtype(dtype)
    a = np.asarray(a)
    if a.dtype != dtype.numpy and not (dtype.kind == "float" and a.dtype == dtype.code_type):
        raise DTypeError(
            f"decode({dtype}) takes elements of {dtype.numpy}; got {a.dtype}",
            hint=f"encode(x, '{dtype}') makes them from numbers",
        )
    if dtype.kind != "float":
        return a.astype(np.int8) if dtype.packed else a
    if dtype.bits <= 8:
        return np.asarray(_decode_table(dtype)[to_codes(a)])  # of a scalar NumPy makes a number
    if dtype.bits == 16:
        return a.view(dtype.numpy).astype(np.float32)
    return a.view(dtype.numpy)


def to_codes(a: np.ndarray) -> np.ndarray:
    """The bit patterns of an array's elements, as unsigned integers of the same size."""
    return np.asarray(a).view(f"u{np.asarray(a).dtype.itemsize}")


def from_codes(codes: Any, dtype: DType | str) -> np.ndarray:
    """Elements of `dtype` from bit patterns: the inverse of to_codes."""
    dtype = as_dtype(dtype)
    return np.asarray(codes, dtype.code_type).view(dtype.numpy)


@cache
def _decode_table(dtype: DType) -> np.ndarray:
    """f32 [256]: the value of each code; bits above the format's are ignored."""
    values = np.empty(256, np.float32)
    for code in range(256):
        magnitude = code & ((1 << dtype.sign_shift) - 1)
        sign = 0.5 - ((code >> dtype.sign_shift) & 1)
        values[code] = math.copysign(_code_value(magnitude, dtype), sign)
    values.setflags(write=False)
    return values


def _code_value(magnitude: int, dtype: DType) -> float:
    if magnitude <= dtype.max_code:
        return dtype.value_of(magnitude)
    return float("inf") if magnitude == dtype.inf_code else float("nan")


def _check_rounding(rounding: str) -> None:
    if rounding not in ROUNDINGS:
        raise PolicyError(f"unknown rounding {rounding!r}", hint=f"one of {', '.join(ROUNDINGS)}")


def _as_numbers(x: Any) -> np.ndarray:
    """x as a native, contiguous array of a type we know."""
    x = np.asarray(x)
    dtype_of_numpy(x.dtype)  # raises for complex, object, text
    return np.asarray(x, dtype=x.dtype.newbyteorder("="), order="C")


def _has_fast_path(x: np.ndarray, dtype: DType, rounding: str, counts: CastCounts | None) -> bool:
    if rounding != "nearest_even" or counts is not None:
        return False
    if x.dtype.kind in "iu":  # an integer is converted by the processor, which rounds once
        return dtype is f32 or dtype is f64
    return (x.dtype, dtype) in ((np.float32, bf16), (np.float64, f32))


def _encode_fast(x: np.ndarray, dtype: DType, saturate: bool) -> np.ndarray:
    if saturate and x.dtype.kind == "f":  # NaN passes through clip; +-max are values of x's type
        x = np.clip(x, dtype.min, dtype.max)
    return x.astype(dtype.numpy)


class _Draw:
    """The random words of elements [start, start + n) of a flattened tensor."""

    def __init__(self, key: Any, offset: int, index: Any, shape: tuple[int, ...]):
        self.key, self.offset, self.index = as_key(key), int(offset), None
        if index is not None:
            index = np.asarray(index)
            if index.shape != shape:
                raise ArgumentError(
                    f"index has shape {index.shape} but x has shape {shape}",
                    hint="give each element of x its index in the whole tensor",
                )
            self.index = index.reshape(-1)

    def __call__(self, start: int, n: int) -> np.ndarray:
        if self.index is not None:
            return random_bits_at(self.key, self.index[start : start + n])
        return random_bits(self.key, n, self.offset + start)


def _encode_float(
    x: np.ndarray,
    dtype: DType,
    rounding: str,
    saturate: bool,
    bits: np.ndarray | None,
    counts: CastCounts | None,
) -> np.ndarray:
    """The generic path: [N] numbers -> [N] of dtype.numpy."""
    if dtype is f64 and x.dtype.kind in "iu" and x.dtype.itemsize == 8:
        return long_to_f64(x, rounding, bits)
    x = exact_float(x)
    src = SOURCE_F32 if x.dtype == np.float32 else SOURCE_F64
    if dtype.man >= src.man:
        return _encode_widen(x, dtype, saturate, counts)
    words = x.view(src.word)
    codes = encode_words(words, src, dtype, rounding, saturate, bits, counts)
    codes = codes.astype(dtype.code_type, copy=False)
    if dtype is tf32:
        codes <<= np.uint32(dtype.pad)
    return codes.view(dtype.numpy)


def _encode_widen(
    x: np.ndarray, dtype: DType, saturate: bool, counts: CastCounts | None
) -> np.ndarray:
    """A target that contains the source: exact, only inf can change."""
    out = x.astype(dtype.numpy)
    if counts is not None:
        magnitude = np.abs(out)
        small = np.count_nonzero((magnitude > 0) & (magnitude < dtype.tiny))
        counts.add(nan=np.count_nonzero(out != out), inf=np.isinf(out).sum(), subnormal=small)
    return np.clip(out, dtype.min, dtype.max, dtype=dtype.numpy) if saturate else out

