"""Intrinsics of sorted rows: keys, and the steps of a bitonic network, as Operations for `use`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from tessera.lazy_dataclass import dataclass
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation, kind_bytes
from tessera.tile.cuda.intrinsics.reduce import kind_of_tag, padded, shuffled
from tessera.tile.cuda.ptx import memory
from tessera.tile.ir.register_layout import Bit, RegisterLayout, bits_of

LLVM = Any
Key = tuple[LLVM, ...]  # one word, or a 64-bit number and a position
Base = tuple[int, ...]  # the index of a register's element, without its thread's part
MOVED_BITS = 4  # of the position, that are brought into registers in place of shuffles


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
def in_order(layout: RegisterLayout) -> RegisterLayout:
    """A layout of whole rows whose thread bits along the last axis lie together, with the bits of
    the position numbered anew: registers have the lowest, then lanes, then warps, as lower bits are
    compared more often. Keys may begin anywhere; they end here."""
    last, count = len(layout.shape) - 1, iter(range(bits_of(layout.shape[-1])))
    along = layout.thread_bits(last)
    threads = list(layout.threads)
    if along and along[-1] - along[0] >= len(along):
        threads.sort(key=lambda b: (b is None, b is not None and b[0] != last))

    def numbered(bits: Sequence[Bit | None]) -> tuple[Bit | None, ...]:
        return tuple((last, next(count)) if b and b[0] == last else b for b in bits)

    registers = numbered(layout.registers)
    return RegisterLayout(padded_rows(layout), registers, numbered(threads))  # type: ignore


def padded_rows(layout: RegisterLayout) -> tuple[int, ...]:
    return (*layout.shape[:-1], padded(layout.shape)[-1])


def padded_to_power_of_two(layout: RegisterLayout) -> RegisterLayout:
    """With the registers that lie outside of rows that are no power of two long."""
    return RegisterLayout(padded_rows(layout), layout.registers, layout.threads)


def with_registers(layout: RegisterLayout, low: int) -> RegisterLayout:
    """The layout with the bits of the position from `low` on in the registers that its lowest have,
    and the others in threads, in order."""
    last = len(layout.shape) - 1
    count = sum(axis == last for axis, _ in layout.registers)
    here = iter(range(low, low + count))
    rest = iter([i for i in range(bits_of(layout.shape[-1])) if not low <= i < low + count])
    registers = tuple((last, next(here)) if b[0] == last else b for b in layout.registers)
    threads = tuple((last, next(rest)) if b and b[0] == last else b for b in layout.threads)
    return RegisterLayout(layout.shape, registers, threads)


@dataclass(frozen=True)
class Network:
    """How rows of a layout are merged: registers, lanes and all, how many bits of the position are
    those of registers, of these and lanes, and all.  parts: (lowest, end) of those that come into
    registers on the way, highest first; the rest below them is compared between lanes."""

    registers: int
    lanes: int
    all: int
    first_thread_bit: int

    @staticmethod
    def of(layout: RegisterLayout, warp_bits: int) -> Network:
        last = len(layout.shape) - 1
        along = layout.thread_bits(last)
        registers = sum(axis == last for axis, _ in layout.registers)
        lanes = registers + sum(i < warp_bits for i in along)
        return Network(registers, lanes, registers + len(along), along[0] if along else 0)

    @property
    def fits(self) -> bool:
        """Whether what warps exchange has registers to come to."""
        return self.registers > 0 or self.lanes == self.all

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        out, end = [], self.all
        while self.lanes < self.all and (
                end > self.lanes or min(end - self.registers, self.registers) >= MOVED_BITS):
            low = max(self.registers, end - self.registers)
            out.append((low, end))
            end = low
        return tuple(out)


@dataclass(frozen=True)
class SharedKeys:
    """Words of keys of a layout in shared memory, between layouts: a word is left out behind every
    32 of 4 bytes and every 16 of 8, so that neighbouring lanes meet no bank twice, whether they
    have neighbours or as many elements each as they are lanes apart."""

    layout: RegisterLayout
    size: int  # bytes of a word

    def _at(self, bit: Bit | None, row: int) -> int:
        """Bytes that a bit of the position moves a word by, or any other of a number `row`."""
        bank, width = (5 if self.size == 4 else 4), self.layout.shape[-1]
        if bit is not None and bit[0] == len(self.layout.shape) - 1:
            return self.size * ((1 << bit[1]) + (1 << bit[1] >> bank))
        return self.size * (width + (width >> bank)) << row

    @functools.cached_property
    def _flips(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes of each bit of a register's number and of a thread's; of threads that have the same
        keys each has a place of its own."""
        last, out = len(self.layout.shape) - 1, []
        others = sorted({b for b in (*self.layout.registers, *self.layout.threads)
                         if b and b[0] != last})
        rows = {b: i for i, b in enumerate(others)}
        replicas = iter(range(len(others), 99))
        for side in (self.layout.registers, self.layout.threads):
            out.append(tuple(self._at(b, rows[b] if b in rows else 0) if b else
                             self._at(None, next(replicas)) for b in side))
        return out[0], out[1]

    @property
    def bytes(self) -> int:
        return self.size + sum(map(sum, self._flips))

    def register_parts(self) -> list[int]:
        """Of each register of the fragment that exists."""
        flips, number = self._flips[0], self.layout._base
        every = {number(r): sum(f for i, f in enumerate(flips) if r >> i & 1)
                 for r in range(1 << len(flips))}
        return [every[base] for base in self.layout.bases]

    def thread_part(self, thread: str) -> str:
        """As an expression of the thread's number."""
        flips, terms, i = self._flips[1], [], 0
        while i < len(flips):
            n = 1
            while i + n < len(flips) and flips[i + n] == flips[i] << n:
                n += 1
            terms.append(f"({thread} >> {i} & {(1 << n) - 1}) * {flips[i]}")
            i += n
        return " + ".join(terms)


