"""A tile of 32-bit numbers that lies across the contracted axis, [K, M] in shared memory, as the
first operand of wgmma, in registers: tensor cores read such numbers along that axis alone.

Lane l of a warp has the columns l % 4 and l % 4 + 4 of the eight of an instruction (PTX ISA
9.7.15), which are rows here. Which row of the result is row l / 4 of an instruction, or the one
eight below, is free. A lane has two neighbours, which one access reads; eight lanes of a row and
four rows have to lie in different banks, where TMA has permuted the chunks of 16 bytes by the row:

    chunk   0 1 2 3 4 5 6 7      of a panel of 32 rows of the result, by lanes 4 r to 4 r + 3:
    warp 0  x . . . x . . .      r = 0, 1 in the first, 2, 3 in the second
            . x . . . x . .      r = 4, 5 and 6, 7
    warp 1  . . x . . . x .      and so on; warps 2 and 3 have the panel behind

Half a warp reads chunks c ^ k and (c + 4) ^ k in rows k = 0 to 3, or 4 to 7: all eight, once each.
The layout of such a result is register_layout.warpgroup_columns.
"""

from __future__ import annotations

import functools
from typing import Any

from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation
from tessera.tile.cuda.intrinsics.shared_memory import slot_address
from tessera.tile.cuda.ptx import memory

STEP = 8  # rows of a matmul instruction
ROW_BYTES = 128  # of a panel


@functools.cache
def read(offset: int, slot_bytes: int, panel_bytes: int, depth: int, piece: int, pieces: int
         ) -> Operation:
    """(slot, thread) -> the registers of 64 columns of a warpgroup, four for eight of `depth` rows,
    of one of so many pieces of them."""
    steps = depth // STEP // pieces

    def body(b: Builder, slot: Any, thread: Any) -> list[Any]:
        lane, warp = b.and_(thread, b.i32(31)), b.lshr(thread, b.i32(5))
        row, down = b.and_(lane, b.i32(3)), b.lshr(lane, b.i32(2))
        chunk = b.or_(b.shl(b.and_(warp, b.i32(1)), b.i32(1)), b.lshr(down, b.i32(2)))
        chunk = b.or_(chunk, b.shl(b.and_(down, b.i32(2)), b.i32(1)))
        at = slot_address(b, offset, slot, slot_bytes)
        at = b.add(at, b.mul(b.lshr(warp, b.i32(1)), b.i32(panel_bytes)))
        at = b.add(at, b.mul(row, b.i32(ROW_BYTES)))
        at = b.add(at, b.shl(b.and_(down, b.i32(1)), b.i32(3)))
        near = b.shl(b.xor(chunk, row), b.i32(4))
        starts = b.add(at, near), b.add(b.add(at, b.i32(4 * ROW_BYTES)), b.xor(near, b.i32(64)))
        out: list[Any] = []
        for step in range(piece * steps, (piece + 1) * steps):
            for start in starts:
                out += b.call(memory.ld("shared", "b32", 2),
                              b.add(start, b.i32(step * STEP * ROW_BYTES)))
        return out

    form = InstructionForm((Operand("slot", "i32"), Operand("thread", "i32")),
                           (Operand("d", "i32", 4 * steps),), body)
    return Operation("read_columns", 2, lambda *_: form)


__all__ = ["read"]
