"""The intrinsics that prefetch or discard the cache lines of a box, shared by the threads."""

from __future__ import annotations

import functools
from typing import Any

from tessera.numerics import find_dtype
from tessera.tile.cuda.instruction import Operand, Operation
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.cuda.intrinsics.thread_elements import operation
from tessera.tile.cuda.intrinsics.tiles import _Access
from tessera.tile.cuda.ptx import memory
from tessera.tile.ir.register_layout import RegisterLayout

LINE_BYTES = 128
ACCESS_BITS, NEVER = 128, 0x7FC10000


@functools.cache
def box(layout: str, shape: tuple[int, ...], axis: int, guards: tuple[str, ...],
        owner: bool, way: str = "prefetch") -> Operation:
    """(address, strides..., bounds..., lines left of the thread's first [, owner]). way: what is
    discarded begins where a line does"""
    how = _Access(RegisterLayout.parse(layout, shape), axis, 1, guards)
    args = (*how.arguments("i64"), Operand("lines", "i32"),
            *([Operand("owner", "i32")] if owner else []))
    record = find_instruction(f"{way}_L2")

    def body(b: Any, *values: Any) -> None:
        mine = b.true(values[-1]) if owner else None
        *where, left = values[:-1] if owner else values
        found = how.run(b, where, "i64", LINE_BYTES, mine)
        for (at, condition, _), (base, _) in zip(found, how.groups, strict=True):
            there = b.compare("<", b.i32(base[axis]), left)
            if way == "discard":
                part = b.and_(at, b.const("i64", LINE_BYTES - 1))
                there = b.and_(there, b.compare("==", part, b.const("i64", 0)))
            with b.when(there if condition is None else b.and_(condition, there)):
                b.call(record, at)

    return operation(f"{way}_box", args, (), body)


@functools.cache
def rows(many: int, row_bytes: int) -> Operation:
    """(address, first row, rows left from it on, whether this thread asks)"""
    args = (Operand("at", "i64"), *(Operand(n, "i32") for n in ("first", "left", "asks")))
    record = find_instruction("bulk_prefetch")

    def body(b: Any, at: Any, first: Any, left: Any, asks: Any) -> None:
        some = b.and_(b.compare(">=", first, b.i32(0)), b.compare(">", left, b.i32(0)))
        count = b.select(b.compare("<", left, b.i32(many)), left, b.i32(many))
        with b.when(b.and_(b.true(asks), some)):
            b.call(record, at, b.mul(count, b.i32(row_bytes)))

    return operation("prefetch_rows", args, (), body)


@functools.cache
def long_rows(many: int, length: int, element_bytes: int) -> Operation:
    """(address of the first row, bytes from one to the next, number of the first, rows left from it
    on, elements left of each, thread): the 16 bytes that lie whole in each row."""
    args = (Operand("at", "i64"), Operand("apart", "i64"),
            *(Operand(n, "i32") for n in ("first", "left", "most", "thread")))
    record = find_instruction("bulk_prefetch")

    def body(b: Any, at: Any, apart: Any, first: Any, left: Any, most: Any, thread: Any) -> None:
        asks = b.compare(">=", b.add(first, thread), b.i32(0))
        for bound in (left, b.i32(many)):
            asks = b.and_(asks, b.compare("<", thread, bound))
        size = b.select(b.compare("<", most, b.i32(length)), most, b.i32(length))
        begin = b.add(at, b.mul(b.sext(thread, "i64"), apart))
        end = b.add(begin, b.sext(b.mul(size, b.i32(element_bytes)), "i64"))
        mask = b.const("i64", -16)
        begin = b.and_(begin, mask)
        length_ = b.trunc(b.sub(b.and_(end, mask), begin), "i32")
        with b.when(b.and_(asks, b.compare(">", length_, b.i32(0)))):
            b.call(record, begin, length_)

    return operation("prefetch_long_rows", args, (), body)


@functools.cache
def arrive(layout: str, shape: tuple[int, ...], dtype: str) -> Operation:
    """(fragment, address): a store of the first element of each access that never happens, as the
    assembler cannot know, and would not matter."""
    how, element = RegisterLayout.parse(layout, shape), find_dtype(dtype)
    kind = kind_of(element)
    each = min(how.run(len(shape) - 1), max(1, ACCESS_BITS // element.bits))

    def body(b: Any, x: list[Any], at: Any) -> None:
        words = [b.bitcast(v, "i32") if kind == "f32" else v for v in x[::each]]
        total = functools.reduce(b.xor, words)
        b.call(memory.st("shared", "b32", guarded=True), at, total,
               b.to_int(b.compare("==", total, b.i32(NEVER))))

    return operation("arrive", (Operand("x", kind, how.count), Operand("at", "i32")), (), body)
