"""Casts between the numbers that registers hold, as tessera.numerics rounds them: once.

What is wider than f32 reaches narrow floats through an f32 rounded to odd (toward zero, with the
last bit set where something was cut off): the second rounding then sees every tie as it was
(Boldo and Melquiond 2008). Integers saturate.
"""

from __future__ import annotations

import functools
from typing import Any

from tessera.numerics import DType, find_dtype
from tessera.numerics.policy import saturates_itself
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics.formats import decode, encode_half, kind_of
from tessera.tile.cuda.intrinsics.narrow_floats import (
    FP8,
    NAN,
    decode_narrow,
    encode_narrow,
    integer_field,
    round_narrow,
)
from tessera.tile.cuda.ptx.convert import ROUND

HALVES = frozenset({"bf16", "f16"})  # rounded two at a time
F32, BYTE = find_dtype("f32"), find_dtype("uint8")
QUIET_F64 = 0x7FF8 << 48


@functools.cache
def cast(source: str, to: str, rounding: str = "nearest_even", saturate: bool = False,
         hardware: bool = False) -> Operation:
    """(numbers of `source`) -> the nearest numbers of `to`, each in its register kind.

    hardware: fp8 instructions may be used (narrow.has_instructions).
    """
    a, z = find_dtype(source), find_dtype(to)
    kind: Any = kind_of(a)
    result: Any = kind_of(z)

    def rule(x: Operand) -> InstructionForm:
        def body(b: Builder, value: Any) -> Any:
            values = value if x.count else [value]
            out = _cast(b, a, z, values, rounding, saturate, hardware)
            return out if x.count else out[0]

        return InstructionForm((Operand("x", kind, x.count),), (Operand("d", result, x.count),),
                               body)

    return Operation(f"{source}_to_{to}", 1, rule)


@functools.cache
def cast_random(to: str, saturate: bool = False) -> Operation:
    """(f32 numbers, random words) -> numbers of a narrower format, as f32: up where a word is below
    the fraction that is cut off, as 32 bits."""
    z = find_dtype(to)

    def rule(x: Operand, words: Operand) -> InstructionForm:
        count = max(x.count, words.count)

        def body(b: Builder, value: Any, word: Any) -> Any:
            if not count:
                return round_narrow(b, z, value, "stochastic", saturate, word)
            values = value if x.count else [value] * count
            bits = word if words.count else [word] * count
            return [round_narrow(b, z, v, "stochastic", saturate, w)
                    for v, w in zip(values, bits, strict=True)]

        return InstructionForm((Operand("x", "f32", x.count), Operand("words", "i32", words.count)),
                               (Operand("d", "f32", count),), body)

    return Operation(f"f32_to_{to}_at_random", 2, rule)


