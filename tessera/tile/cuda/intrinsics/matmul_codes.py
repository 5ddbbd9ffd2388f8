"""Matmuls by mma.sync whose first operand is codes of 4 or 6 bits in shared memory, as they lie.

The order of k within a matmul is free as long as both operands have the same. So a lane reads what
lies together: 16 codes of a row, and 16 numbers of a row of x, for four steps of k16:

    codes  k0 k1 k2 k3 | k4 k5 k6 k7 | ...     a register of two numbers is (k_r, k_r+4), r < 4:
                                               both halves of a word have a code at one position,
                                               two shifts and masks place sign and rest of both
    x      words (k0 k1) (k2 k3) (k4 k5) ...   one byte permutation makes (k_r, k_r+4)

Lane 4 g + t of a warp has two rows of each block of A and one column of x, which the layout of the
sums deals (PTX ISA 9.7.14), and of a part of k the numbers 16 t on, of every 64.
"""

from __future__ import annotations

import functools
from typing import Any

from tessera.numerics import DType, find_dtype
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics.narrow_floats import FP8
from tessera.tile.cuda.intrinsics.packed_codes import SOURCES, TARGETS
from tessera.tile.cuda.intrinsics.shared_tiles import PLACE
from tessera.tile.cuda.intrinsics.swizzle import Addresses, Panel
from tessera.tile.cuda.ptx import convert, memory, mma
from tessera.tile.ir.register_layout import RegisterLayout

LLVM = Any
EACH = 16  # codes that a lane reads at once
UNIT = 4 * EACH  # of k, by the lanes of a row
OF_X = {"bf16": "bf16", "f16": "f16", "fp8_e4m3": "f16", "fp8_e5m2": "f16"}


def target_of(x: DType) -> str:
    """In what tensor cores multiply codes with numbers of a type; "": they do not."""
    return OF_X.get(x.name, "")


def factor_of(codes: DType, target: str) -> float:
    """What products are multiplied by in the end. f16 numbers are the codes' times its inverse;
    those of bf16, where that is 2^-126, are made whole at once."""
    if target == "bf16" or codes.name not in SOURCES:
        return 1.0
    return 2.0 ** (TARGETS[target].bias - SOURCES[codes.name].bias)


# --- codes ----------------------------------------------------------------------------------------
def pairs(b: Builder, codes: DType, words: list[LLVM], group: int, target: str) -> list[LLVM]:
    """Registers (k_r, k_r+4), r = 0 .. 3, of a group of eight of the 16 codes in a lane's words."""
    if codes.bits == 4 and codes.kind == "float" and _fields_disjoint(codes, target):
        return _twice(b, codes, words[group], target)
    place = place_floats if codes.kind == "float" else place_integers
    return [place(b, codes, word, at, target) for word, at in _halves(b, codes.bits, words, group)]


def _fields_disjoint(codes: DType, target: str) -> bool:
    """Whether a code's bits, moved once for its rest and once for its sign, do not meet."""
    return TARGETS[target].man - SOURCES[codes.name].man + codes.bits <= 16 - codes.bits


def _twice(b: Builder, codes: DType, word: LLVM, target: str) -> list[LLVM]:
    """A code that stands alone in its half, times the sum of two powers of two, has its rest and
    its sign where they belong: one product, which is not the unit's that masks."""
    up, made = TARGETS[target].man - SOURCES[codes.name].man, []
    for r in range(4):
        if r == 2:
            word = b.lshr(word, b.i32(2 * codes.bits))
        low = codes.bits * (r & 1)
        alone = b.and_(word, b.i32(0x000F000F << low))
        both = b.mul(alone, b.i32((1 << up - low) + (1 << 16 - codes.bits - low)))
        made.append(_masked(b, codes, both, both, target))
    return made


def _halves(b: Builder, bits: int, words: list[LLVM], group: int) -> list[tuple[LLVM, int]]:
    """(word, position): codes k_r and k_r+4 at that bit of either half."""
    if bits == 4:
        return [(words[group], 4 * r) for r in range(4)]
    # Four codes are three bytes: the first two in bytes 0 and 1, the others in bytes 1 and 2.
    selectors = ((0x6532, 0x7643) if group else (0x4310, 0x5421))
    low, high = (b.call(find_instruction("prmt"), words[group], words[group + 1], b.i32(selector))
                 for selector in selectors)
    return [(low, 0), (low, 6), (high, 4), (high, 10)]


def place_floats(b: Builder, codes: DType, word: LLVM, at: int, target: str) -> LLVM:
    narrow, wide = SOURCES[codes.name], TARGETS[target]
    sign = _moved(b, word, 15 - (at + narrow.bits - 1))
    return _masked(b, codes, sign, _moved(b, word, wide.man - narrow.man - at), target)


