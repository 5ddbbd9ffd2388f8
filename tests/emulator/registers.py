"""Registers as arrays with one number per thread, and the Builder of intrinsics on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import erf, erfc
from typing import Any

import numpy as np

from tessera.tile.cuda.instruction import Instruction

KINDS = {"i16": np.int16, "i32": np.int32, "i64": np.int64, "f32": np.float32, "f64": np.float64,
         "pred": np.int32}
COMPARISONS = {"<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal,
               "==": np.equal, "!=": np.not_equal}
LIBRARY = {"fma": lambda x, y, z: x * y + z, "fabs": np.abs, "pow": np.power, "atan": np.arctan,
           "erf": np.vectorize(erf, otypes=[np.float64]),
           "erfc": np.vectorize(erfc, otypes=[np.float64]), "atan2": np.arctan2}


class DivergedError(AssertionError):
    """Threads go different ways: they have to run one at a time."""


class Register(np.ndarray):
    """One number for each thread; true or false only where all agree."""

    def __bool__(self) -> bool:
        flat = np.asarray(self).reshape(-1)
        if not (flat == flat[0]).all():
            raise DivergedError("control flow differs between threads")
        return bool(flat[0])


def register(x: Any, kind: str | None = None) -> Any:
    """x as the register of a kind, by default of its own."""
    if isinstance(x, Register) and (kind is None or x.dtype == KINDS[kind]):
        return x
    a = np.asarray(x)
    return (a if kind is None else a.astype(KINDS[kind])).view(Register)


def without_sign(x: Any) -> np.ndarray:
    """The same bits as a number without a sign."""
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").reshape(np.shape(x))


def _size(x: np.ndarray) -> np.ndarray:
    return np.abs(x).view(np.uint64)


class Builder:
    """The Builder of intrinsics on arrays. Conditions are bools; operands have one type."""

    register = staticmethod(register)

    def __init__(self, block: Any):
        self.block = block

    def const(self, kind: str, value: float) -> Any:
        number = value if kind[0] == "f" else np.asarray(int(value))
        return self.register(number, kind)

    def i32(self, value: int) -> Any:
        assert -2**31 <= value < 2**32, value
        return self.const("i32", value)

    def undefined(self, kind: str) -> Any:
        return self.const(kind, 0x7EADBEEF)

    def zero(self, x: Any) -> Any:
        return self.like(x, 0)

    def like(self, x: Any, value: float) -> Any:
        return self.register(np.asarray(value).astype(x.dtype))

    def bits(self, x: Any) -> int:
        return 1 if x.dtype == bool else 8 * x.dtype.itemsize

    def is_float(self, x: Any) -> bool:
        return x.dtype.kind == "f"

    def _same(self, x: Any, y: Any) -> None:
        assert x.dtype == y.dtype, f"{x.dtype} meets {y.dtype}"

    def _idle(self) -> Any:
        """The threads that are under no condition which holds: what they compute is not used."""
        return ~self.block.on if self.block is not None else np.False_

    def fneg(self, x: Any) -> Any:
        return self.register(-x)

    def sdiv(self, x: Any, y: Any) -> Any:
        """Toward zero, exactly in 64 bits."""
        self._same(x, y)
        x, y = np.broadcast_arrays(x, y)
        wide, by = x.astype(np.int64), y.astype(np.int64)
        quotient = _size(wide) // np.maximum(_size(by), 1)  # of 2^63 too
        sign = np.sign(wide) * np.sign(by)
        return self.register((sign * quotient.astype(np.int64)).astype(x.dtype))

    def select(self, c: Any, x: Any, y: Any) -> Any:
        assert c.dtype == bool, c.dtype
        self._same(x, y)
        return self.register(np.where(c, x, y))

    def compare(self, op: str, x: Any, y: Any, *, unsigned: bool = False) -> Any:
        self._same(x, y)
        if unsigned and x.dtype.kind == "i":
            x, y = without_sign(x), without_sign(y)
        return self.register(COMPARISONS[op](np.asarray(x), np.asarray(y)))

    def true(self, x: Any) -> Any:
        return self.register(np.asarray(x) != 0)

    def to_int(self, c: Any) -> Any:
        assert c.dtype == bool, c.dtype
        return self.register(c, "i32")

    def zext(self, x: Any, kind: str) -> Any:
        return self.register(without_sign(x), kind)

    def sext(self, x: Any, kind: str) -> Any:
        return self.register(x, kind)

    trunc = sext

    def bitcast(self, x: Any, kind: str) -> Any:
        return self.register(np.ascontiguousarray(x).view(KINDS[kind]).reshape(np.shape(x)))

    def library(self, name: str, *args: Any) -> Any:
        word = name.removeprefix("__nv_")
        if args[0].dtype == np.float32 and word != "erf":
            word = word.removesuffix("f")
        f = LIBRARY.get(word) or getattr(np, word)
        return self.register(f(*(np.asarray(a, np.float64) for a in args)).astype(args[0].dtype))

    def shared_base(self) -> Any:
        return self.i32(0)

    @contextmanager
    def when(self, condition: Any) -> Iterator[None]:
        """Threads where the condition fails touch no memory inside."""
        before = self.block.on
        self.block.on = before & np.broadcast_to(np.asarray(condition), before.shape)
        yield
        self.block.on = before

    def until(self, first: Any, step: Any) -> Any:
        """Threads that are done keep their number and touch no memory."""
        before, x = self.block.on, first
        while self.block.on.any():
            further, done = step(x)
            x = self.select(self.block.on, further, x)
            self.block.on = self.block.on & ~np.broadcast_to(np.asarray(done), before.shape)
        self.block.on = before
        return x

    def call(self, instruction: Instruction, *args: Any) -> Any:
        for operand, given in zip(instruction.args, args, strict=True):
            for x in given if operand.count else [given]:
                assert x.dtype == KINDS[operand.kind], \
                    f"{instruction.name}: {operand} gets {x.dtype}"
        return self.block.call(instruction, *args)


def _define_arithmetic() -> None:
    def operator(f: Any, floats: bool = False) -> Any:
        def apply(self: Builder, x: Any, y: Any) -> Any:
            self._same(x, y)
            assert not floats or self.is_float(x), x.dtype
            return self.register(f(np.asarray(x), np.asarray(y)))
        return apply

    def on_bits(f: Any, shift: bool = False, signed: bool = False) -> Any:
        def apply(self: Builder, x: Any, y: Any) -> Any:
            self._same(x, y)
            assert not shift or ((y >= 0) & (y < self.bits(x)) | self._idle()).all(), \
                "a shift by the width or more is undefined"
            bits = np.asarray if signed else without_sign
            return self.register(f(bits(x), bits(y)).view(x.dtype))
        return apply

    for name, f in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply),
                    ("fdiv", np.divide), ("and_", np.bitwise_and), ("or_", np.bitwise_or),
                    ("xor", np.bitwise_xor)):
        setattr(Builder, name, operator(f))
    for name, f in (("fadd", np.add), ("fsub", np.subtract), ("fmul", np.multiply)):
        setattr(Builder, name, operator(f, floats=True))
    for name, f in (("udiv", np.floor_divide), ("urem", np.remainder)):
        setattr(Builder, name, on_bits(f))
    for name, f in (("shl", np.left_shift), ("lshr", np.right_shift)):
        setattr(Builder, name, on_bits(f, shift=True))
    setattr(Builder, "ashr", on_bits(np.right_shift, shift=True, signed=True))  # noqa: B010


_define_arithmetic()
