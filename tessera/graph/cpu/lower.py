"""From graph nodes to loop programs: what a fused group computes, for the loop compiler."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...lazy_dataclass import dataclass
from ...numerics import DType, NumericType
from ..ir import Node, Value
from ..schedule.loop_dtypes import is_narrow, register_of
from ..schedule.loop_ops import cast_kind, column_sum_axes, filled, loop_reduction
from .program import LoopInput, LoopOp, LoopOutput, LoopProgram


@dataclass(frozen=True)
class LoweredLoop:
    """A loop program and which arrays it takes: (value, key word or None) per input, outputs."""

    program: LoopProgram
    inputs: tuple[tuple[Value, int | None], ...]
    outputs: tuple[Value, ...]
    modes: tuple[str, ...]
    counters: tuple[int, ...] = ()  # of each further output: 0 of bad values, else of a cast
    casts: tuple[Node, ...] = ()  # 1 + 3 i: overflow, underflow and subnormal of cast i


class _Lowering:
    def __init__(self, shape: tuple[int, ...], constants: dict[Value, Any]):
        self.shape, self.constants = shape, constants
        self.inputs: dict[tuple[Value, int | None], int] = {}
        self.ops: list[LoopOp] = []
        self.ids: dict[Value, tuple[str, int]] = {}  # ("in" | "op", position)
        self.sums: dict[Value, tuple[str, int]] = {}
        self.numbers: dict[Any, tuple[str, int]] = {}

    def operand(self, v: Value, word: int | None = None) -> tuple[str, int]:
        if v in self.ids and word is None:
            return self.ids[v]
        if v in self.constants and word is None:
            return self.number(self.constants[v], register_of(v.aval.dtype.name))
        return "in", self.inputs.setdefault((v, word), len(self.inputs))

    def number(self, value: Any, register: str) -> tuple[str, int]:
        key = (repr(value), register)
        if key not in self.numbers:
            self.numbers[key] = self.push(LoopOp("const", (), register, value=value))
        return self.numbers[key]

    def push(self, op: LoopOp) -> tuple[str, int]:
        self.ops.append(op)
        return "op", len(self.ops) - 1

    def node(self, node: Node) -> None:
        out = node.outputs[0]
        if node.op.name == "cast":
            self.ids[out] = self.cast(node)
        elif column_sum_axes(node) is not None and node.inputs[0].aval.shape == self.shape:
            self.sums[out] = self.operand(node.inputs[0])
        elif kind := loop_reduction(node):
            self.ids[out] = self.push(
                LoopOp(kind, (self.operand(node.inputs[0]),), self.register(out))  # type: ignore[arg-type]
            )
        elif node.op.makes == "bits":
            words = tuple(self.operand(node.inputs[0], w) for w in (0, 1))
            self.ids[out] = self.push(LoopOp("random_bits", words, "u32"))  # type: ignore[arg-type]
        else:
            args = tuple(self.operand(v) for v in node.inputs)
            self.ids[out] = self.push(LoopOp("map", args, self.register(out), filled(node)))  # type: ignore[arg-type]

    def register(self, v: Value) -> str:
        return register_of(v.aval.dtype.name)

    def cast(self, node: Node) -> tuple[str, int]:
        source, to = node.attrs["source"], node.attrs["to"]
        x = self.operand(node.inputs[0])
        kind = cast_kind(source, to)
        if source.dtype is to.dtype and kind == "alias":
            return x
        if kind != "round" and to.policy.saturate and to.dtype.kind == source.dtype.kind == "float":
            wide = "f64" if "f64" in (source.dtype.name, to.dtype.name) else "f32"
            x = self.clamped(self.push(LoopOp("map", (x,), wide, "{0}")), wide, to)  # type: ignore[arg-type]
        if kind == "alias":
            return x
        if kind == "round":
            if to.policy.saturate:
                x = self.clamped(x, "f32", to)
            return self.push(LoopOp("round", (x,), to.dtype.name))  # type: ignore[arg-type]
        expr = "{0} != 0" if to.dtype.kind == "bool" else "{0}"
        if source.dtype.kind == "bool":
            expr = "1 if {0} else 0"
        elif to.dtype.kind in ("int", "uint"):
            expr = _saturated(source.dtype, to.dtype)
        return self.push(LoopOp("map", (x,), register_of(to.dtype.name), expr))  # type: ignore[arg-type]

    def clamped(self, x: tuple[str, int], register: str, to: NumericType) -> tuple[str, int]:
        """x within what `to` holds: infinities too, NaN as it is."""
        top = float(to.dtype.max)
        clamp = f"minimum(maximum({{0}}, {-top!r}), {top!r})"
        return self.push(LoopOp("map", (x,), register, clamp))  # type: ignore[arg-type]


def _saturated(source: DType, to: DType) -> str:
    """The integer held within what the target holds, in the register of the source."""
    expr = "{0}"
    if to.max < source.max:
        expr = f"minimum({expr}, {int(to.max)})"
    if to.min > source.min:
        expr = f"maximum({expr}, {int(to.min)})"
    return expr


def lower(shape: tuple[int, ...], nodes: list[Node], outputs: list[Value],
          constants: dict[Value, Any], checked: dict[Value, str] | None = None) -> LoweredLoop:
    """The loop program of a group over `shape`. `constants` are numbers known while compiling.

    checked: values whose bad elements are counted, "any" or "nan"; casts count what they lose.
    """
    low = _Lowering(shape, constants)
    for node in nodes:
        low.node(node)
    counts, casts = _counts(low, nodes, checked) if checked is not None else ([], [])
    made, modes = [], []
    for v in outputs:
        if v in low.sums:
            place, mode = low.sums[v], "column_sum"
        else:
            place = low.ids[v]
            mode = "full" if tuple(v.aval.shape) == shape else "row"
        made.append((place, v.aval.dtype.name, mode))
        modes.append(mode)
    first = len(low.inputs)

    def number(place: tuple[str, int]) -> int:
        return place[1] if place[0] == "in" else first + place[1]

    ops = tuple(
        LoopOp(o.kind, tuple(number(a) for a in o.args), o.dtype, o.expr, o.value)  # type: ignore[arg-type]
        for o in low.ops
    )
    program = LoopProgram(
        tuple(LoopInput(_memory(v, w)) for v, w in low.inputs),
        ops,
        tuple(LoopOutput(number(p), dtype, mode) for p, dtype, mode in made)
        + tuple(LoopOutput(number(p), "int64", mode) for p, mode, _ in counts),
    )
    return LoweredLoop(program, tuple(low.inputs), tuple(outputs), tuple(modes),
                       tuple(counter for _, _, counter in counts), tuple(casts))


Count = tuple[tuple[str, int], str, int]  # a bool of the program, how it is counted, and where


def _counts(low: _Lowering, nodes: list[Node], checked: dict[Value, str]
            ) -> tuple[list[Count], list[Node]]:
    """Bools to be counted: bad elements of checked values, and the fates of casts."""
    counts: list[Count] = []
    casts: list[Node] = []

    def count(v: Value, args: tuple, text: str, counter: int) -> None:
        place = low.push(LoopOp("map", args, "bool_", text))
        whole = tuple(v.aval.shape) == low.shape
        counts.append((place, "count" if whole else "row_count", counter))

    for node in nodes:
        v = node.outputs[0]
        if v not in low.ids:
            continue
        if v in checked:
            limit = _largest(low.register(v))
            text = f"not (abs({{0}}) <= {limit!r})" if checked[v] == "any" else "isnan({0})"
            count(v, (low.ids[v],), text, 0)
        if node.op.name == "cast" and (fates := _fates(low, node)):
            for i, (text, args) in enumerate(fates):
                if text:
                    count(v, args, text, 1 + 3 * len(casts) + i)
            casts.append(node)
    return counts, casts


def _largest(register: str) -> float:
    return float(np.finfo(np.float64 if register == "f64" else np.float32).max)


def _fates(low: _Lowering, node: Node) -> list[tuple[str, tuple]]:
    """Conditions of overflow, underflow and subnormal results of a cast; "" for what cannot be."""
    source, to = node.attrs["source"], node.attrs["to"]
    if source.dtype is to.dtype or {source.dtype.kind, to.dtype.kind} != {"float"}:
        return []
    x, y = low.operand(node.inputs[0]), low.ids[node.outputs[0]]
    tiny = f"abs({{0}}) < {float(to.dtype.tiny)!r} and {{0}} != 0"
    if to.dtype.man >= source.dtype.man and not is_narrow(to.dtype):
        return [("", ()), ("", ()), (tiny, (y,))]
    full = y
    if to.policy.saturate:  # beyond the range, before it was clamped
        full = low.push(LoopOp("round", (x,), to.dtype.name) if is_narrow(to.dtype)  # type: ignore[arg-type]
                        else LoopOp("map", (x,), register_of(to.dtype.name), "{0}"))  # type: ignore[arg-type]
    held = _largest("f64" if source.dtype.name == "f64" else "f32")
    over = f"abs({{0}}) <= {held!r} and not (abs({{1}}) <= {float(to.dtype.max)!r})"
    return [(over, (x, full)), ("{0} != 0 and {1} == 0", (x, y)), (tiny, (y,))]


def _memory(v: Value, word: int | None) -> str:
    return "uint32" if word is not None else v.aval.dtype.name