def _masked(b: Builder, codes: DType, sign: LLVM, rest: LLVM, target: str) -> LLVM:
    """The numbers of codes whose signs and rests stand where they belong."""
    narrow, wide = SOURCES[codes.name], TARGETS[target]
    size = ((1 << narrow.bits - 1) - 1) << wide.man - narrow.man
    placed = b.or_(b.and_(sign, b.i32(0x80008000)), b.and_(rest, b.i32(size | size << 16)))
    if target != "bf16":
        return placed
    exponent = wide.bias - narrow.bias + wide.bias << wide.man  # of 2^(bias difference)
    return b.call(find_instruction("fma_bf16x2"), placed, b.i32(exponent | exponent << 16),
                  b.i32(0x80008000))


# An integer in the lowest bits of 1024 (f16) or 128 (bf16), and that with the code's offset of 8.
_ABOVE = {"f16": (0x6400, 0x3C00, 0xE408), "bf16": (0x4300, 0x3F80, 0xC308)}


def place_integers(b: Builder, codes: DType, word: LLVM, at: int, target: str) -> LLVM:
    """int4: the code with its sign bit turned is the number + 8."""
    above, one, less = (b.i32(x | x << 16) for x in _ABOVE[target])
    code = b.and_(_moved(b, b.xor(word, b.i32(0x88888888)), -at), b.i32(0x000F000F))
    return b.call(find_instruction(f"fma_{target}x2"), b.or_(code, above), one, less)


def _moved(b: Builder, word: LLVM, up: int) -> LLVM:
    if up == 0:
        return word
    return b.shl(word, b.i32(up)) if up > 0 else b.lshr(word, b.i32(-up))


# --- x --------------------------------------------------------------------------------------------
def columns_of(b: Builder, x: DType, words: list[LLVM]) -> list[LLVM]:
    """Registers (k_r, k_r+4) of eight numbers of x, r = 0 .. 3."""
    prmt = find_instruction("prmt")
    if x.bits == 16:
        return [b.call(prmt, words[i], words[i + 2], b.i32(selector))
                for i in (0, 1) for selector in (0x5410, 0x7632)]
    made = []
    for selector in (0x5140, 0x7362):
        both = b.call(prmt, words[0], words[1], b.i32(selector))
        made += [both, b.lshr(both, b.i32(16))]
    return [b.call(convert.fp8_to_f16x2(FP8[x.name]), word) for word in made]


# --- the matmul -----------------------------------------------------------------------------------
@functools.cache
def multiply(codes: str, layout: str, shape: tuple[int, int, int], a: tuple, b: tuple,
             depth: int) -> Operation:
    """(sums, base, row, column of the codes' bytes, base, row, column of x) -> sums + A B.

    layout, shape: of the sums, [parts, M, N].  a, b: (panel, zeros) of bytes and of x.
    depth: k of a part.
    """
    return _Multiply(find_dtype(codes), RegisterLayout.parse(layout, shape), a, b,
                     depth).operation()


