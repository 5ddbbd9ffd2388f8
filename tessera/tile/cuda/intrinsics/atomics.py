"""Intrinsics of atomic updates, as Operations for `use`.

What an instruction does as the interpreter does, it does; everything else is a loop of compare and
swap on the word that holds the element: f(old, x) in f32 or the integer's register, rounded once.
An f32 sum in global memory flushes subnormals (PTX ISA 9.7.13 atom).
"""

from __future__ import annotations

import functools
from typing import Any

from tessera.numerics import DType, find_dtype
from tessera.runtime.generations import Generation
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import Operand, Operation
from tessera.tile.cuda.intrinsics.elementwise import BODIES
from tessera.tile.cuda.intrinsics.formats import decode, encode, kind_of
from tessera.tile.cuda.intrinsics.narrow_floats import round_narrow
from tessera.tile.cuda.intrinsics.shared_tiles import SharedAccess
from tessera.tile.cuda.intrinsics.swizzle import Panel
from tessera.tile.cuda.intrinsics.thread_elements import ADDRESS, operation
from tessera.tile.cuda.intrinsics.tiles import _Access
from tessera.tile.cuda.ptx import atomics, memory
from tessera.tile.ir.register_layout import RegisterLayout

LLVM = Any
SCOPES = {"group": "cta", "device": "gpu", "system": "sys"}
EXTREMES = {"min": "minimum", "max": "maximum"}
BITWISE = {"and": "and_", "or": "or_", "xor": "xor"}


def native(kind: str, d: DType) -> tuple[str, str] | None:
    """(op, type) of the instruction that does an update, if there is one."""
    if d.bits not in (32, 64) or d.name == "tf32" and kind != "exchange":
        return None
    if kind in BITWISE or kind == "exchange":
        return {"exchange": "exch"}.get(kind, kind), f"b{d.bits}"
    if d.kind == "float":
        return ("add", f"f{d.bits}") if kind == "add" else None
    return kind, f"{'u' if kind == 'add' or d.kind == 'uint' else 's'}{d.bits}"


@functools.cache
def update(kind: str, space: str, dtype: str, scope: str = "device", order: str = "relaxed",
           silent: bool = False) -> Operation:
    """(address, x) -> the element before; nothing when silent."""
    d = find_dtype(dtype)
    value = Operand("x", kind_of(d))

    def body(b: Builder, at: LLVM, x: LLVM) -> LLVM:
        return updated(b, kind, space, d, scope, at, x, order, not silent)

    return operation(f"atomic_{kind}", (Operand("at", ADDRESS[space]), value),
                     () if silent else (Operand("d", kind_of(d)),), body)


def updated(b: Builder, kind: str, space: str, d: DType, scope: str, at: LLVM, x: LLVM,
            order: str = "relaxed", result: bool = True) -> LLVM:
    """One update; the element before when `result`."""
    found = native(kind, d)
    if found is None:
        word = Word(b, d, space, scope, at, order)
        old = word.loop(lambda now: (combined(b, kind, d, now, x), None))
        return word.value(old) if result else None
    op, type_ = found
    bits = b.bitcast(x, f"i{d.bits}") if type_[0] == "b" and b.is_float(x) else x
    if not result and op != "exch" and order in ("relaxed", "release"):
        b.call(atomics.red(op, type_, space, scope=SCOPES[scope], order=order), at, bits)
        return None
    old = b.call(atomics.atom(op, type_, space, scope=SCOPES[scope], order=order), at, bits)
    if not result:
        return None
    return b.bitcast(old, kind_of(d)) if type_[0] == "b" and b.is_float(x) else old


def combined(b: Builder, kind: str, d: DType, now: LLVM, x: LLVM) -> LLVM:
    """The new number, before it is rounded to the element's type."""
    if kind == "exchange":
        return x
    if kind in BITWISE:
        return getattr(b, BITWISE[kind])(now, x)
    if kind in EXTREMES:
        tag = ("u" if d.kind == "uint" else "") + kind_of(d)
        return BODIES[EXTREMES[kind], tag][1](b, now, x)
    if d.kind == "bool":
        return b.or_(now, x)
    return b.fadd(now, x) if b.is_float(now) else b.add(now, x)


class Word:
    """The word that holds an element, and the loop that replaces the element in it.

    Elements of 16 bits and more are words themselves; those of 8 share one with their neighbours.
    """

    def __init__(self, b: Builder, d: DType, space: str, scope: str, at: LLVM,
                 order: str = "relaxed"):
        self.b, self.d = b, d
        self.bits = max(d.bits, 16) if d.bits != 8 else 32
        self.at, self.shift = at, None
        if d.bits == 8:
            low = b.and_(at, b.const(ADDRESS[space], 3))
            self.at = b.sub(at, low)
            self.shift = b.shl(b.trunc(low, "i32") if ADDRESS[space] == "i64" else low, b.i32(3))
        element = {16: "u16", 32: "b32", 64: "b64"}[self.bits]
        self._load = memory.ld(space, element, cache="volatile")
        self._swap = atomics.atom("cas", f"b{self.bits}", space, scope=SCOPES[scope], order=order)

    def value(self, word: LLVM) -> LLVM:
        """The element of a word as a number."""
        if self.shift is not None:
            word = self.b.lshr(word, self.shift)
        return decode(self.b, self.d, [word], 1)[0]

    def with_value(self, word: LLVM, x: LLVM) -> LLVM:
        """The word with the element replaced by a number, rounded."""
        b, d = self.b, self.d
        if d.name == "tf32":
            x = round_narrow(b, d, x)
        code = encode(b, d, [x])[0]
        if self.shift is None:
            return code
        hole = b.and_(word, b.xor(b.shl(b.i32(0xFF), self.shift), b.i32(-1)))
        return b.or_(hole, b.shl(b.and_(code, b.i32(0xFF)), self.shift))

    def first(self) -> LLVM:
        return self.b.call(self._load, self.at)

    def swap(self, expected: LLVM, new: LLVM) -> LLVM:
        """Replaces the word where it is `expected`; the word before."""
        b = self.b
        if self.bits != 16:
            return b.call(self._swap, self.at, expected, new)
        halves = [b.trunc(x, "i16") for x in (expected, new)]
        return b.zext(b.call(self._swap, self.at, *halves), "i32")

    def loop(self, f: Any) -> LLVM:
        """Tries until nobody came between: f(number) -> (new number, whether to leave it as it is
        or None). The word before."""
        b = self.b

        def step(old: LLVM) -> tuple[LLVM, LLVM]:
            x, stays = f(self.value(old))
            new = self.with_value(old, x)
            new = new if stays is None else b.select(stays, old, new)
            seen = self.swap(old, new)
            return seen, b.compare("==", seen, old)

        return b.until(self.first(), step)


