"""Intrinsics that carry a fragment from one layout to another, and what decides their routes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tessera.numerics import find_dtype
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation, kind_bytes
from tessera.tile.cuda.intrinsics.formats import decode, encode, kind_of
from tessera.tile.cuda.intrinsics.reduce import element_of, shuffled
from tessera.tile.cuda.ptx import memory
from tessera.tile.ir.register_layout import WARP_BITS, Bit, RegisterLayout

LLVM = Any
BANK_BITS = 5  # 32 banks of 4 bytes


class Route:
    """From `before` to `after`, bit by bit.

    kind: 'thread', 'warp' or 'block', who must exchange.  choices: thread bits of `after` by which
    a thread chooses among registers of `before`.
    """

    def __init__(self, before: RegisterLayout, after: RegisterLayout):
        n = max(len(before.threads), len(after.threads))
        self.before, self.after = _wide(before, n), _wide(after, n)
        self.at_thread = {b: i for i, b in enumerate(self.after.threads) if b is not None}
        self.at_register = {b: i for i, b in enumerate(self.after.registers)}
        moved = [i for i, b in enumerate(self.before.threads)
                 if b is not None and self.after.threads[i] != b]
        self.kind = "thread" if not moved else "warp" if max(moved) < WARP_BITS else "block"
        self.choices = tuple(self.at_thread[b] for b in before.registers if b in self.at_thread)

    @property
    def shuffles(self) -> int:
        return self.after.count << len(self.choices)

    def source(self, base: tuple[int, ...], chosen: int) -> int | None:
        """The register of `before` with the element `base` | thread part, for a choice of the
        thread bits `choices`; None: it lies outside of the tile."""
        index = [0] * len(base)
        for axis, bit in self.before.registers:
            if (axis, bit) in self.at_thread:
                on = chosen >> self.choices.index(self.at_thread[axis, bit]) & 1
            else:
                on = base[axis] >> bit & 1
            index[axis] |= on << bit
        return self.before.number.get(tuple(index))

    def indices(self) -> tuple[int | None, ...]:
        """The register of `before` for each of `after`, where no thread has a choice."""
        return tuple(self.source(base, 0) for base in self.after.bases)

    # --- through shared memory ----------------------------------------------------------------
    @functools.cached_property
    def bits(self) -> tuple[Bit, ...]:
        """Every index bit of both layouts."""
        every = (*self.before.registers, *self.after.registers, *self.before.threads,
                 *self.after.threads)
        return tuple(dict.fromkeys(b for b in every if b is not None))

    @functools.cached_property
    def shared_registers(self) -> tuple[Bit, ...]:
        """Index bits that are register bits on both sides."""
        return tuple(b for b in self.after.registers if b in self.before.registers)

    def vector_bits(self, size: int) -> int:
        """Index bits that one access covers on both sides: up to 16 bytes."""
        return min(len(self.shared_registers), {4: 2, 8: 1}[size])

    def bytes(self, size: int, rounds: int) -> int:
        return size << len(self.bits) - rounds

    def round_bits(self, size: int, rounds: int) -> tuple[Bit, ...]:
        return self.shared_registers[self.vector_bits(size):][:rounds]

    def address(self, size: int, rounds: int) -> dict[Bit, int]:
        """Index bit -> the address bits (in elements) that it flips.

        The lowest are those of one access. Above them lane bits of writers and readers are paired,
        w xor r, so that neither's lanes meet in a bank: an access of 16 bytes is done by 8 lanes at
        a time, on the 3 bank bits that its own leave.
        """
        low = self.shared_registers[:self.vector_bits(size)]
        banks = BANK_BITS - (size == 8) - len(low)
        writers, readers = (_lanes(x, banks) for x in (self.before, self.after))
        both = [b for b in writers if b in readers]
        first = [b for b in writers if b not in both]
        second = [b for b in readers if b not in both]
        out = {b: 1 << i for i, b in enumerate((*low, *both))}
        at = len(out)
        for pair in range(max(len(first), len(second))):
            for side in (first, second):
                if pair < len(side):
                    out[side[pair]] = 1 << at
            at += 1
        skipped = self.round_bits(size, rounds)
        for b in second[:len(first)]:  # flips its pair's bank, and has a bit of its own
            out[b] |= 1 << at
            at += 1
        for b in self.bits:
            if b not in out and b not in skipped:
                out[b] = 1 << at
                at += 1
        return out

    def members(self, layout: RegisterLayout, size: int, rounds: int, step: int) -> list[int]:
        """Registers of a layout that take part in a round."""
        chosen = self.round_bits(size, rounds)
        return [i for i, base in enumerate(layout.bases)
                if sum((base[a] >> bit & 1) << n for n, (a, bit) in enumerate(chosen)) == step]

    def joined(self, size: int, rounds: int) -> tuple[int, ...]:
        """Position in the rounds' fragments, one after another, of each register of `after`."""
        order = [i for step in range(1 << rounds)
                 for i in self.members(self.after, size, rounds, step)]
        return tuple(order.index(i) for i in range(self.after.count))


