"""Codes of 4 and 6 bits in shared memory as the first operand of wgmma, in registers.

The second operand lies in shared memory, so the order of k is that of memory: of every 16 columns a
lane has 2 t, 2 t + 1 and 2 t + 8, 2 t + 9, t its number among the four of a row (PTX ISA 9.7.15).
Those read the same 16 bytes, and each takes its pairs of codes out of them.

The pairs go to one position in both halves of a word: byte permutations fetch the bytes, products
with powers of two shift, for these are done beside what permutes and masks. Then sign and rest are
placed as in matmul_codes.
"""

from __future__ import annotations

import functools
from typing import Any

from tessera.numerics import DType, find_dtype
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics.dealt_codes import numbers_of, registers
from tessera.tile.cuda.intrinsics.matmul_codes import UNIT, place_floats, place_integers
from tessera.tile.cuda.intrinsics.packed_codes import SOURCES, TARGETS
from tessera.tile.cuda.ptx import memory

LLVM = Any
STEP = 16  # columns of a matmul instruction


@functools.cache
def unpack(offset: int, slot_bytes: int, panel_bytes: int, width: int, part_bytes: int, codes: str,
           dtype: str, piece: int, pieces: int) -> Operation:
    """(slot, thread) -> the registers of 64 rows of numbers, times 1 / factor_of(codes, dtype).

    The tile lies in panels of rows of `width` bytes, swizzled as wide; warpgroup i has part_bytes
    of each row, from i * part_bytes on, and here takes one of so many pieces of them.
    """
    kind, chunks = find_dtype(codes), part_bytes // 16
    each = chunks // pieces
    across, shift = width // 16, {128: 0, 64: 1, 32: 2}[width]  # chunks, rows of 128 bytes
    lanes = _Quad(kind, dtype)

    def body(b: Builder, slot: LLVM, thread: LLVM) -> list[LLVM]:
        mine = b.lshr(thread, b.i32(7))
        lane = b.and_(thread, b.i32(31))
        row = b.or_(b.and_(b.lshr(thread, b.i32(1)), b.i32(0x30)), b.lshr(lane, b.i32(2)))
        base = b.add(b.add(b.shared_base(), b.i32(offset)), b.mul(slot, b.i32(slot_bytes)))
        base = b.add(base, b.mul(row, b.i32(width)))
        line = b.and_(b.lshr(row, b.i32(shift)), b.i32(across - 1))
        first = b.mul(mine, b.i32(chunks))
        words: tuple[list[LLVM], list[LLVM]] = [], []
        for c in range(piece * each, (piece + 1) * each):
            at = b.add(first, b.i32(c)) if c else first
            inside = b.xor(b.and_(at, b.i32(across - 1)), line)
            place = b.add(base, b.shl(inside, b.i32(4)))
            panel = b.lshr(at, b.i32(across.bit_length() - 1))
            place = b.add(place, b.mul(panel, b.i32(panel_bytes)))
            for below, found in enumerate(words):  # eight rows further down
                found += b.call(memory.ld("shared", "b32", 4),
                                b.add(place, b.i32(8 * width * below)))
        out: list[LLVM] = []
        quad = lanes.constants(b, b.and_(lane, b.i32(3)))
        step = STEP * kind.bits // 32
        for i in range(0, len(words[0]), step):
            upper, lower = (lanes.pairs(b, found[i:i + step], quad) for found in words)
            out += [upper[0], lower[0], upper[1], lower[1]]
        return out

    count = 16 * each * 8 // kind.bits // STEP * 4
    form = InstructionForm((Operand("slot", "i32"), Operand("thread", "i32")),
                           (Operand("d", "i32", count),), body)
    return Operation("unpack", 2, lambda *_: form)


