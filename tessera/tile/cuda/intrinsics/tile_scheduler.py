"""Intrinsics of who does which tile, as Operations for `use`: the mailbox, the counter, the order.

The mailbox is a ring whose slots hold some numbers each, which its barriers are in front of.
"""

from __future__ import annotations

import functools
from typing import Any

from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics.shared_memory import slot_address
from tessera.tile.cuda.intrinsics.warp_specialised import barrier, operands
from tessera.tile.cuda.ptx import atomics, memory, warp
from tessera.tile.cuda.ptx.mbarrier import BARRIER_BYTES


def _letter(b: Builder, slots: int, barriers: int, slot: Any, numbers: int) -> list[Any]:
    """The addresses of a slot's numbers, behind the barriers."""
    first = slot_address(b, barriers + 2 * BARRIER_BYTES * slots, slot, 4 * numbers)
    return [b.add(first, b.i32(4 * i)) for i in range(numbers)]


@functools.cache
def mail_put(slots: int, barriers: int, numbers: int) -> Operation:
    """(slot, phase, numbers): waits until the slot was read, writes and tells."""
    def body(b: Builder, slot: Any, phase: Any, *told: Any) -> None:
        b.call(find_instruction("mbarrier_wait"),
               barrier(b, barriers + BARRIER_BYTES * slots, slot), phase)
        for at, number in zip(_letter(b, slots, barriers, slot, numbers), told, strict=True):
            b.call(memory.st("shared", "b32"), at, number)
        b.call(find_instruction("mbarrier_arrive"), barrier(b, barriers, slot))

    args = (*operands(slot="i32", phase="i32"), *(Operand(f"n{i}", "i32") for i in range(numbers)))
    form = InstructionForm(args, (), body)
    return Operation("mail_put", 2 + numbers, lambda *_: form)


@functools.cache
def mail_get(slots: int, barriers: int, numbers: int) -> Operation:
    """(slot, phase, lead) -> the numbers, in all lanes; each warp gives the slot back."""
    def body(b: Builder, slot: Any, phase: Any, lead: Any) -> Any:
        b.call(find_instruction("mbarrier_wait"), barrier(b, barriers, slot), phase)
        told = [b.call(memory.ld("shared", "b32"), at)
                for at in _letter(b, slots, barriers, slot, numbers)]
        b.call(find_instruction("sync_warp"), b.i32(-1))
        b.call(find_instruction("mbarrier_arrive_if"),
               barrier(b, barriers + BARRIER_BYTES * slots, slot), lead)
        same = [b.call(warp.shfl("idx"), x, b.i32(0)) for x in told]  # known to be, in the warp
        return same

    form = InstructionForm(operands(slot="i32", phase="i32", lead="i32"),
                           tuple(Operand(f"d{i}", "i32") for i in range(numbers)), body)
    return Operation("mail_get", 3, lambda *_: form)


@functools.cache
def next_tile() -> Operation:
    """(counter, blocks, tiles) -> the number of a tile that nobody has taken, from `tiles` on none.

    Block b begins with tile b, and each block asks until it gets none: `tiles` times in all. Who
    asks last sets the counter back to 0, for the next launch.
    """
    def body(b: Builder, counter: Any, blocks: Any, tiles: Any) -> Any:
        taken = b.call(atomics.atom("add", "u32"), counter, b.i32(1))
        last = b.to_int(b.compare("==", b.add(taken, b.i32(1)), tiles))
        b.call(memory.st("global", "b32", cache="relaxed.gpu", guarded=True), counter, b.i32(0),
               last)
        return b.add(taken, blocks)

    form = InstructionForm(operands(counter="i64", blocks="i32", tiles="i32"), operands(d="i32"),
                           body)
    return Operation("next_tile", 3, lambda *_: form)


@functools.cache
def own_start(rows: int, step: int, columns: int) -> Operation:
    """(lo, hi, start, less, warpgroup): see the op. rows: of a warpgroup."""
    def body(b: Builder, lo: Any, hi: Any, start: Any, less: Any, group: Any) -> Any:
        first = b.add(start, b.mul(group, b.i32(rows)))
        masked = b.sub(first, b.add(less, b.i32(columns - 1)))  # iterations before it are, whole
        end = b.select(b.compare("<", masked, hi), masked, hi)
        room = b.sub(end, lo)
        room = b.select(b.compare("<", room, b.i32(0)), b.i32(0), room)
        many = b.udiv(b.add(room, b.i32(step - 1)), b.i32(step))
        return b.add(lo, b.mul(many, b.i32(step)))

    form = InstructionForm(operands(lo="i32", hi="i32", start="i32", less="i32", group="i32"),
                           operands(d="i32"), body)
    return Operation("own_start", 5, lambda *_: form)


@functools.cache
def tile_order(order: tuple[int, ...], outer: int, reversed: int | None) -> Operation:
    """(tile, raster, extents...) -> coordinates: see the op."""
    rank = len(order)
    strip, inner = order[outer], order[outer + 1:]

    def split(b: Builder, x: Any, n: Any) -> tuple[Any, Any]:
        quotient = b.udiv(x, n)
        return quotient, b.sub(x, b.mul(quotient, n))

    def body(b: Builder, tile: Any, raster: Any, *extents: Any) -> Any:
        at: dict[int, Any] = {}
        many = functools.reduce(b.mul, [extents[a] for a in inner], b.i32(1))
        rest, inside = split(b, tile, b.mul(extents[strip], many)) if outer else (None, tile)
        for axis in order[:outer][::-1]:
            rest, at[axis] = split(b, rest, extents[axis])
        start = b.mul(b.udiv(inside, b.mul(raster, many)), raster)
        left = b.sub(extents[strip], start)
        width = b.select(b.compare("<", left, raster), left, raster)
        rest, within = split(b, b.sub(inside, b.mul(start, many)), width)
        at[strip] = b.add(start, within)
        for axis in inner[::-1]:
            rest, at[axis] = split(b, rest, extents[axis])
        if reversed is not None:
            at[reversed] = b.sub(b.sub(extents[reversed], b.i32(1)), at[reversed])
        return [at[a] for a in range(rank)] if rank > 1 else at[0]

    args = (*operands(tile="i32", raster="i32"), *(Operand(f"n{a}", "i32") for a in range(rank)))
    form = InstructionForm(args, tuple(Operand(f"at{a}", "i32") for a in range(rank)), body)
    return Operation("tile_order", rank + 2, lambda *_: form)
