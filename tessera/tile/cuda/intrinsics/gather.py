"""Intrinsics of gather and scatter: accesses whose place along one axis is a number of the tile.

Registers of the tile in groups of `width` neighbours along the axis that is contiguous in memory.
Two ways to say where: `Linear`, a byte address moved on by strides (tensors of whole bytes), and
`Cells`, a row and a column (packed tensors, shared buffers with their swizzle).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tessera.lazy_dataclass import dataclass
from tessera.numerics import DType, find_dtype
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import Operand, Operation
from tessera.tile.cuda.intrinsics import thread_elements
from tessera.tile.cuda.intrinsics.atomics import _together, _where, updated
from tessera.tile.cuda.intrinsics.formats import access, decode, encode, kind_of
from tessera.tile.cuda.intrinsics.rounding_bits import words as random_words
from tessera.tile.cuda.intrinsics.swizzle import Panel
from tessera.tile.cuda.intrinsics.thread_elements import operation
from tessera.tile.cuda.intrinsics.tiles import _Access
from tessera.tile.cuda.ptx import memory
from tessera.tile.ir.register_layout import RegisterLayout

LLVM = Any
SEEDS = (Operand("base", "i64"), Operand("key0", "i32"), Operand("key1", "i32"))


@dataclass(frozen=True)
class Pick:
    """What an intrinsic is made for; its text recreates it in emitted source.

    layout, shape   of the tile; its axes first .. first + count - 1 are the index's
    axis, width     neighbours that one access moves
    guards          per axis, as parts._Access: of the index's axes only what overhangs
    wide            whether positions are i64    limit  positions from there on are outside, 0: none
    panel           of a shared buffer, or ()    along_columns  the index runs along the last axis
    """

    space: str
    dtype: str
    layout: str
    shape: tuple[int, ...]
    first: int
    count: int
    axis: int
    width: int
    guards: tuple[str, ...]
    wide: bool = False
    limit: int = 0
    panel: tuple = ()
    along_columns: bool = False

    @property
    def text(self) -> str:
        values = [getattr(self, n) for n in self.__dataclass_fields__]
        return f"gather.Pick({', '.join(map(repr, values))})"

    @property
    def numeric(self) -> DType:
        return find_dtype(self.dtype)

    @property
    def cells(self) -> bool:
        return self.space == "shared" or self.numeric.packed


class _Picked(_Access):
    """The accesses of a Pick."""

    def __init__(self, pick: Pick):
        super().__init__(RegisterLayout.parse(pick.layout, pick.shape), pick.axis, pick.width,
                         pick.guards)
        self.pick = pick
        self.inner = range(pick.first, pick.first + pick.count)
        self.moving = [a for a in self.moving if a not in self.inner]
        index = self.layout
        for a in reversed(range(len(pick.shape))):
            index = index if a in self.inner else index.drop(a)
        self.index = index

    def arguments(self, address: str = "") -> tuple[Operand, ...]:
        """positions, then where the thread begins, the step of a position, the position that
        number 0 is, the extent, steps of the moving axes, and what the guards compare with."""
        pick = self.pick
        kind = "i64" if pick.space == "global" else "i32"
        number = "i32" if pick.space == "shared" else "i64"
        places = [Operand("at", kind)]  # type: ignore[arg-type]
        if pick.cells:
            places += [Operand("row", number), Operand("column", "i32")]  # type: ignore[arg-type]
            if pick.numeric.packed:
                places += [Operand("row_bytes", number)]  # type: ignore[arg-type]
        return (Operand("index", "i64" if pick.wide else "i32", self.index.count), *places,
                Operand("step", number), Operand("start", "i64"),  # type: ignore[arg-type]
                Operand("extent", "i64"),
                *(Operand(f"step_{a}", number) for a in self.moving),  # type: ignore[arg-type]
                *self._bounds())

    def _bounds(self) -> list[Operand]:
        out = []
        for a, guard in enumerate(self.guards):
            out += [Operand(f"left_{a}", "i32")] if guard else []
            out += [Operand(f"extent_{a}", "i32")] if guard == "at" else []
        return out

    def accesses(self, b: Builder, values: Sequence[Any],
                 owner: Any) -> list[tuple[tuple, Any, list[int]]]:
        """(where, condition, positions in the fragment) of each access."""
        pick = self.pick
        index, *rest = values
        lead = 1 + (2 if pick.cells else 0) + (pick.cells and pick.numeric.packed)
        places, (step, start, extent), rest = rest[:lead], rest[lead:lead + 3], rest[lead + 3:]
        steps = dict(zip(self.moving, rest, strict=False))
        inside = self._inside(b, rest[len(self.moving):])
        position = functools.cache(lambda i: self._position(b, index[i], start, extent))
        out = []
        for base, registers in self.groups:
            at, condition = position(self.index.number[tuple(base[a] for a in self.inner)])
            condition = condition if owner is None else b.and_(owner, condition)
            for a, test in inside.items():
                condition = b.and_(condition, test(base[a]))
            move = self._cell if pick.cells else self._byte
            out.append((move(b, places, at, step, steps, base), condition, registers))
        return out

    def _position(self, b: Builder, number: LLVM, start: LLVM, extent: LLVM) -> tuple[LLVM, LLVM]:
        """(position along the axis, whether it is there)"""
        number = number if self.pick.wide else b.sext(number, "i64")
        at = b.add(number, start)
        here = b.compare("<", at, extent, unsigned=True)
        if self.pick.limit:
            limit = b.const("i64", self.pick.limit)
            here = b.and_(here, b.compare("<", number, limit, unsigned=True))
        return at, here

    def _byte(self, b: Builder, places: list, at: LLVM, step: LLVM, steps: dict,
              base: tuple[int, ...]) -> tuple:
        where = b.add(places[0], b.mul(at, step))
        for a, stride in steps.items():
            where = b.add(where, b.mul(stride, b.const("i64", base[a]))) if base[a] else where
        if self._across(base):
            where = b.add(where, b.const("i64", self._across(base) * self.pick.numeric.bits // 8))
        return (where,)

    def _across(self, base: tuple[int, ...]) -> int:
        """Elements that a register lies further along the columns."""
        return base[self.pick.axis] if self.pick.axis >= 0 else 0

    def _cell(self, b: Builder, places: list, at: LLVM, step: LLVM, steps: dict,
              base: tuple[int, ...]) -> tuple:
        """An address; of packed types that of the row, and the element of it."""
        first, row, column, *row_bytes = places
        kind = "i32" if self.pick.space == "shared" else "i64"
        small = b.trunc(at, "i32")
        if self.pick.along_columns:
            column = b.add(column, small)
        else:
            row = b.add(row, b.mul(small if kind == "i32" else at, step))
            right = self._across(base)
            column = b.add(column, b.i32(right)) if right else column
        for a, stride in steps.items():
            row = b.add(row, b.mul(stride, b.const(kind, base[a]))) if base[a] else row
        if row_bytes:
            return b.add(first, b.mul(row, row_bytes[0])), column
        element = thread_elements.swizzled(self.pick.panel).rule().body(b, row, column)
        return (b.add(first, b.mul(element, b.i32(Panel(*self.pick.panel).size))),)


@functools.cache
def load(pick: Pick, fill: float = 0, hardware: bool = False) -> Operation:
    """(positions, where...) -> the fragment; `fill` where a position is outside."""
    how, d = _Picked(pick), pick.numeric
    args = how.arguments()
    result = Operand("d", kind_of(d), how.layout.count)

    def body(b: Builder, *values: Any) -> list[LLVM]:
        out: list[Any] = [None] * how.layout.count
        for where, condition, registers in how.accesses(b, values, None):
            found = _read(b, pick, where, b.to_int(condition), hardware)
            for r, x in zip(registers, found, strict=True):
                out[r] = b.select(condition, x, b.like(x, fill)) if fill or d.packed else x
        return out

    return operation(f"gather_{d}", args, (result,), body)


def _read(b: Builder, pick: Pick, where: tuple, condition: LLVM, hardware: bool) -> list[LLVM]:
    d = pick.numeric
    if d.packed:
        read = thread_elements.load_packed(pick.space, d.name, True, hardware)
        return [read.rule().body(b, *where, condition)]
    element, vector = access(d, pick.width)
    got = b.call(memory.ld(pick.space, element, vector, guarded=True), *where, condition)
    return decode(b, d, got if isinstance(got, list) else [got], pick.width, hardware)


@functools.cache
def store(pick: Pick, owner: bool = False, rounding: str = "nearest_even", saturate: bool = False,
          hardware: bool = False) -> Operation:
    """(fragment, positions, where... [, base, key, key] [, owner]): what is outside is left out.

    For stochastic rounding the tensor's base and the two words of the key.
    """
    how, d, draws = _Picked(pick), pick.numeric, rounding == "stochastic"

    def act(b: Builder, where: tuple, condition: LLVM, x: list[LLVM], seeds: tuple) -> None:
        if d.packed:
            record = thread_elements.store_packed(
                pick.space, d.name, True, hardware, rounding, saturate)
            record.rule().body(b, *where, x[0], b.to_int(condition))
            return
        random = None
        if draws:
            number = b.lshr(b.sub(where[0], seeds[0]), b.const("i64", d.bits // 16))
            random = random_words(b, number, len(x), seeds[1:])
        words = encode(b, d, x, hardware, rounding, saturate, random)
        element, vector = access(d, pick.width)
        b.call(memory.st(pick.space, element, vector, guarded=True), *where,
               words if len(words) > 1 else words[0], b.to_int(condition))

    return _writing(f"scatter_{d}", how, act, SEEDS if draws else (), owner)


@functools.cache
def add(pick: Pick, source: str, scope: str = "device", owner: bool = False) -> Operation:
    """(fragment, positions, where... [, owner]): each added as one step."""
    how, d = _Picked(pick), pick.numeric

    def act(b: Builder, where: tuple, condition: LLVM, x: list[LLVM], seeds: tuple) -> None:
        def one() -> None:
            if pick.space == "global":
                _together(b, "add", d, source, scope, where[0], x)
            else:
                updated(b, "add", pick.space, d, scope, where[0], x[0], result=False)

        _where(b, condition, one)

    return _writing(f"scatter_add_{d}", how, act, (), owner)


@functools.cache
def update(pick: Pick, kind: str, scope: str = "device", owner: bool = False,
           read: bool = True) -> Operation:
    """(fragment, positions, where... [, owner]) -> the elements before; each as one step."""
    how, d = _Picked(pick), pick.numeric
    x = Operand("x", kind_of(d), how.layout.count)
    args = (x, *how.arguments(), *([Operand("owner", "i32")] if owner else []))

    def body(b: Builder, values: list[LLVM], *rest: Any) -> Any:
        mine = b.true(rest[-1]) if owner else None
        before = b.array(f"before_{x}", x.kind, x.count) if read else None
        for where, condition, (r,) in how.accesses(b, rest[:-1] if owner else rest, mine):
            if read:
                b.write(before, b.i32(r), b.zero(values[r]))
            with b.when(condition):
                old = updated(b, kind, pick.space, d, scope, where[0], values[r], result=read)
                if read:
                    b.write(before, b.i32(r), old)
        return [b.read(before, b.i32(r)) for r in range(how.layout.count)] if read else None

    return operation(f"atomic_{kind}_{d}", args, (x,) if read else (), body)


def _writing(name: str, how: _Picked, act: Callable, more: tuple[Operand, ...],
             owner: bool) -> Operation:
    args = (Operand("x", kind_of(how.pick.numeric), how.layout.count), *how.arguments(), *more,
            *([Operand("owner", "i32")] if owner else []))

    def body(b: Builder, x: list[LLVM], *values: Any) -> None:
        mine = b.true(values[-1]) if owner else None
        values = values[:-1] if owner else values
        seeds = values[len(values) - len(more):] if more else ()
        for where, condition, registers in how.accesses(b, values[:len(values) - len(more)], mine):
            act(b, where, condition, [x[r] for r in registers], seeds)

    return operation(name, args, (), body)


__all__ = ["Pick", "add", "load", "store", "update"]
