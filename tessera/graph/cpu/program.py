"""Loop programs: what a fused CPU loop computes, as frozen data.

A program is a list of ops over one iteration space `[..., C]`. Every value is either full (one
element per point of the space) or constant along the last axis. Values live in registers of six
types; memory holds more types, decoded on load and encoded on store.

    v0 = input bf16
    v1 = reduce_max f32 (v0)
    v2 = map f32 exp(v0 - v1)
    v3 = reduce_sum f32 (v2)
    v4 = map f32 v2 / v3
    out full bf16 <- v4

`interpret.py` is the meaning of a program in NumPy; `emit.py` writes its loops.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

from ...errors import ArgumentError, did_you_mean
from ...lazy_dataclass import dataclass
from ...numerics import all_dtypes
from ..schedule.loop_dtypes import is_narrow, register_of

REGISTERS = ("f64", "f32", "i64", "i32", "u32", "bool_")

REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min")
ARITY = {
    "reduce_sum": 1, "reduce_max": 1, "reduce_min": 1, "const": 0, "round": 1, "iota": 0,
    "random_bits": 2,
}
KINDS = ("map", *ARITY)
MODES = ("full", "row", "column_sum", "count", "row_count")


@dataclass(frozen=True)
class LoopInput:
    """An array read by the loop; `dtype` is the type of its elements in memory."""

    dtype: str


@dataclass(frozen=True)
class LoopOp:
    """One op; `args` are value ids, inputs first, then op results in order.

    kind         dtype                     expr / value
    map          register of the result    expr: Python expression over {0}, {1}, ... and the
                                           functions of `vocabulary.py`; its result is cast to dtype
    reduce_*     register of the result    along the last axis; f32 sums add blocks in f64
    const        register                  value: the number
    round        storage format            f32 rounded to that format's grid, to nearest even
    iota         register                  value: the axis of the iteration space it counts along
    random_bits  u32                       args: the two u32 words of the key; word i of Philox
                                           4x32-10 where i is the element's linear index
    """

    kind: str
    args: tuple[int, ...]
    dtype: str
    expr: str = ""
    value: Any = None

    @property
    def register(self) -> str:
        """The register type of the result."""
        return "f32" if self.kind == "round" else self.dtype


@dataclass(frozen=True)
class LoopOutput:
    """An array written by the loop: `value` stored as `dtype`.

    full: `[..., C]`.  row: `[..., 1]`, of a value constant along the last axis.
    column_sum: `[C]`, the value summed over all leading axes (runs of rows in its own type, these
    in f64; in an order that the shape alone fixes).
    count: `[1]` int64, the number of points where the value, a bool, holds, added to what lies
    there. row_count: of a value constant along the last axis, the number of rows.
    """

    value: int
    dtype: str
    mode: str = "full"


@dataclass(frozen=True)
class LoopProgram:
    """Inputs, ops and outputs of one fused loop. Raises ArgumentError when ill-formed."""

    inputs: tuple[LoopInput, ...]
    ops: tuple[LoopOp, ...]
    outputs: tuple[LoopOutput, ...]

    def __post_init__(self) -> None:
        verify(self)

    @cached_property
    def registers(self) -> tuple[str, ...]:
        """Register type of every value."""
        return (*(register_of(i.dtype) for i in self.inputs), *(op.register for op in self.ops))

    @cached_property
    def key(self) -> str:
        """Content hash of the program: equal programs have equal keys, NaN constants included."""
        return hashlib.sha256(str(self).encode()).hexdigest()

    @cached_property
    def elementwise(self) -> bool:
        """True when no op or output depends on which axis is the last."""
        return not any(op.kind in REDUCTIONS for op in self.ops) and all(
            out.mode in ("full", "count") for out in self.outputs
        )

    def __str__(self) -> str:
        lines = [f"v{i} = input {x.dtype}" for i, x in enumerate(self.inputs)]
        first = len(self.inputs)
        lines += [f"v{first + i} = {describe(op)}" for i, op in enumerate(self.ops)]
        lines += [f"out {o.mode} {o.dtype} <- v{o.value}" for o in self.outputs]
        return "\n".join(lines)


def describe(op: LoopOp) -> str:
    """`map f32 exp(v0 - v1)`, `reduce_sum f32 (v2)`, `const f32 0.5`, `iota i64 axis 1`."""
    names = [f"v{a}" for a in op.args]
    if op.kind == "map":
        return f"map {op.dtype} {op.expr.format(*names)}"
    if op.kind == "const":
        return f"const {op.dtype} {_number(op.value)!r}"
    if op.kind == "iota":
        return f"iota {op.dtype} axis {op.value}"
    return f"{op.kind} {op.dtype} ({', '.join(names)})"


def _number(value: object) -> object:
    return value.item() if hasattr(value, "item") else value


def memory_types() -> tuple[str, ...]:
    return tuple(d.name for d in all_dtypes() if register_of(d.name))


def verify(program: LoopProgram) -> None:
    """Check names, types and that every op reads only earlier values."""
    for x in program.inputs:
        _check_name(x.dtype, memory_types(), "memory type of a loop input")
    first = len(program.inputs)
    for i, op in enumerate(program.ops):
        _verify_op(op, first + i)
    for out in program.outputs:
        _check_name(out.dtype, memory_types(), "memory type of a loop output")
        _check_name(out.mode, MODES, "mode of a loop output")
        _earlier(out.value, first + len(program.ops), "output")
        if out.mode in ("count", "row_count") and (
                out.dtype != "int64" or program.registers[out.value] != "bool_"):
            raise ArgumentError(f"a {out.mode!r} output counts bools into int64, got "
                                f"{program.registers[out.value]} into {out.dtype}")
    if not program.outputs:
        raise ArgumentError("a loop program needs an output", hint="add a LoopOutput")


def _verify_op(op: LoopOp, position: int) -> None:
    _check_name(op.kind, KINDS, "kind of a loop op")
    grids = REGISTERS if op.kind != "round" else tuple(d.name for d in all_dtypes() if is_narrow(d))
    _check_name(op.dtype, grids, f"type of a loop {op.kind!r}")
    for arg in op.args:
        _earlier(arg, position, f"v{position}")
    if op.kind in ARITY and len(op.args) != ARITY[op.kind]:
        raise ArgumentError(
            f"loop op {op.kind!r} takes {ARITY[op.kind]} arguments, got {len(op.args)}"
        )
    if op.kind == "map" and not op.expr:
        raise ArgumentError("a loop map needs an expression", hint="e.g. expr='{0} + {1}'")
    if op.kind == "iota" and not isinstance(op.value, int):
        raise ArgumentError(f"iota needs an axis number in `value`, got {op.value!r}")
    if op.kind == "const" and not isinstance(_number(op.value), (bool, int, float)):
        raise ArgumentError(f"const needs a number in `value`, got {op.value!r}")


def _earlier(value: int, limit: int, where: str) -> None:
    if not 0 <= value < limit:
        raise ArgumentError(f"{where} reads value {value}, but only v0..v{limit - 1} exist there")


def _check_name(name: str, names: tuple[str, ...], what: str) -> None:
    if name not in names:
        raise ArgumentError(f"unknown {what}: {name!r}", hint=did_you_mean(name, names))
