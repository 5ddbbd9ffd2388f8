"""Intrinsics of reductions, as Operations for `use`."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import Any

from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation, kind_bytes
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics.elementwise import BODIES
from tessera.tile.cuda.ptx import memory, warp
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.register_layout import RegisterLayout, bits_of

CHAINS = 4  # independent partial results, which hide the latency of one operation


def combiner(name: str, tag: str) -> Any:
    """(builder, x, y) -> the two combined."""
    join, floats = OPS[name].joined_by, tag[0] == "f"
    if join == "add":
        return (lambda b, x, y: b.fadd(x, y)) if floats else (lambda b, x, y: b.add(x, y))
    if join == "mul":
        return (lambda b, x, y: b.fmul(x, y)) if floats else (lambda b, x, y: b.mul(x, y))
    return BODIES[join, tag][1]


def kind_of_tag(tag: str) -> Any:
    return tag.removeprefix("u")


@functools.cache
def reduce(name: str, tag: str, layout: str, shape: tuple[int, ...], axis: int,
           lanes: tuple[int, ...], divided: bool = False) -> Operation:
    """(fragment) -> each result's partial value over this warp, in all its lanes; divided: in those
    of RegisterLayout.divided(axis)."""
    whole = RegisterLayout.parse(layout, shape)
    rest, kind, combine = whole.drop(axis), kind_of_tag(tag), combiner(name, tag)
    members = defaultdict(list)
    for i, base in enumerate(whole.bases):
        members[base[:axis] + base[axis + 1:]].append(i)

    def body(b: Builder, x: list[Any]) -> list[Any]:
        out = [chained(b, combine, [x[i] for i in members[base]]) for base in rest.bases]
        if divided:
            return divided_rows(b, kind, out, lanes, combine)
        for mask in lanes:
            out = [combine(b, v, exchanged(b, kind, v, mask)) for v in out]
        return out

    form = InstructionForm((Operand("x", kind, whole.count),),
                           (Operand("d", kind, whole.divided(axis).count  # type: ignore[union-attr]
                                    if divided else rest.count),), body)
    return Operation(name, 1, lambda _: form)


def chained(b: Builder, combine: Any, values: list[Any]) -> Any:
    """All values combined, in CHAINS chains and then those."""
    chains = values[:CHAINS]
    for i, v in enumerate(values[CHAINS:]):
        chains[i % CHAINS] = combine(b, chains[i % CHAINS], v)
    while len(chains) > 1:
        chains = [combine(b, *chains[i:i + 2]) if i + 1 < len(chains) else chains[i]
                  for i in range(0, len(chains), 2)]
    return chains[0]


def divided_rows(b: Builder, kind: str, rows: list[Any], lanes: Sequence[int],
                 combine: Any) -> list[Any]:
    """What lanes have of each row, combined over all of them and left in RegisterLayout.divided.

    lanes: the bits in which their numbers differ. Lanes with several rows send each other half of
    what they have: so each combines ever fewer rows, in the order in which it would have combined
    all.
    """
    lane = b.call(find_instruction("laneid"))
    for mask in lanes:
        if len(rows) == 1:
            rows = [combine(b, rows[0], exchanged(b, kind, rows[0], mask))]
            continue
        upper = b.true(b.and_(lane, b.i32(mask)))
        rows = [combine(b, b.select(upper, high, low),
                        exchanged(b, kind, b.select(upper, low, high), mask))
                for low, high in zip(rows[::2], rows[1::2], strict=True)]
    return rows


def exchanged(b: Builder, kind: str, x: Any, mask: int) -> Any:
    """The value of the lane whose number differs in `mask`."""
    return shuffled(b, kind, x, "bfly", b.i32(mask))


def shuffled(b: Builder, kind: str, x: Any, mode: str, lane: Any) -> Any:
    """A shuffle of registers of any kind; see ptx/warp.shfl."""
    if kind in ("i32", "f32"):
        return b.call(warp.shfl(mode, kind), x, lane)
    bits = b.bitcast(x, "i64") if kind == "f64" else x
    low, high = b.trunc(bits, "i32"), b.trunc(b.lshr(bits, b.const("i64", 32)), "i32")
    low, high = (b.call(warp.shfl(mode), v, lane) for v in (low, high))
    bits = b.or_(b.zext(low, "i64"), b.shl(b.zext(high, "i64"), b.const("i64", 32)))
    return b.bitcast(bits, "f64") if kind == "f64" else bits


def element_of(kind: str) -> str:
    return {"i32": "b32", "i64": "b64"}.get(kind, kind)


def padded(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Extents rounded up to powers of two: what registers beyond the tile write is not read."""
    return tuple(1 << bits_of(n) for n in shape)


