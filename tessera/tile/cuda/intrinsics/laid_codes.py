"""Codes that lie as registers have them (numerics/packed_order.py), made these registers.

A shift brings the codes of a register, one for each half or byte, to where the wide type has its
sign and rest, and a mask leaves them. Those that stand apart in what the others leave take more.

    bf16    one product makes up for exponents: 1.5 instructions for a code of 4 bits, 2.1 of 6
    fp8     0.7 of 4 bits and of 6
"""

from __future__ import annotations

from typing import Any

from tessera.numerics import DType, find_dtype
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics.packed_codes import SOURCES, TARGETS

LLVM = Any
SIGN = 0x8000


def registers(b: Builder, codes: DType, words: list[LLVM], dtype: str) -> list[LLVM]:
    """The numbers of 16 codes, all of an r of that order in a register."""
    if find_dtype(dtype).bits == 8:
        return _bytes_of_four(b, words) if codes.bits == 4 else _bytes_of_six(b, words)
    make = _of_four if codes.bits == 4 else _of_six
    narrow, wide = SOURCES[codes.name], TARGETS[dtype]
    exponent = in_both_halves(wide.bias - narrow.bias + wide.bias << wide.man)  # of 2^(biases)
    fma = find_instruction("fma_bf16x2")
    return [b.call(fma, placed, b.i32(exponent), b.i32(in_both_halves(SIGN)))
            for placed in make(b, words)]


# --- two to a register ----------------------------------------------------------------------------
def _of_four(b: Builder, words: list[LLVM]) -> list[LLVM]:
    made, whole = [], b.i32(in_both_halves(SIGN | 0x1C0))
    for word in words:
        made += [b.and_(turned, whole) for turned in (word, _rotate_right(b, word, 3),
                                                      _rotate_right(b, word, 6))]
        rest = b.and_(word, b.i32(in_both_halves(0x1B)))
        made.append(b.and_(b.mul(rest, b.i32(1 << 3 | 1 << 8 | 1 << 14)), whole))
    return made


def _rotate_right(b: Builder, word: LLVM, down: int) -> LLVM:
    return b.or_(b.lshr(word, b.i32(down)), b.shl(word, b.i32(32 - down)))


def _of_six(b: Builder, words: list[LLVM]) -> list[LLVM]:
    sign, rest = b.i32(in_both_halves(SIGN)), b.i32(in_both_halves(0x1F0))
    made = [b.and_(word, b.i32(in_both_halves(SIGN | 0x1F0))) for word in words]
    made += [b.or_(b.and_(b.shl(word, b.i32(1)), sign), b.and_(b.lshr(word, b.i32(5)), rest))
             for word in words]
    for word, first, moved in ((words[0], 0xC, 1 << 12 | 1 << 2), (words[1], 3, 1 << 14 | 1 << 4)):
        ends = b.mul(b.and_(words[2], b.i32(in_both_halves(first))), b.i32(moved))
        made.append(b.or_(b.and_(b.shl(word, b.i32(5)), b.i32(in_both_halves(0x1E0))),
                          b.and_(ends, b.i32(in_both_halves(SIGN | 0x10)))))
    return made


def in_both_halves(half: int) -> int:
    return half << 16 | half


# --- four to a register ---------------------------------------------------------------------------
def _bytes_of_four(b: Builder, words: list[LLVM]) -> list[LLVM]:
    made = []
    for word in words:
        made += [b.and_(word, b.i32(every(0x9C))),
                 b.or_(b.and_(b.shl(word, b.i32(2)), b.i32(every(0x8C))),
                       b.and_(b.lshr(word, b.i32(2)), b.i32(every(0x10))))]
    return made


def _bytes_of_six(b: Builder, words: list[LLVM]) -> list[LLVM]:
    made = [b.and_(word, b.i32(every(0x9F))) for word in words]
    last = b.and_(b.lshr(words[0], b.i32(2)), b.i32(every(0x18)))
    for moved, mask in ((b.lshr(words[1], b.i32(4)), 0x06), (b.lshr(words[2], b.i32(5)), 0x01),
                        (b.shl(words[2], b.i32(1)), 0x80)):
        last = b.or_(last, b.and_(moved, b.i32(every(mask))))
    return [*made, last]


def every(byte: int) -> int:
    return byte * 0x01010101


__all__ = ["registers"]
