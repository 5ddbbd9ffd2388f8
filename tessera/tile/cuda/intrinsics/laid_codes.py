"""Codes that lie as registers of bf16 have them (numerics/packed_order.py), made these registers.

Two codes of a register stand at one position of both halves of a word. A shift brings them to where
bf16 has its sign and rest, a mask leaves them, and a product makes up for exponents: 1.5
instructions for a code of 4 bits, 2.1 for one of 6. The last two of a word of 4 bits stand apart in
what the others leave, and one more product brings their parts together.
"""

from __future__ import annotations

from typing import Any

from tessera.numerics import DType
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics.packed_codes import SOURCES, TARGETS

LLVM = Any
SIGN = 0x8000


def registers(b: Builder, codes: DType, words: list[LLVM]) -> list[LLVM]:
    """The numbers of 16 codes, two in a register: of columns 8 r + 2 t on, r = 0 .. 7."""
    make = _of_four if codes.bits == 4 else _of_six
    narrow, wide = SOURCES[codes.name], TARGETS["bf16"]
    exponent = both(wide.bias - narrow.bias + wide.bias << wide.man)  # of 2^(bias difference)
    fma = find_instruction("fma_bf16x2")
    return [b.call(fma, placed, b.i32(exponent), b.i32(both(SIGN))) for placed in make(b, words)]


def _of_four(b: Builder, words: list[LLVM]) -> list[LLVM]:
    made, whole = [], b.i32(both(SIGN | 0x1C0))
    for word in words:
        made += [b.and_(turned, whole) for turned in (word, _turned(b, word, 3),
                                                      _turned(b, word, 6))]
        rest = b.and_(word, b.i32(both(0x1B)))
        made.append(b.and_(b.mul(rest, b.i32(1 << 3 | 1 << 8 | 1 << 14)), whole))
    return made


def _turned(b: Builder, word: LLVM, down: int) -> LLVM:
    return b.or_(b.lshr(word, b.i32(down)), b.shl(word, b.i32(32 - down)))


def _of_six(b: Builder, words: list[LLVM]) -> list[LLVM]:
    sign, rest = b.i32(both(SIGN)), b.i32(both(0x1F0))
    made = [b.and_(word, b.i32(both(SIGN | 0x1F0))) for word in words]
    made += [b.or_(b.and_(b.shl(word, b.i32(1)), sign), b.and_(b.lshr(word, b.i32(5)), rest))
             for word in words]
    for word, first, moved in ((words[0], 0xC, 1 << 12 | 1 << 2), (words[1], 3, 1 << 14 | 1 << 4)):
        ends = b.mul(b.and_(words[2], b.i32(both(first))), b.i32(moved))
        made.append(b.or_(b.and_(b.shl(word, b.i32(5)), b.i32(both(0x1E0))),
                          b.and_(ends, b.i32(both(SIGN | 0x10)))))
    return made


def both(half: int) -> int:
    return half << 16 | half


__all__ = ["registers"]
