"""Intrinsics of exchange between the groups of a cluster, as Operations for `use`."""

from __future__ import annotations

import functools
from math import prod
from typing import Any

from tessera.numerics import find_dtype
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation, kind_bytes
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.cuda.intrinsics.reduce import flat, kind_of_tag, reached
from tessera.tile.cuda.ptx.mbarrier import BARRIER_BYTES
from tessera.tile.ir.register_layout import RegisterLayout


@functools.cache
def init(count: int) -> Operation:
    """(shared address): barriers of one arrival, and of the bytes that it says."""
    def body(b: Builder, at: Any) -> None:
        for i in range(count):
            b.call(find_instruction("mbarrier_init"), b.add(at, b.i32(BARRIER_BYTES * i)),
                   b.i32(1))

    form = InstructionForm((Operand("at", "i32"),), (), body)
    return Operation("cluster_init", 1, lambda *_: form)


@functools.cache
def send(tag: str, layout: str, shape: tuple[int, ...], groups: int) -> Operation:
    """(fragment, shared address, barrier, first group, condition): elements to their row-major
    places behind the address, in so many groups of the cluster, where the barrier counts their
    bytes."""
    kind, how = kind_of_tag(tag), RegisterLayout.parse(layout, shape)
    size = kind_bytes(kind)

    def body(b: Builder, x: list[Any], at: Any, barrier: Any, first: Any, condition: Any) -> None:
        far, store = find_instruction("mapa"), find_instruction("st_async_b32")
        with b.when(b.true(condition)):
            for rank in (b.add(first, b.i32(i)) for i in range(groups)):
                there, counts = b.call(far, at, rank), b.call(far, barrier, rank)
                for base, v in zip(how.bases, x, strict=True):
                    place = size * flat(base, reached(how))
                    for i, word in enumerate(_words(b, v, kind)):
                        b.call(store, b.add(there, b.i32(place + 4 * i)), word, counts)

    form = InstructionForm((Operand("x", kind, how.count), Operand("at", "i32"),
                            Operand("barrier", "i32"), Operand("first", "i32"),
                            Operand("if", "i32")), (), body)
    return Operation("cluster_send", 5, lambda *_: form)


@functools.cache
def send_word(dtype: str) -> Operation:
    """(address in another group's memory, element, its barrier that counts, condition)"""
    kind = kind_of(find_dtype(dtype))

    def body(b: Builder, at: Any, x: Any, barrier: Any, condition: Any) -> None:
        with b.when(b.true(condition)):
            b.call(find_instruction("st_async_b32"), at, _words(b, x, kind)[0], barrier)

    form = InstructionForm((Operand("at", "i32"), Operand("x", kind), Operand("barrier", "i32"),
                            Operand("if", "i32")), (), body)
    return Operation("send_word", 4, lambda *_: form)


def _words(b: Builder, x: Any, kind: str) -> list[Any]:
    """A register as words of 32 bits."""
    whole = "i64" if kind[-2:] == "64" else "i32"
    bits = b.bitcast(x, whole) if kind[0] == "f" else x
    if whole == "i32":
        return [bits]
    return [b.trunc(bits, "i32"), b.trunc(b.lshr(bits, b.const("i64", 32)), "i32")]


def sent_bytes(tag: str, shape: tuple[int, ...], groups: int) -> int:
    """What all groups send to one."""
    return kind_bytes(tag) * prod(shape) * groups
