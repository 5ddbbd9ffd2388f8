"""Intrinsics over the lanes of a warp, as Operations for `use`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tessera.numerics import find_dtype
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import Kind, Operand, Operation, kind_bytes
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.cuda.intrinsics.narrow_floats import integer_field
from tessera.tile.cuda.intrinsics.reduce import combiner, element_of, kind_of_tag
from tessera.tile.cuda.intrinsics.thread_elements import operation
from tessera.tile.cuda.ptx import memory, warp
from tessera.tile.ops.ids import WARP

LLVM = Any
I32 = Operand("i", "i32")
REDUX = {"reduce_sum": "add", "reduce_max": "max", "reduce_min": "min"}


def shuffle_words(b: Builder, mode: str, x: LLVM, by: LLVM) -> LLVM:
    """x of another lane, in 32-bit pieces."""
    if b.bits(x) == 32:
        return b.call(warp.shfl(mode, "f32" if b.is_float(x) else "i32"), x, by)
    bits = b.bitcast(x, "i64") if b.is_float(x) else x
    pieces = [b.trunc(bits, "i32"), b.trunc(b.lshr(bits, b.const("i64", 32)), "i32")]
    low, high = (b.zext(b.call(warp.shfl(mode), p, by), "i64") for p in pieces)
    bits = b.or_(low, b.shl(high, b.const("i64", 32)))
    return b.bitcast(bits, "f64") if b.is_float(x) else bits


@functools.cache
def shuffle(mode: str, kind: Kind) -> Operation:
    """(x, lane or distance below 32) -> x of that lane, in warps of 32."""
    return operation(f"shuffle_{mode}", (Operand("x", kind), I32), (Operand("d", kind),),
                     lambda b, x, by: shuffle_words(b, mode, x, by))


@functools.cache
def shuffle_any(mode: str, kind: Kind) -> Operation:
    """(x, lane or distance, own lane, lanes of the warp): any number, any size of the warp."""
    args = (Operand("x", kind), Operand("by", "i32"), Operand("own", "i32"), Operand("size", "i32"))

    def body(b: Builder, x: LLVM, by: LLVM, own: LLVM, size: LLVM) -> LLVM:
        if mode == "idx":  # the remainder, of the sign of the size
            rest = b.sub(by, b.mul(b.sdiv(by, size), size))
            at = b.select(b.compare("<", rest, b.i32(0)), b.add(rest, size), rest)
            return shuffle_words(b, "idx", x, at)
        at = {"down": b.add, "up": b.sub, "bfly": b.xor}[mode](own, by)
        inside = b.compare("<", at, size, unsigned=True)
        return shuffle_words(b, "idx", x, b.select(inside, at, own))

    return operation(f"shuffle_{mode}", args, (Operand("d", kind),), body)


@functools.cache
def reduce(name: str, tag: str) -> Operation:
    """(x) -> the reduction over a warp of 32 lanes, in each."""
    kind, combine = kind_of_tag(tag), combiner(name, tag)

    def body(b: Builder, x: LLVM) -> LLVM:
        if kind == "i32":
            sign = "u32" if tag[0] == "u" and name != "reduce_sum" else "s32"
            return b.call(find_instruction(f"redux_{REDUX[name]}_{sign}"), x)
        for bit in (16, 8, 4, 2, 1):
            x = combine(b, x, shuffle_words(b, "bfly", x, b.i32(bit)))
        return x

    return operation(f"warp_{name}", (Operand("x", kind),), (Operand("d", kind),), body)


@functools.cache
def reduce_small_warp(name: str, tag: str) -> Operation:
    """(x, own lane, lanes of the warp): as reduce, in a warp that may be smaller."""
    kind, combine = kind_of_tag(tag), combiner(name, tag)

    def body(b: Builder, x: LLVM, own: LLVM, size: LLVM) -> LLVM:
        for bit in (1, 2, 4, 8, 16):  # lane 0 ends with all: each lane takes what lies above it
            other = shuffle_words(b, "down", x, b.i32(bit))
            there = b.compare("<", b.add(own, b.i32(bit)), size)
            x = b.select(there, combine(b, x, other), x)
        return shuffle_words(b, "idx", x, b.i32(0))

    args = (Operand("x", kind), Operand("own", "i32"), Operand("size", "i32"))
    return operation(f"warp_{name}", args, (Operand("d", kind),), body)


@functools.cache
def scan(dtype: str) -> Operation:
    """(x, own lane) -> the sum over the lanes up to this one."""
    d = find_dtype(dtype)
    kind = kind_of(d)
    add: Callable = (lambda b, x, y: b.or_(x, y)) if d.kind == "bool" else \
        combiner("reduce_sum", kind)

    def body(b: Builder, x: LLVM, own: LLVM) -> LLVM:
        for bit in (1, 2, 4, 8, 16):
            before = shuffle_words(b, "up", x, b.i32(bit))
            x = b.select(b.compare(">=", own, b.i32(bit)), add(b, before, x), x)
        return within(b, d, x)

    return operation("warp_scan", (Operand("x", kind), I32), (Operand("d", kind),), body)


def within(b: Builder, d: Any, x: LLVM) -> LLVM:
    """An integer of fewer than 32 bits as its register holds it."""
    return integer_field(b, d, x, 0) if d.kind in ("int", "uint") and d.bits < 32 else x


# --- over the warps of a group --------------------------------------------------------------------
@functools.cache
def put(tag: str) -> Operation:
    """(shared address, x, if)"""
    kind = kind_of_tag(tag)
    record = memory.st("shared", element_of(kind), guarded=True)
    return operation("put_part", (Operand("at", "i32"), Operand("x", kind), Operand("if", "i32")),
                     (), lambda b, *given: b.call(record, *given))


@functools.cache
def get(name: str, tag: str, count: int) -> Operation:
    """(shared address) -> `count` numbers there, combined in order."""
    kind, combine = kind_of_tag(tag), combiner(name, tag)
    size = kind_bytes(kind)
    width = 16 // size  # of the widest load

    def body(b: Builder, at: LLVM) -> LLVM:
        found: list[LLVM] = []
        while len(found) < count:
            vector = width if count - len(found) >= width else 1
            record = memory.ld("shared", element_of(kind), vector, offset=size * len(found))
            got = b.call(record, at)
            found += got if isinstance(got, list) else [got]
        return functools.reduce(lambda x, y: combine(b, x, y), found)

    return operation("all_parts", (Operand("at", "i32"),), (Operand("d", kind),), body)


__all__ = ["WARP", "get", "put", "reduce", "reduce_small_warp", "scan", "shuffle_words",
           "shuffle", "shuffle_any", "within"]
