"""Intrinsics of sorted rows: keys, and the steps of a bitonic network, as Operations for `use`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation
from tessera.tile.cuda.intrinsics.reduce import exchanged, kind_of_tag, padded
from tessera.tile.cuda.ptx import memory
from tessera.tile.ir.register_layout import Bit, RegisterLayout, bits_of

LLVM = Any
Key = tuple[LLVM, ...]  # one word, or a 64-bit number and a position


# --- keys ---------------------------------------------------------------------------------------
def kinds_of(name: str, tag: str) -> tuple[str, ...]:
    """Registers of a key."""
    kind = kind_of_tag(tag)
    wide = "i64" if kind[-2:] == "64" else "i32"
    if name == "sort":
        return (wide,)
    return ("i64",) if wide == "i32" else ("i64", "i32")


def key_of(b: Builder, name: str, tag: str, descending: bool, x: LLVM, position: LLVM) -> Key:
    """The key of an element."""
    kind = "i64" if kind_of_tag(tag)[-2:] == "64" else "i32"
    bits = b.bitcast(x, kind) if tag[0] == "f" else x
    if tag[0] == "f":
        bits = _ordered(b, name, x, bits)
    elif tag[0] == "u":
        bits = b.xor(bits, b.like(bits, -(1 << b.bits(bits) - 1)))
    if descending:
        bits = b.xor(bits, b.like(bits, -1))
    if name == "sort":
        return (bits,)
    if kind == "i64":
        return bits, position
    high = b.shl(b.sext(bits, "i64"), b.const("i64", 32))
    return (b.or_(high, b.zext(position, "i64")),)


def _ordered(b: Builder, name: str, x: LLVM, bits: LLVM) -> LLVM:
    """Bits of a float as an integer of the same order; all NaN alike, above everything."""
    width = b.bits(bits)
    most = (1 << width - 1) - 1
    if name == "argsort":  # 0 and -0 are equal
        bits = b.select(b.compare("==", x, b.zero(x)), b.zero(bits), bits)
    flip = b.and_(b.ashr(bits, b.like(bits, width - 1)), b.like(bits, most))
    return b.select(b.compare("!=", x, x), b.like(bits, most), b.xor(bits, flip))


def value_of(b: Builder, name: str, tag: str, descending: bool, key: Key) -> LLVM:
    """What a key stands for: the number, or the position."""
    if name == "argsort":
        return key[1] if len(key) > 1 else b.trunc(key[0], "i32")
    bits = b.xor(key[0], b.like(key[0], -1)) if descending else key[0]
    width = b.bits(bits)
    if tag[0] == "u":
        return b.xor(bits, b.like(bits, -(1 << width - 1)))
    if tag[0] != "f":
        return bits
    flip = b.and_(b.ashr(bits, b.like(bits, width - 1)), b.like(bits, (1 << width - 1) - 1))
    return b.bitcast(b.xor(bits, flip), kind_of_tag(tag))


def last_key(b: Builder, name: str, tag: str, position: LLVM) -> Key:
    """The key of a place beyond the row: not before any other."""
    kinds = kinds_of(name, tag)
    if name == "sort":
        return (b.const(kinds[0], (1 << (63 if kinds[0] == "i64" else 31)) - 1),)
    if len(kinds) == 2:
        return b.const("i64", (1 << 63) - 1), position
    return (b.or_(b.const("i64", 0x7FFFFFFF << 32), b.zext(position, "i64")),)


def less(b: Builder, x: Key, y: Key) -> LLVM:
    """Whether key x stands before key y."""
    before = b.compare("<", x[0], y[0])
    if len(x) == 1:
        return before
    tied = b.and_(b.compare("==", x[0], y[0]), b.compare("<", x[1], y[1]))
    return b.or_(before, tied)


def _chosen(b: Builder, c: LLVM, x: Key, y: Key) -> Key:
    return tuple(b.select(c, p, q) for p, q in zip(x, y, strict=True))


def _with_pads(b: Builder, name: str, tag: str, descending: bool, x: LLVM, position: LLVM,
               length: int, sure: bool) -> Key:
    key = key_of(b, name, tag, descending, x, position)
    if sure:
        return key
    inside = b.compare("<", position, b.i32(length))
    return _chosen(b, inside, key, last_key(b, name, tag, position))


# --- in registers -------------------------------------------------------------------------------
def by_cost(layout: RegisterLayout) -> RegisterLayout:
    """The threads and registers of a layout, numbered along the last axis anew: what is exchanged
    for less has the lower bits of the position, since those are compared more often. Keys may begin
    anywhere; they end here."""
    last, count = len(layout.shape) - 1, iter(range(bits_of(layout.shape[-1])))

    def numbered(bits: tuple[Bit | None, ...]) -> tuple[Bit | None, ...]:
        return tuple((last, next(count)) if b and b[0] == last else b for b in bits)

    registers = numbered(layout.registers)
    return RegisterLayout(layout.shape, registers, numbered(layout.threads))  # type: ignore


def whole(layout: RegisterLayout) -> RegisterLayout:
    """With the registers that lie outside of rows that are no power of two long."""
    return RegisterLayout((*layout.shape[:-1], padded(layout.shape)[-1]), layout.registers,
                          layout.threads)


def steps_of(layout: RegisterLayout, bitonic: bool = False) -> list[tuple[int, ...]]:
    """The bits of the position in which compared elements differ, step by step; bitonic: of the
    last merge alone."""
    if bitonic:
        return [(bit,) for bit in reversed(range(bits_of(layout.shape[-1])))]
    return [flips for top in range(bits_of(layout.shape[-1]))
            for flips in (tuple(range(top + 1)), *((bit,) for bit in reversed(range(top))))]


def _words(name: str, tag: str, count: int) -> tuple[Operand, ...]:
    return tuple(Operand(f"w{i}", kind, count)  # type: ignore[arg-type]
                 for i, kind in enumerate(kinds_of(name, tag)))


def _result(words: list[list[LLVM]]) -> Any:
    return words if len(words) > 1 else words[0]


@functools.cache
def keys(name: str, tag: str, descending: bool, layout: str, shape: tuple[int, ...]) -> Operation:
    """(fragment, thread part of the position) -> keys, those of places beyond the rows too"""
    how = RegisterLayout.parse(layout, shape)
    full, kind, last = whole(how), kind_of_tag(tag), len(shape) - 1
    sure = shape[-1] == full.shape[-1]

    def body(b: Builder, x: list[LLVM], at: LLVM) -> Any:
        out = []
        for base in full.bases:
            position = b.add(at, b.i32(base[last]))
            there = how.number.get(base)
            out.append(last_key(b, name, tag, position) if there is None else _with_pads(
                b, name, tag, descending, x[there], position, shape[-1], sure))
        return _result([list(words) for words in zip(*out, strict=True)])

    form = InstructionForm((Operand("x", kind, how.count), Operand("at", "i32")),
                           _words(name, tag, full.count), body)
    return Operation("sort_keys", 2, lambda *_: form)


@functools.cache
def values(name: str, tag: str, descending: bool, layout: str, shape: tuple[int, ...]
           ) -> Operation:
    """(keys) -> fragment of what they stand for"""
    how, kind = RegisterLayout.parse(layout, shape), kind_of_tag(tag)
    full = whole(how)

    def body(b: Builder, *words: list[LLVM]) -> list[LLVM]:
        key = dict(zip(full.bases, zip(*words, strict=True), strict=True))
        return [value_of(b, name, tag, descending, key[base]) for base in how.bases]

    given = _words(name, tag, full.count)
    result = Operand("d", "i32" if name == "argsort" else kind, how.count)
    return Operation("sorted_values", len(given), lambda *_: InstructionForm(given, (result,),
                                                                            body))


@functools.cache
def in_warp(name: str, tag: str, layout: str, shape: tuple[int, ...],
            steps: tuple[tuple[int, ...], ...]) -> Operation:
    """(keys, thread) -> keys after some steps between lanes of a warp"""
    full = whole(RegisterLayout.parse(layout, shape))
    last = len(shape) - 1
    lane = {bit[1]: i for i, bit in enumerate(full.threads) if bit and bit[0] == last}

    def body(b: Builder, *given: Any) -> Any:
        *words, thread = given
        keys = dict(zip(full.bases, zip(*words, strict=True), strict=True))
        upper = functools.cache(lambda bit: b.true(b.and_(thread, b.i32(1 << lane[bit]))))
        for flips in steps:
            keys = _compared(b, keys, flips, lane, upper)
        return _result([list(words) for words in zip(*keys.values(), strict=True)])

    out = _words(name, tag, full.count)
    form = InstructionForm((*out, Operand("thread", "i32")), out, body)
    return Operation("sort_steps", len(out) + 1, lambda *_: form)


def _compared(b: Builder, keys: dict[tuple[int, ...], Key], flips: Sequence[int],
              lane: dict[int, int], upper: Callable[[int], LLVM]) -> dict[tuple[int, ...], Key]:
    """One step: positions that differ in the bits `flips`; the highest of them tells which keeps
    the smaller key."""
    mask = sum(1 << lane[bit] for bit in flips if bit in lane)
    if mask:
        def partner(key: Key) -> Key:
            return tuple(exchanged(b, "i64" if b.bits(k) == 64 else "i32", k, mask) for k in key)

        return _kept(b, keys, {base: partner(keys[_partner(base, flips, lane)]) for base in keys},
                     max(flips), lane, upper)
    out: dict[tuple[int, ...], Key] = {}
    for base in keys:
        if base in out:
            continue
        other = _partner(base, flips, lane)
        low, high = (base, other) if not base[-1] >> max(flips) & 1 else (other, base)
        swap = less(b, keys[high], keys[low])
        out[low] = _chosen(b, swap, keys[high], keys[low])
        out[high] = _chosen(b, swap, keys[low], keys[high])
    return {base: out[base] for base in keys}


def _partner(base: tuple[int, ...], flips: Sequence[int], thread: dict[int, int]
             ) -> tuple[int, ...]:
    """The register that is compared with one, in this thread or in another."""
    return (*base[:-1], base[-1] ^ sum(1 << bit for bit in flips if bit not in thread))


def _kept(b: Builder, keys: dict[tuple[int, ...], Key], others: dict[tuple[int, ...], Key],
          decides: int, thread: dict[int, int], upper: Callable[[int], LLVM]
          ) -> dict[tuple[int, ...], Key]:
    """Of each key and another thread's the one that belongs here."""
    out = {}
    for base, mine in keys.items():
        other = others[base]
        take = less(b, other, mine)
        if decides in thread:  # equal keys are equal in every part, or they are the same
            take = b.xor(take, upper(decides))
        elif base[-1] >> decides & 1:
            take = b.xor(take, b.compare("==", b.i32(0), b.i32(0)))
        out[base] = _chosen(b, take, other, mine)
    return out


