"""Intrinsics that bring each element the one whose number along an axis differs in a bit."""

from __future__ import annotations

import functools
from typing import Any

from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Kind, Operand, Operation, kind_bytes
from tessera.tile.cuda.intrinsics.reduce import element_of, exchanged
from tessera.tile.cuda.ptx import memory
from tessera.tile.ir.register_layout import RegisterLayout

LLVM = Any


def registers(layout: RegisterLayout, axis: int, bit: int) -> tuple[int, ...]:
    """Where the neighbour lies in the fragment, for a bit of registers; its own beyond the tile."""
    found = []
    for i, base in enumerate(layout.bases):
        other = (*base[:axis], base[axis] ^ 1 << bit, *base[axis + 1:])
        found.append(layout.number.get(other, i))
    return tuple(found)


@functools.cache
def lanes(kind: Kind, count: int, mask: int) -> Operation:
    """(fragment) -> that of the lane whose number differs in `mask`."""
    def body(b: Builder, values: list[LLVM]) -> list[LLVM]:
        return [exchanged(b, kind, v, mask) for v in values]

    x = Operand("x", kind, count)
    return Operation("neighbours", 1, lambda _: InstructionForm((x,), (x,), body))


@functools.cache
def put(kind: Kind, count: int, threads: int) -> Operation:
    """(fragment, shared address, thread): each thread writes its own; none that repeats others."""
    size = kind_bytes(kind)

    def body(b: Builder, values: list[LLVM], at: LLVM, thread: LLVM) -> None:
        first = b.compare("<", thread, b.i32(threads))
        start = b.add(at, b.mul(thread, b.i32(size)))
        record = memory.st("shared", element_of(kind), guarded=True)
        for i, v in enumerate(values):
            b.call(record, b.add(start, b.i32(size * threads * i)), v, b.to_int(first))

    args = (Operand("x", kind, count), Operand("at", "i32"), Operand("thread", "i32"))
    return Operation("put_exchange", 3, lambda *_: InstructionForm(args, (), body))


@functools.cache
def get(kind: Kind, count: int, threads: int, mask: int) -> Operation:
    """(shared address, thread) -> the fragment of the thread whose number differs in `mask`."""
    size = kind_bytes(kind)

    def body(b: Builder, at: LLVM, thread: LLVM) -> list[LLVM]:
        other = b.xor(b.and_(thread, b.i32(threads - 1)), b.i32(mask))
        start = b.add(at, b.mul(other, b.i32(size)))
        record = memory.ld("shared", element_of(kind))
        return [b.call(record, b.add(start, b.i32(size * threads * i))) for i in range(count)]

    args = (Operand("at", "i32"), Operand("thread", "i32"))
    return Operation("get_exchange", 2, lambda *_: InstructionForm(
        args, (Operand("x", kind, count),), body))
