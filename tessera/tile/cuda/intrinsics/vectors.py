"""Intrinsics that move a few neighbours of a row, as Operations for `use`.

`left` is how many elements the row has from the first one on: what lies beyond reads 0 and is not
written. `piece` elements move at once; they are aligned and lie inside all or none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tessera.numerics import DType, find_dtype
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import Operand, Operation
from tessera.tile.cuda.intrinsics.formats import access, decode, encode, kind_of
from tessera.tile.cuda.intrinsics.narrow_floats import encode_code
from tessera.tile.cuda.intrinsics.swizzle import Addresses, Panel
from tessera.tile.cuda.intrinsics.thread_elements import ADDRESS, load_packed, operation, put_bits
from tessera.tile.cuda.ptx import memory

LLVM = Any
LEFT = Operand("left", "i32")
GLOBAL = (Operand("at", "i64"), LEFT)
SHARED = (Operand("base", "i32"), Operand("row", "i32"), Operand("column", "i32"), LEFT)
Where = Callable[[int], LLVM]  # the address of the thread's element i


def _read(b: Builder, space: str, d: DType, width: int, piece: int, where: Where, left: LLVM,
          hardware: bool) -> list[LLVM]:
    element, vector = access(d, piece)
    record = memory.ld(space, element, vector, guarded=True)
    out: list[LLVM] = []
    for i in range(0, width, piece):
        inside = b.to_int(b.compare("<", b.i32(i), left))
        got = b.call(record, where(i), inside)
        out += decode(b, d, got if isinstance(got, list) else [got], piece, hardware)
    return out


def _write(b: Builder, space: str, d: DType, piece: int, where: Where, left: LLVM,
           values: Sequence[LLVM], hardware: bool, saturate: bool) -> None:
    element, vector = access(d, piece)
    record = memory.st(space, element, vector, guarded=True)
    for i in range(0, len(values), piece):
        words = encode(b, d, list(values[i:i + piece]), hardware, saturate=saturate)
        inside = b.to_int(b.compare("<", b.i32(i), left))
        b.call(record, where(i), words if len(words) > 1 else words[0], inside)


def _global(b: Builder, d: DType, at: LLVM) -> Where:
    return lambda i: b.add(at, b.const("i64", i * d.bits // 8))


@functools.cache
def load(dtype: str, width: int, piece: int, hardware: bool = False) -> Operation:
    """(address of the first, left) -> the vector."""
    d = find_dtype(dtype)
    return operation("load_vector", GLOBAL, (Operand("d", kind_of(d), width),),
                     lambda b, at, left: _read(b, "global", d, width, piece, _global(b, d, at),
                                               left, hardware))


@functools.cache
def store(dtype: str, width: int, piece: int, hardware: bool = False,
          saturate: bool = False) -> Operation:
    """(vector, address of the first, left)"""
    d = find_dtype(dtype)
    return operation("store_vector", (Operand("x", kind_of(d), width), *GLOBAL), (),
                     lambda b, x, at, left: _write(b, "global", d, piece, _global(b, d, at), left,
                                                   x, hardware, saturate))


def _shared(b: Builder, panel: Panel, base: LLVM, row: LLVM, column: LLVM, width: int) -> Where:
    addresses = Addresses(b, panel, (base, row, column), width - 1)
    return lambda i: addresses.at(0, i)


@functools.cache
def load_shared(panel: tuple, width: int, piece: int, hardware: bool = False) -> Operation:
    """(base, row, column, left) -> the vector."""
    p = Panel(*panel)
    d = find_dtype(p.dtype)
    return operation(
        "load_vector", SHARED, (Operand("d", kind_of(d), width),),
        lambda b, base, row, column, left: _read(
            b, "shared", d, width, piece, _shared(b, p, base, row, column, width), left, hardware))


@functools.cache
def store_shared(panel: tuple, width: int, piece: int, hardware: bool = False,
                 saturate: bool = False) -> Operation:
    """(vector, base, row, column, left)"""
    p = Panel(*panel)
    d = find_dtype(p.dtype)
    return operation(
        "store_vector", (Operand("x", kind_of(d), width), *SHARED), (),
        lambda b, x, base, row, column, left: _write(
            b, "shared", d, piece, _shared(b, p, base, row, column, width), left, x, hardware,
            saturate))


# --- packed types: element by element -------------------------------------------------------------
def _packed_arguments(space: str) -> tuple[Operand, ...]:
    return (Operand("at", ADDRESS[space]), Operand("column", "i32"), LEFT)


@functools.cache
def load_packed_row(space: str, dtype: str, width: int) -> Operation:
    """(address of the row, column, left) -> the vector."""
    d = find_dtype(dtype)
    one = load_packed(space, dtype, True).rule().body

    def body(b: Builder, at: LLVM, column: LLVM, left: LLVM) -> list[LLVM]:
        return [one(b, at, b.add(column, b.i32(i)), b.to_int(b.compare("<", b.i32(i), left)))
                for i in range(width)]

    return operation("load_vector", _packed_arguments(space), (Operand("d", kind_of(d), width),),
                     body)


@functools.cache
def store_packed_row(space: str, dtype: str, width: int) -> Operation:
    """(vector, address of the row, column, left)"""
    d = find_dtype(dtype)

    def body(b: Builder, x: list[LLVM], at: LLVM, column: LLVM, left: LLVM) -> None:
        for i, v in enumerate(x):
            with b.when(b.compare("<", b.i32(i), left)):
                code = encode_code(b, d, v) if d.kind == "float" else v
                put_bits(b, space, at, b.add(column, b.i32(i)), code, d.bits)

    return operation("store_vector", (Operand("x", kind_of(d), width), *_packed_arguments(space)),
                     (), body)