@functools.cache
def encode_bytes(dtype: str, rounding: str, saturate: bool, hardware: bool) -> Operation:
    """(f32 numbers) -> the codes of the nearest numbers of a type of 8 bits."""
    z = find_dtype(dtype)

    def rule(x: Operand) -> InstructionForm:
        def body(b: Builder, value: Any) -> Any:
            values = value if x.count else [value]
            words = encode_narrow(b, z, values, hardware, rounding, saturate)
            out = [integer_field(b, BYTE, words[i // 4], i % 4 * 8) for i in range(len(values))]
            return out if x.count else out[0]

        return InstructionForm((Operand("x", "f32", x.count),), (Operand("d", "i32", x.count),),
                               body)

    return Operation(f"bytes_of_{dtype}", 1, rule)


def same_register(a: DType, z: DType, saturate: bool = False) -> bool:
    """Whether every number of one type is held by the same bits in the other: bf16 -> f32."""
    if a is z:  # saturating, infinities become numbers
        return not saturates_itself(z, saturate)
    if "float" in (a.kind, z.kind):
        return a.kind == z.kind and max(a.bits, z.bits) <= 32 and contains(z, a, saturate)
    if max(a.bits, z.bits) > 32 or z.kind == "bool":
        return False
    return z.min <= a.min and a.max <= z.max


def contains(z: DType, a: DType, saturate: bool) -> bool:
    """Whether a float format has every number of another, inf and NaN too."""
    if z is F32:
        return not (saturate and a.special == "ieee")
    if a.bits == 16:  # its NaNs have payloads, of which no other format keeps any
        return False
    if a.special != "none" and (z.special != "ieee" or saturate):
        return False
    return a.man <= z.man and a.max <= z.max and a.smallest >= z.smallest


def _cast(b: Builder, a: DType, z: DType, values: list[Any], rounding: str, saturate: bool,
          hardware: bool) -> list[Any]:
    if same_register(a, z, saturate):
        return values
    if a.kind != "float" and z.kind != "float":
        return [_int_to_int(b, a, z, v) for v in values]
    if z.kind != "float":
        return [_float_to_int(b, a, z, v) for v in values]
    if z.bits == 64:
        return [_to_f64(b, a, v, rounding, saturate) for v in values]
    if z is F32:
        if a.kind == "float" and a.bits <= 32:  # held in the register: infinities alone change
            return [_clamped(b, v, F32.max) for v in values]
        return [_to_f32(b, a, v, rounding, saturate) for v in values]
    return _to_narrow(b, z, [as_f32(b, a, v) for v in values], rounding, saturate, hardware)


# --- to floats --------------------------------------------------------------------------------
def _to_narrow(b: Builder, z: DType, values: list[Any], rounding: str, saturate: bool,
               hardware: bool) -> list[Any]:
    """f32 -> the nearest numbers of a narrower format, as f32."""
    if z.name in HALVES:
        out: list[Any] = []
        for i in range(0, len(values), 2):
            pair = values[i:i + 2]
            out += decode(b, z, encode_half(b, z.name, pair, rounding, saturate), len(pair))
        return out
    if hardware and z.name in FP8 and rounding == "nearest_even":
        out = []
        for i in range(0, len(values), 4):
            part = values[i:i + 4]
            (word,) = encode_narrow(b, z, part, True, rounding, saturate)
            out += [decode_narrow(b, z, word, at, True) for at in range(len(part))]
        return out
    return [round_narrow(b, z, v, rounding, saturate) for v in values]


def as_f32(b: Builder, a: DType, v: Any) -> Any:
    """An f32 that rounds to fewer bits as the number would: exact, or rounded to odd."""
    if a.kind == "float":
        return f64_to_odd(b, v) if a.bits == 64 else v
    name = _integer(a)
    if a.bits < 32:
        return b.call(find_instruction(f"{name}_to_f32_rn"), v)
    cut = b.call(find_instruction(f"{name}_to_f32_rz"), v)
    back = b.call(find_instruction(f"f32_to_{name}_rzi"), cut)
    return _or_bits(b, cut, b.to_int(b.compare("!=", back, v)))


def f64_to_odd(b: Builder, v: Any) -> Any:
    cut = b.call(find_instruction("f64_to_f32_rz"), v)
    wide = b.call(find_instruction("f32_to_f64"), cut)
    lost = b.to_int(b.compare("!=", wide, v))
    return _or_bits(b, cut, b.or_(lost, _sign_of_f64(b, v)))


def _sign_of_f64(b: Builder, v: Any) -> Any:
    high = b.trunc(b.lshr(b.bitcast(v, "i64"), b.const("i64", 32)), "i32")
    return b.and_(high, b.i32(0x80000000))


def _or_bits(b: Builder, x: Any, bits: Any) -> Any:
    return b.bitcast(b.or_(b.bitcast(x, "i32"), bits), "f32")


def _to_f64(b: Builder, a: DType, v: Any, rounding: str, saturate: bool) -> Any:
    if a.kind != "float":
        return b.call(find_instruction(f"{_integer(a)}_to_f64_{ROUND[rounding]}"), v)
    wide = b.bitcast(b.call(find_instruction("f32_to_f64"), v), "i64")
    bits = b.zext(b.bitcast(v, "i32"), "i64")
    payload = b.and_(b.shl(bits, b.const("i64", 29)), b.const("i64", 0x000FFFFFFFFFFFFF))
    wide = b.select(b.compare("!=", v, v), b.or_(payload, b.const("i64", QUIET_F64)), wide)
    sign = b.and_(b.shl(bits, b.const("i64", 32)), b.const("i64", -(1 << 63)))
    out = b.bitcast(b.or_(wide, sign), "f64")
    return _clamped(b, out, find_dtype("f64").max) if saturate else out


def _to_f32(b: Builder, a: DType, v: Any, rounding: str, saturate: bool) -> Any:
    if a.kind != "float":
        return b.call(find_instruction(f"{_integer(a)}_to_f32_{ROUND[rounding]}"), v)
    out = b.call(find_instruction(f"f64_to_f32_{ROUND[rounding]}"), v)
    # to nearest the upper bits of the payload stay, as in NumPy's cast, which numerics uses there
    upper = b.trunc(b.lshr(b.bitcast(v, "i64"), b.const("i64", 29)), "i32")
    payload = b.and_(upper, b.i32(0x007FFFFF)) if rounding == "nearest_even" else b.i32(0)
    nan = b.bitcast(b.or_(payload, b.i32(NAN)), "f32")
    out = b.select(b.compare("!=", v, v), nan, out)
    out = _or_bits(b, out, _sign_of_f64(b, v))
    return _clamped(b, out, F32.max) if saturate else out


def _clamped(b: Builder, x: Any, most: float) -> Any:
    """x within +-most; NaN stays."""
    x = b.select(b.compare(">", x, b.like(x, most)), b.like(x, most), x)
    return b.select(b.compare("<", x, b.like(x, -most)), b.like(x, -most), x)


def _integer(a: DType) -> str:
    """The type by which conversions read an integer's register: s32, u32, s64, u64."""
    return f"{'u' if a.kind == 'uint' else 's'}{64 if a.bits == 64 else 32}"


# --- to integers ------------------------------------------------------------------------------
def _float_to_int(b: Builder, a: DType, z: DType, v: Any) -> Any:
    """Toward zero, saturating, NaN to 0."""
    if z.kind == "bool":
        return b.to_int(b.compare("!=", v, b.zero(v)))
    source = "f64" if a.bits == 64 else "f32"
    name = _integer(z)
    got = b.call(find_instruction(f"{source}_to_{name}_rzi"), v)
    if source == "f64" or z.bits == 64:  # elsewhere the instruction gives 0 (PTX ISA 9.7.9 cvt)
        got = b.select(b.compare("==", v, v), got, b.zero(got))
    if z.bits >= 32:
        return got
    return _limited(b, got, int(z.min) if z.kind == "int" else None, int(z.max), z.kind == "uint")


def _limited(b: Builder, v: Any, low: int | None, high: int | None, signless: bool) -> Any:
    """v within bounds; None: it surely is."""
    if low is not None:
        v = b.select(b.compare("<", v, b.like(v, low)), b.like(v, low), v)
    if high is not None:
        above = b.compare(">", v, b.like(v, high), unsigned=signless)
        v = b.select(above, b.like(v, high), v)
    return v


def _int_to_int(b: Builder, a: DType, z: DType, v: Any) -> Any:
    if z.kind == "bool":
        return b.to_int(b.true(v))
    v = _limited(b, v, int(z.min) if a.min < z.min else None, int(z.max) if a.max > z.max else None,
                 a.kind == "uint")
    if z.bits == a.bits == 64 or z.bits < 64 and a.bits < 64:
        return v
    if z.bits < 64:
        return b.trunc(v, "i32")
    return b.sext(v, "i64") if a.kind == "int" else b.zext(v, "i64")


__all__ = ["as_f32", "cast", "same_register"]
