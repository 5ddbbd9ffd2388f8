"""Intrinsics of sums, products and maxima of the elements up to each, as Operations for `use`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tessera.lazy_dataclass import dataclass
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation, kind_bytes
from tessera.tile.cuda.intrinsics.elementwise import BODIES
from tessera.tile.cuda.intrinsics.layout_conversion import gathered
from tessera.tile.cuda.intrinsics.reduce import element_of, exchanged, kind_of_tag
from tessera.tile.cuda.ptx import memory
from tessera.tile.ir.register_layout import RegisterLayout, bits_of

LLVM = Any
Index = tuple[int, ...]


# --- what happens in which order --------------------------------------------------------------
@dataclass(frozen=True)
class ScanStep:
    """Index bits lo .. hi - 1 of the axis. warps: their thread bits, beyond a warp; none: the bits
    are in registers and lanes."""

    lo: int
    hi: int
    warps: tuple[int, ...]


def steps_of(layout: RegisterLayout, axis: int, lanes: int) -> list[ScanStep]:
    """Begins with a step within warps, perhaps of no bits, which makes the first totals.

    lanes: the thread bits by which lanes may be exchanged; see Emitter.warp_bits."""
    place = {bit[1]: i for i, bit in enumerate(layout.threads) if bit and bit[0] == axis}
    steps = [ScanStep(0, 0, ())]
    for bit in range(bits_of(layout.shape[axis])):
        warp = (place[bit],) if place.get(bit, -1) >= lanes else ()
        last = steps[-1]
        if bool(last.warps) == bool(warp):
            steps[-1] = ScanStep(last.lo, bit + 1, last.warps + warp)
        else:
            steps.append(ScanStep(bit, bit + 1, warp))
    return steps


@functools.cache
def blocks(layout: RegisterLayout, axis: int, low: int) -> tuple[Index, ...]:
    """The blocks of 2^low elements that a thread holds parts of: their first register index."""
    return tuple(dict.fromkeys(_block(base, axis, low) for base in layout.bases))


def _block(base: Index, axis: int, low: int) -> Index:
    return base[:axis] + (base[axis] >> low << low,) + base[axis + 1:]


@dataclass(frozen=True)
class Slots:
    """Shared places of the totals before a run of warp bits: by block, by the threads that belong
    to other blocks, and by the number along the run, which varies slowest."""

    others: tuple[tuple[int, int], ...]  # (thread bit, bit of the place)
    run: tuple[tuple[int, int], ...]  # (thread bit, bit of the number)
    blocks: int
    same: int  # thread bits whose threads have the same total

    @property
    def each(self) -> int:
        return self.blocks << len(self.others)

    @property
    def count(self) -> int:
        return self.each << len(self.run)


@functools.cache
def slots_of(layout: RegisterLayout, axis: int, lanes: int, number: int) -> Slots:
    step = steps_of(layout, axis, lanes)[number]
    done = {i for i, bit in enumerate(layout.threads)
            if bit is None or (bit[0] == axis and bit[1] < step.lo)}
    others = [i for i in range(len(layout.threads)) if i not in done and i not in step.warps]
    return Slots(tuple((i, at) for at, i in enumerate(others)),
                 tuple((i, at) for at, i in enumerate(step.warps)),
                 len(blocks(layout, axis, step.lo)), sum(1 << i for i in done))


# --- intrinsics ---------------------------------------------------------------------------------
def combiner(name: str, tag: str) -> Callable[[Builder, LLVM, LLVM], LLVM]:
    """(builder, what precedes, x) -> both together."""
    if name == "cummax":
        return BODIES["maximum", tag][1]
    word = {"cumsum": "add", "cumprod": "mul"}[name]
    word = f"f{word}" if tag[0] == "f" else word
    return lambda b, x, y: getattr(b, word)(x, y)


class _State:
    """Values so far, and the totals of blocks of 2^low elements."""

    def __init__(self, layout: RegisterLayout, axis: int, values: list[LLVM], low: int,
                 totals: list[LLVM]):
        self.layout, self.axis, self.values, self.low = layout, axis, list(values), low
        self.totals = dict(zip(blocks(layout, axis, low), totals, strict=True))
        self.before: dict[Index, LLVM] = {}  # what precedes a block of `start` bits; none: nothing
        self.start = low

    def results(self, b: Builder, combine: Any) -> list[list[LLVM]]:
        out = []
        for base, v in zip(self.layout.bases, self.values, strict=True):
            before = self.before.get(_block(base, self.axis, self.start))
            out.append(v if before is None else combine(b, before, v))
        return [out, list(self.totals.values())]

    def precede(self, b: Builder, combine: Any, block: Index, total: LLVM) -> None:
        """`total` precedes all parts of a block."""
        for part in blocks(self.layout, self.axis, self.start):
            if _block(part, self.axis, self.low) == block:
                old = self.before.get(part)
                self.before[part] = total if old is None else combine(b, total, old)


def _neutral(name: str, tag: str) -> float:
    """What precedes the first element without changing it."""
    kind = kind_of_tag(tag)
    if name == "cummax":
        if kind[0] == "f":
            return -float("inf")
        return 0 if tag[0] == "u" else -(1 << (63 if kind == "i64" else 31))
    return 0 if name == "cumsum" else 1


@functools.cache
def within(name: str, tag: str, layout: str, shape: tuple[int, ...], axis: int,
           lanes: int, number: int) -> Operation:
    """(values, [totals,] thread) -> (values, totals) after a step in registers and lanes."""
    how, kind, combine = RegisterLayout.parse(layout, shape), kind_of_tag(tag), combiner(name, tag)
    step = steps_of(how, axis, lanes)[number]
    lane = {bit[1]: i for i, bit in enumerate(how.threads) if bit and bit[0] == axis}

    def body(b: Builder, values: list[LLVM], *rest: Any) -> list[list[LLVM]]:
        thread = rest[-1]
        first = rest[0] if number else values
        state = _State(how, axis, values, step.lo, list(first))
        for bit in range(step.lo, step.hi):
            if bit in lane:
                _lane_bit(b, combine, state, kind, lane[bit], thread,
                          b.const(kind, _neutral(name, tag)))
            else:
                _register_bit(b, combine, state, bit)
            state.low = bit + 1
            state.totals = {block: state.totals[block]
                            for block in blocks(how, axis, bit + 1)}
        return state.results(b, combine)

    x = Operand("x", kind, how.count)
    before = Operand("t", kind, len(blocks(how, axis, step.lo)))
    after = Operand("t", kind, len(blocks(how, axis, step.hi)))
    args = (x, before, Operand("thread", "i32")) if number else (x, Operand("thread", "i32"))
    return Operation(name, len(args), lambda *_: InstructionForm(args, (x, after), body))


def _register_bit(b: Builder, combine: Any, state: _State, bit: int) -> None:
    """Two blocks of a thread become one."""
    totals = dict(state.totals)
    for block, total in state.totals.items():
        if not block[state.axis] >> bit & 1:
            continue
        lower = _block(block, state.axis, bit + 1)
        state.precede(b, combine, block, state.totals[lower])
        totals[lower] = combine(b, state.totals[lower], total)
    state.totals = totals


def _lane_bit(b: Builder, combine: Any, state: _State, kind: str, lane: int, thread: LLVM,
              neutral: LLVM) -> None:
    """The upper of two lanes puts the lower's total before its own."""
    upper = b.true(b.and_(thread, b.i32(1 << lane)))
    for block, total in state.totals.items():
        other = exchanged(b, kind, total, 1 << lane)
        state.precede(b, combine, block, b.select(upper, other, neutral))
        state.totals[block] = combine(b, total, other)


