"""What the body of an intrinsic may do: the protocol of the builder that numba_gate gives it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from .instruction import Instruction

Value = Any  # an LLVM value of the function that is being built


class Builder(Protocol):
    """Integer and float arithmetic, selects, arrays of a thread, branches and instructions.

    Both operands of an operation have one type. A tuple argument of the intrinsic is a Python list
    of values; a `kind` is one of instruction.Kind. Arithmetic written here is seen by the optimiser
    (multiply and add fuse into an fma), unlike that in an instruction's text.
    """

    # --- arithmetic: the names of LLVM ------------------------------------------------------------
    def add(self, x: Value, y: Value, /) -> Value: ...
    def sub(self, x: Value, y: Value, /) -> Value: ...
    def mul(self, x: Value, y: Value, /) -> Value: ...
    def udiv(self, x: Value, y: Value, /) -> Value: ...
    def urem(self, x: Value, y: Value, /) -> Value: ...
    def sdiv(self, x: Value, y: Value, /) -> Value: ...
    def and_(self, x: Value, y: Value, /) -> Value: ...
    def or_(self, x: Value, y: Value, /) -> Value: ...
    def xor(self, x: Value, y: Value, /) -> Value: ...
    def shl(self, x: Value, count: Value, /) -> Value: ...
    def lshr(self, x: Value, count: Value, /) -> Value: ...
    def ashr(self, x: Value, count: Value, /) -> Value: ...
    def fadd(self, x: Value, y: Value, /) -> Value: ...
    def fsub(self, x: Value, y: Value, /) -> Value: ...
    def fmul(self, x: Value, y: Value, /) -> Value: ...
    def fdiv(self, x: Value, y: Value, /) -> Value: ...

    def fneg(self, x: Value) -> Value:
        """-0 - x"""

    def select(self, condition: Value, x: Value, y: Value, /) -> Value:
        """x where the condition holds, else y."""

    def library(self, name: str, *args: Value) -> Value:
        """A function of libdevice on numbers of one type: __nv_expf."""

    # --- constants --------------------------------------------------------------------------------
    def const(self, kind: str, value: float) -> Value: ...
    def i32(self, value: int) -> Value: ...

    def undefined(self, kind: str) -> Value:
        """Any value: an accumulator whose first use overwrites it."""

    def zero(self, x: Value) -> Value:
        """0 of the type of x."""

    def like(self, x: Value, value: float) -> Value:
        """A constant of the type of x."""

    # --- conditions and types ---------------------------------------------------------------------
    def compare(self, op: str, x: Value, y: Value, *, unsigned: bool = False) -> Value:
        """`op` is <, <=, ==, !=, >=, >; floats compare ordered (!= unordered), as in Python."""

    def true(self, x: Value) -> Value:
        """Whether an int is not 0, as a condition for `select`."""

    def to_int(self, condition: Value) -> Value:
        """A condition as an i32, 0 or 1."""

    def is_float(self, x: Value) -> bool: ...

    def bits(self, x: Value) -> int:
        """Width of a number."""

    def zext(self, x: Value, kind: str) -> Value: ...
    def sext(self, x: Value, kind: str) -> Value: ...
    def trunc(self, x: Value, kind: str) -> Value: ...
    def bitcast(self, x: Value, kind: str) -> Value: ...

    # --- memory -----------------------------------------------------------------------------------
    def array(self, name: str, kind: str, count: int) -> Value:
        """Memory of `count` numbers private to a thread; one for each name in a kernel."""

    def read(self, array: Value, index: Value) -> Value: ...
    def write(self, array: Value, index: Value, x: Value) -> None: ...

    def shared_base(self) -> Value:
        """32-bit shared-space address of the kernel's dynamic shared memory, 1024-byte aligned."""

    # --- control ----------------------------------------------------------------------------------
    def when(self, condition: Value) -> AbstractContextManager[Any]:
        """A context: what is built inside runs where the condition holds."""

    def until(self, first: Value, step: Callable[[Value], tuple[Value, Value]]) -> Value:
        """x = first; repeat (x, done) = step(x) until done; the last x."""

    def call(self, instruction: Instruction, *args: Value) -> Any:
        """One PTX statement: None, a value, or a list (a tuple result, or several results)."""


__all__ = ["Builder", "Value"]
