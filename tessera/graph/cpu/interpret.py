"""The meaning of a loop program: NumPy, one op at a time. The compiled loops are compared with it.

A value constant along the last axis is [..., 1], so that it exists for rows of no elements too.
Sums run in f64 and are rounded once, so the compiled f32 sums are within a few ulp of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import ArgumentError
from ..schedule.loop_dtypes import numpy_of, register_of
from .expressions import ExpressionNode, literal_type, parse
from .program import LoopOp, LoopOutput, LoopProgram
from .vocabulary import FUNCTIONS

REGISTER_NUMPY = {
    "f64": np.float64, "f32": np.float32, "i64": np.int64, "i32": np.int32, "u32": np.uint32,
    "bool_": np.bool_,
}
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)


def interpret(
    program: LoopProgram, arrays: Sequence[np.ndarray], shape: tuple[int, ...] | None = None
) -> list[np.ndarray]:
    """The program's outputs on these arrays, which broadcast to `shape` (default: together).

    Raises ArgumentError when the number of arrays is not the program's.
    """
    if len(arrays) != len(program.inputs):
        raise ArgumentError(f"program has {len(program.inputs)} inputs, got {len(arrays)} arrays")
    if shape is None:
        shape = np.broadcast_shapes(*(a.shape for a in arrays)) if arrays else (1,)
    shape = shape or (1,)
    values: list[np.ndarray] = [
        np.broadcast_to(a, (*shape[:-1], *(a.shape[-1:] or (1,))))
        .astype(REGISTER_NUMPY[register_of(x.dtype)])
        for a, x in zip(arrays, program.inputs, strict=True)
    ]
    with np.errstate(all="ignore"):
        for op in program.ops:
            values.append(_value(op, [values[a] for a in op.args], shape))
        return [_output(out, values[out.value], shape) for out in program.outputs]


def _value(op: LoopOp, args: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    register = REGISTER_NUMPY[op.register]
    match op.kind:
        case "map":
            value = np.asarray(_map(op, args))
            return value.reshape(value.shape or (1,) * len(shape)).astype(register)
        case "const":
            return np.full((*shape[:-1], 1), op.value).astype(register)
        case "iota":
            index: np.ndarray = np.arange(shape[op.value]).astype(register)
            lead = [1] * len(shape)
            lead[op.value] = -1
            return np.broadcast_to(index.reshape(lead), shape)
        case "round":
            return args[0].astype(numpy_of(op.dtype)).astype(np.float32)
        case "random_bits":
            key = [a.flat[0] if a.size else 0 for a in args]
            return philox_words(key, int(np.prod(shape))).reshape(shape)
    return _reduce(op, np.broadcast_to(args[0], shape).astype(register))


def _map(op: LoopOp, args: list[np.ndarray]) -> np.ndarray:
    dtypes = tuple(_register_name(a) for a in args)
    return _evaluate(parse(op.expr), args, REGISTER_NUMPY[literal_type(dtypes, op.dtype)])


def _register_name(array: np.ndarray) -> str:
    return next(name for name, t in REGISTER_NUMPY.items() if array.dtype == t)


def _evaluate(node: ExpressionNode, args: list[np.ndarray], literal: type) -> np.ndarray:
    """One node of an expression tree; numbers become scalars of the literal type."""
    if node.head == "arg":
        return args[node.value]
    if node.head == "number":
        return np.asarray(node.value, bool if isinstance(node.value, bool) else literal)
    parts = [_evaluate(p, args, literal) for p in node.parts]
    match node.head:
        case "call" if node.value == "where":
            return np.where(np.asarray(parts[0]).astype(bool), parts[1], parts[2])
        case "call":
            return FUNCTIONS[node.value].meaning(*parts)
        case "not":
            return np.logical_not(parts[0])
        case "logical":
            join = np.logical_and if node.value == "&" else np.logical_or
            return join.reduce(np.broadcast_arrays(*parts))
        case "unary":
            return np.invert(parts[0]) if node.value == "~" else np.negative(parts[0])
    return UFUNCS[node.value](*parts)


UFUNCS = {
    "+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide, "&": np.bitwise_and,
    "|": np.bitwise_or, "^": np.bitwise_xor, "<<": np.left_shift, ">>": np.right_shift,
    "==": np.equal, "!=": np.not_equal, "<": np.less, "<=": np.less_equal, ">": np.greater,
    ">=": np.greater_equal,
}


def _reduce(op: LoopOp, x: np.ndarray) -> np.ndarray:
    if op.kind == "reduce_sum":
        wide = np.float64 if x.dtype.kind == "f" else x.dtype
        if x.dtype == np.bool_:
            return np.asarray(x.any(axis=-1, keepdims=True))
        return x.sum(axis=-1, keepdims=True, dtype=wide).astype(x.dtype)
    least = identity(op.kind, op.dtype)
    reduce = np.maximum if op.kind == "reduce_max" else np.minimum
    return reduce.reduce(x, axis=-1, keepdims=True, initial=least)


def identity(kind: str, dtype: str) -> Any:
    """What a reduction of no elements gives: 0, or the type's least or greatest value."""
    kind_of: Any = np.dtype(REGISTER_NUMPY[dtype])
    if kind == "reduce_sum":
        return kind_of.type(0)
    if dtype == "bool_":
        return np.bool_(kind == "reduce_min")
    if kind_of.kind == "f":
        return kind_of.type(-np.inf if kind == "reduce_max" else np.inf)
    bounds = np.iinfo(kind_of)
    return kind_of.type(bounds.min if kind == "reduce_max" else bounds.max)


