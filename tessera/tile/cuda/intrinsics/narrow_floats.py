"""Codes of narrow floats <-> f32 registers, with integer arithmetic or the target's instructions.

The arithmetic is that of tessera.numerics.round_bits, specialised to f32: below the target's
smallest normal an addition of a power of two rounds (its unit in the last place is the target's
smallest subnormal), above it the mantissa is rounded where it stands. Some targets have
instructions for fp8; `hardware` says that they may be used. NaN keeps its sign and gets the payload
that tessera.numerics gives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tessera.numerics import DType
from tessera.runtime.generations import Generation
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.ptx import convert

LLVM = Any
MAN, BIAS, INF, NAN = 23, 127, 0x7F800000, 0x7FC00000  # of f32
SIGN, MAGNITUDE = 0x80000000, 0x7FFFFFFF
FP8 = {"fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}


def has_instructions(dtype: DType, generation: Generation) -> bool:
    """Whether a generation converts to and from a format by itself."""
    return dtype.name in generation.converts


# --- code -> f32 ------------------------------------------------------------------------------
def decode_narrow(b: Builder, dtype: DType, word: LLVM, at: int, hardware: bool = False,
                  any_nan: bool = False) -> LLVM:
    """The number of element `at` of a word of 8-bit elements. any_nan: whatever sign and payload a
    NaN has, which saves three of five instructions."""
    if hardware:
        pair = word if at < 2 else b.lshr(word, b.i32(16))
        halves = b.call(convert.fp8_to_f16x2(FP8[dtype.name]), pair)
        value = b.call(find_instruction("f16_high" if at % 2 else "f16_low"), halves)
        if any_nan:
            return value
        return _with_sign(b, _one_nan(b, value), _shift_bit(b, word, 8 * at + 7, 31))
    return decode_field(b, dtype, word, dtype.bits * at)


def decode_field(b: Builder, dtype: DType, word: LLVM, at: int) -> LLVM:
    """The number of the code whose lowest bit is bit `at` of a word."""
    if dtype.kind != "float":
        return integer_field(b, dtype, word, at)
    sign = _shift_bit(b, word, at + dtype.sign_shift, 31)
    if dtype.bits == 8 and dtype.exp == 5:  # the upper byte of an f16
        value = b.call(find_instruction("f16_low"),
                       b.and_(_shift_bit(b, word, at, 8), b.i32(0xFF00)))
        return _with_sign(b, _one_nan(b, value), sign)
    mask = ((1 << dtype.sign_shift) - 1) << (MAN - dtype.man)
    field = b.and_(_shift_bit(b, word, at, MAN - dtype.man), b.i32(mask))
    value = b.fmul(b.bitcast(field, "f32"), b.const("f32", 2.0 ** (BIAS - dtype.bias)))
    if dtype.special == "fn":
        nan = b.bitcast(b.i32(NAN), "f32")
        value = b.select(b.compare("==", field, b.i32(mask)), nan, value)
    if dtype.inf_code is not None:
        infinite = b.i32(dtype.inf_code << MAN - dtype.man)
        beyond = b.select(b.compare("==", field, infinite), b.i32(INF), b.i32(NAN))
        value = b.select(b.compare(">=", field, infinite), b.bitcast(beyond, "f32"), value)
    return _with_sign(b, value, sign)


def integer_field(b: Builder, dtype: DType, word: LLVM, at: int) -> LLVM:
    """The integer whose lowest bit is bit `at` of a word."""
    if dtype.kind == "int":
        up = 32 - dtype.bits - at
        raised = b.shl(word, b.i32(up)) if up else word
        return b.ashr(raised, b.i32(32 - dtype.bits))
    return b.and_(_shift_bit(b, word, at, 0), b.i32((1 << dtype.bits) - 1))


def _shift_bit(b: Builder, word: LLVM, at: int, to: int) -> LLVM:
    """The word shifted so that bit `at` becomes bit `to`."""
    if to > at:
        return b.shl(word, b.i32(to - at))
    return b.lshr(word, b.i32(at - to)) if at > to else word


def f16_to_f32(b: Builder, word: LLVM, at: int) -> LLVM:
    """The number of half `at` of a word; a NaN keeps its payload, as it does in numerics."""
    value = b.call(find_instruction("f16_high" if at else "f16_low"), word)
    half = word if at else b.shl(word, b.i32(16))
    # exponent and mantissa in their places: that exponent is 31 of 255
    field = b.and_(b.lshr(half, b.i32(16 + 10 - MAN)), b.i32(0x0FFFE000))
    bits = b.select(b.compare("!=", value, value), b.or_(field, b.i32(0x70000000)),
                    b.bitcast(value, "i32"))
    return _with_sign(b, b.bitcast(bits, "f32"), half)


def _one_nan(b: Builder, value: LLVM) -> LLVM:
    """A converted number, its NaN 0x7FC00000: the 0x7FFFFFFF of the instruction is the only one
    above, and as signed integers numbers below zero are below, too."""
    return b.bitcast(b.call(find_instruction("s32_min"), b.bitcast(value, "i32"), b.i32(NAN)),
                     "f32")


def _with_sign(b: Builder, value: LLVM, word: LLVM) -> LLVM:
    """A number without sign (or a NaN that lost it) with the sign bit of a word."""
    return b.bitcast(b.or_(b.bitcast(value, "i32"), b.and_(word, b.i32(SIGN))), "f32")


# --- f32 -> code ------------------------------------------------------------------------------
def encode_narrow(b: Builder, dtype: DType, values: Sequence[LLVM], hardware: bool = False,
                  rounding: str = "nearest_even", saturate: bool = False,
                  random: Sequence[LLVM] | None = None) -> list[LLVM]:
    """Words of four 8-bit codes (the last may hold fewer). random: a word each, to draw by."""
    draws = list(random) if random is not None else [None] * len(values)
    out = []
    for i in range(0, len(values), 4):
        part = list(values[i:i + 4])
        if hardware and rounding == "nearest_even":
            out.append(_by_instruction(b, dtype, part, saturate))
            continue
        codes = [encode_code(b, dtype, v, rounding, saturate, r)
                 for v, r in zip(part, draws[i:i + 4], strict=True)]
        out.append(pack_codes(b, codes, 8))
    return out


def pack_codes(b: Builder, codes: Sequence[LLVM], bits: int) -> LLVM:
    """Codes (without bits above theirs) side by side in a word, first lowest."""
    word = codes[0]
    for i, code in enumerate(codes[1:], 1):
        word = b.or_(word, b.shl(code, b.i32(bits * i)))
    return word


def _by_instruction(b: Builder, dtype: DType, values: list[LLVM], saturate: bool) -> LLVM:
    """1 to 4 codes in a word. The instruction saturates: what overflows becomes the next code."""
    name = FP8[dtype.name]
    full = values + [b.const("f32", 0)] * (-len(values) % 2)
    pairs = [b.call(convert.pack_fp8(name), full[i], full[i + 1]) for i in range(0, len(full), 2)]
    word = pairs[0] if len(pairs) == 1 else b.or_(pairs[0], b.shl(pairs[1], b.i32(16)))
    if name == "e5m2":  # NaN, 0x7F of the instruction, to 0x7E: bit 7 of the sum is its alone
        ones = b.add(b.and_(word, b.i32(0x7F7F7F7F)), b.i32(0x01010101))
        word = b.sub(word, b.and_(b.lshr(ones, b.i32(7)), b.i32(0x01010101)))
    if not saturate:
        # the tie above the largest number: its code is even in e4m3 (stays) and odd in e5m2
        limit, sign = (464.0, ">") if name == "e4m3" else (61440.0, ">=")
        for i, v in enumerate(values):
            size = b.bitcast(b.and_(b.bitcast(v, "i32"), b.i32(MAGNITUDE)), "f32")
            above = b.compare(sign, size, b.const("f32", limit))
            word = b.add(word, b.select(above, b.i32(1 << 8 * i), b.i32(0)))
    for i, v in enumerate(values):
        word = b.or_(word, b.and_(_shift_bit(b, b.bitcast(v, "i32"), 31, 8 * i + 7),
                                  b.i32(1 << 8 * i + 7)))
    return word


def encode_code(b: Builder, dtype: DType, value: LLVM, rounding: str = "nearest_even",
                saturate: bool = False, random: LLVM = None) -> LLVM:
    """The code of one f32, in the low bits; nothing above."""
    bits = b.bitcast(value, "i32")
    magnitude = b.and_(bits, b.i32(MAGNITUDE))
    code = {"nearest_even": _nearest, "toward_zero": _toward_zero}[rounding](b, dtype, magnitude) \
        if rounding != "stochastic" else _stochastic(b, dtype, magnitude, random)
    code, sign = _in_range(b, dtype, code, bits, magnitude, rounding, saturate)
    return b.or_(code, b.and_(_shift_bit(b, sign, 31, dtype.sign_shift),
                              b.i32(1 << dtype.sign_shift)))


def _nearest(b: Builder, dtype: DType, magnitude: LLVM) -> LLVM:
    drop, less = MAN - dtype.man, BIAS - dtype.bias
    half = (1 << drop - 1) - 1 - (less << MAN)
    odd = b.and_(b.lshr(magnitude, b.i32(drop)), b.i32(1))
    normal = b.lshr(b.add(b.add(magnitude, b.i32(half)), odd), b.i32(drop))
    if less == 0:
        return normal
    # 2^k whose unit in the last place is the smallest number of the format
    magic = (BIAS + 1 - dtype.bias - dtype.man + MAN) << MAN
    moved = b.fadd(b.bitcast(magnitude, "f32"), b.bitcast(b.i32(magic), "f32"))
    small = b.sub(b.bitcast(moved, "i32"), b.i32(magic))
    return b.select(b.compare("<", magnitude, b.i32(less + 1 << MAN)), small, normal)


def _toward_zero(b: Builder, dtype: DType, magnitude: LLVM) -> LLVM:
    drop, less = MAN - dtype.man, BIAS - dtype.bias
    normal = b.lshr(b.sub(magnitude, b.i32(less << MAN)), b.i32(drop))
    if less == 0:
        return normal
    units = b.fmul(b.bitcast(magnitude, "f32"), b.const("f32", 2.0 ** (dtype.man + dtype.bias - 1)))
    small = b.call(find_instruction("f32_to_u32_rzi"), units)
    return b.select(b.compare("<", magnitude, b.i32(less + 1 << MAN)), small, normal)


def _stochastic(b: Builder, dtype: DType, magnitude: LLVM, random: LLVM) -> LLVM:
    """Up where the random word is below the fraction that is cut off, as 32 bits."""
    field = b.lshr(magnitude, b.i32(MAN))
    subnormal = b.compare("==", field, b.i32(0))
    mantissa = b.and_(magnitude, b.i32((1 << MAN) - 1))
    m = b.select(subnormal, mantissa, b.or_(mantissa, b.i32(1 << MAN)))
    exponent = b.select(subnormal, b.i32(1), field)
    t = b.sub(exponent, b.i32(BIAS - dtype.bias + 1))
    negative = b.compare("<", t, b.i32(0))
    drop = b.add(b.select(negative, b.sub(b.i32(0), t), b.i32(0)), b.i32(MAN - dtype.man))
    near = _least(b, drop, 31)
    rest = _least(b, b.sub(drop, near), 31)
    base = b.shl(b.select(negative, b.i32(0), t), b.i32(dtype.man))
    fraction = b.lshr(b.shl(m, b.sub(b.i32(32), near)), rest)
    up = b.to_int(b.compare("<", random, fraction, unsigned=True))
    return b.add(b.add(base, b.lshr(m, near)), up)


def _least(b: Builder, x: LLVM, limit: int) -> LLVM:
    return b.select(b.compare("<", x, b.i32(limit)), x, b.i32(limit))


def _in_range(b: Builder, dtype: DType, code: LLVM, bits: LLVM, magnitude: LLVM, rounding: str,
              saturate: bool) -> tuple[LLVM, LLVM]:
    """(code, word with the sign): overflow, inf and NaN, as numerics.round_bits replaces them."""
    infinite = dtype.inf_code if dtype.inf_code is not None else dtype.nan_code
    limit = dtype.max_code if saturate or infinite is None else infinite
    most = dtype.max_code if rounding == "toward_zero" else limit
    code = b.select(b.compare(">", code, b.i32(most), unsigned=True), b.i32(most), code)
    if most != limit:
        code = b.select(b.compare("==", magnitude, b.i32(INF)), b.i32(limit), code)
    if dtype.nan_code is not None and most == dtype.nan_code:
        return code, bits  # a NaN is beyond the range anyway
    nan = b.compare(">", magnitude, b.i32(INF))
    code = b.select(nan, b.i32(dtype.nan_code or 0), code)
    if dtype.nan_code is None:  # no code for NaN: a zero of the other sign
        bits = b.select(nan, b.xor(bits, b.i32(SIGN)), bits)
    return code, bits


def round_narrow(b: Builder, dtype: DType, value: LLVM, rounding: str = "nearest_even",
                 saturate: bool = False, random: LLVM = None) -> LLVM:
    """The f32 that is nearest in a format of fewer bits, under a rounding; random: as in
    encode_code."""
    code = encode_code(b, dtype, value, rounding, saturate, random)
    if dtype.name == "f16":
        return f16_to_f32(b, code, 0)
    if dtype.bias == BIAS:  # bf16, tf32: the upper bits of an f32
        return b.bitcast(b.shl(code, b.i32(MAN - dtype.man)), "f32")
    return decode_field(b, dtype, code, 0)


__all__ = ["decode_field", "decode_narrow", "encode_code", "encode_narrow", "f16_to_f32",
           "has_instructions", "integer_field", "pack_codes", "round_narrow"]
