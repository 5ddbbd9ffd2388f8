"""Sorting rows: a bitonic network over the bits of the position.

Keys are integers in whose order the numbers stand: NaN last, and first in descending order, where
keys are inverted. For argsort the position is part of the key, so equal elements keep their order.
A merge of 2^s elements begins by comparing mirrored positions (all lower bits flipped) and goes on
with single bits; the smaller key always goes down (Batcher 1968, with Knuth's mirrored first step).

Rows that fit into a warp are sorted in registers and by shuffles; longer ones in shared memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from tessera.numerics import DType
from tessera.tile.cuda.emit.emitter import Emitter, kind_of
from tessera.tile.cuda.emit.exchange import convert_layout, indices, pool
from tessera.tile.cuda.emit.reductions import exchanged, kind_of_tag, padded
from tessera.tile.cuda.emit.table import emits
from tessera.tile.cuda.instruction import Form, Operand, Operation
from tessera.tile.cuda.ptx import memory
from tessera.tile.ir import Op
from tessera.tile.layouts import WARP_BITS, Bit, Layout, bits_of

Builder = Any
LLVM = Any
Key = tuple[LLVM, ...]  # one word, or a 64-bit number and a position
IN_WARP = 1024  # the longest row sorted by a warp
REGISTERS = 64  # most of them, of 32 bits, that it may take


@emits("sort", "argsort")
def _sort(e: Emitter, op: Op) -> None:
    (x,), (made,) = op.args, op.outs
    layout, dtype = e.layout(x), e.dtype(x)
    tag = ("u" if dtype.kind == "uint" else "") + kind_of(dtype)
    how = f"{op.name!r}, {tag!r}, {bool(op.attr['descending'])}"
    rows = in_warps(layout)
    words = sum(2 if k == "i64" else 1 for k in kinds_of(op.name, tag))
    short = 1 << bits_of(layout.shape[-1]) <= IN_WARP and rows.count * words <= REGISTERS
    if short and e.warp_bits:
        text = e.fresh("rows")
        e.line(f"{text} = {convert_layout(e, e.name(x), layout, rows, dtype)}")
        at = e.index(rows, len(rows.shape) - 1)
        sort = e.use(op.name, f"use(sorting.in_warp({how}, {rows.text!r}, {rows.shape}))")
        done = e.fresh("sorted")
        e.line(f"{done} = {sort}({text}, {at}, {e.thread})")
        e.define(made, convert_layout(e, done, rows, layout, made.type.dtype))
        return
    e.define(made, _in_memory(e, op.name, how, e.name(x), layout, dtype, tag))


def in_warps(layout: Layout) -> Layout:
    """A layout whose rows lie in one warp each: as it is if they do, else the low bits of the
    position in registers, the next in lanes, and other axes first over the warps."""
    last = len(layout.shape) - 1
    if all(i < WARP_BITS for i in layout.thread_bits(last)):
        return layout
    along: list[Bit] = [(last, i) for i in range(bits_of(layout.shape[last]))]
    other: list[Bit] = [(a, i) for a in range(last) for i in range(bits_of(layout.shape[a]))]
    warps = max(0, len(layout.threads) - WARP_BITS)
    lanes = min(WARP_BITS, len(layout.threads))
    over = other[:warps]
    inner = [*along[max(0, len(along) - lanes):]]
    inner += other[len(over):len(over) + lanes - len(inner)]
    used = {*over, *inner}
    spread = [*inner, *([None] * (lanes - len(inner))), *over, *([None] * (warps - len(over)))]
    return Layout(layout.shape, tuple(b for b in (*along, *other) if b not in used), tuple(spread))


def _in_memory(e: Emitter, name: str, how: str, text: str, layout: Layout, dtype: DType,
               tag: str) -> str:
    """Rows in shared memory, padded to powers of two: each step is a loop over all pairs."""
    kinds = kinds_of(name, tag)
    rows, width = prod(layout.shape[:-1]), padded(layout.shape)[-1]
    sizes = [8 if k == "i64" else 4 for k in kinds]
    at, used = pool(e, rows * width * sum(sizes))
    if used:
        e.sync()
    shape = (rows, width)
    clear = e.use("pad_rows", f"use(sorting.pad({how}, {shape}))")
    store = e.use("put_rows", f"use(sorting.put({how}, {layout.text!r}, {layout.shape}))")
    step = e.use("sort_step", f"use(sorting.step({how}, {shape}))")
    size, bit = e.fresh("size"), e.fresh("stride")
    if width > layout.shape[-1]:
        _loop(e, rows * width, clear, at)
        e.sync()
    e.line(f"{store}({', '.join([text, at, *indices(e, layout)])})")
    e.line(f"{size} = i32(2)")
    with e.block(f"while {size} <= {width}"):
        e.line(f"{bit} = i32({size} >> 1)")
        with e.block(f"while {bit} > 0"):
            e.sync()
            _loop(e, rows * width // 2, step, at, size, bit)
            e.line(f"{bit} = i32({bit} >> 1)")
        e.line(f"{size} = i32({size} * 2)")
    e.sync()
    load = e.use("get_rows", f"use(sorting.get({how}, {layout.text!r}, {layout.shape}))")
    made = e.fresh("sorted")
    e.line(f"{made} = {load}({', '.join([at, *indices(e, layout)])})")
    return made


def _loop(e: Emitter, count: int, call: str, *args: str) -> None:
    """call(0 .. count - 1, ...), dealt to the threads; what is beyond `count` does nothing."""
    i = e.fresh("turn")
    e.line(f"{i} = i32(0)")
    with e.block(f"while {i} < {count}"):
        e.line(f"{call}(i32({i} + {e.thread}), {', '.join(args)})")
        e.line(f"{i} = i32({i} + {e.lanes})")


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


# --- in a warp ----------------------------------------------------------------------------------
@functools.cache
def in_warp(name: str, tag: str, descending: bool, layout: str, shape: tuple[int, ...]
            ) -> Operation:
    """(fragment, thread part of the position, thread) -> sorted fragment, or positions"""
    how, kind = Layout.parse(layout, shape), kind_of_tag(tag)
    last = len(shape) - 1
    full = Layout((*shape[:-1], padded(shape)[-1]), how.registers, how.threads)
    lane = {bit[1]: i for i, bit in enumerate(how.threads) if bit and bit[0] == last}
    sure = shape[-1] == full.shape[-1]

    def body(b: Builder, x: list[LLVM], at: LLVM, thread: LLVM) -> list[LLVM]:
        keys = {}
        for base in full.bases:
            position = b.add(at, b.i32(base[last]))
            there = how.number.get(base)
            keys[base] = last_key(b, name, tag, position) if there is None else _with_pads(
                b, name, tag, descending, x[there], position, shape[-1], sure)
        upper = functools.cache(lambda bit: b.true(b.and_(thread, b.i32(1 << lane[bit]))))
        for top in range(bits_of(shape[-1])):
            for flips in (tuple(range(top + 1)), *((bit,) for bit in reversed(range(top)))):
                keys = _compared(b, keys, flips, lane, upper)
        return [value_of(b, name, tag, descending, keys[base]) for base in how.bases]

    result = "i32" if name == "argsort" else kind
    form = Form((Operand("x", kind, how.count), Operand("at", "i32"),
                 Operand("thread", "i32")),
                (Operand("d", result, how.count),), body)  # type: ignore[arg-type]
    return Operation(name, 3, lambda *_: form)


def _compared(b: Builder, keys: dict[tuple[int, ...], Key], flips: Sequence[int],
              lane: dict[int, int], upper: Callable[[int], LLVM]) -> dict[tuple[int, ...], Key]:
    """One step: positions that differ in the bits `flips`; the highest of them tells which keeps
    the smaller key."""
    decides = max(flips)
    mask = sum(1 << lane[bit] for bit in flips if bit in lane)
    registers = sum(1 << bit for bit in flips if bit not in lane)
    out: dict[tuple[int, ...], Key] = {}
    for base, mine in keys.items():
        partner = (*base[:-1], base[-1] ^ registers)
        if not mask:
            if base in out:
                continue
            low, high = (base, partner) if not base[-1] >> decides & 1 else (partner, base)
            swap = less(b, keys[high], keys[low])
            out[low] = _chosen(b, swap, keys[high], keys[low])
            out[high] = _chosen(b, swap, keys[low], keys[high])
            continue
        other = tuple(exchanged(b, "i64" if b.bits(k) == 64 else "i32", k, mask)
                      for k in keys[partner])
        if decides in lane:  # equal keys are equal in every part, or they are the same
            take = b.xor(less(b, other, mine), upper(decides))
        else:
            take = less(b, other, mine)
            if base[-1] >> decides & 1:
                take = b.xor(take, b.compare("==", b.i32(0), b.i32(0)))
        out[base] = _chosen(b, take, other, mine)
    return {base: out[base] for base in keys}


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

    form = Form((Operand("i", "i32"), Operand("at", "i32")), (), body)
    return Operation("pad_rows", 2, lambda *_: form)


def _elements(b: Builder, how: Layout, parts: Sequence[LLVM]) -> list[tuple[LLVM, LLVM, LLVM]]:
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


def _rows_form(how: Layout, kind: str, first: bool) -> tuple[Operand, ...]:
    x = (Operand("x", kind, how.count),) if first else ()  # type: ignore[arg-type]
    return (*x, Operand("at", "i32"), *(Operand(f"i{a}", "i32") for a in range(len(how.shape))))


@functools.cache
def put(name: str, tag: str, descending: bool, layout: str, shape: tuple[int, ...]) -> Operation:
    """(fragment, address, thread part of each axis' index...)"""
    how, kind = Layout.parse(layout, shape), kind_of_tag(tag)
    held = _Memory(name, tag, prod(shape[:-1]) * padded(shape)[-1])

    def body(b: Builder, x: list[LLVM], at: LLVM, *parts: LLVM) -> None:
        for value, (i, position, inside) in zip(x, _elements(b, how, parts), strict=True):
            held.write(b, at, i, key_of(b, name, tag, descending, value, position), inside)

    args = _rows_form(how, kind, True)
    return Operation("put_rows", len(args), lambda *_: Form(args, (), body))


@functools.cache
def get(name: str, tag: str, descending: bool, layout: str, shape: tuple[int, ...]) -> Operation:
    """(address, thread part of each axis' index...) -> fragment"""
    how, kind = Layout.parse(layout, shape), kind_of_tag(tag)
    held = _Memory(name, tag, prod(shape[:-1]) * padded(shape)[-1])

    def body(b: Builder, at: LLVM, *parts: LLVM) -> list[LLVM]:
        out = []
        for i, _, inside in _elements(b, how, parts):
            key = held.read(b, at, i, inside)
            out.append(value_of(b, name, tag, descending, key))
        return out

    args = _rows_form(how, kind, False)
    result = Operand("d", "i32" if name == "argsort" else kind, how.count)
    return Operation("get_rows", len(args), lambda *_: Form(args, (result,), body))


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

    form = Form(tuple(Operand(n, "i32") for n in ("pair", "at", "size", "stride")), (), body)
    return Operation("sort_step", 4, lambda *_: form)
