"""Intrinsics of sentinels: what a thread reads or writes is looked at, and bad elements counted.

A bad element is a NaN, an infinity, or a number that the cast on its way to memory cannot hold. The
look costs one instruction for each element, x * 0 added up, which is NaN where one of them is bad
(two where a cast has a limit below the largest f32: x is scaled so that it overflows; three where
it is one to integers, whose limits lie about another number than 0). Only a
thread whose sum is NaN looks at each of its elements, with the guards of their store, and counts;
nothing is known of the others of its warp. Words are those of tessera.runtime.sentinel_words.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.numerics import DType
from tessera.runtime.sentinel_words import FIRST, INDEX_BITS, SITE_BYTES, WORD_BYTES
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics.tiles import access_groups
from tessera.tile.cuda.ptx import atomics

LLVM = Any
KINDS = ("nan", "inf", "overflow")  # of bad elements, in the order of their words


Limits = tuple[float, float]  # numbers from the second on, and up to the first, are lost
ANY_FINITE: Limits = (-math.inf, math.inf)


def limits_of(source: DType, to: DType, rounding: str) -> Limits:
    """Numbers of `source` between these fit `to`."""
    if to.kind in ("int", "uint"):  # casts drop the fraction
        number = np.float64 if source.bits == 64 else np.float32
        most, least = number(to.max + 1), number(to.min - 1)
        if least == to.min:  # no number of the source lies between
            least = np.nextafter(least, -number(np.inf))
        return float(least), float(most)
    limit = limit_of(source, to, rounding)
    return -limit, limit


def limit_of(source: DType, to: DType, rounding: str) -> float:
    """Numbers of `source` below this, without their sign, fit `to`; inf where all finite ones do.

    A number overflows where it would round beyond the largest one: at half a unit above it, or a
    whole one towards zero (IEEE 754-2019, 7.4). Stochastic rounding may do so anywhere above it;
    it is counted from half a unit on.
    """
    if source.kind != "float" or to.kind != "float" or source.max <= to.max:
        return math.inf
    largest = float(to.max)
    unit = largest - to.value_of(to.max_code - 1)
    beyond = largest + (unit if rounding == "toward_zero" else unit / 2)
    kept = rounding != "toward_zero" and to.max_code % 2 == 0  # a tie goes to the even code
    if beyond > source.max:
        return math.inf
    number = np.float64 if source.bits == 64 else np.float32
    return float(np.nextafter(number(beyond), number(np.inf))) if kept else beyond


@functools.cache
def tile(site: int, itemsize: int, kind: str, layout: str, shape: tuple[int, ...],
         guards: tuple[str, ...], limits: Limits, owner: bool = False, held: str = "") -> Operation:
    """(fragment, address, strides..., bounds..., base of the tensor, words [, owner]): as the store
    of a fragment, whose elements are looked at where it writes them. kind: of its registers, or
    "marked any", "marked nan": `marks` of a fragment of that layout. held: "any" or "nan" of a
    value that stays inside. Of marks and of what is held threads are counted, and no first element
    is kept."""
    how = access_groups(layout, shape, -1, 1, guards)
    marked = kind.startswith("marked")
    x = Operand("x", "i32", _words(how.layout.count)) if marked else \
        Operand("x", kind, how.layout.count)  # type: ignore[arg-type]
    args = (x, *how.arguments("i64"), Operand("base", "i64"), Operand("words", "i64"),
            *([Operand("owner", "i32")] if owner else []))

    def body(b: Builder, x: list[LLVM], *values: LLVM) -> None:
        first = b.true(values[-1]) if owner else None
        *rest, base, words = values[:-1] if owner else values
        suspect = functools.reduce(b.or_, x) if marked else _quick(b, x, limits)
        with b.when(b.compare("!=", suspect, b.zero(suspect) if marked else suspect)):
            runs = how.run(b, rest, "i64", itemsize, first)
            if marked or held:
                one = _marked if marked else _is_held
                which = "nan" if "nan" in (held or kind) else "inf"
                _count_threads(b, [one(b, x, p, which, condition) for _, condition, (p,) in runs],
                               words, WORD_BYTES * KINDS.index(which), site)
                return
            found = [(at, _bad(b, x[p], limits, condition), x[p]) for at, condition, (p,) in runs]
            _count(b, found, base, words, site, itemsize)

    form = InstructionForm(args, (), body)
    return Operation("count_bad", len(args), lambda *_: form)


@functools.cache
def marks(kind: str, count: int, what: str) -> Operation:
    """(fragment) -> words with a bit for each register: a NaN, or, "any", an infinity too."""
    def body(b: Builder, x: list[LLVM]) -> list[LLVM]:
        out = []
        for start in range(0, count, 32):
            word = b.i32(0)
            for i, v in enumerate(x[start:start + 32]):
                fine = b.compare("==", v, v) if what == "nan" else \
                    b.compare("<", _size(b, v), b.like(v, math.inf))
                bit = b.i32(1 << i if i < 31 else -(1 << 31))
                word = b.or_(word, b.select(fine, b.i32(0), bit))
            out.append(word)
        return out

    args = (Operand("x", kind, count),)  # type: ignore[arg-type]
    form = InstructionForm(args, (Operand("d", "i32", _words(count)),), body)
    return Operation("mark_bad", 1, lambda _: form)


def _words(count: int) -> int:
    return -(-count // 32)


CHAINS = 4  # of sums side by side: one would wait for itself


def _quick(b: Builder, x: Sequence[LLVM], limits: Limits) -> LLVM:
    """A number that is NaN where one of them is NaN, infinite, or not between the limits; it may be
    where one is just inside."""
    low, high = limits
    middle = 0.0 if low == -high else (low + high) / 2
    limit = high - middle if middle == 0.0 else (high - middle) * (1 - 2.0**-20)
    sums: list[LLVM] = [b.like(x[0], 0.0)] * min(CHAINS, len(x))
    for i, v in enumerate(x):
        v = v if middle == 0.0 else b.fadd(v, b.like(v, -middle))
        v = v if limit == math.inf else b.fmul(v, b.like(v, _scale(b.bits(v), limit)))
        sums[i % CHAINS] = _fma(b, v, b.like(v, 0.0), sums[i % CHAINS])
    return functools.reduce(b.fadd, sums)


def _scale(bits: int, limit: float) -> float:
    """What makes an infinity of numbers from the limit on, and of few below it."""
    number = np.float64 if bits == 64 else np.float32
    most = float(np.finfo(number).max)
    return float(number(min(most, most / limit * (1 + 2.0**-20))))


def _fma(b: Builder, x: LLVM, y: LLVM, z: LLVM) -> LLVM:
    return b.call(find_instruction("fma_rn"), x, y, z) if b.bits(x) == 32 else \
        b.library("__nv_fma", x, y, z)


def _marked(b: Builder, words: Sequence[LLVM], p: int, which: str, condition: LLVM | None) -> LLVM:
    here = b.and_(b.lshr(words[p // 32], b.i32(p % 32)), b.i32(1))
    return b.true(here if condition is None else b.and_(here, b.to_int(condition)))


def _is_held(b: Builder, x: Sequence[LLVM], p: int, which: str, condition: LLVM | None) -> LLVM:
    v = x[p]
    if which == "inf":
        return _bad(b, v, ANY_FINITE, condition)
    nan = b.compare("!=", v, v)
    return nan if condition is None else b.and_(nan, condition)


@functools.cache
def element(site: int, itemsize: int, kind: str, limits: Limits, guarded: bool = False
            ) -> Operation:
    """(x, address, base of the tensor, words [, if]): one element, where the condition holds."""
    args = (Operand("x", kind), Operand("at", "i64"), Operand("base", "i64"),  # type: ignore[arg-type]
            Operand("words", "i64"), *([Operand("if", "i32")] if guarded else []))

    def body(b: Builder, x: LLVM, at: LLVM, base: LLVM, words: LLVM, *given: LLVM) -> None:
        condition = b.true(given[0]) if guarded else None
        _count(b, [(at, _bad(b, x, limits, condition), x)], base, words, site, itemsize)

    form = InstructionForm(args, (), body)
    return Operation("count_bad", len(args), lambda *_: form)


@functools.cache
def row(site: int, itemsize: int, kind: str, width: int, limits: Limits) -> Operation:
    """(vector, address of the first, left, base of the tensor, words): neighbours of a row, of
    which `left` are inside."""
    args = (Operand("x", kind, width), Operand("at", "i64"), Operand("left", "i32"),  # type: ignore[arg-type]
            Operand("base", "i64"), Operand("words", "i64"))

    def body(b: Builder, x: list[LLVM], at: LLVM, left: LLVM, base: LLVM, words: LLVM) -> None:
        found = [(b.add(at, b.const("i64", i * itemsize)),
                  _bad(b, v, limits, b.compare("<", b.i32(i), left)), v) for i, v in enumerate(x)]
        _count(b, found, base, words, site, itemsize)

    form = InstructionForm(args, (), body)
    return Operation("count_bad", len(args), lambda *_: form)


def _bad(b: Builder, x: LLVM, limits: Limits, condition: LLVM | None) -> LLVM:
    """Whether an element is there and no number between the limits: a NaN is between none."""
    low, high = limits
    if low == -high:
        fits = b.to_int(b.compare("<", _size(b, x), b.like(x, high)))
    else:
        fits = b.and_(b.to_int(b.compare("<", x, b.like(x, high))),
                      b.to_int(b.compare(">", x, b.like(x, low))))
    there = b.i32(1) if condition is None else b.to_int(condition)
    return b.compare("<", fits, there, unsigned=True)


def _size(b: Builder, x: LLVM) -> LLVM:
    return b.library("__nv_fabsf" if b.bits(x) == 32 else "__nv_fabs", x)


Found = Sequence[tuple[LLVM, LLVM, LLVM]]  # address, whether it is bad, the element


def _count(b: Builder, found: Found, base: LLVM, words: LLVM, site: int, itemsize: int) -> None:
    """Adds what a thread saw to the site's words, and offers its first element."""
    seen = functools.reduce(b.or_, [bad for _, bad, _ in found])
    with b.when(seen):
        at = b.add(words, b.const("i64", SITE_BYTES * site))
        total: list[LLVM] = [b.i32(0)] * len(KINDS)
        first = b.const("i64", -1)
        for address, bad, x in found:
            kinds = _kinds(b, x)
            total = [b.add(n, b.select(b.and_(bad, k), b.i32(1), b.i32(0)))
                     for n, k in zip(total, kinds, strict=True)]
            mine = b.select(bad, _packed(b, address, base, x, itemsize), b.const("i64", -1))
            first = b.select(b.compare("<", mine, first, unsigned=True), mine, first)
        add, least = atomics.red("add", "u64"), atomics.red("min", "u64")
        for i, n in enumerate(total):
            b.call(add, b.add(at, b.const("i64", WORD_BYTES * i)), b.zext(n, "i64"))
        b.call(least, b.add(at, b.const("i64", WORD_BYTES * FIRST)), first)