@functools.cache
def unpack_bytes(offset: int, slot_bytes: int, panel_bytes: int, width: int, part_bytes: int,
                 codes: str, piece: int, pieces: int) -> Operation:
    """The same as e4m3 numbers, four in a register: of every 16 columns a lane has 4 t to 4 t + 3.
    """
    kind = find_dtype(codes)
    unit = UNIT * kind.bits // 8  # bytes of 64 columns
    units = part_bytes // unit // pieces
    four = _FourOfSix if kind.bits == 6 else _FourOfFour

    def body(b: Builder, slot: LLVM, thread: LLVM) -> list[LLVM]:
        lane = b.and_(thread, b.i32(31))
        row = b.or_(b.and_(b.lshr(thread, b.i32(1)), b.i32(0x30)), b.lshr(lane, b.i32(2)))
        base = b.add(b.add(b.shared_base(), b.i32(offset)), b.mul(slot, b.i32(slot_bytes)))
        lanes = four(b, kind, b.and_(lane, b.i32(3)))
        base = b.add(b.add(base, b.mul(row, b.i32(width))), lanes.first)
        shift = {128: 0, 64: 1, 32: 2}[width]  # rows of 128 bytes
        line = b.shl(b.and_(b.lshr(row, b.i32(shift)), b.i32(width // 16 - 1)), b.i32(4))
        mine = b.mul(b.lshr(thread, b.i32(7)), b.i32(part_bytes))
        out: list[LLVM] = []
        for first in range(piece * units * unit, (piece + 1) * units * unit, unit):
            places = []
            for at in range(first, first + unit, 16):
                column = b.add(mine, b.i32(at))
                panel = b.mul(b.lshr(column, b.i32(width.bit_length() - 1)), b.i32(panel_bytes))
                places.append(b.add(b.add(base, panel),
                                    b.xor(b.and_(column, b.i32(width - 1)), line)))
            upper, lower = (lanes.registers(b, [b.add(p, b.i32(below)) for p in places])
                            for below in (0, 8 * width))  # eight rows further down
            out += [half[i + at] for i in (0, 2) for at in (0, 1) for half in (upper, lower)]
        return out

    form = InstructionForm((Operand("slot", "i32"), Operand("thread", "i32")),
                           (Operand("d", "i32", 8 * units),), body)
    return Operation("unpack_bytes", 2, lambda *_: form)


class _FourOfFour:
    """Four codes of 4 bits are half of a word. Shifts and masks make numbers of every second code
    at once, of two halves, and permutations bring them in line.

    first: where a lane's word begins in 16 bytes.
    """

    def __init__(self, b: Builder, codes: DType, t: LLVM):
        self.codes, self.first = codes, b.shl(b.and_(t, b.i32(2)), b.i32(1))
        self.half = b.add(b.mul(b.and_(t, b.i32(1)), b.i32(0x2222)), b.i32(0x5410))

    def registers(self, b: Builder, places: list[LLVM]) -> list[LLVM]:
        """Of 64 codes at places of 16 bytes each."""
        prmt, made = find_instruction("prmt"), []
        for place in places:
            words = [b.call(memory.ld("shared", "b32"), b.add(place, b.i32(at))) for at in (0, 8)]
            even, odd = registers(b, self.codes, [b.call(prmt, *words, self.half)])
            made += [b.call(prmt, even, odd, b.i32(order)) for order in (0x5140, 0x7362)]
        return made


class _FourOfSix:
    """Four codes of 6 bits are bytes 3 t to 3 t + 2 of twelve, which permutations fetch out of what
    all lanes of a row read. Then codes move apart, first two and two."""

    def __init__(self, b: Builder, codes: DType, t: LLVM):
        self.codes, self.first = codes, b.i32(0)
        self.early = b.add(b.mul(t, b.i32(0x333)), b.i32(0x210))  # bytes of the first two words
        late, last = b.lshr(t, b.i32(1)), b.and_(b.lshr(t, b.i32(1)), t)
        self.late = b.add(b.add(b.mul(late, b.i32(0x200)), b.mul(last, b.i32(0x355))),
                          b.i32(0x3210))

    def registers(self, b: Builder, places: list[LLVM]) -> list[LLVM]:
        prmt, words = find_instruction("prmt"), []
        for place in places:
            words += b.call(memory.ld("shared", "b32", 4), place)
        made = []
        for i in range(0, len(words), 3):
            bits = b.call(prmt, b.call(prmt, *words[i:i + 2], self.early), words[i + 2], self.late)
            bits = _parted(b, _parted(b, bits, 4, 0xFFFFF000), 2, 0xFFC00FC0)
            made.append(numbers_of(b, [(bits, 0, 6)], self.codes))
        return made


def _parted(b: Builder, bits: LLVM, up: int, moved: int) -> LLVM:
    """Those of a mask further up: there is nothing where they come. A product and a sum are done
    beside what masks."""
    return b.add(bits, b.mul(b.and_(bits, b.i32(moved)), b.i32((1 << up) - 1)))


class _Quad:
    """How a lane takes its two pairs out of 16 codes of a row, and where a word has them first:
    code 2 t at `at` of its low half, the one behind it there in the other."""

    def __init__(self, codes: DType, dtype: str):
        self.codes, self.dtype = codes, dtype
        self.at = TARGETS[dtype].man - SOURCES[codes.name].man if codes.kind == "float" else 0

    def constants(self, b: Builder, t: LLVM) -> list[LLVM]:
        """What depends on the lane alone. t: its number among four."""
        if self.codes.bits == 4:
            return [b.or_(t, b.i32(0x4440))]  # byte t, and zeros
        byte = b.add(t, b.lshr(t, b.i32(1)))  # of the first pair, which begins there or 4 bits on
        first = b.add(b.mul(byte, b.i32(0x11)), b.i32(0x10))
        later = b.and_(t, b.i32(1))  # as differences, which LLVM does not turn into shifts again
        ups = [b.sub(b.i32(1 << up), b.mul(later, b.i32((1 << up) - (1 << up - 4))))
               for up in (self.at, self.at + 10)]
        return [first, b.add(first, b.i32(0x22)), *ups]

    def pairs(self, b: Builder, words: list[LLVM], quad: list[LLVM]) -> list[LLVM]:
        """The registers of columns 2 t, 2 t + 1 and of 2 t + 8, 2 t + 9."""
        prmt = find_instruction("prmt")
        if self.codes.bits == 4:
            both = b.i32((1 << self.at) + (1 << self.at + 12))
            return [self._placed(b, b.mul(b.call(prmt, word, b.i32(0), quad[0]), both))
                    for word in words]
        low, high = (b.call(prmt, words[i], words[i + 1], quad[i]) for i in (0, 1))
        return [self._placed(b, b.call(prmt, b.mul(pair, quad[2]), b.mul(pair, quad[3]),
                                       b.i32(0x7610))) for pair in (low, high)]

    def _placed(self, b: Builder, word: LLVM) -> LLVM:
        place = place_floats if self.codes.kind == "float" else place_integers
        return place(b, self.codes, word, self.at, self.dtype)


__all__ = ["unpack", "unpack_bytes"]
