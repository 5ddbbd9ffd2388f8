"""PTX instructions of one number per thread, by name: conversions bit by bit, maths, bits of words.

`arithmetic(name)` is a function of registers. NaN and its payload are as the hardware makes them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.numerics import decode, encode, find_dtype

from .registers import without_sign

ROUNDS = {"rn": "nearest_even", "rz": "toward_zero"}
CODE_NAN = {"bf16": 0x7FFF, "f16": 0x7FFF, "fp8_e4m3": 0x7F, "fp8_e5m2": 0x7F}
NAN32 = 0x7FFFFFFF


def _canonical(x: Any, nan: int) -> np.ndarray:
    """Floats with the one NaN that the hardware makes."""
    out = np.array(x)
    words = out.view(f"u{out.dtype.itemsize}")
    words[np.isnan(out.astype(np.float32))] = nan
    return out


# --- conversions --------------------------------------------------------------------------------
def _code(x: Any, name: str, rounding: str = "nearest_even", saturate: bool = False) -> np.ndarray:
    d = find_dtype(name)
    found = np.asarray(encode(np.asarray(x), d, rounding=rounding, saturate=saturate))
    codes = found.view(d.code_type).astype(np.int64)
    return np.where(np.isnan(x), CODE_NAN[name], codes).astype(np.int32)


def _to_integer(x: Any, bits: int, signed: bool, nan: int) -> np.ndarray:
    """Toward zero, clamped."""
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    out = [nan if v != v else min(max(int(v) if abs(v) != np.inf else
                                      (high if v > 0 else low), low), high)
           for v in np.asarray(x, np.float64).reshape(-1).tolist()]
    whole = np.array([v & ((1 << bits) - 1) for v in out], np.uint64).astype(f"u{bits // 8}")
    return whole.view(f"i{bits // 8}").reshape(np.shape(x))


def _from_integer(x: Any, kind: str, signed: bool, rounding: str) -> Any:
    wide = np.asarray(x) if signed else without_sign(x)
    d = find_dtype(kind)
    if d.name == "f64" and x.dtype.itemsize == 4:
        return wide.astype(np.float64)
    return encode(wide, d, rounding=rounding)


def _half(word: Any, name: str, shift: int) -> np.ndarray:
    """The 16 bits of a word at `shift` as an f32."""
    if name == "bf16":
        return (np.asarray(word) << (16 - shift) & np.int32(-65536)).astype(np.int32).view(
            np.float32)
    half = (without_sign(np.asarray(word)) >> shift & 0xFFFF).astype(np.uint16).view(np.float16)
    return _canonical(half.astype(np.float32), NAN32)


def _fp8_to_halves(x: Any, name: str) -> np.ndarray:
    d = find_dtype("fp8_" + name)

    def half(code: Any) -> np.ndarray:
        numbers = np.asarray(decode(code.astype(np.uint8).view(d.numpy), d)).astype(np.float16)
        return _canonical(numbers, 0x7FFF).view(np.uint16).astype(np.int32)

    word = np.asarray(x)
    return half(word & 0xFF) | half(word >> 8 & 0xFF) << 16


def _of_halves(op: str, name: str) -> Callable[..., Any]:
    ufunc = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[op]

    def of_both(x: Any, y: Any) -> Any:
        with np.errstate(all="ignore"):
            low, high = (_code(ufunc(np.float64(_half(x, name, s)), _half(y, name, s)), name)
                         for s in (0, 16))
        return low | high << 16
    return of_both


def _fma_halves(name: str) -> Callable[..., Any]:
    def fma(x: Any, y: Any, z: Any) -> Any:
        low, high = (_code(np.float64(_half(x, name, s)) * _half(y, name, s) + _half(z, name, s),
                           name) for s in (0, 16))
        return low | high << 16
    return fma


def _packed(parts: list[np.ndarray], bits: int) -> Any:
    return functools.reduce(np.bitwise_or, [p << bits * i for i, p in enumerate(parts)])


# --- words --------------------------------------------------------------------------------------
def _prmt(x: Any, y: Any, selector: Any) -> np.ndarray:
    x, y, s = (np.asarray(v).astype(np.uint32).astype(np.uint64) for v in (x, y, selector))
    both = y << np.uint64(32) | x
    out = np.zeros(np.broadcast_shapes(x.shape, y.shape, s.shape), np.uint64)
    for i in range(4):
        nibble = s >> np.uint64(4 * i) & np.uint64(15)
        byte = both >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)
        byte = np.where(nibble >= 8, np.where(byte >= 128, 0xFF, 0), byte).astype(np.uint64)
        out |= byte << np.uint64(8 * i)
    return out.astype(np.uint32).view(np.int32)


def _shift_right(low: Any, high: Any, by: Any) -> np.ndarray:
    """The low word of both as one, shifted by the low five bits of a number."""
    low, high, by = (np.asarray(v).astype(np.uint32).astype(np.uint64) for v in (low, high, by))
    both = (high << np.uint64(32) | low) >> (by & np.uint64(31))
    return both.astype(np.uint32).view(np.int32)


def _mul_hi(x: Any, y: Any) -> np.ndarray:
    wide = without_sign(np.asarray(x)).astype(np.uint64) * without_sign(np.asarray(y))
    return (wide >> np.uint64(32)).astype(np.uint32).view(np.int32)


def _lop3(table: int) -> Callable[..., Any]:
    def apply(x: Any, y: Any, z: Any) -> Any:
        out = np.zeros((), np.int32)
        for n in range(8):
            if table >> n & 1:
                out = out | ((x if n & 4 else ~x) & (y if n & 2 else ~y) & (z if n & 1 else ~z))
        return out
    return apply


def _extreme(f: Any, nan: bool) -> Callable[..., Any]:
    def apply(x: Any, y: Any) -> Any:
        with np.errstate(all="ignore"):
            out = f(np.asarray(x), np.asarray(y))
        return _canonical(out, NAN32) if nan else out
    return apply


def _f32(f: Any) -> Callable[..., Any]:
    """In f64, rounded once."""
    return lambda *x: f(*(np.asarray(v, np.float64) for v in x)).astype(np.float32)


def _reciprocal_root(x: np.ndarray) -> np.ndarray:
    return 1 / np.sqrt(x)  # -inf of -0, where x ** -0.5 is inf


def _reciprocal(x: Any) -> Any:
    return 1 / x


NAMED: dict[str, Callable[..., Any]] = {
    "f32_to_f64": lambda x: _canonical(x.astype(np.float64), NAN32 << 32),
    "to_tf32_rn": lambda x: _canonical(encode(np.asarray(x), find_dtype("tf32")), NAN32).view(
        np.int32),
    "prmt": _prmt, "shf_right": _shift_right,
    "mul_hi_u32": _mul_hi,
    "popc": lambda x: np.bitwise_count(without_sign(np.asarray(x))).astype(np.int32),
    "f32_max_nan": _extreme(np.maximum, True), "f32_min_nan": _extreme(np.minimum, True),
    "f32_max": _extreme(np.fmax, False), "f32_min": _extreme(np.fmin, False),
    "s32_max": _extreme(np.maximum, False), "s32_min": _extreme(np.minimum, False),
    "fma_rn": _f32(lambda x, y, z: x * y + z), "div_rn": _f32(np.divide),
    "rcp_approx_full": _f32(_reciprocal), "rcp_approx": _f32(_reciprocal),
    "rcp_rn": _f32(_reciprocal), "sqrt_rn": _f32(np.sqrt),
    "rsqrt_approx_full": _f32(_reciprocal_root), "rsqrt_approx": _f32(_reciprocal_root),
    "div_approx": _f32(np.divide), "sqrt_approx": _f32(np.sqrt), "tanh_approx": _f32(np.tanh),
    "sin_approx": _f32(np.sin), "cos_approx": _f32(np.cos),
    "ex2_approx": _f32(np.exp2), "ex2_approx_full": _f32(np.exp2),
    "lg2_approx": _f32(np.log2), "lg2_approx_full": _f32(np.log2),
    "mul_rn": _f32(np.multiply), "add_rn": _f32(np.add), "sub_rn": _f32(np.subtract),
    "round_f32_rni": _f32(np.rint), "round_f32_rzi": _f32(np.trunc),
}

# Pattern of the name -> (its groups) -> the function of registers.
FAMILIES: tuple[tuple[str, Callable[..., Callable[..., Any]]], ...] = (
    (r"(bf16|f16)_(low|high)", lambda name, part: lambda x: _half(x, name, 16 * (part == "high"))),
    (r"(add|sub|mul)_(bf16|f16)x2", _of_halves),
    (r"fma_(bf16|f16)x2", _fma_halves),
    (r"to_(bf16|f16)_(r[nz])", lambda name, r: lambda x: _code(x, name, ROUNDS[r])),
    (r"pack_(bf16|f16)_(r[nz])",
     lambda name, r: lambda *x: _packed([_code(v, name, ROUNDS[r]) for v in x], 16)),
    (r"pack_(e4m3|e5m2)",
     lambda name: lambda *x: _packed([_code(v, "fp8_" + name, saturate=True) for v in x], 8)),
    (r"pack4_(e4m3|e5m2)",
     lambda name: lambda x: _packed([_code(v, "fp8_" + name, saturate=True) for v in x], 8)),
    (r"(e4m3|e5m2)_to_f16x2", lambda name: lambda x: _fp8_to_halves(x, name)),
    (r"(f32|f64)_to_([su])(32|64)_rzi", lambda source, sign, bits: lambda x: _to_integer(
        x, int(bits), sign == "s", _nan_as_integer(source, sign, int(bits)))),
    (r"([su])(?:32|64)_to_(f32|f64)_(r[nz])",
     lambda sign, kind, r: lambda x: _from_integer(x, kind, sign == "s", ROUNDS[r])),
    (r"f64_to_f32_(r[nz])", lambda r: lambda x: _canonical(
        encode(np.asarray(x), find_dtype("f32"), rounding=ROUNDS[r]), NAN32)),
    (r"lop3_([0-9A-F]{2})", lambda table: _lop3(int(table, 16))),
)


def _nan_as_integer(source: str, sign: str, bits: int) -> int:
    """0 from f32 to 32 bits, else the highest bit alone."""
    if source == "f32" and bits == 32:
        return 0
    return -(1 << bits - 1) if sign == "s" else 1 << bits - 1


@functools.cache
def arithmetic(name: str) -> Callable[..., Any]:
    """Raises NotImplementedError for what is no such instruction, or not written yet."""
    if name in NAMED:
        return NAMED[name]
    for pattern, function in FAMILIES:
        if found := re.fullmatch(pattern, name):
            return function(*found.groups())
    raise NotImplementedError(f"the emulator has no {name}")
