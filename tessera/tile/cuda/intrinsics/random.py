"""Philox4x32-10 inside intrinsics, bit for bit tessera.numerics.philox."""

from __future__ import annotations

import functools
from typing import Any

from tessera.numerics import find_dtype
from tessera.numerics.philox import FACTOR_0, FACTOR_1, FOLD_DOMAIN, ROUNDS, WEYL_0, WEYL_1
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.cuda.intrinsics.reduce import exchanged
from tessera.tile.cuda.intrinsics.thread_elements import operation
from tessera.tile.cuda.ptx import memory
from tessera.tile.ir.register_layout import RegisterLayout

LLVM = Any
RUN, LANE_BITS = 4, 5
MULTIPLIERS, WEYL = (FACTOR_0, FACTOR_1), (WEYL_0, WEYL_1)
KEY = (Operand("k0", "i32"), Operand("k1", "i32"))


def _product(b: Builder, x: LLVM, constant: int) -> tuple[LLVM, LLVM]:
    """(low, high) word of an unsigned product."""
    wide = b.mul(b.zext(x, "i64"), b.const("i64", constant))
    return b.trunc(wide, "i32"), b.trunc(b.lshr(wide, b.const("i64", 32)), "i32")


def philox(b: Builder, counter: list[LLVM], key: tuple[LLVM, ...]) -> list[LLVM]:
    """The four words of a counter."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        low0, high0 = _product(b, c0, MULTIPLIERS[0])
        low1, high1 = _product(b, c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = b.xor(b.xor(high1, c1), k0), low1, b.xor(b.xor(high0, c3), k1), low0
        k0, k1 = b.add(k0, b.i32(WEYL[0])), b.add(k1, b.i32(WEYL[1]))
    return [c0, c1, c2, c3]


def block(b: Builder, index: LLVM, key: tuple[LLVM, ...]) -> list[LLVM]:
    """The words of the four elements around an index (64 bits, not negative)."""
    low = b.trunc(b.lshr(index, b.const("i64", 2)), "i32")
    high = b.trunc(b.lshr(index, b.const("i64", 34)), "i32")
    return philox(b, [low, high, b.i32(0), b.i32(0)], key)


def chosen(b: Builder, words: list[LLVM], number: LLVM) -> LLVM:
    """words[number & 3]"""
    odd = b.true(b.and_(number, b.i32(1)))
    low, high = (b.select(odd, words[i + 1], words[i]) for i in (0, 2))
    return b.select(b.true(b.and_(number, b.i32(2))), high, low)


def element(b: Builder, index: LLVM, key: tuple[LLVM, ...]) -> LLVM:
    """The word of an index; negative ones count as 0."""
    index = b.select(b.compare("<", index, b.zero(index)), b.zero(index), index)
    return chosen(b, block(b, index, key), b.trunc(index, "i32"))


@functools.cache
def random_bits(dtype: str) -> Operation:
    """(index, key...) -> its word of the key's stream, for a number or a fragment."""
    kind = kind_of(find_dtype(dtype))

    def rule(x: Operand, *_: Operand) -> Any:
        def body(b: Builder, index: Any, k0: LLVM, k1: LLVM) -> Any:
            def one(i: LLVM) -> LLVM:
                return element(b, _wide(b, i, dtype), (k0, k1))

            return [one(i) for i in index] if x.count else one(index)

        return InstructionForm((Operand("x", kind, x.count), *KEY), (Operand("d", "i32", x.count),),
                               body)

    return Operation("random_bits", 3, rule)


def _wide(b: Builder, index: LLVM, dtype: str) -> LLVM:
    """An index in 64 bits."""
    d = find_dtype(dtype)
    if kind_of(d) == "i64":
        return index
    return b.zext(index, "i64") if d.kind == "uint" else b.sext(index, "i64")


@functools.cache
def random_runs(dtype: str, layout: str, shape: tuple[int, ...], signed: bool = False) -> Operation:
    """(fragment of indices, key...) -> their words, where aligned runs of four stand along the last
    axis: registers of one run share a block, and lanes that have parts of the same runs each make
    as many of them, and exchange words. signed: indices may be negative, which count as 0; then
    lanes exchange none."""
    how, last = RegisterLayout.parse(layout, shape), len(shape) - 1
    lanes = {bit[1]: i for i, bit in enumerate(how.threads) if bit and bit[0] == last
             and bit[1] < 2}
    near = max(lanes.values(), default=0) < LANE_BITS <= len(how.threads) and not signed
    shared = sorted(lanes) if near else []
    runs = list(dict.fromkeys((*base[:last], base[last] & ~3) for base in how.bases))
    together = 1 << len(shared)
    whole = len(runs) // together * together if together > 1 else 0

    def body(b: Builder, index: list[LLVM], *key: LLVM) -> list[LLVM]:
        numbers = [_wide(b, index[how.number[run]], dtype) for run in runs]
        if below := signed and dtype[0] != "u":
            numbers = [b.select(b.compare("<", i, b.zero(i)), b.zero(i), i) for i in numbers]
        found: dict[tuple[int, ...], dict[int, LLVM]] = {}
        for i in range(0, whole, together):
            made = _exchanged_blocks(b, numbers[i:i + together], key,
                                     {bit: lanes[bit] for bit in shared})
            found |= zip(runs[i:i + together], made, strict=True)
        for run, number in zip(runs[whole:], numbers[whole:], strict=True):
            found[run] = dict(enumerate(block(b, number, key)))

        def word(base: tuple[int, ...], at: LLVM) -> LLVM:
            words = found[(*base[:last], base[last] & ~3)]
            number = b.trunc(_wide(b, at, dtype), "i32")
            if below:
                number = b.select(b.compare("<", at, b.zero(at)), b.i32(0), number)
            if lanes and len(words) == RUN:
                return chosen(b, list(words.values()), number)
            one = words[base[last] & 3]
            return b.select(b.compare("<", at, b.zero(at)), words[0], one) if below else one

        return [word(base, at) for base, at in zip(how.bases, index, strict=True)]

    x = Operand("x", kind_of(find_dtype(dtype)), how.count)
    return operation("random_bits", (x, *KEY), (Operand("d", "i32", how.count),), body)