def reached(layout: RegisterLayout) -> tuple[int, ...]:
    """Extents of shared memory for all that threads hold, rounded up to powers of two: an
    accumulator of few rows reaches beyond them."""
    return padded(tuple(max(n, layout.reach(a)) for a, n in enumerate(layout.shape)))


def flat(base: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Row-major number of an element."""
    at = 0
    for i, n in zip(base, shape, strict=True):
        at = at * n + i
    return at


@functools.cache
def put(tag: str, layout: str, shape: tuple[int, ...]) -> Operation:
    """(fragment, shared address, condition): elements to their row-major places."""
    kind, how = kind_of_tag(tag), RegisterLayout.parse(layout, shape)
    size = kind_bytes(kind)

    def body(b: Builder, x: list[Any], at: Any, condition: Any) -> None:
        record = memory.st("shared", element_of(kind), guarded=True)
        for base, v in zip(how.bases, x, strict=True):
            b.call(record, b.add(at, b.i32(size * flat(base, reached(how)))), v, condition)

    form = InstructionForm((Operand("x", kind, how.count), Operand("at", "i32"),
                            Operand("if", "i32")), (),
                           body)
    return Operation("put_parts", 3, lambda *_: form)


@functools.cache
def get(name: str, tag: str, layout: str, shape: tuple[int, ...], count: int) -> Operation:
    """(shared address) -> `count` partial values of each element, combined in order."""
    kind, how, combine = kind_of_tag(tag), RegisterLayout.parse(layout, shape), combiner(name, tag)
    size = kind_bytes(kind)
    step = size * prod(reached(how))

    def body(b: Builder, at: Any) -> list[Any]:
        record = memory.ld("shared", element_of(kind))
        out = []
        for base in how.bases:
            first = b.add(at, b.i32(size * flat(base, reached(how))))
            parts = [b.call(record, b.add(first, b.i32(step * i))) for i in range(count)]
            out.append(functools.reduce(lambda x, y: combine(b, x, y), parts))
        return out

    form = InstructionForm((Operand("at", "i32"),), (Operand("d", kind, how.count),), body)
    return Operation("get_parts", 1, lambda _: form)


@functools.cache
def join(name: str, tag: str, count: int, elements: int, threads: int) -> Operation:
    """(shared address, another, condition): `count` partial values of the elements of a thread,
    which are `threads` apart, combined in order and written to the other address."""
    kind, combine = kind_of_tag(tag), combiner(name, tag)
    size = kind_bytes(kind)

    def body(b: Builder, at: Any, to: Any, condition: Any) -> None:
        load = memory.ld("shared", element_of(kind))
        record = memory.st("shared", element_of(kind), guarded=True)
        for first in range(0, elements, threads):
            parts = [b.call(load, b.add(at, b.i32(size * (first + elements * i))))
                     for i in range(count)]
            made = functools.reduce(lambda x, y: combine(b, x, y), parts)
            b.call(record, b.add(to, b.i32(size * first)), made, condition)

    form = InstructionForm((Operand("at", "i32"), Operand("to", "i32"), Operand("if", "i32")), (),
                           body)
    return Operation("join_parts", 3, lambda *_: form)