def _count_threads(b: Builder, bad: Sequence[LLVM], words: LLVM, word: int, site: int) -> None:
    with b.when(functools.reduce(b.or_, bad)):
        b.call(atomics.red("add", "u64"), b.add(words, b.const("i64", SITE_BYTES * site + word)),
               b.const("i64", 1))


def _kinds(b: Builder, x: LLVM) -> list[LLVM]:
    """Whether a bad element is each of KINDS."""
    infinite = b.compare("==", _size(b, x), b.like(x, math.inf))
    finite = b.compare("<", _size(b, x), b.like(x, math.inf))
    return [b.compare("!=", x, x), infinite, finite]


def _packed(b: Builder, address: LLVM, base: LLVM, x: LLVM, itemsize: int) -> LLVM:
    """Number in the tensor, above the element as an f32: the least of them is the first element."""
    number = b.lshr(b.sub(address, base), b.const("i64", itemsize.bit_length() - 1))
    most = b.const("i64", (1 << INDEX_BITS) - 2)
    number = b.select(b.compare("<", number, most, unsigned=True), number, most)
    value = x if b.bits(x) == 32 else b.call(find_instruction("f64_to_f32_rn"), x)
    bits = b.zext(b.bitcast(value, "i32"), "i64")
    return b.or_(b.shl(number, b.const("i64", 64 - INDEX_BITS)), bits)


__all__ = ["ANY_FINITE", "KINDS", "Limits", "element", "limit_of", "limits_of", "marks", "row",
           "tile"]
