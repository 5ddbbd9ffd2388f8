"""Intrinsics of tiles of 4- and 6-bit elements in global memory, as Operations for `use`."""

from __future__ import annotations

import functools
from typing import Any

from tessera.numerics import DType, find_dtype
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.cuda.intrinsics.narrow_floats import decode_field, encode_code, pack_codes
from tessera.tile.cuda.intrinsics.rounding_bits import words as random_words
from tessera.tile.cuda.intrinsics.tiles import _Access
from tessera.tile.cuda.ptx import atomics, memory
from tessera.tile.ir.register_layout import RegisterLayout

LLVM = Any
MOST = 16  # elements of one access


class _Packed(_Access):
    """Groups of `width` codes; the address given is that of the row, the last argument before the
    draws is the column."""

    def __init__(self, dtype: DType, layout: RegisterLayout, axis: int, width: int, guards: Any):
        self.dtype = dtype
        super().__init__(layout, axis, max(1, width), guards) if axis >= 0 else \
            self._scattered(layout, guards)

    def _scattered(self, layout: RegisterLayout, guards: Any) -> None:
        """The rows are not an axis of the tile: every element has its own."""
        self.layout, self.axis, self.width, self.guards = layout, -1, 1, tuple(guards)
        self.moving = [a for a in range(len(layout.shape)) if any(b[a] for b in layout.bases)]
        self.groups = [(base, [i]) for i, base in enumerate(layout.bases)]

    def arguments(self, address: str) -> tuple[Operand, ...]:
        return (*super().arguments(address), Operand("column", "i32"))

    def each(self, b: Builder, values: list[Any], owner: LLVM) -> list[Any]:
        """(address of the row, column, condition, test of element i, positions) of each access."""
        at, strides = values[0], dict(zip(self.moving, values[1:], strict=False))
        bounds, column = values[1 + len(self.moving):-1], values[-1]
        inside = self._inside(b, list(bounds))
        out = []
        for base, positions in self.groups:
            where, condition = at, owner
            for a in self.moving:
                if base[a]:
                    where = b.add(where, b.mul(strides[a], b.const("i64", base[a])))
            for a, test in inside.items():
                condition = test(base[a]) if condition is None else b.and_(condition, test(base[a]))
            along = base[self.axis] if self.axis >= 0 else 0

            def single(i: int, along: int = along) -> LLVM:
                return inside[self.axis](along + i) if self.axis in inside else None

            out.append((where, b.add(column, b.i32(along)), condition, single, positions))
        return out


def _packed(dtype: str, layout: str, shape: tuple[int, ...], axis: int, width: int,
            guards: tuple[str, ...]) -> _Packed:
    return _Packed(find_dtype(dtype), RegisterLayout.parse(layout, shape), axis, width, guards)


def _byte(b: Builder, dtype: DType, column: LLVM) -> LLVM:
    """The byte of a column at the start of a group, 64 bits."""
    if dtype.bits == 4:
        return b.sext(b.ashr(column, b.i32(1)), "i64")
    return b.sext(b.mul(b.ashr(column, b.i32(2)), b.i32(3)), "i64")