# --- across warps -------------------------------------------------------------------------------
def _slots(name: str, tag: str, count: int, threads: int) -> list[list[tuple[str, int]]]:
    """(element, byte) of each word of a thread's keys: words of all threads side by side."""
    out, start = [], 0
    for kind in kinds_of(name, tag):
        size = 8 if kind == "i64" else 4
        out.append([("b64" if size == 8 else "b32", start + size * threads * i)
                    for i in range(count)])
        start += size * threads * count
    return out


@functools.cache
def put_keys(name: str, tag: str, count: int, threads: int) -> Operation:
    """(keys, address, thread)"""
    given = _words(name, tag, count)

    def body(b: Builder, *args: Any) -> None:
        *words, at, thread = args
        for word, slots in zip(words, _slots(name, tag, count, threads), strict=True):
            for x, (element, start) in zip(word, slots, strict=True):
                size = 8 if element == "b64" else 4
                place = b.add(b.add(at, b.i32(start)), b.mul(thread, b.i32(size)))
                b.call(memory.st("shared", element), place, x)

    form = InstructionForm((*given, Operand("at", "i32"), Operand("thread", "i32")), (), body)
    return Operation("put_keys", len(given) + 2, lambda *_: form)


@functools.cache
def across(name: str, tag: str, layout: str, shape: tuple[int, ...], flips: tuple[int, ...],
           threads: int) -> Operation:
    """(keys, address, thread) -> keys after a step between warps, which have put theirs there"""
    full = whole(RegisterLayout.parse(layout, shape))
    last = len(shape) - 1
    bit_of = {bit[1]: i for i, bit in enumerate(full.threads) if bit and bit[0] == last}
    mask = sum(1 << bit_of[bit] for bit in flips if bit in bit_of)
    given = _words(name, tag, full.count)

    def body(b: Builder, *args: Any) -> Any:
        *words, at, thread = args
        keys = dict(zip(full.bases, zip(*words, strict=True), strict=True))
        there, slots = b.xor(thread, b.i32(mask)), _slots(name, tag, full.count, threads)

        def read(register: int) -> Key:
            out = []
            for word in slots:
                element, start = word[register]
                place = b.add(b.add(at, b.i32(start)),
                              b.mul(there, b.i32(8 if element == "b64" else 4)))
                out.append(b.call(memory.ld("shared", element), place))
            return tuple(out)

        upper = functools.cache(lambda bit: b.true(b.and_(thread, b.i32(1 << bit_of[bit]))))
        others = {base: read(full.number[_partner(base, flips, bit_of)]) for base in keys}
        kept = _kept(b, keys, others, max(flips), bit_of, upper)
        return _result([list(words) for words in zip(*kept.values(), strict=True)])

    form = InstructionForm((*given, Operand("at", "i32"), Operand("thread", "i32")), given, body)
    return Operation("sort_across", len(given) + 2, lambda *_: form)