@functools.cache
def compare_exchange(space: str, dtype: str, scope: str = "device",
                     order: str = "relaxed") -> Operation:
    """(address, expected, x) -> the element before. Numbers are compared: -0 is 0, NaN nothing."""
    d = find_dtype(dtype)
    kind = kind_of(d)
    args = (Operand("at", ADDRESS[space]), Operand("expected", kind), Operand("x", kind))

    def body(b: Builder, at: LLVM, expected: LLVM, x: LLVM) -> LLVM:
        word = Word(b, d, space, scope, at, order)
        if d.kind != "float" and d.bits >= 16:
            low = 0xFFFF if d.bits == 16 else None
            given = [b.and_(v, b.i32(low)) if low else v for v in (expected, x)]
            return word.value(word.swap(*given))
        return word.value(word.loop(lambda now: (x, b.compare("!=", now, expected))))

    return operation("compare_exchange", args, (Operand("d", kind),), body)


# --- tiles ----------------------------------------------------------------------------------------
@functools.cache
def tile(kind: str, dtype: str, source: str, scope: str, layout: str, shape: tuple[int, ...],
         axis: int, width: int, guards: tuple[str, ...], owner: bool) -> Operation:
    """(fragment, global address, strides..., bounds... [, owner]): each element inside.

    source: the type of the fragment's numbers.  width: neighbours that one update may take.
    """
    d = find_dtype(dtype)
    how = _Access(RegisterLayout.parse(layout, shape), axis, width, guards)
    args = (Operand("x", kind_of(d), how.layout.count), *how.arguments("i64"),
            *([Operand("owner", "i32")] if owner else []))

    def body(b: Builder, x: list[LLVM], *values: LLVM) -> None:
        first = b.true(values[-1]) if owner else None
        rest = values[:-1] if owner else values
        for at, condition, positions in how.run(b, rest, "i64", d.bits // 8, first):
            _where(b, condition, lambda at=at, part=[x[p] for p in positions]: _together(
                b, kind, d, source, scope, at, part))

    return operation(f"atomic_{kind}", args, (), body)


@functools.cache
def shared_tile(kind: str, dtype: str, scope: str, panel: tuple, layout: str,
                shape: tuple[int, ...], axis: int, guards: tuple[str, ...],
                steps: tuple[int, ...], zeros: int, owner: bool) -> Operation:
    """(fragment, base, row, column, bounds... [, owner]): each element inside."""
    d = find_dtype(dtype)
    how = SharedAccess(Panel(*panel), RegisterLayout.parse(layout, shape), axis, 1, guards, steps,
                       zeros)
    args = (Operand("x", kind_of(d), how.layout.count), *how.arguments(),
            *([Operand("owner", "i32")] if owner else []))

    def body(b: Builder, x: list[LLVM], *values: LLVM) -> None:
        first = b.true(values[-1]) if owner else None
        rest = values[:-1] if owner else values
        for at, condition, (p,) in how.accesses(b, rest, first):
            _where(b, condition, lambda at=at, v=x[p]: updated(
                b, kind, "shared", d, scope, at, v, result=False))

    return operation(f"atomic_{kind}", args, (), body)


def _where(b: Builder, condition: LLVM, act: Any) -> None:
    if condition is None:
        act()
        return
    with b.when(condition):
        act()


def _together(b: Builder, kind: str, d: DType, source: str, scope: str, at: LLVM,
              values: list[LLVM]) -> None:
    """Neighbours by one instruction where there is one for them."""
    if len(values) == 1:
        updated(b, kind, "global", d, scope, at, values[0], result=False)
    elif d.name == "f32":
        b.call(atomics.red_add_vector(len(values)), at, values)
    else:
        (word,) = encode(b, d, values)
        b.call(atomics.red("add", f"{d.name}x2", scope=SCOPES[scope]), at, word)


def neighbours(kind: str, d: DType, source: DType, scope: str,
               generation: Generation) -> int:
    """How many neighbours in global memory one instruction updates as the interpreter does: numbers
    of the element's own type are not rounded before the sum."""
    vectors = generation.vector_sums
    if kind != "add":
        return 1
    if d.name == "f32":
        return 4 if vectors and scope == "device" else 1
    return 2 if source is d and (d.name == "f16" or d.name == "bf16" and vectors) else 1