def _exchanged_blocks(b: Builder, numbers: list[LLVM], key: tuple[LLVM, ...],
                      lanes: dict[int, int]) -> list[dict[int, LLVM]]:
    """Of each of as many runs as lanes share them, the words that this lane has of it, by those
    bits of their place that are no lane's. numbers: an index in each run.  lanes: a bit of the
    place in a run -> the bit of the lane's number that it is

    The lane whose bits are u makes run u. With d between two of them each sends the other what that
    one has of its run: u gets of run u ^ d what it has itself.
    """
    lane = b.call(find_instruction("laneid"))
    own = [b.true(b.and_(b.lshr(lane, b.i32(at)), b.i32(1))) for at in lanes.values()]
    bits, n = list(lanes), 1 << len(lanes)

    def turned(xs: list[LLVM]) -> list[LLVM]:
        """xs[u ^ d] for each d."""
        for i, mine in enumerate(own):
            xs = [b.select(mine, xs[d ^ 1 << i], x) for d, x in enumerate(xs)]
        return xs

    words = block(b, turned(numbers)[0], key)
    found: list[dict[int, LLVM]] = [{} for _ in range(n)]
    for rest in (w for w in range(RUN) if not any(w >> bit & 1 for bit in bits)):
        of_lanes = [words[rest | sum((u >> i & 1) << bit for i, bit in enumerate(bits))]
                    for u in range(n)]
        masks = [sum((d >> i & 1) << at for i, at in enumerate(lanes.values())) for d in range(n)]
        got = [exchanged(b, "i32", x, mask) if mask else x
               for x, mask in zip(turned(of_lanes), masks, strict=True)]
        for run, x in enumerate(turned(got)):
            found[run][rest] = x
    return found


@functools.cache
def fold_in(data: int) -> Operation:
    """(key...) -> the two words of numerics.fold_in(key, data)."""
    words = (data & 0xFFFFFFFF, data >> 32 & 0xFFFFFFFF, FOLD_DOMAIN, 0)
    return operation("fold_in", KEY, (Operand("d", "i32", 2),), lambda b, k0, k1: philox(
        b, [b.i32(w) for w in words], (k0, k1))[:2])


@functools.cache
def launch_key() -> Operation:
    """(key..., address) -> the key; of a captured launch, which has the number of its replay at
    that address, fold_in(key, number)."""
    record = memory.ld("global", "b64", guarded=True)

    def body(b: Builder, k0: LLVM, k1: LLVM, at: LLVM) -> list[LLVM]:
        captured = b.compare("!=", at, b.zero(at))
        number = b.call(record, at, b.zext(captured, "i32"))
        low, high = b.trunc(number, "i32"), b.trunc(b.lshr(number, b.const("i64", 32)), "i32")
        made = philox(b, [low, high, b.i32(FOLD_DOMAIN), b.i32(0)], (k0, k1))
        return [b.select(captured, x, k) for x, k in zip(made[:2], (k0, k1), strict=True)]

    return operation("launch_key", (*KEY, Operand("at", "i64")), (Operand("d", "i32", 2),), body)


@functools.cache
def drop(layout: str, shape: tuple[int, ...], kind: str, threshold: int, scale: float,
         aligned: bool = False) -> Operation:
    """(fragment [1, R, C] or [C], index of the thread's first element, row stride, thread part of
    the column, key...): scaled where the element's word is at least the threshold, else 0.

    aligned: rows begin at multiples of four, so that four neighbours share one Philox block.
    """
    how = RegisterLayout.parse(layout, shape)
    column = len(shape) - 1
    by_thread = any(bit and bit[0] == column and bit[1] < 2 for bit in how.threads)
    x = Operand("x", kind, how.count)  # type: ignore[arg-type]
    args = (x, Operand("start", "i64"), Operand("stride", "i64"), Operand("part", "i32"), *KEY)

    def body(b: Builder, values: list[LLVM], start: LLVM, stride: LLVM, part: LLVM,
             *key: LLVM) -> list[LLVM]:
        @functools.cache
        def words(r: int, c: int) -> list[LLVM]:
            at = b.add(start, b.add(b.mul(stride, b.const("i64", r)), b.const("i64", c)))
            return block(b, at, key)

        def word(r: int, c: int) -> LLVM:
            if aligned and not by_thread:
                return words(r, c & ~3)[c & 3]
            if aligned:
                return chosen(b, words(r, c & ~3), b.or_(part, b.i32(c & 3)))
            at = b.add(start, b.add(b.mul(stride, b.const("i64", r)), b.const("i64", c)))
            return chosen(b, words(r, c), b.trunc(at, "i32"))

        out = []
        for base, v in zip(how.bases, values, strict=True):
            row = base[column - 1] if column else 0
            kept = b.compare(">=", word(row, base[column]), b.i32(threshold), unsigned=True)
            out.append(b.select(kept, b.fmul(v, b.const(kind, scale)), b.zero(v)))
        return out

    return operation("drop", args, (x,), body)