def _wide(layout: RegisterLayout, threads: int) -> RegisterLayout:
    extra = (None,) * (threads - len(layout.threads))
    return RegisterLayout(layout.shape, layout.registers, layout.threads + extra)


def _lanes(layout: RegisterLayout, count: int) -> list[Bit]:
    """Index bits of the lowest lane bits."""
    return [b for b in layout.threads[:WARP_BITS] if b is not None][:count]


def rounds_of(route: Route, size: int, most: int) -> int:
    """log2 of the rounds in which at most `most` bytes are needed, as far as registers allow."""
    possible = len(route.shared_registers) - route.vector_bits(size)
    rounds = 0
    while rounds < possible and route.bytes(size, rounds) > most:
        rounds += 1
    return rounds


def _route(before: str, after: str, shape: tuple[int, ...]) -> Route:
    return Route(RegisterLayout.parse(before, shape), RegisterLayout.parse(after, shape))


# --- registers and shuffles ---------------------------------------------------------------------
@functools.cache
def exchanged(before: str, after: str, shape: tuple[int, ...], kind: str) -> Operation:
    """(fragment, thread) -> the fragment in the other layout, within each thread or warp."""
    route = _route(before, after, shape)

    def body(b: Builder, x: list[Any], thread: LLVM) -> list[Any]:
        bit = functools.cache(lambda i: b.true(b.and_(thread, b.i32(1 << i))))
        fetch = _fetcher(b, route, kind, x, thread)
        out = []
        for base in route.after.bases:
            found = [fetch(base, chosen) for chosen in range(1 << len(route.choices))]
            for i in route.choices:
                found = [b.select(bit(i), found[j + 1], found[j]) for j in range(0, len(found), 2)]
            out.append(found[0])
        return out

    form = InstructionForm((Operand("x", kind, route.before.count), Operand("thread", "i32")),  # type: ignore
                           (Operand("d", kind, route.after.count),), body)  # type: ignore[arg-type]
    return Operation("exchanged", 2, lambda *_: form)


def _fetcher(b: Builder, route: Route, kind: str, x: list[Any],
             thread: LLVM) -> Callable[[tuple[int, ...], int], LLVM]:
    """(index of the register, choice) -> that element, from the lane that has it."""
    nothing = b.const(kind, 0)
    if route.kind == "thread":
        def own(base: tuple[int, ...], chosen: int) -> LLVM:
            at = route.source(base, chosen)
            return nothing if at is None else x[at]

        return own
    moving = _source_lane(b, route, thread)

    @functools.cache
    def fetched(register: int, constant: int) -> LLVM:
        return shuffled(b, kind, x[register], "idx", b.or_(moving, b.i32(constant)))

    def far(base: tuple[int, ...], chosen: int) -> LLVM:
        at = route.source(base, chosen)
        constant = 0
        for i, bit in enumerate(route.before.threads[:WARP_BITS]):
            if bit is not None and bit in route.at_register:
                constant |= (base[bit[0]] >> bit[1] & 1) << i
        return nothing if at is None else fetched(at, constant)

    return far


def _source_lane(b: Builder, route: Route, thread: LLVM) -> LLVM:
    """The part of the source lane's number that depends on the thread alone."""
    pairs = []
    for i, bit in enumerate(route.before.threads[:WARP_BITS]):
        if bit is None:
            pairs.append((i, i))
        elif bit in route.at_thread:
            pairs.append((route.at_thread[bit], i))
    return gathered(b, thread, pairs)


def gathered(b: Builder, x: LLVM, pairs: Sequence[tuple[int, int]]) -> LLVM:
    """The xor over (i, p) of bit i of x, put at bit p."""
    masks: dict[int, int] = {}
    for i, p in pairs:
        masks[p - i] = masks.get(p - i, 0) | 1 << i
    out = b.i32(0)
    for by, mask in masks.items():
        part = b.and_(x, b.i32(mask))
        moved = b.shl(part, b.i32(by)) if by > 0 else b.lshr(part, b.i32(-by)) if by else part
        out = b.xor(out, moved)
    return out


