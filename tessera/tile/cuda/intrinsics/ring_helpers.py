"""Intrinsics of the warps that help a producer: bringing a slot into order, asking L2 ahead."""

from __future__ import annotations

import functools
from typing import Any

from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics.warp_specialised import barrier, operands
from tessera.tile.cuda.ptx import tma


@functools.cache
def ring_ahead(rank: int, panels: int, panel_columns: int, joined: bool = False) -> Operation:
    """(map, coordinates innermost first): L2 is asked for each panel of a tile, or for all."""
    def body(b: Builder, map_: Any, first: Any, *rest: Any) -> None:
        if joined:
            b.call(tma.prefetch(rank + 1), map_, b.i32(0), *rest,
                   b.udiv(first, b.i32(panel_columns)))
            return
        for p in range(panels):
            b.call(tma.prefetch(rank), map_, b.add(first, b.i32(p * panel_columns)), *rest)

    args = (Operand("map", "i64"), *(Operand(f"c{i}", "i32") for i in range(rank)))
    return Operation("ring_ahead", len(args), lambda *_: InstructionForm(args, (), body))


@functools.cache
def ring_whole(barriers: int) -> Operation:
    """(slot, phase of one that fills): waits until the slot is full."""
    def body(b: Builder, slot: Any, phase: Any) -> None:
        b.call(find_instruction("mbarrier_wait"), barrier(b, barriers, slot),
               b.xor(phase, b.i32(1)))

    return Operation("ring_whole", 2, lambda *_: InstructionForm(
        operands(slot="i32", phase="i32"), (), body))


@functools.cache
def ring_dealt(dealt: int) -> Operation:
    """(slot): what this thread brought into order there may be read, by tensor cores too."""
    def body(b: Builder, slot: Any) -> None:
        b.call(find_instruction("fence_async_shared"))
        b.call(find_instruction("mbarrier_arrive"), barrier(b, dealt, slot))

    return Operation("ring_dealt", 1, lambda *_: InstructionForm(operands(slot="i32"), (), body))
