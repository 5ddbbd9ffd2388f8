"""Intrinsics that emitted kernels name: whole loads and stores of fragments, and the like.

Each is an Operation for `use`, described by plain numbers and texts so that the emitted line says
what it is: which registers sit where, and how they are guarded.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tessera.numerics import find_dtype
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics.formats import access, decode, encode, kind_of
from tessera.tile.cuda.intrinsics.rounding_bits import words as random_words
from tessera.tile.cuda.ptx import memory
from tessera.tile.ir.register_layout import RegisterLayout


def _kind(dtype_name: str) -> str:
    return kind_of(find_dtype(dtype_name))


# --- guarded accesses of a fragment ---------------------------------------------------------------
class _Access:
    """Registers of a layout in groups of `width` neighbours along `axis`, with their guards.

    axis: of the tile, along which memory is contiguous; -1 where it is along none.
    guards: per axis '' (none), 'left' (b < n) or 'at' (0 <= start + b < extent).
    """

    def __init__(self, layout: RegisterLayout, axis: int, width: int, guards: Sequence[str]):
        self.layout, self.axis, self.width, self.guards = layout, axis, width, tuple(guards)
        self.moving = [a for a in range(len(layout.shape)) if a != axis
                       and any(base[a] for base in layout.bases)]
        starts = [b for b in layout.bases if width == 1 or b[axis] % width == 0]
        self.groups = [(b, [layout.number[b[:axis] + (b[axis] + i,) + b[axis + 1:]]
                            for i in range(width)] if width > 1 else [layout.number[b]])
                       for b in starts]

    def arguments(self, address: str) -> tuple[Operand, ...]:
        """Address, byte strides of the moving axes, then what the guards compare with."""
        args = [Operand("at", address)]  # type: ignore[arg-type]
        args += [Operand(f"stride_{a}", address) for a in self.moving]  # type: ignore[arg-type]
        for a, guard in enumerate(self.guards):
            if guard:
                args.append(Operand(f"left_{a}", "i32"))
            if guard == "at":
                args.append(Operand(f"extent_{a}", "i32"))
        return tuple(args)

    def run(self, b: Builder, values: Sequence[Any], address: str, itemsize: int,
            owner: Any) -> list[tuple[Any, Any, list[int]]]:
        """(address, condition or None, positions) of each access."""
        given = list(values)
        at, strides = given[0], dict(zip(self.moving, given[1:], strict=False))
        bounds = given[1 + len(self.moving):]
        inside = self._inside(b, bounds)
        out = []
        for base, positions in self.groups:
            where = at
            for a in self.moving:
                if base[a]:
                    where = b.add(where, b.mul(strides[a], b.const(address, base[a])))
            if self.axis >= 0 and base[self.axis]:
                where = b.add(where, b.const(address, base[self.axis] * itemsize))
            condition = owner
            for a, test in inside.items():
                condition = test(base[a]) if condition is None else b.and_(condition, test(base[a]))
            out.append((where, condition, positions))
        return out

    def _inside(self, b: Builder, bounds: list[Any]) -> dict[int, Any]:
        tests: dict[int, Any] = {}
        at = 0
        for a, guard in enumerate(self.guards):
            if guard == "left":
                tests[a] = functools.cache(functools.partial(self._left, b, bounds[at]))
                at += 1
            elif guard == "at":
                tests[a] = functools.cache(
                    functools.partial(self._at, b, bounds[at], bounds[at + 1]))
                at += 2
        return tests

    @staticmethod
    def _left(b: Builder, left: Any, base: int) -> Any:
        return b.compare("<", b.i32(base), left)

    @staticmethod
    def _at(b: Builder, start: Any, extent: Any, base: int) -> Any:
        return b.compare("<", b.add(start, b.i32(base)), extent, unsigned=True)


def access_groups(layout: str, shape: tuple[int, ...], axis: int, width: int,
            guards: tuple[str, ...]) -> _Access:
    return _Access(RegisterLayout.parse(layout, shape), axis, width, guards)


@functools.cache
def load(space: str, dtype: str, layout: str, shape: tuple[int, ...], axis: int, width: int,
         guards: tuple[str, ...], fill: float = 0, cache: str = "",
         hardware: bool = False, any_nan: bool = False) -> Operation:
    """(address, strides..., bounds...) -> the fragment; elements outside are `fill`."""
    kind, d = _kind(dtype), find_dtype(dtype)
    how = access_groups(layout, shape, axis, width, guards)
    address = "i64" if space == "global" else "i32"
    element, vector = access(d, width)
    args = how.arguments(address)

    def body(b: Builder, *values: Any) -> list[Any]:
        out: list[Any] = [None] * how.layout.count
        fills = b.const(kind, fill)
        for at, condition, positions in how.run(b, values, address, d.bits // 8, None):
            guarded = condition is not None
            record = memory.ld(space, element, vector, cache=cache, guarded=guarded)
            got = b.call(record, at, *([b.to_int(condition)] if guarded else []))
            found = decode(b, d, got if isinstance(got, list) else [got], width, hardware, any_nan)
            for p, value in zip(positions, found, strict=True):
                out[p] = b.select(condition, value, fills) if guarded and fill != 0 else value
        return out

    form = InstructionForm(args, (Operand("d", kind, how.layout.count),), body)  # type: ignore[arg-type]
    return Operation(f"load_{dtype}", len(args), lambda *_: form)


@functools.cache
def store(space: str, dtype: str, layout: str, shape: tuple[int, ...], axis: int, width: int,
          guards: tuple[str, ...], owner: bool = False, cache: str = "",
          rounding: str = "nearest_even", saturate: bool = False,
          hardware: bool = False) -> Operation:
    """(fragment, address, strides..., bounds... [, base, key, key] [, owner]): elements outside
    are left out. For stochastic rounding the tensor's base and the two words of the key."""
    kind, d = _kind(dtype), find_dtype(dtype)
    how = access_groups(layout, shape, axis, width, guards)
    address = "i64" if space == "global" else "i32"
    element, vector = access(d, width)
    draws = rounding == "stochastic"
    seeds = (Operand("base", "i64"), Operand("key0", "i32"), Operand("key1", "i32"))
    args = (Operand("x", kind, how.layout.count), *how.arguments(address),  # type: ignore[arg-type]
            *(seeds if draws else ()), *([Operand("owner", "i32")] if owner else []))

    def body(b: Builder, x: list[Any], *values: Any) -> None:
        first = b.true(values[-1]) if owner else None
        rest = values[:-1] if owner else values
        rest, (base, *key) = (rest[:-3], rest[-3:]) if draws else (rest, (None,))
        for at, condition, positions in how.run(b, rest, address, d.bits // 8, first):
            random = None
            if draws:
                number = b.lshr(b.sub(at, base), b.const("i64", d.bits // 16))
                random = random_words(b, number, len(positions), tuple(key))
            words = encode(b, d, [x[p] for p in positions], hardware, rounding, saturate, random)
            guarded = condition is not None
            record = memory.st(space, element, vector, cache=cache, guarded=guarded)
            b.call(record, at, words if len(words) > 1 else words[0],
                   *([b.to_int(condition)] if guarded else []))

    form = InstructionForm(args, (), body)
    return Operation(f"store_{dtype}", len(args), lambda *_: form)


NEAR = 1 << 29  # beyond what any box reaches; twice it still fits 32 bits


@functools.cache
def near() -> Operation:
    """A distance of 64 bits -> the same in 32, or -NEAR or NEAR where it is further."""
    def body(b: Builder, x: Any) -> Any:
        low, high = (b.const("i64", n) for n in (-NEAR, NEAR))
        x = b.select(b.compare("<", x, low), low, x)
        return b.trunc(b.select(b.compare(">", x, high), high, x), "i32")

    form = InstructionForm((Operand("x", "i64"),), (Operand("d", "i32"),), body)
    return Operation("near", 1, lambda _: form)


# --- registers ----------------------------------------------------------------------------------
@functools.cache
def mask(layout: str, shape: tuple[int, ...], axis: int, kind: str, fill: float,
         together: int = 1) -> Operation:
    """(fragment, left) -> elements whose base along `axis` is below `left`; `fill` elsewhere.
    together: neighbours of a thread that begin at multiples of so many, as `left` does, so that one
    comparison holds for all of them."""
    bases = RegisterLayout.parse(layout, shape).bases
    x = Operand("x", kind, len(bases))  # type: ignore[arg-type]

    def body(b: Builder, values: list[Any], left: Any) -> list[Any]:
        test = functools.cache(lambda base: b.compare("<", b.i32(base), left))
        other = b.const(kind, fill)
        return [b.select(test(base[axis] & -together), v, other)
                for base, v in zip(bases, values, strict=True)]

    form = InstructionForm((x, Operand("left", "i32")), (x,), body)
    return Operation("mask", 2, lambda *_: form)


@functools.cache
def mask_between(layout: str, shape: tuple[int, ...], axis: int, kind: str, fill: float
                 ) -> Operation:
    """(fragment, first, left) -> as mask, and `fill` also where the base is below `first`."""
    bases = RegisterLayout.parse(layout, shape).bases
    x = Operand("x", kind, len(bases))  # type: ignore[arg-type]

    def body(b: Builder, values: list[Any], first: Any, left: Any) -> list[Any]:
        below = functools.cache(lambda base: b.compare("<", b.i32(base), left))
        above = functools.cache(lambda base: b.compare("<", b.i32(base), first))
        other = b.const(kind, fill)
        return [b.select(above(base[axis]), other, b.select(below(base[axis]), v, other))
                for base, v in zip(bases, values, strict=True)]

    form = InstructionForm((x, Operand("first", "i32"), Operand("left", "i32")), (x,), body)
    return Operation("mask_between", 3, lambda *_: form)


@functools.cache
def positions(layout: str, shape: tuple[int, ...], axis: int) -> Operation:
    """(thread part) -> the index along `axis` of each register."""
    bases = RegisterLayout.parse(layout, shape).bases
    form = InstructionForm((Operand("at", "i32"),), (Operand("d", "i32", len(bases)),),
                           lambda b, at: [b.add(at, b.i32(base[axis])) for base in bases])
    return Operation("positions", 1, lambda _: form)


@functools.cache
def ramp(layout: str, shape: tuple[int, ...]) -> Operation:
    """(start, step, thread part) -> start + step times the index of each register. The thread part
    is added to the start once."""
    bases = [base[0] for base in RegisterLayout.parse(layout, shape).bases]
    fma = find_instruction("fma_rn")

    def body(b: Builder, start: Any, step: Any, at: Any) -> list[Any]:
        first = b.call(fma, step, b.call(find_instruction("s32_to_f32_rn"), at), start)
        return [b.call(fma, step, b.const("f32", base), first) if base else first for base in bases]

    form = InstructionForm((Operand("start", "f32"), Operand("step", "f32"), Operand("at", "i32")),
                           (Operand("d", "f32", len(bases)),), body)
    return Operation("ramp", 3, lambda *_: form)