# --- narrow elements in words ---------------------------------------------------------------------
def _words(text: str, shape: tuple[int, ...], bits: tuple[Bit, ...]) -> list[list[int]]:
    """For each register of a layout without these bits, the registers with them."""
    layout = RegisterLayout.parse(text, shape)

    def number(base: tuple[int, ...], part: int) -> int:
        index = list(base)
        for i, (axis, bit) in enumerate(bits):
            index[axis] |= (part >> i & 1) << bit
        return layout.number[tuple(index)]

    return [[number(base, part) for part in range(1 << len(bits))]
            for base in layout.without(bits).bases]


@functools.cache
def together(text: str, shape: tuple[int, ...], bits: tuple[Bit, ...], dtype: str) -> Operation:
    """(fragment) -> words of the elements that differ in these index bits alone."""
    groups, kind = _words(text, shape, bits), find_dtype(dtype)
    rounding = "exact" if dtype == "bf16" else "nearest_even"

    def body(b: Builder, x: list[Any]) -> list[Any]:
        return [encode(b, kind, [x[i] for i in group], rounding=rounding)[0] for group in groups]

    form = InstructionForm((Operand("x", kind_of(kind), sum(map(len, groups))),),
                           (Operand("d", "i32", len(groups)),), body)
    return Operation("together", 1, lambda *_: form)


@functools.cache
def apart(text: str, shape: tuple[int, ...], bits: tuple[Bit, ...], dtype: str) -> Operation:
    """(words) -> the fragment."""
    groups, kind = _words(text, shape, bits), find_dtype(dtype)
    place = {i: (w, part) for w, group in enumerate(groups) for part, i in enumerate(group)}

    def body(b: Builder, words: list[Any]) -> list[Any]:
        found = [decode(b, kind, [word], len(group))
                 for word, group in zip(words, groups, strict=True)]
        return [found[w][part] for _, (w, part) in sorted(place.items())]

    form = InstructionForm((Operand("words", "i32", len(groups)),),
                           (Operand("d", kind_of(kind), len(place)),), body)
    return Operation("apart", 1, lambda *_: form)


# --- shared memory --------------------------------------------------------------------------------
class _Slots:
    """Where the registers of one side of a route lie in shared memory."""

    def __init__(self, route: Route, layout: RegisterLayout, kind: str, rounds: int, step: int):
        self.size, self.layout = kind_bytes(kind), layout
        self.map = route.address(self.size, rounds)
        self.width = 1 << route.vector_bits(self.size)
        self.moving = [(i, p) for i, bit in enumerate(layout.threads) if bit is not None
                       for p in range(32) if self.map[bit] >> p & 1]
        self.reach = sum({1 << p for _, p in self.moving})
        members = route.members(layout, self.size, rounds, step)
        slots = {self._constant(layout.bases[i]): i for i in members}
        self.groups = [(at, [slots.get(at + j) for j in range(self.width)])
                       for at in sorted(slots) if at % self.width == 0]
        self.members = members

    def _constant(self, base: tuple[int, ...]) -> int:
        at = 0
        for (axis, bit), flips in self.map.items():
            if (axis, bit) in self.layout.registers and base[axis] >> bit & 1:
                at ^= flips
        return at

    def addresses(self, b: Builder, start: LLVM, thread: LLVM) -> list[LLVM]:
        moving = gathered(b, thread, self.moving)

        @functools.cache
        def flipped(mask: int) -> LLVM:
            return b.add(start, b.mul(b.xor(moving, b.i32(mask)), b.i32(self.size)))

        return [b.add(flipped(at & self.reach), b.i32(self.size * (at & ~self.reach)))
                for at, _ in self.groups]


@functools.cache
def put(before: str, after: str, shape: tuple[int, ...], kind: str, rounds: int = 0, step: int = 0,
        owner: bool = False) -> Operation:
    """(fragment, shared address, thread [, owner]): the elements of a round to their places."""
    route = _route(before, after, shape)
    slots = _Slots(route, route.before, kind, rounds, step)
    args = (Operand("x", kind, route.before.count), Operand("at", "i32"),  # type: ignore[arg-type]
            Operand("thread", "i32"), *([Operand("owner", "i32")] if owner else []))
    record = memory.st("shared", element_of(kind), slots.width, guarded=owner)

    def body(b: Builder, x: list[Any], start: LLVM, thread: LLVM, *first: LLVM) -> None:
        nothing = b.const(kind, 0)
        for (_, group), at in zip(slots.groups, slots.addresses(b, start, thread), strict=True):
            values = [nothing if i is None else x[i] for i in group]
            b.call(record, at, values if len(values) > 1 else values[0], *first)

    form = InstructionForm(args, (), body)
    return Operation("put", len(args), lambda *_: form)