# --- in shared memory ---------------------------------------------------------------------------
class _Memory:
    """Keys of padded rows: their words in one array after another."""

    def __init__(self, name: str, tag: str, count: int):
        self.kinds, self.count = kinds_of(name, tag), count
        self.sizes = [8 if k == "i64" else 4 for k in self.kinds]

    def _places(self, b: Builder, at: LLVM, index: LLVM) -> list[tuple[str, LLVM]]:
        out, start = [], 0
        for kind, size in zip(self.kinds, self.sizes, strict=True):
            place = b.add(b.add(at, b.i32(start)), b.mul(index, b.i32(size)))
            out.append(("b64" if kind == "i64" else "b32", place))
            start += size * self.count
        return out

    def read(self, b: Builder, at: LLVM, index: LLVM, on: LLVM) -> Key:
        return tuple(b.call(memory.ld("shared", e, guarded=True), p, b.to_int(on))
                     for e, p in self._places(b, at, index))

    def write(self, b: Builder, at: LLVM, index: LLVM, key: Key, on: LLVM) -> None:
        for (element, place), word in zip(self._places(b, at, index), key, strict=True):
            b.call(memory.st("shared", element, guarded=True), place, word, b.to_int(on))


@functools.cache
def pad(name: str, tag: str, descending: bool, shape: tuple[int, int]) -> Operation:
    """(element, address): the last key, everywhere before the rows are written"""
    held = _Memory(name, tag, prod(shape))

    def body(b: Builder, i: LLVM, at: LLVM) -> None:
        key = last_key(b, name, tag, b.and_(i, b.i32(shape[1] - 1)))
        held.write(b, at, i, key, b.compare("<", i, b.i32(held.count)))

    form = InstructionForm((Operand("i", "i32"), Operand("at", "i32")), (), body)
    return Operation("pad_rows", 2, lambda *_: form)


