"""Codes of 4, 6 and 8 bits placed bit by bit into e4m3, f16 or bf16; exact, a few instructions.

A code's exponent and mantissa become those of the wider format, so the number that comes out is the
code's times 2^(bias difference), subnormals included: `factor` gives it, and the scale that follows
absorbs it. Every e2m1, e2m3 and e3m2 number is an e4m3 number that way, so packed weights feed fp8
tensor cores without loss.

Storage is that of tessera.numerics.pack: 4-bit codes two a byte, low nibble first; 6-bit codes four
in 24 bits, little-endian. NaN and infinities of fp8 codes: e5m2 keeps them in f16; of e4m3 the two
NaN codes become 480 times the factor.
"""

from __future__ import annotations

import functools
from typing import Any

from ....lazy_dataclass import dataclass
from ..instruction import InstructionForm, Operand, Operation, one_of
from ..instruction_names import find_instruction


@dataclass(frozen=True)
class CodeLayout:
    """Sign bit on top, then exponent and `man` bits of mantissa; exponents are biased."""

    bits: int
    man: int
    bias: int


SOURCES = {"fp4_e2m1": CodeLayout(4, 1, 1), "fp4_e3m0": CodeLayout(4, 0, 3),
           "fp6_e2m3": CodeLayout(6, 3, 1),
           "fp6_e3m2": CodeLayout(6, 2, 3), "fp8_e4m3": CodeLayout(8, 3, 7),
           "fp8_e5m2": CodeLayout(8, 2, 15)}
TARGETS = {"fp8_e4m3": CodeLayout(8, 3, 7), "f16": CodeLayout(16, 10, 15),
           "bf16": CodeLayout(16, 7, 127)}


def factor(source: str, target: str) -> float:
    """What the placed number must be multiplied by to be the code's."""
    return 2.0 ** (TARGETS[target].bias - SOURCES[source].bias)


def codes_per_word(source: str) -> int:
    """Codes that `place` takes at once: 8 of 4 bits, 4 of 6 (in the low 24 bits) or 8."""
    return {4: 8, 6: 4, 8: 4}[SOURCES[source].bits]


@functools.cache
def place(source: str, target: str) -> Operation:
    """(word of codes) -> their numbers times 1 / factor, in order, packed in registers."""
    layout, wide = SOURCES[one_of("source", source, SOURCES)], \
        TARGETS[one_of("target", target, TARGETS)]
    one_of("source", source, [s for s in SOURCES if SOURCES[s].bits < wide.bits])
    count = codes_per_word(source) * wide.bits // 32

    def body(b: Any, word: Any) -> Any:
        lanes = _bytes(b, word, layout.bits)
        if wide.bits == 16:
            lanes = [half for lane in lanes for half in _halves(b, lane)]
        return [_placed(b, lane, layout, wide) for lane in lanes]

    form = InstructionForm((Operand("x", "i32"),), (Operand("d", "i32", count),), body)
    return Operation(f"place_{source}_in_{target}", 1, lambda _: form)


@functools.cache
def int4() -> Operation:
    """(word of 8 int4 codes) -> two registers of four int8, each 16 times its code."""
    def body(b: Any, word: Any) -> Any:
        return [b.shl(lane, b.i32(4)) for lane in _bytes(b, word, 4)]

    form = InstructionForm((Operand("x", "i32"),), (Operand("d", "i32", 2),), body)
    return Operation("place_int4_in_int8", 1, lambda _: form)


def _bytes(b: Any, word: Any, bits: int) -> list[Any]:
    """The codes one a byte, in order."""
    if bits == 8:
        return [word]
    if bits == 6:
        lane = b.and_(word, b.i32(0x3F))
        for i in (1, 2, 3):
            lane = b.or_(lane, b.and_(b.shl(word, b.i32(2 * i)), b.i32(0x3F << 8 * i)))
        return [lane]
    low = b.and_(word, b.i32(0x0F0F0F0F))
    high = b.and_(b.lshr(word, b.i32(4)), b.i32(0x0F0F0F0F))
    prmt = find_instruction("prmt")
    return [b.call(prmt, low, high, b.i32(selector)) for selector in (0x5140, 0x7362)]


def _halves(b: Any, lane: Any) -> list[Any]:
    """Four bytes -> two registers of two halves, each with its byte below."""
    prmt = find_instruction("prmt")
    return [b.call(prmt, lane, b.i32(0), b.i32(selector)) for selector in (0x4140, 0x4342)]


def _placed(b: Any, lane: Any, layout: CodeLayout, wide: CodeLayout) -> Any:
    """In every field of `wide.bits`: the sign to the top, the rest up to the wider mantissa."""
    def everywhere(mask: int) -> Any:
        return b.i32(sum(mask << at for at in range(0, 32, wide.bits)))

    sign, rest = 1 << layout.bits - 1, (1 << layout.bits - 1) - 1
    top = b.shl(b.and_(lane, everywhere(sign)), b.i32(wide.bits - layout.bits))
    return b.or_(top, b.shl(b.and_(lane, everywhere(rest)), b.i32(wide.man - layout.man)))
