"""Intrinsics of positions of the largest and smallest elements, as Operations for `use`."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from math import prod
from typing import Any

from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation, kind_bytes
from tessera.tile.cuda.intrinsics.reduce import element_of, exchanged, flat, kind_of_tag, reached
from tessera.tile.cuda.ptx import memory
from tessera.tile.ir.register_layout import RegisterLayout

LLVM = Any
Pair = tuple[LLVM, LLVM]  # value, position


def rest_of(layout: RegisterLayout, axes: tuple[int, ...]) -> RegisterLayout:
    for a in sorted(axes, reverse=True):
        layout = layout.drop(a)
    return layout


def _beats(name: str, tag: str) -> Callable[[Builder, LLVM, LLVM], LLVM]:
    """(builder, x, y) -> whether x comes before y whatever their positions."""
    sign = ">" if name == "argmax" else "<"

    def beats(b: Builder, x: LLVM, y: LLVM) -> LLVM:
        if tag[0] != "f":
            return b.compare(sign, x, y, unsigned=tag[0] == "u")
        only = b.and_(b.compare("!=", x, x), b.compare("==", y, y))
        return b.or_(b.compare(sign, x, y), only)

    return beats


def _chosen(b: Builder, take: LLVM, x: Pair, y: Pair) -> Pair:
    return b.select(take, x[0], y[0]), b.select(take, x[1], y[1])


def _merged(b: Builder, beats: Any, x: Pair, y: Pair) -> Pair:
    """The better of two pairs in any order of positions."""
    tied = b.xor(b.to_int(beats(b, y[0], x[0])), b.i32(1))
    earlier = b.and_(b.true(tied), b.compare("<", x[1], y[1]))
    return _chosen(b, b.or_(beats(b, x[0], y[0]), earlier), x, y)


@functools.cache
def find(name: str, tag: str, layout: str, shape: tuple[int, ...], axes: tuple[int, ...],
         lanes: tuple[int, ...]) -> Operation:
    """(fragment, thread part of the position) -> (values, positions) over this warp."""
    whole = RegisterLayout.parse(layout, shape)
    rest, kind, beats = rest_of(whole, axes), kind_of_tag(tag), _beats(name, tag)
    kept = [a for a in range(len(shape)) if a not in axes]
    within = tuple(shape[a] for a in axes)
    members = defaultdict(list)
    for i, base in enumerate(whole.bases):
        at = flat(tuple(base[a] for a in axes), within)
        members[tuple(base[a] for a in kept)].append((at, i))

    def body(b: Builder, x: list[Any], at: LLVM) -> list[list[Any]]:
        out = []
        for base in rest.bases:
            pairs = [(x[i], b.i32(n)) for n, i in sorted(members[base])]
            while len(pairs) > 1:  # neighbours: the first of a pair has the smaller position
                pairs = [_chosen(b, beats(b, pairs[i + 1][0], pairs[i][0]), pairs[i + 1], pairs[i])
                         if i + 1 < len(pairs) else pairs[i] for i in range(0, len(pairs), 2)]
            best = (pairs[0][0], b.add(at, pairs[0][1]))
            for mask in lanes:
                other = (exchanged(b, kind, best[0], mask), exchanged(b, "i32", best[1], mask))
                best = _merged(b, beats, other, best)
            out.append(best)
        return [[v for v, _ in out], [i for _, i in out]]

    form = InstructionForm((Operand("x", kind, whole.count), Operand("at", "i32")),
                           (Operand("v", kind, rest.count), Operand("i", "i32", rest.count)), body)
    return Operation(name, 2, lambda *_: form)


@functools.cache
def get(name: str, tag: str, layout: str, shape: tuple[int, ...], count: int) -> Operation:
    """(addresses of values and positions) -> the positions of the best of `count` parts."""
    kind, how, beats = kind_of_tag(tag), RegisterLayout.parse(layout, shape), _beats(name, tag)
    size = kind_bytes(kind)
    step = prod(reached(how))

    def body(b: Builder, values: LLVM, places: LLVM) -> list[Any]:
        value, place = memory.ld("shared", element_of(kind)), memory.ld("shared", "b32")
        out = []
        for base in how.bases:
            at = [flat(base, reached(how)) + step * i for i in range(count)]
            pairs = [(b.call(value, b.add(values, b.i32(size * i))),
                      b.call(place, b.add(places, b.i32(4 * i)))) for i in at]
            out.append(functools.reduce(lambda x, y: _merged(b, beats, x, y), pairs)[1])
        return out

    form = InstructionForm((Operand("values", "i32"), Operand("places", "i32")),
                           (Operand("d", "i32", how.count),), body)
    return Operation("get_best", 2, lambda *_: form)