def _elements(b: Builder, how: RegisterLayout,
              parts: Sequence[LLVM]) -> list[tuple[LLVM, LLVM, LLVM]]:
    """(number in the padded rows, position, whether it exists) of each register."""
    width, out = padded(how.shape)[-1], []
    for base in how.bases:
        at = [b.add(p, b.i32(i)) for p, i in zip(parts, base, strict=True)]
        row, inside = b.i32(0), b.compare("<", at[-1], b.i32(how.shape[-1]))
        for i, n in zip(at[:-1], how.shape[:-1], strict=True):
            row = b.add(b.mul(row, b.i32(n)), i)
            inside = b.and_(inside, b.compare("<", i, b.i32(n)))
        out.append((b.add(b.mul(row, b.i32(width)), at[-1]), at[-1], inside))
    return out


def _rows_form(how: RegisterLayout, kind: str, first: bool) -> tuple[Operand, ...]:
    x = (Operand("x", kind, how.count),) if first else ()  # type: ignore[arg-type]
    return (*x, Operand("at", "i32"), *(Operand(f"i{a}", "i32") for a in range(len(how.shape))))


@functools.cache
def put(name: str, tag: str, descending: bool, layout: str, shape: tuple[int, ...]) -> Operation:
    """(fragment, address, thread part of each axis' index...)"""
    how, kind = RegisterLayout.parse(layout, shape), kind_of_tag(tag)
    held = _Memory(name, tag, prod(shape[:-1]) * padded(shape)[-1])

    def body(b: Builder, x: list[LLVM], at: LLVM, *parts: LLVM) -> None:
        for value, (i, position, inside) in zip(x, _elements(b, how, parts), strict=True):
            held.write(b, at, i, key_of(b, name, tag, descending, value, position), inside)

    args = _rows_form(how, kind, True)
    return Operation("put_rows", len(args), lambda *_: InstructionForm(args, (), body))


