"""Intrinsics that move tiles in and out of shared memory, and from global to shared memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tessera.numerics import DType, find_dtype
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation
from tessera.tile.cuda.intrinsics import thread_elements
from tessera.tile.cuda.intrinsics.formats import access, decode, encode
from tessera.tile.cuda.intrinsics.swizzle import Addresses, Panel
from tessera.tile.cuda.intrinsics.tiles import _Access, _kind
from tessera.tile.cuda.ptx import copy_async, memory
from tessera.tile.ir.register_layout import RegisterLayout

PLACE = (Operand("base", "i32"), Operand("row", "i32"), Operand("column", "i32"))


class SharedAccess(_Access):
    """Registers of a layout in groups of `width` neighbours of a row of a shared buffer.

    steps: rows of the buffer that one step along each axis of the tile is; 0 for `axis`, along
    which the columns run.
    """

    def __init__(self, panel: Panel, layout: RegisterLayout, axis: int, width: int,
                 guards: Sequence[str],
                 steps: Sequence[int], zeros: int):
        super().__init__(layout, axis, width, guards)
        self.panel, self.steps, self.zeros = panel, tuple(steps), zeros

    def arguments(self, address: str = "i32") -> tuple[Operand, ...]:
        """base, row and column of the thread's first element, then what guards compare with."""
        return (*PLACE, *self._bounds())

    def _bounds(self) -> list[Operand]:
        out = []
        for a, guard in enumerate(self.guards):
            if guard:
                out.append(Operand(f"left_{a}", "i32"))
            if guard == "at":
                out.append(Operand(f"extent_{a}", "i32"))
        return out

    def accesses(self, b: Builder, values: Sequence[Any],
                 owner: Any) -> list[tuple[Any, Any, list[int]]]:
        """(address, condition or None, positions) of each access."""
        base, row, column, *bounds = values
        where = Addresses(b, self.panel, (base, row, column), self.zeros)
        inside = self._inside(b, list(bounds))
        out = []
        for at, positions in self.groups:
            condition = owner
            for a, test in inside.items():
                held = test(at[a])
                condition = held if condition is None else b.and_(condition, held)
            dr = sum(n * step for n, step in zip(at, self.steps, strict=True))
            dc = sum(n for n, step in zip(at, self.steps, strict=True) if not step)
            out.append((where.at(dr, dc), condition, positions))
        return out


def _shared(panel: tuple, layout: str, shape: tuple[int, ...], axis: int, width: int,
            guards: tuple[str, ...], steps: tuple[int, ...], zeros: int) -> SharedAccess:
    return SharedAccess(Panel(*panel), RegisterLayout.parse(layout, shape), axis, width, guards,
                        steps,
                        zeros)


@functools.cache
def load(panel: tuple, layout: str, shape: tuple[int, ...], axis: int, width: int,
         guards: tuple[str, ...], steps: tuple[int, ...], zeros: int, fill: float,
         hardware: bool = False, any_nan: bool = False) -> Operation:
    """(base, row, column, bounds...) -> the fragment; elements outside are `fill`.

    hardware: fp8 instructions may be used (narrow.has_instructions).
    """
    how = _shared(panel, layout, shape, axis, width, guards, steps, zeros)
    d = find_dtype(how.panel.dtype)
    kind = _kind(d.name)
    args = how.arguments()
    read = _read_code if d.packed else _read

    def body(b: Builder, *values: Any) -> list[Any]:
        out: list[Any] = [None] * how.layout.count
        for at, condition, positions in how.accesses(b, values, None):
            found = read(b, d, values[0], at, condition, width, hardware, any_nan)
            for p, value in zip(positions, found, strict=True):
                filled = condition is not None and fill != 0
                out[p] = b.select(condition, value, b.const(kind, fill)) if filled else value
        return out

    form = InstructionForm(args, (Operand("d", kind, how.layout.count),),  # type: ignore[arg-type]
                           body)
    return Operation("load_shared", len(args), lambda *_: form)


def _read(b: Builder, d: DType, base: Any, at: Any, condition: Any, width: int,
          hardware: bool, any_nan: bool) -> list[Any]:
    """Neighbours by one load; zeros where the condition fails."""
    guarded = condition is not None
    record = memory.ld("shared", *access(d, width), guarded=guarded)
    got = b.call(record, at, *([b.to_int(condition)] if guarded else []))
    return decode(b, d, got if isinstance(got, list) else [got], width, hardware, any_nan)


def _read_code(b: Builder, d: DType, base: Any, at: Any, condition: Any, *_: Any) -> list[Any]:
    """One code of 4 or 6 bits."""
    made = thread_elements.load_packed("shared", d.name, guarded=condition is not None)
    args = (base, b.sub(at, base), *([] if condition is None else [b.to_int(condition)]))
    return [made.rule(*_operands(made.arity)).body(b, *args)]


