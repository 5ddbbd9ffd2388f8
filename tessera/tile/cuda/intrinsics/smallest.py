"""Intrinsics of the smallest elements of rows, as Operations for `use`.

A thread keeps its k smallest in order. Two ordered lists are joined by taking the smaller of one's
element i and the other's element k - 1 - i: these are the k smallest of both, first rising and
then falling, and log2 k steps of a bitonic merge put them in order (Batcher 1968). The lists of
lanes are joined likewise. No step depends on the numbers.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation, kind_bytes
from tessera.tile.cuda.intrinsics.reduce import (
    element_of,
    exchanged,
    flat,
    kind_of_tag,
    padded,
    reached,
)
from tessera.tile.cuda.intrinsics.sort import key_of, last_key, value_of
from tessera.tile.cuda.ptx import memory
from tessera.tile.ir.register_layout import RegisterLayout, bits_of

LLVM = Any
Keys = list[LLVM | None]  # ascending; None stands behind every number


def pairs_of_sort(n: int) -> Iterator[tuple[int, int]]:
    """Comparisons that sort n elements, a power of two (Batcher's odd-even mergesort, 1968)."""
    p = 1
    while p < n:
        k = p
        while k:
            for j in range(k % p, n - k, 2 * k):
                for i in range(min(k, n - j - k)):
                    if (i + j) // (2 * p) == (i + j + k) // (2 * p):
                        yield i + j, i + j + k
            k //= 2
        p *= 2


def _exchange(b: Builder, keys: Keys, i: int, j: int) -> None:
    x, y = keys[i], keys[j]
    if y is None:
        return
    if x is None:
        keys[i], keys[j] = y, x
        return
    swap = b.compare("<", y, x)
    keys[i], keys[j] = b.select(swap, y, x), b.select(swap, x, y)


def _smaller(b: Builder, x: LLVM | None, y: LLVM | None) -> LLVM | None:
    if x is None or y is None:
        return y if x is None else x
    return b.select(b.compare("<", y, x), y, x)


def merge_smallest(b: Builder, x: Keys, y: Keys) -> Keys:
    """The smallest of two ordered lists of one length, as many as each has, in order."""
    keys = [_smaller(b, p, q) for p, q in zip(x, reversed(y), strict=True)]
    stride = len(keys) // 2
    while stride:
        for i in range(len(keys)):
            if not i & stride:
                _exchange(b, keys, i, i + stride)
        stride //= 2
    return keys


def first_of(b: Builder, keys: Sequence[LLVM], k: int) -> Keys:
    """The k smallest of a thread's keys; k: a power of two."""
    count = max(k, 1 << bits_of(len(keys)))
    spread: Keys = [*keys, *([None] * (count - len(keys)))]
    runs = [spread[i:i + k] for i in range(0, count, k)]
    for run in runs:
        for i, j in pairs_of_sort(k):
            _exchange(b, run, i, j)
    while len(runs) > 1:
        runs = [merge_smallest(b, *runs[i:i + 2]) for i in range(0, len(runs), 2)]
    return runs[0]


def _out(b: Builder, tag: str, rest: RegisterLayout, found: dict[tuple[int, ...], Keys]
         ) -> list[LLVM]:
    """Elements in the order of the result's registers; the last of all where there is none."""
    last = last_key(b, "sort", tag, b.i32(0))
    return [value_of(b, "sort", tag, False, last if key is None else (key,))
            for key in (found[base[:-1]][base[-1]] for base in rest.bases)]


@functools.cache
def find(tag: str, layout: str, shape: tuple[int, ...], k: int, lanes: tuple[int, ...]
         ) -> Operation:
    """(fragment) -> the k smallest of each row that this warp has, in all its lanes."""
    whole = RegisterLayout.parse(layout, shape)
    rest, kind = whole.first(k), kind_of_tag(tag)
    word = "i64" if kind[-2:] == "64" else "i32"
    rows = defaultdict(list)
    for i, base in enumerate(whole.bases):
        rows[base[:-1]].append(i)

    def body(b: Builder, x: list[LLVM]) -> list[LLVM]:
        found = {}
        for row, numbers in rows.items():
            keys = first_of(b, [key_of(b, "sort", tag, False, x[i], None)[0] for i in numbers],
                            1 << bits_of(k))
            for mask in lanes:
                there = [None if key is None else exchanged(b, word, key, mask) for key in keys]
                keys = merge_smallest(b, keys, there)
            found[row] = keys
        return _out(b, tag, rest, found)

    form = InstructionForm((Operand("x", kind, whole.count),), (Operand("d", kind, rest.count),),
                           body)
    return Operation("smallest", 1, lambda _: form)


@functools.cache
def get(tag: str, layout: str, shape: tuple[int, ...], count: int) -> Operation:
    """(shared address) -> the smallest of `count` ordered lists of each row; layout: the result's.
    """
    kind, rest = kind_of_tag(tag), RegisterLayout.parse(layout, shape)
    size = kind_bytes(kind)
    step, k = size * prod(reached(rest)), shape[-1]

    def body(b: Builder, at: LLVM) -> list[LLVM]:
        record = memory.ld("shared", element_of(kind))

        def read(row: tuple[int, ...], part: int) -> Keys:
            first = b.add(at, b.i32(size * flat((*row, 0), reached(rest)) + step * part))
            words = [b.call(record, b.add(first, b.i32(size * i))) for i in range(k)]
            keys = [key_of(b, "sort", tag, False, w, None)[0] for w in words]
            return [*keys, *([None] * (padded(shape)[-1] - k))]

        rows = dict.fromkeys(base[:-1] for base in rest.bases)
        return _out(b, tag, rest, {row: functools.reduce(
            lambda x, y: merge_smallest(b, x, y), [read(row, i) for i in range(count)])
            for row in rows})

    form = InstructionForm((Operand("at", "i32"),), (Operand("d", kind, rest.count),), body)
    return Operation("get_smallest", 1, lambda *_: form)