@functools.cache
def put(name: str, tag: str, layout: str, shape: tuple[int, ...], axis: int,
        lanes: int, number: int) -> Operation:
    """(totals, shared address, thread): one thread of each block writes its total."""
    how, kind = RegisterLayout.parse(layout, shape), kind_of_tag(tag)
    slots, size = slots_of(how, axis, lanes, number), kind_bytes(kind)

    def body(b: Builder, totals: list[LLVM], at: LLVM, thread: LLVM) -> None:
        place = _slot_address(b, slots, thread)
        run = b.mul(gathered(b, thread, slots.run), b.i32(slots.each))
        beyond = -(1 << len(how.threads))  # threads that only repeat others
        first = b.compare("==", b.and_(thread, b.i32(slots.same | beyond)), b.i32(0))
        start = b.add(at, b.mul(b.add(place, run), b.i32(size)))
        record = memory.st("shared", element_of(kind), guarded=True)
        for i, total in enumerate(totals):
            b.call(record, b.add(start, b.i32(size * i)), total, b.to_int(first))

    args = (Operand("t", kind, slots.blocks), Operand("at", "i32"),
            Operand("thread", "i32"))
    return Operation("put_totals", 3, lambda *_: InstructionForm(args, (), body))


def _slot_address(b: Builder, slots: Slots, thread: LLVM) -> LLVM:
    return b.mul(gathered(b, thread, slots.others), b.i32(slots.blocks))


@functools.cache
def across(name: str, tag: str, layout: str, shape: tuple[int, ...], axis: int,
           lanes: int, number: int) -> Operation:
    """(values, shared address, thread) -> (values, totals) after a run of warp bits."""
    how, kind, combine = RegisterLayout.parse(layout, shape), kind_of_tag(tag), combiner(name, tag)
    step, slots = steps_of(how, axis, lanes)[number], slots_of(how, axis, lanes, number)
    size = kind_bytes(kind)

    def body(b: Builder, values: list[LLVM], at: LLVM, thread: LLVM) -> list[list[LLVM]]:
        start = b.add(at, b.mul(_slot_address(b, slots, thread), b.i32(size)))
        mine, record = gathered(b, thread, slots.run), memory.ld("shared", element_of(kind))
        neutral = b.const(kind, _neutral(name, tag))
        totals: list[LLVM] = []
        state = _State(how, axis, values, step.lo, [neutral] * slots.blocks)
        for i, block in enumerate(blocks(how, axis, step.lo)):
            before, whole = neutral, None
            for run in range(1 << len(slots.run)):
                one = b.call(record, b.add(start, b.i32(size * (i + run * slots.each))))
                whole = one if whole is None else combine(b, whole, one)
                before = b.select(b.compare(">", mine, b.i32(run)), whole, before)
            state.precede(b, combine, block, before)
            totals.append(whole)
        return [state.results(b, combine)[0], totals]

    x = Operand("x", kind, how.count)
    args = (x, Operand("at", "i32"), Operand("thread", "i32"))
    results = (x, Operand("t", kind, slots.blocks))
    return Operation(name, 3, lambda *_: InstructionForm(args, results, body))