@functools.cache
def get(name: str, tag: str, descending: bool, layout: str, shape: tuple[int, ...]) -> Operation:
    """(address, thread part of each axis' index...) -> fragment"""
    how, kind = RegisterLayout.parse(layout, shape), kind_of_tag(tag)
    held = _Memory(name, tag, prod(shape[:-1]) * padded(shape)[-1])

    def body(b: Builder, at: LLVM, *parts: LLVM) -> list[LLVM]:
        out = []
        for i, _, inside in _elements(b, how, parts):
            key = held.read(b, at, i, inside)
            out.append(value_of(b, name, tag, descending, key))
        return out

    args = _rows_form(how, kind, False)
    result = Operand("d", "i32" if name == "argsort" else kind, how.count)
    return Operation("get_rows", len(args), lambda *_: InstructionForm(args, (result,), body))


@functools.cache
def step(name: str, tag: str, descending: bool, shape: tuple[int, int]) -> Operation:
    """(pair, address, size, stride): one comparison of a merge of `size` elements

    The first step of a merge (stride = size / 2) compares mirrored positions.
    """
    held = _Memory(name, tag, prod(shape))

    def body(b: Builder, pair: LLVM, at: LLVM, size: LLVM, stride: LLVM) -> None:
        one, on = b.i32(1), b.compare("<", pair, b.i32(held.count // 2))
        inner = b.and_(pair, b.sub(stride, one))
        low = b.add(b.shl(b.sub(pair, inner), one), inner)
        mirrored = b.xor(low, b.sub(size, one))
        first = b.compare("==", b.shl(stride, one), size)
        high = b.select(first, mirrored, b.or_(low, stride))
        x, y = held.read(b, at, low, on), held.read(b, at, high, on)
        swap = b.and_(on, less(b, y, x))
        held.write(b, at, low, y, swap)
        held.write(b, at, high, x, swap)

    form = InstructionForm(tuple(Operand(n, "i32") for n in ("pair", "at", "size", "stride")), (),
                           body)
    return Operation("sort_step", 4, lambda *_: form)