def _operands(count: int) -> list[Operand]:
    return [Operand(f"a{i}", "i32") for i in range(count)]


def _write(b: Builder, d: DType, base: Any, at: Any, condition: Any, values: list[Any],
           hardware: bool) -> None:
    """Neighbours by one store, where the condition holds."""
    words = encode(b, d, values, hardware)
    guarded = condition is not None
    record = memory.st("shared", *access(d, len(values)), guarded=guarded)
    b.call(record, at, words if len(words) > 1 else words[0],
           *([b.to_int(condition)] if guarded else []))


def _write_code(b: Builder, d: DType, base: Any, at: Any, condition: Any, values: list[Any],
                hardware: bool) -> None:
    """One code of 4 or 6 bits."""
    made = thread_elements.store_packed("shared", d.name, guarded=condition is not None)
    args = (base, b.sub(at, base), *values,
            *([] if condition is None else [b.to_int(condition)]))
    made.rule(*_operands(made.arity)).body(b, *args)


@functools.cache
def store(panel: tuple, layout: str, shape: tuple[int, ...], axis: int, width: int,
          guards: tuple[str, ...], steps: tuple[int, ...], zeros: int,
          owner: bool = False, hardware: bool = False) -> Operation:
    """(fragment, base, row, column, bounds... [, owner]): elements outside are left out."""
    how = _shared(panel, layout, shape, axis, width, guards, steps, zeros)
    d = find_dtype(how.panel.dtype)
    write = _write_code if d.packed else _write
    args = (Operand("x", _kind(d.name), how.layout.count), *how.arguments(),  # type: ignore
            *([Operand("owner", "i32")] if owner else []))

    def body(b: Builder, x: list[Any], *values: Any) -> None:
        first = b.true(values[-1]) if owner else None
        rest = values[:-1] if owner else values
        for at, condition, positions in how.accesses(b, rest, first):
            write(b, d, values[0], at, condition, [x[p] for p in positions], hardware)

    form = InstructionForm(args, (), body)
    return Operation("store_shared", len(args), lambda *_: form)


@functools.cache
def copy(panel: tuple, dtype: str, layout: str, shape: tuple[int, ...], axis: int, width: int,
         box: tuple[str, ...], guards: tuple[str, ...], steps: tuple[int, ...], zeros: int,
         how: str = "async", owner: bool = False) -> Operation:
    """(base, row, column, bounds of the box..., address, byte strides..., bounds of the tensor...
    [, owner]): global to shared memory, `width` elements at once.

    What lies outside of the tensor becomes 0, what lies outside of the box is not touched.
    how: 'async' by cp.async, 'plain' through registers.
    """
    to = _shared(panel, layout, shape, axis, width, box, steps, zeros)
    source = _Access(to.layout, axis, width, guards)
    size, first = find_dtype(dtype).bits // 8, to.arguments()
    args = (*first, *source.arguments("i64"), *([Operand("owner", "i32")] if owner else []))

    def body(b: Builder, *values: Any) -> None:
        mine = b.true(values[-1]) if owner else None
        targets = to.accesses(b, values[:len(first)], mine)
        rest = values[len(first):len(args) - owner]
        for (place, wanted, _), (at, inside, _) in zip(
                targets, source.run(b, rest, "i64", size, None), strict=True):
            move = _copy_async if how == "async" else _copy_plain
            move(b, place, at, inside, wanted, width * size)

    form = InstructionForm(args, (), body)
    return Operation("copy_to_shared", len(args), lambda *_: form)


def _copy_async(b: Builder, place: Any, at: Any, inside: Any, wanted: Any, size: int) -> None:
    record = copy_async.cp_async(size, fill=inside is not None, guarded=wanted is not None)
    args = [] if inside is None else [b.select(inside, b.i32(size), b.i32(0))]
    args += [] if wanted is None else [b.to_int(wanted)]
    b.call(record, place, at, *args)


def _copy_plain(b: Builder, place: Any, at: Any, inside: Any, wanted: Any, size: int) -> None:
    element, vector = {1: ("u8", 1), 2: ("u16", 1)}.get(size, ("b32", size // 4))
    if wanted is not None:
        inside = wanted if inside is None else b.and_(inside, wanted)
    read = memory.ld("global", element, vector, guarded=inside is not None)
    got = b.call(read, at, *([] if inside is None else [b.to_int(inside)]))
    write = memory.st("shared", element, vector, guarded=wanted is not None)
    b.call(write, place, got, *([] if wanted is None else [b.to_int(wanted)]))
