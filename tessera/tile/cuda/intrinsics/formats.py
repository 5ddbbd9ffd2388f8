"""Numbers in memory <-> numbers in registers, inside intrinsics.

A float of at most 32 bits is held as f32, an integer of at most 32 bits as i32 (unsigned ones
zero-extended, bools 0 or 1). In memory they are bits: `decode` and `encode` take and give the words
of one access, 32 bits each (64 for 64-bit types), lowest element first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tessera.numerics import DType, find_dtype
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import Kind
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics.narrow_floats import (
    decode_narrow,
    encode_code,
    encode_narrow,
    f16_to_f32,
    integer_field,
    pack_codes,
)

LLVM = Any


def kind_of(dtype: DType) -> Kind:
    """The register kind that holds a value."""
    if dtype.kind == "float":
        return "f64" if dtype.bits == 64 else "f32"
    return "i64" if dtype.bits == 64 else "i32"


def decode(b: Builder, dtype: DType, words: list[LLVM], count: int,
           hardware: bool = False, any_nan: bool = False) -> list[LLVM]:
    """`count` elements of an access. hardware: fp8 by instructions (narrow.has_instructions).
    any_nan: as decode_narrow has it."""
    if dtype.bits == 64:
        return [b.bitcast(w, "f64") for w in words] if dtype.kind == "float" else list(words)
    if dtype.bits == 32:
        return [b.bitcast(w, "f32") for w in words] if dtype.kind == "float" else list(words)
    per_word = 32 // dtype.bits
    return [_element(b, dtype, words[i // per_word], i % per_word, hardware, any_nan)
            for i in range(count)]


def _element(b: Builder, dtype: DType, word: LLVM, at: int, hardware: bool, any_nan: bool) -> LLVM:
    """Element `at` of a word of 8- or 16-bit elements."""
    if dtype.name == "bf16":
        return bf16_to_f32(b, word, at)
    if dtype.name == "f16":
        return f16_to_f32(b, word, at)
    if dtype.kind == "float":
        return decode_narrow(b, dtype, word, at, hardware, any_nan)
    return integer_field(b, dtype, word, dtype.bits * at)


def bf16_to_f32(b: Builder, word: LLVM, at: int) -> LLVM:
    """The upper half of an f32. Plain arithmetic, which the optimiser can see through."""
    bits = b.and_(word, b.i32(0xFFFF0000)) if at else b.shl(word, b.i32(16))
    return b.bitcast(bits, "f32")


def encode(b: Builder, dtype: DType, values: list[LLVM], hardware: bool = False,
           rounding: str = "nearest_even", saturate: bool = False,
           random: Sequence[LLVM] | None = None) -> list[LLVM]:
    """The words of neighbouring elements, rounded.

    random: for rounding='stochastic', a random word for each.
    """
    if dtype.bits == 64:
        return [b.bitcast(v, "i64") for v in values] if dtype.kind == "float" else list(values)
    if dtype.bits == 32:
        return [b.bitcast(v, "i32") for v in values] if dtype.kind == "float" else list(values)
    if dtype.name in ("bf16", "f16"):
        return encode_half(b, dtype.name, values, rounding, saturate, random)
    if dtype.kind == "float":
        return encode_narrow(b, dtype, values, hardware, rounding, saturate, random)
    per_word = 32 // dtype.bits
    return [_together(b, values[i:i + per_word], dtype.bits)
            for i in range(0, len(values), per_word)]


def _together(b: Builder, values: list[LLVM], bits: int) -> LLVM:
    """Low bits of each value, side by side."""
    word = b.and_(values[0], b.i32((1 << bits) - 1))
    for i, v in enumerate(values[1:], 1):
        word = b.or_(word, b.shl(b.and_(v, b.i32((1 << bits) - 1)), b.i32(bits * i)))
    return word


def encode_half(b: Builder, name: str, values: list[LLVM], rounding: str = "nearest_even",
                saturate: bool = False, random: Sequence[LLVM] | None = None) -> list[LLVM]:
    """bf16 or f16, two a word, by one instruction. A NaN is the instruction's, 0x7FFF: all bits
    that mean NaN will do (docs/reference/gpu.md), and the sign of its operand would take three
    instructions more for each pair, in every epilogue.

    rounding='exact': the values are bf16 numbers already, and their upper halves are moved.
    """
    if rounding == "exact":
        pairs = [values[i:i + 2] for i in range(0, len(values), 2)]
        return [_upper_halves(b, *pair) for pair in pairs]
    if rounding == "stochastic":
        assert random is not None
        dtype = find_dtype(name)
        codes = [encode_code(b, dtype, v, rounding, saturate, r)
                 for v, r in zip(values, random, strict=True)]
        return [pack_codes(b, codes[i:i + 2], 16) for i in range(0, len(codes), 2)]
    given = [_within(b, v, find_dtype(name).max) for v in values] if saturate else values
    how = {"nearest_even": "rn", "toward_zero": "rz"}[rounding]
    out = []
    for i in range(0, len(values) - 1, 2):
        out.append(b.call(find_instruction(f"pack_{name}_{how}"), *given[i:i + 2]))
    if len(values) % 2:
        out.append(b.call(find_instruction(f"to_{name}_{how}"), given[-1]))
    return out


def operand(b: Builder, dtype: DType, values: list[LLVM]) -> LLVM:
    """One register of an operand of a matmul."""
    return encode(b, dtype, values)[0]


def _upper_halves(b: Builder, low: LLVM, high: LLVM | None = None) -> LLVM:
    """The upper 16 bits of one or two f32."""
    word = b.bitcast(low, "i32")
    if high is None:
        return b.lshr(word, b.i32(16))
    return b.call(find_instruction("prmt"), word, b.bitcast(high, "i32"), b.i32(0x7632))


def _within(b: Builder, x: LLVM, most: float) -> LLVM:
    """x between -most and most; NaN stays, its sign does not."""
    low = b.call(find_instruction("f32_max_nan"), x, b.const("f32", -most))
    return b.call(find_instruction("f32_min_nan"), low, b.const("f32", most))


def access(dtype: DType, width: int) -> tuple[str, int]:
    """(element, vector) of the instruction that moves `width` elements."""
    bits = dtype.bits * width
    if dtype.bits == 64:
        return "b64", width
    if bits < 32:
        return {8: "u8", 16: "u16"}[bits], 1
    return "b32", bits // 32