@functools.cache
def get(before: str, after: str, shape: tuple[int, ...], kind: str, rounds: int = 0,
        step: int = 0) -> Operation:
    """(shared address, thread) -> the registers of a round."""
    route = _route(before, after, shape)
    slots = _Slots(route, route.after, kind, rounds, step)
    record = memory.ld("shared", element_of(kind), slots.width)

    def body(b: Builder, start: LLVM, thread: LLVM) -> list[Any]:
        out: dict[int, Any] = {}
        for (_, group), at in zip(slots.groups, slots.addresses(b, start, thread), strict=True):
            got = b.call(record, at)
            for i, value in zip(group, got if slots.width > 1 else [got], strict=True):
                if i is not None:
                    out[i] = value
        return [out[i] for i in slots.members]

    form = InstructionForm((Operand("at", "i32"), Operand("thread", "i32")),
                           (Operand("d", kind, len(slots.members)),), body)  # type: ignore[arg-type]
    return Operation("get", 2, lambda *_: form)


# --- rows: reshapes of extents that are no powers of two -----------------------------------------
class _Rows:
    """Row-major places of the elements of a tile, without padding."""

    def __init__(self, layout: RegisterLayout, size: int):
        self.layout, self.size = layout, size
        self.strides = [1] * len(layout.shape)
        for a in reversed(range(len(layout.shape) - 1)):
            self.strides[a] = self.strides[a + 1] * layout.shape[a + 1]
        self.guarded = [a for a in range(len(layout.shape)) if layout.overhangs(a)]

    def each(self, b: Builder, start: LLVM, parts: Sequence[LLVM],
             owner: LLVM | None = None) -> list[tuple[LLVM, LLVM | None]]:
        """(address, condition) of each register."""
        flat = b.i32(0)
        for part, stride in zip(parts, self.strides, strict=True):
            flat = b.add(flat, b.mul(part, b.i32(stride)))
        first = b.add(start, b.mul(flat, b.i32(self.size)))

        @functools.cache
        def inside(axis: int, at: int) -> LLVM:
            return b.compare("<", parts[axis], b.i32(self.layout.shape[axis] - at))

        out = []
        for base in self.layout.bases:
            condition = owner
            for a in self.guarded:
                test = inside(a, base[a])
                condition = test if condition is None else b.and_(condition, test)
            offset = sum(i * s for i, s in zip(base, self.strides, strict=True))
            out.append((b.add(first, b.i32(self.size * offset)), condition))
        return out


@functools.cache
def put_rows(layout: str, shape: tuple[int, ...], kind: str, owner: bool = False) -> Operation:
    """(fragment, shared address, thread part of each axis' index... [, owner])"""
    how = RegisterLayout.parse(layout, shape)
    rows = _Rows(how, kind_bytes(kind))
    args = (Operand("x", kind, how.count), Operand("at", "i32"),  # type: ignore[arg-type]
            *(Operand(f"i{a}", "i32") for a in range(len(shape))),
            *([Operand("owner", "i32")] if owner else []))

    def body(b: Builder, x: list[Any], start: LLVM, *given: LLVM) -> None:
        parts = given[:len(shape)]
        first = b.true(given[-1]) if owner else None
        for (at, on), value in zip(rows.each(b, start, parts, first), x, strict=True):
            record = memory.st("shared", element_of(kind), guarded=on is not None)
            b.call(record, at, value, *([b.to_int(on)] if on is not None else []))

    form = InstructionForm(args, (), body)
    return Operation("put_rows", len(args), lambda *_: form)


@functools.cache
def get_rows(layout: str, shape: tuple[int, ...], kind: str) -> Operation:
    """(shared address, thread part of each axis' index...) -> fragment; 0 outside of the tile"""
    how = RegisterLayout.parse(layout, shape)
    rows = _Rows(how, kind_bytes(kind))
    args = (Operand("at", "i32"), *(Operand(f"i{a}", "i32") for a in range(len(shape))))

    def body(b: Builder, start: LLVM, *parts: LLVM) -> list[Any]:
        out = []
        for at, on in rows.each(b, start, parts):
            record = memory.ld("shared", element_of(kind), guarded=on is not None)
            out.append(b.call(record, at, *([b.to_int(on)] if on is not None else [])))
        return out

    form = InstructionForm(args, (Operand("d", kind, how.count),), body)  # type: ignore[arg-type]
    return Operation("get_rows", len(args), lambda *_: form)