def _output(out: LoopOutput, value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if out.mode in ("count", "row_count"):
        space = shape if out.mode == "count" else (*shape[:-1], 1)
        held = np.broadcast_to(value[..., :1] if out.mode == "row_count" else value, space)
        return np.array([held.sum()], np.int64)
    if out.mode == "row":
        value = np.broadcast_to(value[..., :1], (*shape[:-1], 1))
    else:
        value = np.broadcast_to(value, shape)
    if out.mode == "column_sum":
        wide = np.float64 if value.dtype.kind == "f" else np.int64
        value = value.sum(axis=tuple(range(len(shape) - 1)), dtype=wide)
        if value.dtype == np.float64 and out.dtype != "f64":
            value = value.astype(np.float32)
    return store(value, out.dtype)


def store(value: np.ndarray, dtype: str) -> np.ndarray:
    """A register value as it lies in memory: cast to the memory type's register, then encoded."""
    return value.astype(REGISTER_NUMPY[register_of(dtype)]).astype(numpy_of(dtype))


def philox_words(key: Sequence[int], count: int) -> np.ndarray:
    """uint32 [count]: element i is word i % 4 of philox4x32-10((i // 4, i // 2**34, 0, 0), key).

    Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3.
    """
    blocks = np.arange((count + 3) // 4, dtype=np.uint64)
    low = np.uint64(0xFFFFFFFF)
    x = [blocks & low, blocks >> np.uint64(32), np.zeros_like(blocks), np.zeros_like(blocks)]
    k0, k1 = int(key[0]), int(key[1])
    for _ in range(10):
        a, b = x[0] * np.uint64(PHILOX_MULTIPLIERS[0]), x[2] * np.uint64(PHILOX_MULTIPLIERS[1])
        x = [
            (b >> np.uint64(32)) ^ x[1] ^ np.uint64(k0), b & low,
            (a >> np.uint64(32)) ^ x[3] ^ np.uint64(k1), a & low,
        ]
        k0, k1 = (k0 + PHILOX_WEYL[0]) & 0xFFFFFFFF, (k1 + PHILOX_WEYL[1]) & 0xFFFFFFFF
    return np.stack(x, axis=-1).astype(np.uint32).reshape(-1)[:count]
