"""Sums that two blocks of a cluster exchange, as Operations for `use`.

Each sends the other all that it has, by `st.async`, whose bytes a barrier of the other one counts
(PTX ISA 9.7.9), and adds what has come. Two buffers take turns: who sends for tile i + 2 has got
what all threads of the other block sent for i + 1, before which each of these had read what came
for i, where none but the thread of its number writes.
"""

from __future__ import annotations

import functools
from typing import Any

from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.ptx import memory
from tessera.tile.cuda.ptx.mbarrier import BARRIER_BYTES

BUFFERS, WORDS = 2, 4  # WORDS: that a thread sends at once
ALIGNMENT = 16
BARRIERS_BYTES = BUFFERS * BARRIER_BYTES


def buffer_bytes(count: int, threads: int) -> int:
    return 4 * count * threads


@functools.cache
def init(barriers: int) -> Operation:
    """() -> a barrier for each buffer, of one arrival, and of the bytes that it says."""
    def body(b: Builder) -> None:
        for i in range(BUFFERS):
            at = b.add(b.shared_base(), b.i32(barriers + BARRIER_BYTES * i))
            b.call(find_instruction("mbarrier_init"), at, b.i32(1))

    return Operation("exchange_init", 0, lambda: InstructionForm((), (), body))


@functools.cache
def add(count: int, threads: int, buffers: int, barriers: int) -> Operation:
    """(fragment, thread, number of this block, buffer, phase) -> the fragment's sum with that of
    the other block's thread."""
    assert count % WORDS == 0
    size = buffer_bytes(count, threads)

    def body(b: Builder, x: list[Any], thread: Any, which: Any, turn: Any, phase: Any) -> list[Any]:
        far, send = find_instruction("mapa"), find_instruction("st_async_b32x4")
        base, other = b.shared_base(), b.xor(which, b.i32(1))
        mine = b.add(b.add(base, b.i32(buffers)), b.mul(turn, b.i32(size)))
        mine = b.add(mine, b.mul(thread, b.i32(4 * WORDS)))
        barrier = b.add(b.add(base, b.i32(barriers)), b.mul(turn, b.i32(BARRIER_BYTES)))
        with b.when(b.compare("==", thread, b.i32(0))):
            b.call(find_instruction("mbarrier_arrive_expect"), barrier, b.i32(size))
        there, counts = b.call(far, mine, other), b.call(far, barrier, other)
        places = [4 * i * threads for i in range(0, count, WORDS)]
        for i, place in enumerate(places):
            words = [b.bitcast(v, "i32") for v in x[WORDS * i:WORDS * (i + 1)]]
            b.call(send, b.add(there, b.i32(place)), *words, counts)
        b.call(find_instruction("mbarrier_wait"), barrier, phase)
        came = [v for place in places for v in b.call(
            memory.ld("shared", "f32", WORDS), b.add(mine, b.i32(place)))]
        return [b.fadd(v, y) for v, y in zip(x, came, strict=True)]

    form = InstructionForm((Operand("x", "f32", count), *(Operand(name, "i32") for name in (
        "thread", "which", "turn", "phase"))), (Operand("d", "f32", count),), body)
    return Operation("sum_across", 5, lambda *_: form)


__all__ = ["add", "buffer_bytes", "init"]