class _Multiply:
    def __init__(self, codes: DType, layout: RegisterLayout, a: tuple, b: tuple, depth: int):
        self.codes, self.layout, self.depth = codes, layout, depth
        (panel_a, self.zeros_a), (panel_b, self.zeros_b) = a, b
        self.panels = Panel(*panel_a), Panel(*panel_b)
        self.x = find_dtype(self.panels[1].dtype)
        self.target = target_of(self.x)
        self.rows = sorted({base[1] & ~8 for base in layout.bases})
        self.columns = sorted({base[2] & ~7 for base in layout.bases})
        self.step = 1 << layout.registers[0][1]  # to the other of two columns of a lane
        self.instruction = mma.mma(self.target, "f32")

    def operation(self) -> Operation:
        sums = Operand("sums", "f32", self.layout.count)
        form = InstructionForm((sums, *PLACE, *PLACE), (sums,), self.body)
        return Operation(f"multiply_{self.codes.name}", 7, lambda *_: form)

    def body(self, b: Builder, sums: list[LLVM], *places: LLVM) -> list[LLVM]:
        a = Addresses(b, self.panels[0], places[:3], self.zeros_a)
        x = Addresses(b, self.panels[1], places[3:], self.zeros_b)
        number = self.layout.number
        tiles = {(m, n): [sums[number[0, m + 8 * i, n + self.step * j]]
                         for i in (0, 1) for j in (0, 1)]
                 for m in self.rows for n in self.columns}
        for k in range(0, self.depth, UNIT):
            words = {m: self.codes_at(b, a, m, k) for row in self.rows for m in (row, row + 8)}
            read: dict[tuple[int, int], list[LLVM]] = {}
            for group in (0, 1):
                self.multiply(b, words, x, k, group, read, tiles)
        out: list[LLVM] = [None] * self.layout.count
        for (m, n), parts in tiles.items():
            for i, value in enumerate(parts):
                out[number[0, m + 8 * (i >> 1), n + self.step * (i & 1)]] = value
        return out

    def multiply(self, b: Builder, words: dict[int, list[LLVM]], x: Addresses, k: int, group: int,
                 read: dict[tuple[int, int], list[LLVM]],
                 tiles: dict[tuple[int, int], list[LLVM]]) -> None:
        """The two steps of k of a group of eight codes in each lane."""
        unpacked = {m: pairs(b, self.codes, w, group, self.target) for m, w in words.items()}
        for n in self.columns:
            right = columns_of(b, self.x, self.numbers_at(b, x, n, k, group, read))
            for r in (0, 2):
                for m in self.rows:
                    low, high = unpacked[m], unpacked[m + 8]
                    left = [low[r], high[r], low[r + 1], high[r + 1]]
                    tiles[m, n] = b.call(self.instruction, left, right[r:r + 2], tiles[m, n])

    def codes_at(self, b: Builder, a: Addresses, row: int, k: int) -> list[LLVM]:
        """The words of a lane's 16 codes."""
        at = k * self.codes.bits // 8
        if self.codes.bits == 4:
            got = b.call(memory.ld("shared", "b32", 2), a.at(row, at))
            return list(got)
        return [b.call(memory.ld("shared", "b32"), a.at(row, at + 4 * i)) for i in range(3)]

    def numbers_at(self, b: Builder, x: Addresses, row: int, k: int, group: int,
                   read: dict[tuple[int, int], list[LLVM]]) -> list[LLVM]:
        """The words of eight numbers of a row of x; 16 bytes are read at once."""
        count, words = 16 * 8 // self.x.bits, 8 * self.x.bits // 32
        at = 8 * group // count * count
        if (row, at) not in read:
            read[row, at] = list(b.call(memory.ld("shared", "b32", 4), x.at(row, k + at)))
        first = (8 * group - at) * self.x.bits // 32
        return read[row, at][first:first + words]


# --- the sum of parts -----------------------------------------------------------------------------
PAD = 4  # words that a column of parts is longer, so that the lanes of a store meet no bank twice


def part_words(shape: tuple[int, int]) -> int:
    """Words of a part of [M, N] in shared memory: column after column."""
    return (shape[0] + PAD) * shape[1]


@functools.cache
def put_part(layout: str, shape: tuple[int, int, int]) -> Operation:
    """(parts, address of the thread's first element)"""
    how = RegisterLayout.parse(layout, shape)

    def body(b: Builder, x: list[LLVM], at: LLVM) -> None:
        for (_, m, n), value in zip(how.bases, x, strict=True):
            b.call(memory.st("shared", "f32"), b.add(at, b.i32(4 * (n * (shape[1] + PAD) + m))),
                   value)

    form = InstructionForm((Operand("x", "f32", how.count), Operand("at", "i32")), (), body)
    return Operation("put_part", 2, lambda *_: form)


def neighbours(b: Builder, at: LLVM, width: int) -> list[LLVM]:
    got = b.call(memory.ld("shared", "f32", width), at)
    return got if isinstance(got, list) else [got]


@functools.cache
def sum_parts(layout: str, shape: tuple[int, int], count: int) -> Operation:
    """(address of the thread's first element) -> the sum of its elements of all parts."""
    how = RegisterLayout.parse(layout, shape)

    def body(b: Builder, at: LLVM) -> list[LLVM]:
        out: list[LLVM] = [None] * how.count
        width = min(4, how.run(0))
        for m, n in how.bases:
            if m % width:
                continue
            first = 4 * (n * (shape[0] + PAD) + m)
            parts = [neighbours(b, b.add(at, b.i32(first + 4 * i * part_words(shape))), width)
                     for i in range(count)]
            for i, values in enumerate(zip(*parts, strict=True)):
                out[how.number[m + i, n]] = functools.reduce(b.fadd, values)
        return out

    form = InstructionForm((Operand("at", "i32"),), (Operand("d", "f32", how.count),), body)
    return Operation("sum_parts", 1, lambda _: form)


__all__ = ["OF_X", "UNIT", "factor_of", "multiply", "part_words", "place_floats",
           "place_integers", "put_part", "sum_parts",
           "target_of"]
