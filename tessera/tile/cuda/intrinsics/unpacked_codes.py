"""Codes of 4 and 6 bits in shared memory as the first operand of wgmma, in registers.

A warpgroup reads words of its codes, many at once, and makes the registers of one matmul
instruction at a time, while those before run: a warp that issues matmuls whose first operand is in
registers waits until the one before has read its own, so arithmetic belongs between them.

Lane 4 g + t of a warp has rows g and g + 8 (PTX ISA 9.7.15). The order of k:

    memory    that of the second operand where it lies: of every 16 columns of 16 bits a lane has
              2 t, 2 t + 1 and 2 t + 8, 2 t + 9, of every 32 of 8 bits 4 t to 4 t + 3 and as many
              16 further on. Lanes of a row read the same 16 bytes, and each takes its codes out:
              byte permutations fetch them, products with powers of two shift, for these are done
              beside what permutes and masks
    dealt     that of codes: a lane reads 16 that lie together (dealt_codes)
    laid      that of memory, of codes that lie as lanes read them (numerics/packed_order.py)
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from tessera.numerics import DType, find_dtype
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics import dealt_codes, laid_codes
from tessera.tile.cuda.intrinsics.dealt_codes import numbers_of, registers
from tessera.tile.cuda.intrinsics.matmul_codes import UNIT, place_floats, place_integers
from tessera.tile.cuda.intrinsics.packed_codes import SOURCES, TARGETS
from tessera.tile.cuda.ptx import memory
from tessera.tile.ir.register_layout import CODE_ROWS

LLVM = Any
CHUNK, STEP_BITS = 16, 256  # bytes; bits of a row that a matmul instruction multiplies
ROWS = 64  # of a warpgroup
MOST_WORDS = 48  # of codes that a lane holds at once


@dataclass(frozen=True)
class Part:
    """What a warpgroup has of each row of codes, and as what it multiplies them.

    part_bytes: of a row.  order_of_k: "memory", "dealt" or "laid".
    """

    part_bytes: int
    codes: str
    dtype: str
    order_of_k: str

    @property
    def steps(self) -> int:
        """Matmul instructions."""
        bits, wide = find_dtype(self.codes).bits, find_dtype(self.dtype).bits
        return self.part_bytes * 8 // bits * wide // STEP_BITS

    @property
    def order(self) -> _Order:
        kind, wide = find_dtype(self.codes), find_dtype(self.dtype).bits
        if self.order_of_k != "memory":
            return (_Laid if self.order_of_k == "laid" else _Dealt)(kind, self.dtype)
        if wide == 16:
            return _Quad(kind, self.dtype)
        return _FourOfSix(kind, self.dtype) if kind.bits == 6 else _FourOfFour(kind, self.dtype)

    @property
    def batches(self) -> int:
        """In how many times a lane reads its words."""
        order, made = self.order, 1
        while 2 * order.words * self.steps // order.steps > made * MOST_WORDS \
                and self.part_bytes % (2 * made * order.unit) == 0:
            made *= 2
        return made


@functools.cache
def read(offset: int, slot_bytes: int, panel_bytes: int, width: int, part_bytes: int, codes: str,
         dtype: str, order_of_k: str, batch: int, panel: int, parts: int = 2) -> Operation:
    """(slot, thread) -> the words of a lane: those of its upper row, and of the one below.

    The tile lies in panels of rows of `width` bytes, swizzled as wide; warpgroup i has part_bytes
    of each row, from i * part_bytes on, and reads one batch of them. parts: 1 where it has all of
    rows of its own, 64 i and those behind it.  panel: lanes have the rows of warpgroup_codes of it.
    """
    part = Part(part_bytes, codes, dtype, order_of_k)
    order, size = part.order, part_bytes // part.batches
    across, shift = width // CHUNK, {128: 0, 64: 1, 32: 2}[width]  # chunks, rows of 128 bytes

    def body(b: Builder, slot: LLVM, thread: LLVM) -> list[LLVM]:
        lane = b.and_(thread, b.i32(31))
        row = b.and_(b.lshr(thread, b.i32(1)), b.i32(0x30))
        for i, place in enumerate(CODE_ROWS[panel]):
            bit = b.and_(b.lshr(lane, b.i32(2 + i)), b.i32(1))
            row = b.or_(row, b.shl(bit, b.i32(place)))
        base = b.add(b.add(b.shared_base(), b.i32(offset)), b.mul(slot, b.i32(slot_bytes)))
        group = b.lshr(thread, b.i32(7))
        base = b.add(base, b.mul(row, b.i32(width)))
        if parts == 1:
            base = b.add(base, b.mul(group, b.i32(ROWS * width)))
        line = b.shl(b.and_(b.lshr(row, b.i32(shift)), b.i32(across - 1)), b.i32(4))
        rows: tuple[list[LLVM], list[LLVM]] = [], []
        for first in range(batch * size, (batch + 1) * size, order.unit):
            for at, rest, vector in order.loads:
                column, inside = order.first(b, b.and_(lane, b.i32(3)), vector)
                if parts != 1:
                    column = b.add(b.mul(group, b.i32(part_bytes)), column)
                column = b.add(column, b.i32(first + at))
                before = b.mul(b.lshr(column, b.i32(width.bit_length() - 1)), b.i32(panel_bytes))
                place = b.add(b.add(b.add(base, inside), before),
                              b.xor(b.and_(column, b.i32(width - 1)), line))
                for below, words in enumerate(rows):  # eight rows further down
                    got = b.call(memory.ld("shared", "b32", vector),
                                 b.add(place, b.i32(8 * width * below + rest)))
                    words += got if vector > 1 else [got]
        return [*rows[0], *rows[1]]

    count = 2 * order.words * part.steps // order.steps // part.batches
    form = InstructionForm((Operand("slot", "i32"), Operand("thread", "i32")),
                           (Operand("w", "i32", count),), body)
    return Operation("read_codes", 2, lambda *_: form)


@functools.cache
def unpack(part_bytes: int, codes: str, dtype: str, order_of_k: str, piece: int, pieces: int
           ) -> Operation:
    """(words of the piece's batch, thread) -> its registers, of numbers times 1 / factor: four for
    each matmul instruction, of the upper row, the one below, and both further on."""
    part = Part(part_bytes, codes, dtype, order_of_k)
    order, each = part.order, part.steps // pieces
    held = part.steps // part.batches  # of a batch
    assert part.steps % pieces == held % each == held % order.steps == 0
    count = order.words * held // order.steps

    def body(b: Builder, words: list[LLVM], thread: LLVM) -> list[LLVM]:
        lane = order.constants(b, b.and_(thread, b.i32(3)))
        out: list[LLVM] = []
        for step in range(piece * each % held, piece * each % held + each):
            group, at = divmod(step, order.steps)
            first = group * order.words
            upper, lower = (order.registers(b, words[row + first:row + first + order.words],
                                            lane)[2 * at:2 * at + 2] for row in (0, count))
            out += [upper[0], lower[0], upper[1], lower[1]]
        return out

    form = InstructionForm((Operand("w", "i32", 2 * count), Operand("thread", "i32")),
                           (Operand("d", "i32", 4 * each),), body)
    return Operation("unpack_codes", 2, lambda *_: form)


class _Order(ABC):
    """How a lane, t of the four of a row, reads codes, and what it makes of them.

    unit: bytes of a row that lanes read together.  loads: of a lane in them, where a chunk begins,
    how far behind that, and words.  words: of a group, of which come the registers of a row for so
    many steps, two for each.
    """

    unit, words, steps = CHUNK, 2, 1
    loads: tuple[tuple[int, int, int], ...] = ((0, 0, 4),)

    def __init__(self, codes: DType, dtype: str):
        self.codes, self.dtype = codes, dtype

    def first(self, b: Builder, t: LLVM, words: int) -> tuple[LLVM, LLVM]:
        """Bytes in front of the words that a lane reads: of a row, and inside of a chunk."""
        return b.i32(0), b.i32(0)

    def constants(self, b: Builder, t: LLVM) -> list[LLVM]:
        """What registers depend on beside words."""
        return []

    @abstractmethod
    def registers(self, b: Builder, words: list[LLVM], lane: list[LLVM]) -> list[LLVM]:
        """The registers of a row that come of a group's words, two for each step."""


class _Dealt(_Order):
    def __init__(self, codes: DType, dtype: str):
        super().__init__(codes, dtype)
        self.unit = UNIT * codes.bits // 8
        vector = 2 if codes.bits == 4 else 1  # words of a load: 8 bytes, or 4 of 12
        self.words, self.steps = self.unit // 16, find_dtype(dtype).bits // 4
        self.loads = tuple((at, 0, vector) for at in range(0, self.unit // 4, 4 * vector))

    def first(self, b: Builder, t: LLVM, words: int) -> tuple[LLVM, LLVM]:
        return b.mul(t, b.i32(self.unit // 4)), b.i32(0)

    def registers(self, b: Builder, words: list[LLVM], lane: list[LLVM]) -> list[LLVM]:
        make = registers if find_dtype(self.dtype).bits == 8 else dealt_codes.halves
        return make(b, self.codes, words, self.dtype)


class _Laid(_Dealt):
    """Words of codes that lie as registers have them. First come two of each lane, then a third of
    6 bits."""

    def __init__(self, codes: DType, dtype: str):
        super().__init__(codes, dtype)
        self.loads = ((0, 0, 2), (2 * CHUNK, 0, 1))[:self.words - 1]

    def first(self, b: Builder, t: LLVM, words: int) -> tuple[LLVM, LLVM]:
        return b.mul(t, b.i32(4 * words)), b.i32(0)

    def registers(self, b: Builder, words: list[LLVM], lane: list[LLVM]) -> list[LLVM]:
        return laid_codes.registers(b, self.codes, words, self.dtype)


class _FourOfFour(_Order):
    """Four codes of 4 bits are half of a word. Shifts and masks make numbers of every second code
    at once, of two halves, and permutations bring them in line."""

    loads = (0, 0, 1), (0, 8, 1)

    def first(self, b: Builder, t: LLVM, words: int) -> tuple[LLVM, LLVM]:
        return b.i32(0), b.shl(b.and_(t, b.i32(2)), b.i32(1))

    def constants(self, b: Builder, t: LLVM) -> list[LLVM]:
        return [b.add(b.mul(b.and_(t, b.i32(1)), b.i32(0x2222)), b.i32(0x5410))]

    def registers(self, b: Builder, words: list[LLVM], lane: list[LLVM]) -> list[LLVM]:
        prmt = find_instruction("prmt")
        even, odd = registers(b, self.codes, [b.call(prmt, *words, lane[0])])
        return [b.call(prmt, even, odd, b.i32(order)) for order in (0x5140, 0x7362)]


class _FourOfSix(_Order):
    """Four codes of 6 bits are bytes 3 t to 3 t + 2 of twelve, which permutations fetch out of what
    all lanes of a row read. Then codes move apart, first two and two."""

    unit, words, loads = 3 * CHUNK, 6, tuple((at, 0, 4) for at in range(0, 3 * CHUNK, CHUNK))

    def constants(self, b: Builder, t: LLVM) -> list[LLVM]:
        early = b.add(b.mul(t, b.i32(0x333)), b.i32(0x210))  # bytes of the first two words
        late, last = b.lshr(t, b.i32(1)), b.and_(b.lshr(t, b.i32(1)), t)
        late = b.add(b.add(b.mul(late, b.i32(0x200)), b.mul(last, b.i32(0x355))), b.i32(0x3210))
        return [early, late]

    def registers(self, b: Builder, words: list[LLVM], lane: list[LLVM]) -> list[LLVM]:
        prmt, made = find_instruction("prmt"), []
        for i in (0, 3):
            bits = b.call(prmt, b.call(prmt, *words[i:i + 2], lane[0]), words[i + 2], lane[1])
            bits = _parted(b, _parted(b, bits, 4, 0xFFFFF000), 2, 0xFFC00FC0)
            made.append(numbers_of(b, [(bits, 0, 6)], self.codes))
        return made


def _parted(b: Builder, bits: LLVM, up: int, moved: int) -> LLVM:
    """Those of a mask further up: there is nothing where they come. A product and a sum are done
    beside what masks."""
    return b.add(bits, b.mul(b.and_(bits, b.i32(moved)), b.i32((1 << up) - 1)))


class _Quad(_Order):
    """How a lane takes its two pairs out of 16 codes of a row, and where a word has them first:
    code 2 t at `at` of its low half, the one behind it there in the other."""

    def __init__(self, codes: DType, dtype: str):
        super().__init__(codes, dtype)
        self.words = codes.bits // 2
        if codes.bits == 6:
            self.unit, self.loads = 3 * CHUNK, _FourOfSix.loads
        self.at = TARGETS[dtype].man - SOURCES[codes.name].man if codes.kind == "float" else 0

    def constants(self, b: Builder, t: LLVM) -> list[LLVM]:
        if self.codes.bits == 4:
            return [b.or_(t, b.i32(0x4440))]  # byte t, and zeros
        byte = b.add(t, b.lshr(t, b.i32(1)))  # of the first pair, which begins there or 4 bits on
        first = b.add(b.mul(byte, b.i32(0x11)), b.i32(0x10))
        later = b.and_(t, b.i32(1))  # as differences, which LLVM does not turn into shifts again
        ups = [b.sub(b.i32(1 << up), b.mul(later, b.i32((1 << up) - (1 << up - 4))))
               for up in (self.at, self.at + 10)]
        return [first, b.add(first, b.i32(0x22)), *ups]

    def registers(self, b: Builder, words: list[LLVM], lane: list[LLVM]) -> list[LLVM]:
        """The registers of columns 2 t, 2 t + 1 and of 2 t + 8, 2 t + 9."""
        prmt = find_instruction("prmt")
        if self.codes.bits == 4:
            both = b.i32((1 << self.at) + (1 << self.at + 12))
            return [self._placed(b, b.mul(b.call(prmt, word, b.i32(0), lane[0]), both))
                    for word in words]
        low, high = (b.call(prmt, words[i], words[i + 1], lane[i]) for i in (0, 1))
        return [self._placed(b, b.call(prmt, b.mul(pair, lane[2]), b.mul(pair, lane[3]),
                                       b.i32(0x7610))) for pair in (low, high)]

    def _placed(self, b: Builder, word: LLVM) -> LLVM:
        place = place_floats if self.codes.kind == "float" else place_integers
        return place(b, self.codes, word, self.at, self.dtype)


__all__ = ["Part", "read", "unpack"]