@functools.cache
def put(layout: str, shape: tuple[int, ...], kind: Any) -> Operation:
    """(words, address): to shared memory"""
    how = RegisterLayout.parse(layout, shape)
    held = SharedKeys(how, kind_bytes(kind))

    def body(b: Builder, words: list[LLVM], at: LLVM) -> None:
        for word, part in zip(words, held.register_parts(), strict=True):
            b.call(memory.st("shared", f"b{8 * held.size}"), b.add(at, b.i32(part)), word)

    form = InstructionForm((Operand("x", kind, how.count), Operand("at", "i32")), (), body)
    return Operation("put_keys", 2, lambda *_: form)


@functools.cache
def get(layout: str, shape: tuple[int, ...], kind: Any) -> Operation:
    """(address) -> words"""
    how = RegisterLayout.parse(layout, shape)
    held = SharedKeys(how, kind_bytes(kind))

    def body(b: Builder, at: LLVM) -> list[LLVM]:
        return [b.call(memory.ld("shared", f"b{8 * held.size}"), b.add(at, b.i32(part)))
                for part in held.register_parts()]

    form = InstructionForm((Operand("at", "i32"),), (Operand("d", kind, how.count),), body)
    return Operation("get_keys", 1, lambda *_: form)


def _words(name: str, tag: str, count: int) -> tuple[Operand, ...]:
    return tuple(Operand(f"w{i}", kind, count)  # type: ignore[arg-type]
                 for i, kind in enumerate(kinds_of(name, tag)))


def _result(words: Sequence[Sequence[LLVM]]) -> Any:
    lists = [list(w) for w in words]
    return lists if len(lists) > 1 else lists[0]


def _on_keys(label: str, name: str, tag: str, full: RegisterLayout, more: tuple[str, ...],
             step: Callable[..., dict[Base, Key]]) -> Operation:
    """(keys, more...) -> keys; step: (builder, keys by registers, more...) -> keys."""
    given = _words(name, tag, full.count)

    def body(b: Builder, *args: Any) -> Any:
        words, rest = args[:len(given)], args[len(given):]
        found = step(b, dict(zip(full.bases, zip(*words, strict=True), strict=True)), *rest)
        return _result(list(zip(*(found[base] for base in full.bases), strict=True)))

    form = InstructionForm((*given, *(Operand(m, "i32") for m in more)), given, body)
    return Operation(label, len(given) + len(more), lambda *_: form)


@functools.cache
def keys(name: str, tag: str, descending: bool, layout: str, shape: tuple[int, ...]) -> Operation:
    """(fragment, thread part of the position) -> keys, those of places beyond the rows too"""
    how = RegisterLayout.parse(layout, shape)
    full, kind, last = padded_to_power_of_two(how), kind_of_tag(tag), len(shape) - 1
    sure = shape[-1] == full.shape[-1]

    def body(b: Builder, x: list[LLVM], at: LLVM) -> Any:
        out = []
        for base in full.bases:
            position = b.add(at, b.i32(base[last]))
            there = how.number.get(base)
            out.append(last_key(b, name, tag, position) if there is None else _with_pads(
                b, name, tag, descending, x[there], position, shape[-1], sure))
        return _result(list(zip(*out, strict=True)))

    form = InstructionForm((Operand("x", kind, how.count), Operand("at", "i32")),
                           _words(name, tag, full.count), body)
    return Operation("sort_keys", 2, lambda *_: form)


@functools.cache
def values(name: str, tag: str, descending: bool, layout: str, shape: tuple[int, ...]
           ) -> Operation:
    """(keys) -> fragment of what they stand for"""
    how, kind = RegisterLayout.parse(layout, shape), kind_of_tag(tag)
    full = padded_to_power_of_two(how)

    def body(b: Builder, *words: list[LLVM]) -> list[LLVM]:
        key = dict(zip(full.bases, zip(*words, strict=True), strict=True))
        return [value_of(b, name, tag, descending, key[base]) for base in how.bases]

    given = _words(name, tag, full.count)
    result = Operand("d", "i32" if name == "argsort" else kind, how.count)
    return Operation("sorted_values", len(given), lambda *_: InstructionForm(given, (result,),
                                                                            body))


