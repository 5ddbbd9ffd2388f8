"""Intrinsics of attention's gradient (emit/attention_backward.py), as Operations for `use`.

Tiles are those of a warpgroup of wgmma: scores are 64 keys by 64 queries, products for queries 64
queries by 64 columns. Both have 32 numbers a thread: number i of its row i & 2 (8 below) and
columns 8 (i / 4) + 2 (lane % 4) + (i & 1).
"""

from __future__ import annotations

import functools
from typing import Any

from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics.formats import encode_half
from tessera.tile.cuda.intrinsics.warp_specialised import _transposed, operands
from tessera.tile.cuda.ptx import atomics, convert, matrix, memory

COUNT = 32  # numbers of a thread
PIECE_BYTES = 512  # of sums in memory: four numbers of each lane of a warp
ROW_PIECES = 8


def _columns(b: Builder, at: Any) -> list[Any]:
    """The two columns of each eight that a lane has, of a row of f32 in shared memory. at: where
    its first lies."""
    found: list[Any] = []
    for i in range(COUNT // 4):
        found += b.call(memory.ld("shared", "f32", 2, offset=32 * i), at)
    return found


@functools.cache
def weights() -> Operation:
    """(scores, address of the lane's logs of sums, factor) -> exp2(factor scores - logs)."""
    def body(b: Builder, x: list[Any], at: Any, factor: Any) -> list[Any]:
        logs = [b.fneg(v) for v in _columns(b, at)]
        return [b.call(find_instruction("ex2_approx"), b.call(
            find_instruction("fma_rn"), v, factor, logs[i // 4 * 2 + i % 2]))
            for i, v in enumerate(x)]

    form = InstructionForm((Operand("x", "f32", COUNT), *operands(at="i32", factor="f32")),
                           (Operand("d", "f32", COUNT),), body)
    return Operation("weights", 3, lambda *_: form)


@functools.cache
def of_scores() -> Operation:
    """(cotangents of weights, weights, address of the lane's row sums) -> of scores."""
    def body(b: Builder, x: list[Any], p: list[Any], at: Any) -> list[Any]:
        sums = _columns(b, at)
        return [b.fmul(w, b.fsub(v, sums[i // 4 * 2 + i % 2]))
                for i, (v, w) in enumerate(zip(x, p, strict=True))]

    form = InstructionForm((Operand("x", "f32", COUNT), Operand("p", "f32", COUNT),
                            Operand("at", "i32")), (Operand("d", "f32", COUNT),), body)
    return Operation("of_scores", 3, lambda *_: form)


@functools.cache
def packed(dtype: str) -> Operation:
    """(numbers) -> the registers of a first operand, where this stands."""
    def body(b: Builder, x: list[Any]) -> list[Any]:
        return [b.call(convert.pack_half_there(dtype), *x[i:i + 2]) for i in range(0, COUNT, 2)]

    form = InstructionForm((Operand("x", "f32", COUNT),), (Operand("d", "i32", COUNT // 2),), body)
    return Operation("packed", 1, lambda _: form)


@functools.cache
def put_scores() -> Operation:
    """(registers of a first operand, address of the warp's 16 rows, lane): rows of 128 bytes,
    swizzled."""
    def body(b: Builder, x: list[Any], at: Any, lane: Any) -> None:
        line, high = b.and_(lane, b.i32(7)), b.lshr(lane, b.i32(4))
        at = b.add(at, b.shl(b.and_(lane, b.i32(15)), b.i32(7)))
        for i in range(COUNT // 8):
            chunk = b.xor(b.or_(high, b.i32(2 * i)), line)
            b.call(matrix.stmatrix(4), b.add(at, b.shl(chunk, b.i32(4))), x[4 * i:4 * i + 4])

    form = InstructionForm((Operand("x", "i32", COUNT // 2), *operands(at="i32", lane="i32")), (),
                           body)
    return Operation("put_scores", 3, lambda *_: form)


@functools.cache
def store_sums() -> Operation:
    """(numbers, address of the lane's first in the sums): the first group's."""
    def body(b: Builder, x: list[Any], at: Any) -> None:
        for i in range(ROW_PIECES):
            b.call(memory.st("global", "f32", 4, offset=PIECE_BYTES * i), at, x[4 * i:4 * i + 4])

    form = InstructionForm((Operand("x", "f32", COUNT), Operand("at", "i64")), (), body)
    return Operation("store_sums", 2, lambda *_: form)


@functools.cache
def add_sums() -> Operation:
    """(numbers, address): those of the groups in the middle, on their way when it ends."""
    def body(b: Builder, x: list[Any], at: Any) -> None:
        for i in range(ROW_PIECES):
            b.call(atomics.red_add_vector(4), b.add(at, b.const("i64", PIECE_BYTES * i)),
                   x[4 * i:4 * i + 4])

    form = InstructionForm((Operand("x", "f32", COUNT), Operand("at", "i64")), (), body)
    return Operation("add_sums", 2, lambda *_: form)


@functools.cache
def whole_sums() -> Operation:
    """(numbers, address) -> the sums with the last group's: what lies there is added to."""
    def body(b: Builder, x: list[Any], at: Any) -> list[Any]:
        out = []
        for i in range(ROW_PIECES):
            there = b.call(memory.ld("global", "f32", 4, cache="cg", offset=PIECE_BYTES * i), at)
            out += [b.fadd(v, w) for v, w in zip(there, x[4 * i:4 * i + 4], strict=True)]
        return out

    form = InstructionForm((Operand("x", "f32", COUNT), Operand("at", "i64")),
                           (Operand("d", "f32", COUNT),), body)
    return Operation("whole_sums", 2, lambda *_: form)


@functools.cache
def store_rows(count: int, dtype: str, row_bytes: int) -> Operation:
    """(numbers, scale, address of the lane's row, lane % 4): two rows of 2 count bytes, the second
    8 below, in pieces of 16 bytes."""
    def body(b: Builder, x: list[Any], scale: Any, at: Any, quad: Any) -> None:
        odd, high = (b.true(b.and_(quad, b.i32(m))) for m in (1, 2))
        at = b.add(at, b.shl(b.zext(quad, "i64"), b.const("i64", 4)))
        for down in (0, 1):
            mine = [b.fmul(v, scale) for i, v in enumerate(x) if i >> 1 & 1 == down]
            for first in range(0, len(mine), 8):
                words = encode_half(b, dtype, mine[first:first + 8])
                place = b.add(at, b.const("i64", 8 * row_bytes * down + 8 * first))
                b.call(memory.st("global", "b32", 4), place, _transposed(b, words, odd, high))

    form = InstructionForm((Operand("x", "f32", count), *operands(
        scale="f32", at="i64", quad="i32")), (), body)
    return Operation("store_rows", 4, lambda *_: form)
