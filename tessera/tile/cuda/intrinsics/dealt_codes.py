"""Codes of 4 and 6 bits as the first operand of wgmma, beside one that is dealt like them.

The order of k is free as long as both operands have the same. Of every 64 codes of a row each of
four lanes reads 16 that lie together, and makes a register of those that stand at one place of
bytes, or of halves: shifts and masks move several at once, none is fetched from another lane.

    fp8, fp4    of 8 codes in a word those at even places, and those at odd ones
    fp8, fp6    of 16 codes every fourth, from the first, second, third and fourth on
    16 bits     as mma.sync has them (matmul_codes)

A register of four lanes is a chunk of 16 bytes of the other operand. So chunks of its rows, four at
a time, are made anew where they lie: by threads that neither copy nor multiply, as they come.

Lane 4 g + t of a warp has rows g and g + 8, and codes 16 t on (PTX ISA 9.7.15).
"""

from __future__ import annotations

import functools
from typing import Any

from tessera.numerics import DType, find_dtype
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics.matmul_codes import UNIT, columns_of, pairs
from tessera.tile.cuda.intrinsics.packed_codes import SOURCES, TARGETS
from tessera.tile.cuda.intrinsics.shared_memory import slot_address
from tessera.tile.cuda.ptx import memory

LLVM = Any
CHUNK, LANES, WIDTH = 16, 4, 128  # bytes; lanes of a row; bytes of a panel's row
EVERY = 0x01010101  # byte of a word
TARGET = TARGETS["fp8_e4m3"]


# --- codes ----------------------------------------------------------------------------------------
def registers(b: Builder, codes: DType, words: list[LLVM], dtype: str = "") -> list[LLVM]:
    """The numbers of 16 codes that lie together, as e4m3 times 1 / factor."""
    if codes.bits == 4:
        return [numbers_of(b, [(word, at, 4)], codes) for word in words for at in (0, 4)]
    first, second, third = (_every_third(b, words, byte) for byte in range(3))
    return [numbers_of(b, parts, codes) for parts in (
        [(first, 0, 6)], [(first, 6, 2), (second, 0, 4)], [(second, 4, 4), (third, 0, 2)],
        [(third, 2, 6)])]


def halves(b: Builder, codes: DType, words: list[LLVM], dtype: str) -> list[LLVM]:
    """The numbers of 16 codes that lie together, two in a register, as mma.sync has them beside x:
    of each step of 16 those of the first eight codes, and of the others."""
    eight = [pairs(b, codes, words, group, dtype) for group in (0, 1)]
    return [half[step] for step in range(4) for half in eight]


def _every_third(b: Builder, words: list[LLVM], byte: int) -> LLVM:
    """Of twelve bytes that one, and each third behind it."""
    prmt = find_instruction("prmt")
    places = range(byte, 12, 3)
    early = [at for at in places if at < 8]
    late = [*range(len(early)), *(at - 4 for at in places if at >= 8)]
    return b.call(prmt, b.call(prmt, *words[:2], b.i32(_selector(early))), words[2],
                  b.i32(_selector(late)))


def _selector(places: list[int]) -> int:
    return sum(at << 4 * i for i, at in enumerate(places))


def numbers_of(b: Builder, parts: list[tuple[LLVM, int, int]], codes: DType) -> LLVM:
    """A number in each byte, of bits of a code that lie in parts: (word, first bit, bits) from the
    lowest on."""
    narrow = SOURCES[codes.name]
    above, placed, done = TARGET.man - narrow.man, [], 0
    for word, at, bits in parts:
        rest = min(bits, narrow.bits - 1 - done)
        if rest:
            mask = (1 << rest) - 1 << above + done
            placed.append(b.and_(_shift_word(b, word, above + done - at), b.i32(mask * EVERY)))
        if rest < bits:
            placed.append(b.and_(_shift_word(b, word, 7 - at - rest), b.i32(0x80 * EVERY)))
        done += bits
    return functools.reduce(b.or_, placed)


def _shift_word(b: Builder, word: LLVM, up: int) -> LLVM:
    if up == 0:
        return word
    return b.shl(word, b.i32(up)) if up > 0 else b.lshr(word, b.i32(-up))


# --- the other operand ----------------------------------------------------------------------------
@functools.cache
def deal(offset: int, slot_bytes: int, panel_bytes: int, shape: tuple[int, int], dtype: str,
         codes: str, threads: int) -> Operation:
    """(slot, thread of so many): the numbers of all rows are put into the order of codes.

    Rows of panels of 128 bytes, swizzled as wide. Of 8 bits one thread has 64 numbers of a row, of
    16 every second chunk of these.
    """
    kind, (rows, columns) = find_dtype(codes), shape
    x = find_dtype(dtype)
    every = x.bits // 8  # of a unit's chunks
    tasks = rows * columns // UNIT * every
    make = scales_for_codes if x.bits == 8 else lambda b, codes, words: columns_of(b, x, words)

    def body(b: Builder, slot: LLVM, thread: LLVM) -> None:
        base = slot_address(b, offset, slot, slot_bytes)

        def step(task: LLVM) -> tuple[LLVM, LLVM]:  # a loop, for which few registers do
            one(b, base, task)
            later = b.add(task, b.i32(threads))
            return later, b.compare(">=", later, b.i32(tasks))

        if tasks < threads:
            with b.when(b.compare("<", thread, b.i32(tasks))):
                one(b, base, thread)
        else:
            b.until(thread, step)

    def one(b: Builder, base: LLVM, task: LLVM) -> None:
        row, part = b.and_(task, b.i32(rows - 1)), b.lshr(task, b.i32(rows.bit_length() - 1))
        column = b.mul(b.lshr(part, b.i32(every - 1)), b.i32(UNIT * every))
        column = b.add(column, b.mul(b.and_(part, b.i32(every - 1)), b.i32(CHUNK)))
        panel = b.mul(b.lshr(column, b.i32(7)), b.i32(panel_bytes))
        base = b.add(b.add(base, panel), b.mul(row, b.i32(WIDTH)))
        line = b.xor(b.and_(column, b.i32(WIDTH - 1)), b.shl(b.and_(row, b.i32(7)), b.i32(4)))
        places = [b.add(base, b.xor(line, b.i32(CHUNK * every * t))) for t in range(LANES)]
        found = [make(b, kind, b.call(memory.ld("shared", "b32", 4), at)) for at in places]
        for i, place in enumerate(places):
            b.call(memory.st("shared", "b32", 4), place, *(words[i] for words in found))

    form = InstructionForm((Operand("slot", "i32"), Operand("thread", "i32")), (), body)
    return Operation("deal", 2, lambda *_: form)


def scales_for_codes(b: Builder, codes: DType, words: list[LLVM]) -> list[LLVM]:
    """Of 16 numbers of a row those that meet each register of a lane's codes."""
    prmt = find_instruction("prmt")
    if codes.bits == 4:
        return [b.call(prmt, *words[i:i + 2], b.i32(selector)) for i in (0, 2)
                for selector in (0x6420, 0x7531)]
    low, high = ([b.call(prmt, *words[i:i + 2], b.i32(selector)) for i in (0, 2)]
                 for selector in (0x5140, 0x7362))
    return [b.call(prmt, *two, b.i32(selector)) for two in (low, high)
            for selector in (0x5410, 0x7632)]


__all__ = ["deal", "scales_for_codes", "halves", "numbers_of", "registers"]