def _unit(dtype: DType, width: int) -> tuple[str, int, int]:
    """(element, vector, accesses) that move `width` codes."""
    if dtype.bits == 6:
        return {4: ("u8", 1, 3), 8: ("u16", 1, 3), 16: ("b32", 1, 3)}[width]
    return {2: ("u8", 1, 1), 4: ("u16", 1, 1)}.get(width, ("b32", width // 8, 1))


@functools.cache
def load(dtype: str, layout: str, shape: tuple[int, ...], axis: int, width: int,
         guards: tuple[str, ...], fill: float = 0) -> Operation:
    """(address of the row, strides..., bounds..., column) -> fragment; outside is `fill`"""
    how = _packed(dtype, layout, shape, axis, width, guards)
    d: DType = how.dtype
    kind: Any = kind_of(d)
    element, vector, pieces = _unit(d, width)
    step = memory.BITS[element] * vector // 8

    def body(b: Builder, *values: Any) -> list[Any]:
        out: list[Any] = [None] * how.layout.count
        fills = b.const(kind, fill)
        for row, column, condition, single, positions in how.each(b, list(values), None):
            at, guarded = b.add(row, _byte(b, d, column)), condition is not None
            record = memory.ld("global", element, vector, guarded=guarded)
            test = [b.to_int(condition)] if guarded else []
            words: list[Any] = []
            for i in range(pieces):
                got = b.call(record, b.add(at, b.const("i64", step * i)), *test)
                words += got if isinstance(got, list) else [got]
            found = _codes(b, d, words, width)
            for i, (p, value) in enumerate(zip(positions, found, strict=True)):
                alone = single(i)
                out[p] = value if alone is None else b.select(alone, value, fills)
                if guarded and fill != 0:
                    out[p] = b.select(condition, out[p], fills)
        return out

    form = InstructionForm(how.arguments("i64"), (Operand("d", kind, how.layout.count),), body)
    return Operation(f"load_{dtype}", len(form.args), lambda *_: form)


def _codes(b: Builder, d: DType, words: list[LLVM], width: int) -> list[LLVM]:
    """The numbers of the codes in the words of an access."""
    if d.bits == 4:
        return [decode_field(b, d, words[i // 8], 4 * (i % 8)) for i in range(width)]
    first, second, third = words
    if width == 4:
        whole = [pack_codes(b, words, 8)]
    elif width == 8:
        whole = [b.or_(first, b.shl(second, b.i32(16))),
                 b.or_(b.lshr(second, b.i32(8)), b.shl(third, b.i32(8)))]
    else:
        whole = [first, b.or_(b.lshr(first, b.i32(24)), b.shl(second, b.i32(8))),
                 b.or_(b.lshr(second, b.i32(16)), b.shl(third, b.i32(16))),
                 b.lshr(third, b.i32(8))]
    return [decode_field(b, d, whole[i // 4], 6 * (i % 4)) for i in range(width)]


def _words(b: Builder, d: DType, codes: list[LLVM]) -> list[LLVM]:
    """The inverse: what each access writes."""
    if d.bits == 4:
        return [pack_codes(b, codes[i:i + 8], 4) for i in range(0, len(codes), 8)]
    whole = [pack_codes(b, codes[i:i + 4], 6) for i in range(0, len(codes), 4)]
    if len(whole) == 1:
        return [b.lshr(whole[0], b.i32(8 * i)) for i in range(3)]
    if len(whole) == 2:
        second = b.or_(b.lshr(whole[0], b.i32(16)), b.shl(whole[1], b.i32(8)))
        return [whole[0], second, b.lshr(whole[1], b.i32(8))]
    return [b.or_(b.lshr(whole[i], b.i32(8 * i)) if i else whole[0],
                  b.shl(whole[i + 1], b.i32(24 - 8 * i))) for i in range(3)]


@functools.cache
def load_each(dtype: str, layout: str, shape: tuple[int, ...], axis: int, width: int,
              guards: tuple[str, ...], fill: float = 0) -> Operation:
    """As `load`, code by code: for a tile that begins or ends inside of a group."""
    how = _packed(dtype, layout, shape, axis, 0, guards)
    d: DType = how.dtype
    kind: Any = kind_of(d)

    def body(b: Builder, *values: Any) -> list[Any]:
        out: list[Any] = [None] * how.layout.count
        record = memory.ld("global", "u8", guarded=True)
        for row, column, condition, _, (p,) in how.each(b, list(values), None):
            bit = b.mul(column, b.i32(d.bits))
            at, shift = b.add(row, b.sext(b.ashr(bit, b.i32(3)), "i64")), b.and_(bit, b.i32(7))
            on = b.compare("==", bit, bit) if condition is None else condition
            word = b.call(record, at, b.to_int(on))
            if d.bits == 6:
                more = b.and_(on, b.compare(">", shift, b.i32(2)))
                upper = b.call(record, b.add(at, b.const("i64", 1)), b.to_int(more))
                word = b.or_(word, b.shl(upper, b.i32(8)))
            value = decode_field(b, d, b.lshr(word, shift), 0)
            out[p] = value if condition is None else b.select(condition, value,
                                                              b.const(kind, fill))
        return out

    form = InstructionForm(how.arguments("i64"), (Operand("d", kind, how.layout.count),), body)
    return Operation(f"load_each_{dtype}", len(form.args), lambda *_: form)


class _Drawn:
    """The arguments that rounding adds, and the codes of values."""

    def __init__(self, how: _Packed, rounding: str, saturate: bool):
        self.how, self.rounding, self.saturate = how, rounding, saturate
        self.moving = [a for a in range(len(how.layout.shape))
                       if any(base[a] for base in how.layout.bases)]
        seeds = (Operand("number", "i64"), Operand("key0", "i32"), Operand("key1", "i32"),
                 *(Operand(f"step_{a}", "i64") for a in self.moving))
        self.arguments = seeds if rounding == "stochastic" else ()

    def code(self, b: Builder, value: LLVM, given: Any, position: int) -> LLVM:
        """The code of the register at a position."""
        d = self.how.dtype
        if d.kind != "float":
            return b.and_(value, b.i32((1 << d.bits) - 1))
        random = None
        if self.arguments:
            at, base = given[0], self.how.layout.bases[position]
            for a, step in zip(self.moving, given[3:], strict=True):
                if base[a]:
                    at = b.add(at, b.mul(step, b.const("i64", base[a])))
            (random,) = random_words(b, at, 1, tuple(given[1:3]))
        return encode_code(b, d, value, self.rounding, self.saturate, random)


def _split(how: _Packed, drawn: _Drawn, values: Any, owner: bool,
           b: Builder) -> tuple[list[Any], Any, LLVM]:
    """(arguments of the access, of the rounding, condition of the owner)"""
    rest = list(values)
    first = b.true(rest.pop()) if owner else None
    count = len(rest) - len(drawn.arguments)
    return rest[:count], rest[count:], first


@functools.cache
def store(dtype: str, layout: str, shape: tuple[int, ...], axis: int, width: int,
          guards: tuple[str, ...], owner: bool = False, rounding: str = "nearest_even",
          saturate: bool = False) -> Operation:
    """(fragment, address of the row, strides..., bounds..., column [, draws] [, owner])"""
    how = _packed(dtype, layout, shape, axis, width, guards)
    drawn, d = _Drawn(how, rounding, saturate), how.dtype
    kind: Any = kind_of(d)
    element, vector, pieces = _unit(d, width)
    step = memory.BITS[element] * vector // 8

    def body(b: Builder, x: list[Any], *values: Any) -> None:
        given, draws, first = _split(how, drawn, values, owner, b)
        for row, column, condition, single, positions in how.each(b, given, first):
            codes = []
            for i, p in enumerate(positions):
                code, alone = drawn.code(b, x[p], draws, p), single(i)
                # what pads the row is 0
                codes.append(code if alone is None else b.select(alone, code, b.i32(0)))
            words, guarded = _words(b, d, codes), condition is not None
            record = memory.st("global", element, vector, guarded=guarded)
            test, at = [b.to_int(condition)] if guarded else [], b.add(row, _byte(b, d, column))
            if pieces == 1:
                b.call(record, at, words if vector > 1 else words[0], *test)
                continue
            for i, word in enumerate(words):
                b.call(record, b.add(at, b.const("i64", step * i)), word, *test)

    args = (Operand("x", kind, how.layout.count), *how.arguments("i64"), *drawn.arguments,
            *([Operand("owner", "i32")] if owner else []))
    form = InstructionForm(args, (), body)
    return Operation(f"store_{dtype}", len(args), lambda *_: form)


@functools.cache
def store_each(dtype: str, layout: str, shape: tuple[int, ...], axis: int, width: int,
               guards: tuple[str, ...], owner: bool = False, rounding: str = "nearest_even",
               saturate: bool = False) -> Operation:
    """As `store`, code by code: bits of a word are cleared, then set, and the others stay."""
    how = _packed(dtype, layout, shape, axis, 0, guards)
    drawn, d = _Drawn(how, rounding, saturate), how.dtype
    kind: Any = kind_of(d)

    def body(b: Builder, x: list[Any], *values: Any) -> None:
        given, draws, first = _split(how, drawn, values, owner, b)
        for row, column, condition, _, (p,) in how.each(b, given, first):
            bit = b.mul(column, b.i32(d.bits))
            byte = b.add(row, b.sext(b.ashr(bit, b.i32(3)), "i64"))
            word = b.and_(byte, b.const("i64", -4))
            shift = b.add(b.mul(b.trunc(b.sub(byte, word), "i32"), b.i32(8)), b.and_(bit, b.i32(7)))
            on = b.compare("==", bit, bit) if condition is None else condition
            wide = b.zext(shift, "i64")
            code = b.shl(b.zext(drawn.code(b, x[p], draws, p), "i64"), wide)
            kept = b.xor(b.shl(b.const("i64", (1 << d.bits) - 1), wide), b.const("i64", -1))
            crosses = b.and_(on, b.compare(">", shift, b.i32(32 - d.bits)))
            _set(b, word, b.trunc(kept, "i32"), b.trunc(code, "i32"), on)
            if d.bits == 6:
                upper = b.const("i64", 32)
                _set(b, b.add(word, b.const("i64", 4)), b.trunc(b.lshr(kept, upper), "i32"),
                     b.trunc(b.lshr(code, upper), "i32"), crosses)

    args = (Operand("x", kind, how.layout.count), *how.arguments("i64"), *drawn.arguments,
            *([Operand("owner", "i32")] if owner else []))
    form = InstructionForm(args, (), body)
    return Operation(f"store_each_{dtype}", len(args), lambda *_: form)


def _set(b: Builder, word: LLVM, kept: LLVM, code: LLVM, on: LLVM) -> None:
    """Bits of a word: first those that change are cleared. Both are atomic; no other thread
    writes these bits."""
    b.call(atomics.red_bits("and"), word, kept, b.to_int(on))
    b.call(atomics.red_bits("or"), word, code, b.to_int(on))