@functools.cache
def runs(name: str, tag: str, layout: str, shape: tuple[int, ...], bits: int) -> Operation:
    """(keys) -> keys of each thread in runs of so many bits of the position"""
    def step(b: Builder, keys: dict[Base, Key]) -> dict[Base, Key]:
        for top in range(bits):
            keys = _merged(b, keys, top, (2 << top) - 1)
            for bit in reversed(range(top)):
                keys = _merged(b, keys, bit, 1 << bit)
        return keys

    return _on_keys("sort_runs", name, tag, RegisterLayout.parse(layout, shape), (), step)


@functools.cache
def merge(name: str, tag: str, layout: str, shape: tuple[int, ...], low: int, end: int
          ) -> Operation:
    """(keys) -> keys after the steps of a merge by bits of the position that registers have"""
    def step(b: Builder, keys: dict[Base, Key]) -> dict[Base, Key]:
        for bit in reversed(range(low, end)):
            keys = _merged(b, keys, bit, 1 << bit)
        return keys

    return _on_keys("merge_registers", name, tag, RegisterLayout.parse(layout, shape), (), step)


def _merged(b: Builder, keys: dict[Base, Key], bit: int, flips: int) -> dict[Base, Key]:
    """A step between registers whose positions differ in the bits `flips`, of which `bit` is the
    highest."""
    out = {}
    for low in keys:
        if not low[-1] >> bit & 1:
            high = (*low[:-1], low[-1] ^ flips)
            swap = less(b, keys[high], keys[low])
            out[low] = _chosen(b, swap, keys[high], keys[low])
            out[high] = _chosen(b, swap, keys[low], keys[high])
    return out


@functools.cache
def turned(name: str, tag: str, layout: str, shape: tuple[int, ...]) -> Operation:
    """(keys, changes, i) -> keys, all of them inverted where bit i of `changes` is set: runs that
    should fall are those of inverted keys that rise, so that all threads compare alike"""
    def step(b: Builder, keys: dict[Base, Key], changes: LLVM, i: LLVM) -> dict[Base, Key]:
        mask = b.sub(b.i32(0), b.and_(b.lshr(changes, i), b.i32(1)))

        def inverted(word: LLVM) -> LLVM:
            return b.xor(word, mask if b.bits(word) == 32 else b.sext(mask, "i64"))

        return {base: tuple(map(inverted, key)) for base, key in keys.items()}

    return _on_keys("turned_keys", name, tag, RegisterLayout.parse(layout, shape),
                    ("changes", "i"), step)


@functools.cache
def across(name: str, tag: str, layout: str, shape: tuple[int, ...], first: int, mirrored: int
           ) -> Operation:
    """(keys, part, i) -> keys after a step between lanes whose part of the row differs in bit i;
    mirrored: in all bits of the position up to that

    first: the bit of a thread's number that bit 0 of its part is.
    """
    how = RegisterLayout.parse(layout, shape)
    last = len(shape) - 1
    flips = sum(1 << bit for axis, bit in how.registers if axis == last) if mirrored else 0

    def step(b: Builder, keys: dict[Base, Key], part: LLVM, i: LLVM) -> dict[Base, Key]:
        mask = b.shl(b.i32((1 + mirrored) << first), i)
        if mirrored:
            mask = b.sub(mask, b.i32(1 << first))
        upper = b.true(b.and_(b.lshr(part, i), b.i32(1)))
        out = {}
        # registers that are compared with each other's stand together, so that few live twice
        for base in sorted(keys, key=lambda base: (*base[:-1], min(base[-1], base[-1] ^ flips))):
            mine = keys[base]
            other = tuple(shuffled(b, "i64" if b.bits(k) == 64 else "i32", k, "bfly", mask)
                          for k in keys[*base[:-1], base[-1] ^ flips])
            # equal keys are equal in every part, or they are the same
            take = b.xor(less(b, other, mine), upper)
            out[base] = _chosen(b, take, other, mine)
        return out

    return _on_keys("sort_across", name, tag, how, ("part", "i"), step)


# --- in shared memory ---------------------------------------------------------------------------
class _Memory:
    """Keys of padded rows: their words in one array after another."""

    def __init__(self, name: str, tag: str, count: int):
        self.kinds, self.count = kinds_of(name, tag), count
        self.sizes = [kind_bytes(k) for k in self.kinds]

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
def put_rows(name: str, tag: str, descending: bool, layout: str, shape: tuple[int, ...]
             ) -> Operation:
    """(fragment, address, thread part of each axis' index...)"""
    how, kind = RegisterLayout.parse(layout, shape), kind_of_tag(tag)
    held = _Memory(name, tag, prod(shape[:-1]) * padded(shape)[-1])

    def body(b: Builder, x: list[LLVM], at: LLVM, *parts: LLVM) -> None:
        for value, (i, position, inside) in zip(x, _elements(b, how, parts), strict=True):
            held.write(b, at, i, key_of(b, name, tag, descending, value, position), inside)

    args = _rows_form(how, kind, True)
    return Operation("put_rows", len(args), lambda *_: InstructionForm(args, (), body))


@functools.cache
def get_rows(name: str, tag: str, descending: bool, layout: str, shape: tuple[int, ...]
             ) -> Operation:
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
