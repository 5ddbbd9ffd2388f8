"""Intrinsics of accesses by single threads: one element or some neighbours, arrays of a thread."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tessera.numerics import DType, find_dtype
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Kind, Operand, Operation
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics.formats import access, decode, encode, kind_of
from tessera.tile.cuda.intrinsics.narrow_floats import decode_field, encode_code
from tessera.tile.cuda.intrinsics.swizzle import Panel
from tessera.tile.cuda.ptx import atomics, memory, tma

LLVM = Any
ADDRESS: dict[str, Kind] = {"global": "i64", "shared": "i32", "shared::cluster": "i32"}
IF, RANDOM = Operand("if", "i32"), Operand("random", "i32")
SECTOR = 8  # elements of 32 bits


def operation(name: str, args: tuple[Operand, ...], results: tuple[Operand, ...],
              body: Any) -> Operation:
    """An intrinsic with one form."""
    form = InstructionForm(args, results, body)
    return Operation(name, len(args), lambda *_: form)


# --- one element ----------------------------------------------------------------------------------
@functools.cache
def load(space: str, dtype: str, guarded: bool = False, hardware: bool = False) -> Operation:
    """(address [, if]) -> the element; 0 where the condition is 0."""
    d = find_dtype(dtype)
    record = memory.ld(space, access(d, 1)[0], guarded=guarded)
    args = (Operand("at", ADDRESS[space]), *([IF] if guarded else []))
    return operation(f"load_{dtype}", args, (Operand("d", kind_of(d)),),
                     lambda b, *given: decode(b, d, [b.call(record, *given)], 1,
                                             hardware)[0])


@functools.cache
def store(space: str, dtype: str, guarded: bool = False, hardware: bool = False,
          rounding: str = "nearest_even", saturate: bool = False) -> Operation:
    """(address, x [, random] [, if]): x rounded, where the condition is not 0.

    random: a random word, for rounding='stochastic'.
    """
    d = find_dtype(dtype)
    record = memory.st(space, access(d, 1)[0], guarded=guarded)
    args = (Operand("at", ADDRESS[space]), *_value(d, guarded, rounding))

    def body(b: Builder, at: LLVM, x: LLVM, *given: LLVM) -> None:
        code, *condition = _encoded(b, d, x, given, hardware, rounding, saturate)
        b.call(record, at, code, *condition)

    return operation(f"store_{dtype}", args, (), body)


@functools.cache
def load_pair(space: str, dtype: str, piece: int, guarded: bool = False) -> Operation:
    """(address of the first [, if]) -> two of 32 bits; piece: 2 where they move at once."""
    d = find_dtype(dtype)
    record = memory.ld(space, *access(d, piece), guarded=guarded)

    def body(b: Builder, at: LLVM, *given: LLVM) -> list[LLVM]:
        return [x for n in range(0, 2, piece)
                for x in decode(b, d, _words(b.call(record, _advance_address(b, space, at, n),
                                                    *given)),
                                piece, False)]

    args = (Operand("at", ADDRESS[space]), *([IF] if guarded else []))
    return operation("load_pair", args, (Operand("x", kind_of(d)), Operand("y", kind_of(d))), body)


@functools.cache
def store_pair(space: str, dtype: str, piece: int, guarded: bool = False) -> Operation:
    """(address of the first, x, y [, if])"""
    d = find_dtype(dtype)
    record = memory.st(space, *access(d, piece), guarded=guarded)

    def body(b: Builder, at: LLVM, x: LLVM, y: LLVM, *given: LLVM) -> None:
        for n in range(0, 2, piece):
            words = encode(b, d, [x, y][n:n + piece], False)
            b.call(record, _advance_address(b, space, at, n), words if piece > 1 else words[0],
                   *given)

    args = (Operand("at", ADDRESS[space]), Operand("x", kind_of(d)), Operand("y", kind_of(d)))
    return operation("store_pair", (*args, *([IF] if guarded else [])), (), body)


@functools.cache
def store_span(lanes: int, lane: int, engine: bool) -> Operation:
    """(address in global memory, in shared memory, elements of 32 bits, thread): the threads of a
    group move so many, after a barrier. engine: whole sectors by the copy engine, which one thread
    asks, where both places lie alike in 16 bytes."""
    def body(b: Builder, to: LLVM, at: LLVM, count: LLVM, thread: LLVM) -> None:
        if engine:
            b.call(find_instruction("fence_async_shared"))
        b.call(find_instruction("sync_threads"))
        if not engine:
            return _copy_elements(b, lanes, thread, to, at, b.i32(0), count)
        low, none = b.trunc(to, "i32"), b.i32(0)
        ahead = b.and_(b.sub(none, b.lshr(low, b.i32(2))), b.i32(SECTOR - 1))
        whole = b.and_(b.sub(count, ahead), b.i32(-SECTOR))
        alike = b.compare("==", b.and_(b.xor(low, at), b.i32(15)), none)
        size = b.select(alike, b.select(b.compare(">", whole, none), whole, none), none)
        some = b.compare(">", size, none)
        head = b.select(some, ahead, count)
        mine = b.and_(b.to_int(some), b.to_int(b.compare("==", thread, b.i32(lane))))
        with b.when(b.true(mine)):
            words = b.shl(head, b.i32(2))
            b.call(find_instruction("bulk_store"), b.add(to, b.zext(words, "i64")),
                   b.add(at, words), b.shl(size, b.i32(2)))
            b.call(find_instruction("bulk_commit"))
            b.call(tma.bulk_wait(0, read=True))
        _copy_elements(b, lanes, thread, to, at, none, head)
        _copy_elements(b, lanes, thread, to, at, b.add(head, size), count)

    args = (Operand("to", "i64"), *(Operand(n, "i32") for n in ("at", "count", "thread")))
    return operation("store_span", args, (), body)


def _copy_elements(b: Builder, lanes: int, thread: LLVM, to: LLVM, at: LLVM, first: LLVM, end: LLVM
                   ) -> None:
    """Elements from first to end."""
    def step(i: LLVM) -> tuple[LLVM, LLVM]:
        mine = b.add(i, thread)
        with b.when(b.compare("<", mine, end)):
            words = b.shl(mine, b.i32(2))
            b.call(memory.st("global", "b32"), b.add(to, b.zext(words, "i64")),
                   b.call(memory.ld("shared", "b32"), b.add(at, words)))
        further = b.add(i, b.i32(lanes))
        return further, b.compare(">=", further, end)

    b.until(first, step)


def _words(found: Any) -> list[LLVM]:
    return found if isinstance(found, list) else [found]


def _advance_address(b: Builder, space: str, at: LLVM, n: int) -> LLVM:
    return b.add(at, b.const(ADDRESS[space], 4 * n)) if n else at


def _value(d: DType, guarded: bool, rounding: str) -> tuple[Operand, ...]:
    random = [RANDOM] if rounding == "stochastic" else []
    return (Operand("x", kind_of(d)), *random, *([IF] if guarded else []))


def _encoded(b: Builder, d: DType, x: LLVM, given: Sequence[LLVM], hardware: bool, rounding: str,
             saturate: bool) -> list[LLVM]:
    """The code of x, and what follows the random word."""
    random = [given[0]] if rounding == "stochastic" else None
    rest = list(given[1:] if random else given)
    if d.packed and d.kind == "float":
        draw = random[0] if random else None
        return [encode_code(b, d, x, rounding, saturate, draw), *rest]
    return [encode(b, d, [x], hardware, rounding, saturate, random)[0], *rest]


# --- packed elements: codes of 4 and 6 bits, as tessera.numerics.pack lays them -------------------
def _bit_place(b: Builder, at: LLVM, element: LLVM, bits: int, space: str) -> tuple[LLVM, LLVM]:
    """(address of the 32-bit word that holds the first bit, bit in it)."""
    kind = ADDRESS[space]
    bit = b.mul(element, b.i32(bits))
    byte = b.add(at, b.zext(b.lshr(bit, b.i32(3)), "i64") if kind == "i64"
                 else b.lshr(bit, b.i32(3)))
    low = b.and_(byte, b.const(kind, 3))
    low32 = b.trunc(low, "i32") if kind == "i64" else low
    shift = b.add(b.shl(low32, b.i32(3)), b.and_(bit, b.i32(7)))
    return b.sub(byte, low), shift


@functools.cache
def load_packed(space: str, dtype: str, guarded: bool = False,
                hardware: bool = False) -> Operation:
    """(address of the row, element of the row [, if]) -> the element; 0 where it is 0."""
    d = find_dtype(dtype)
    byte = memory.ld(space, "u8", guarded=True)

    def body(b: Builder, at: LLVM, element: LLVM, *given: LLVM) -> LLVM:
        here = b.true(given[0]) if guarded else b.compare("==", element, element)
        bit = b.mul(element, b.i32(d.bits))
        shift = b.and_(bit, b.i32(7))
        first = b.lshr(bit, b.i32(3))
        low = b.add(at, b.zext(first, "i64") if ADDRESS[space] == "i64" else first)
        word = b.call(byte, low, b.to_int(here))
        if d.bits == 6:  # may go on in the next byte
            on = b.and_(here, b.compare(">", shift, b.i32(2)))
            high = b.call(byte, b.add(low, b.const(ADDRESS[space], 1)), b.to_int(on))
            word = b.or_(word, b.shl(high, b.i32(8)))
        return decode_field(b, d, b.lshr(word, shift), 0)

    args = (Operand("at", ADDRESS[space]), Operand("element", "i32"), *([IF] if guarded else []))
    return operation(f"load_{dtype}", args, (Operand("d", kind_of(d)),), body)


def put_bits(b: Builder, space: str, at: LLVM, element: LLVM, code: LLVM, bits: int) -> None:
    """Writes a code of `bits` bits that shares its word with other lanes' elements.

    Its bits are cleared and then set by two atomics, which leave all others alone.
    """
    word, shift = _bit_place(b, at, element, bits, space)
    mask = (1 << bits) - 1
    code = b.and_(code, b.i32(mask))
    clear = atomics.red("and", "b32", space, scope="gpu")
    fill = atomics.red("or", "b32", space, scope="gpu")
    b.call(clear, word, b.xor(b.shl(b.i32(mask), shift), b.i32(-1)))
    b.call(fill, word, b.shl(code, shift))
    if 32 % bits:
        with b.when(b.compare(">", shift, b.i32(32 - bits))):  # the rest is in the next word
            rest, after = b.sub(b.i32(32), shift), b.add(word, b.const(ADDRESS[space], 4))
            b.call(clear, after, b.xor(b.lshr(b.i32(mask), rest), b.i32(-1)))
            b.call(fill, after, b.lshr(code, rest))


@functools.cache
def store_packed(space: str, dtype: str, guarded: bool = False, hardware: bool = False,
                 rounding: str = "nearest_even", saturate: bool = False) -> Operation:
    """(address of the row, element of the row, x [, random] [, if])"""
    d = find_dtype(dtype)
    args = (Operand("at", ADDRESS[space]), Operand("element", "i32"),
            *_value(d, guarded, rounding))

    def body(b: Builder, at: LLVM, element: LLVM, x: LLVM, *given: LLVM) -> None:
        code, *condition = _encoded(b, d, x, given, hardware, rounding, saturate)
        if not guarded:
            put_bits(b, space, at, element, code, d.bits)
            return
        with b.when(b.true(condition[0])):
            put_bits(b, space, at, element, code, d.bits)

    return operation(f"store_{dtype}", args, (), body)


# --- places ---------------------------------------------------------------------------------------
@functools.cache
def inside(axes: int) -> Operation:
    """(index, extent, ...) for each axis -> whether all lie inside."""
    args = tuple(Operand(f"{what}{i}", "i64") for i in range(axes) for what in "in")

    def body(b: Builder, *given: LLVM) -> LLVM:
        tests = [b.compare("<", i, n, unsigned=True)
                 for i, n in zip(given[::2], given[1::2], strict=True)]
        return b.to_int(functools.reduce(b.and_, tests))

    return operation("inside", args, (Operand("d", "i32"),), body)


@functools.cache
def swizzled(panel: tuple) -> Operation:
    """(row, column) -> element of a shared buffer, given by its Panel's fields."""
    shared = Panel(*panel)

    def body(b: Builder, row: LLVM, column: LLVM) -> LLVM:
        term = shared.term(b, row)
        at = column if term is None else b.xor(column, b.udiv(term, b.i32(shared.size)))
        return b.add(b.mul(row, b.i32(shared.columns)), at)

    return operation("swizzled_element", (Operand("row", "i32"), Operand("column", "i32")),
                     (Operand("d", "i32"),), body)


# --- arrays of a thread -------------------------------------------------------------------------
@functools.cache
def read(name: str, kind: Kind, count: int) -> Operation:
    """(index) -> the number of a thread's array there."""
    return operation(f"read_{name}", (Operand("i", "i32"),), (Operand("d", kind),),
                     lambda b, i: b.read(b.array(name, kind, count), i))


@functools.cache
def write(name: str, kind: Kind, count: int) -> Operation:
    """(index, x): sets a number of a thread's array."""
    return operation(f"write_{name}", (Operand("i", "i32"), Operand("x", kind)), (),
                     lambda b, i, x: b.write(b.array(name, kind, count), i, x))


# --- votes of a condition -------------------------------------------------------------------------
@functools.cache
def both() -> Operation:
    """(condition, condition) -> whether both hold."""
    return operation("both", (Operand("x", "i32"), Operand("y", "i32")), (Operand("d", "i32"),),
                     lambda b, x, y: b.to_int(b.and_(b.true(x), b.true(y))))
