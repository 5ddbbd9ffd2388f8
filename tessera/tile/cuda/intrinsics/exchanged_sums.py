"""Sums that two blocks of a cluster exchange, as Operations for `use`.

One of two warpgroups of a number sends the other all that it has, by `st.async`, whose bytes a
barrier of that one counts (PTX ISA 9.7.9), which adds them to its own. They take turns: who sends
for tile i + 2 has got what the other sent for i + 1, before which that one had read what came for
i, each thread what the thread of its number sent. So a warpgroup needs one buffer.
"""

from __future__ import annotations

import functools
from typing import Any

from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.ptx import memory
from tessera.tile.cuda.ptx.mbarrier import BARRIER_BYTES

WARPGROUP = 128  # threads
TURNS, WORDS = 2, 4  # WORDS: that a thread sends at once
ALIGNMENT = 16


def buffer_bytes(count: int, threads: int) -> int:
    """Of the buffers of all warpgroups."""
    return 4 * count * threads


@functools.cache
def init(barriers: int, groups: int) -> Operation:
    """() -> a barrier for each buffer, of one arrival, and of the bytes that it says."""
    def body(b: Builder) -> None:
        for i in range(groups):
            at = b.add(b.shared_base(), b.i32(barriers + BARRIER_BYTES * i))
            b.call(find_instruction("mbarrier_init"), at, b.i32(1))

    return Operation("exchange_init", 0, lambda: InstructionForm((), (), body))


@functools.cache
def add(count: int, threads: int, buffers: int, barriers: int) -> Operation:
    """(fragment, thread, its warpgroup, number of this block, whether this warpgroup has the sums,
    phase) -> the fragment's sum with that of the other block's thread; where the other one has it,
    the fragment.

    group: known to be uniform, for a barrier's address by which lanes of a warp could differ makes
    the assembler take all that follows for divergent.  phase: of who sends the one that is over, so
    that all wait.
    """
    assert count % WORDS == 0
    places = [4 * i * threads for i in range(0, count, WORDS)]

    def body(b: Builder, x: list[Any], thread: Any, group: Any, which: Any, has: Any,
             phase: Any) -> list[Any]:
        base, lane = b.shared_base(), b.and_(thread, b.i32(WARPGROUP - 1))
        mine = b.add(b.add(base, b.i32(buffers)), b.mul(thread, b.i32(4 * WORDS)))
        barrier = b.add(b.add(base, b.i32(barriers)), b.mul(group, b.i32(BARRIER_BYTES)))
        gets = b.true(has)
        with b.when(b.and_(gets, b.compare("==", lane, b.i32(0)))):
            b.call(find_instruction("mbarrier_arrive_expect"), barrier,
                   b.i32(buffer_bytes(count, WARPGROUP)))
        with b.when(b.true(b.xor(has, b.i32(1)))):
            far, other = find_instruction("mapa"), b.xor(which, b.i32(1))
            there, counts = b.call(far, mine, other), b.call(far, barrier, other)
            for i, place in enumerate(places):
                words = [b.bitcast(v, "i32") for v in x[WORDS * i:WORDS * (i + 1)]]
                b.call(find_instruction("st_async_b32x4"), b.add(there, b.i32(place)), *words,
                       counts)
        b.call(find_instruction("mbarrier_wait"), barrier, phase)
        came = [v for place in places for v in b.call(
            memory.ld("shared", "f32", WORDS), b.add(mine, b.i32(place)))]
        return [b.select(gets, b.fadd(v, y), v) for v, y in zip(x, came, strict=True)]

    form = InstructionForm((Operand("x", "f32", count), *(Operand(name, "i32") for name in (
        "thread", "group", "which", "has", "phase"))), (Operand("d", "f32", count),), body)
    return Operation("sum_across", 6, lambda *_: form)


@functools.cache
def either(count: int) -> Operation:
    """(whether the first, two fragments) -> one of them."""
    def body(b: Builder, first: Any, x: list[Any], y: list[Any]) -> list[Any]:
        return [b.select(b.true(first), v, w) for v, w in zip(x, y, strict=True)]

    form = InstructionForm((Operand("first", "i32"), Operand("x", "f32", count),
                            Operand("y", "f32", count)), (Operand("d", "f32", count),), body)
    return Operation("either", 3, lambda *_: form)


__all__ = ["TURNS", "add", "buffer_bytes", "either", "init"]
