"""Tile matmuls: dot and mma are one op."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.errors import ArgumentError
from tessera.numerics import DType, NumericType, as_type, f32, f64, tf32
from tessera.tensor import OPERATORS, as_tensor
from tessera.tile.builder import edge_rules
from tessera.tile.builder.edge_masks import Along
from tessera.tile.builder.op_tracer import OpTracer
from tessera.tile.builder.rules import promote
from tessera.tile.interpreter.async_copies import wide
from tessera.tile.interpreter.memory import MemoryBox
from tessera.tile.interpreter.sanitizer import MANY
from tessera.tile.ir import edges
from tessera.tile.ir.errors import RuleError
from tessera.tile.ir.handles import Handle, TensorRow, describe
from tessera.tile.ir.numpy_values import array_dtype, convert
from tessera.tile.ir.op_record import OPS, declare, macro
from tessera.tile.ir.types import Buffer, GlobalTensor, Scalar, TileType, View

PRECISIONS = (None, "tf32", "f32")


def _dot_rule(types: Any, attrs: dict[str, Any]) -> TileType:
    a, b, *rest = types
    for t in (a, b):
        placed = not isinstance(t, Scalar | GlobalTensor)
        if not placed or len(t.shape) != 2:
            deep = placed and len(t.shape) > 2
            flat = placed and len(t.shape) == 1
            raise RuleError(f"dot multiplies two matrices, got {a} and {b}",
                            "an index takes an axis away: x[b, m:m+64, k:k+32], where b may be "
                            "tile_b" if deep else "a vector is a matrix of one column, v[:, None], "
                            "or of one row, v[None, :]; each row times a vector is "
                            "ts.tile.row_sum(a * v[None, :])" if flat else None)
        if isinstance(t, View) and t.space == "global":
            raise RuleError(f"dot of {t}: a matmul reads tiles or shared memory",
                            "load it: ts.tile.load(...), or copy it to shared memory")
    if a.shape[1] != b.shape[0]:
        hint = "is a .T missing?" if a.shape[1] == b.shape[1] else None
        raise RuleError(f"dot of {a} and {b}: the inner extents {a.shape[1]} and {b.shape[0]} "
                        "differ", hint)
    out = TileType(attrs["dtype"], (a.shape[0], b.shape[1]))
    if rest and rest[0] != out:
        raise RuleError(f"dot adds {out} to the accumulator {rest[0]}", "make it of that type")
    return out


def _contracted(types: Any, attrs: Any) -> Any:
    """What a load read beyond the edge is 0 already; what was computed from it need not be."""
    return [Along(i, 1 - i, 0.0, sums=True, always=False, said="a matmul") for i in (0, 1)]


@declare(rule=_dot_rule, attrs=("dtype", "precision", "taken"), run=True, effect="read", group=True,
         public=False, edges=edge_rules.matmul, combines=_contracted, layouts="any",
         multiplies=True)
def matmul(m: Any, op: Any, a: Any, b: Any, accumulator: Any = None, taken: Any = False) -> Any:
    """accumulator + a @ b; operands are tiles or shared memory, sums are in `dtype`.

    taken: both operands were read by take_operand.
    """
    dtype, precision = op.attr["dtype"], op.attr["precision"]
    x, y = (operand_array(m, op, v) for v in (a, b))
    if precision == "tf32":
        x, y = convert(x, tf32), convert(y, tf32)
    wide = np.float64 if dtype is f64 else np.float32
    if dtype.kind == "float":
        out = np.matmul(x.astype(wide), y.astype(wide))
    else:
        out = np.matmul(x.astype(np.int64), y.astype(np.int64)).astype(array_dtype(dtype))
    if accumulator is not None:
        out = out + accumulator
    return convert(out, dtype) if dtype.kind == "float" else out


def _take_rule(types: Any, attrs: dict[str, Any]) -> TileType:
    place, _ = types
    if not isinstance(place, Buffer | View) or place.space != "shared":
        raise RuleError(f"take_operand reads shared memory, got {place}")
    return TileType(place.dtype, place.shape)


@declare(rule=_take_rule, attrs=("side", "format"), run=True, effect="read", group=True,
         public=False, layouts="any")
def take_operand(m: Any, op: Any, place: Any, accumulator: Any, side: Any = "A",
                 format: Any = "") -> Any:
    """An operand of a matmul in registers, in the form of the tensor cores: for a matmul whose
    sums lie as `accumulator` does. side: 'A' or 'B'; format: of the tensor cores."""
    return np.array(operand_array(m, op, place))


def operand_array(m: Any, op: Any, x: Any) -> np.ndarray:
    """A tile, or the contents of a place in shared memory."""
    if not isinstance(x, MemoryBox):
        return x
    address, inside = x.addresses(m.groups)
    access = m.tile_access(x, address, inside & wide(m.active_groups(), inside), MANY, op.where)
    if access is not None:
        m.sanitizer.read(access)
    return x.memory.read(address)


def _operand_of(t: OpTracer, x: Any, what: str) -> Handle:
    if isinstance(x, TensorRow):
        x = t.memory.view_of_row(x)
    if not isinstance(x, Handle) or isinstance(x.type, Scalar):
        t.fail(f"{what} of {describe(x)}: it multiplies tiles or shared buffers")
    return x


def _multiply(t: OpTracer, what: str, a: Any, b: Any, accumulator: Any, precision: Any) -> Handle:
    a, b = _operand_of(t, a, what), _operand_of(t, b, what)
    if precision not in PRECISIONS:
        t.fail(f"precision={precision!r} is not known", "'tf32' or 'f32'")
    a, b = _same_operands(t, what, a, b, precision)
    a, b = _within(t, a, 1), _within(t, b, 0)
    integer = a.type.dtype.kind != "float"
    # sums of integers have the type that arithmetic on the operands has
    dtype, extra = (promote([a.type.dtype, b.type.dtype]) if integer else
                    f64 if a.type.dtype is f64 else f32), []
    if isinstance(accumulator, Handle):
        extra = [accumulator]
        dtype = accumulator.type.dtype
        if dtype.kind == "float" and dtype.bits < 32:
            t.position.warn(f"{what} adds to a tile of {dtype}, to which each sum is rounded: a "
                            "loop loses small terms. ts.tile.zeros(shape) is f32, and a store of "
                            "it rounds once")
    elif accumulator is not None:
        if not isinstance(accumulator, DType | NumericType | str):
            t.fail(f"accumulator={describe(accumulator)}", "a dtype (ts.f32) or a tile to add to")
        dtype = as_type(accumulator).dtype
    if (dtype.kind == "float") == integer:
        t.fail(f"{what} of {describe(a)} and {describe(b)} cannot accumulate in {dtype}",
               "begin with ts.tile.zeros(shape), which is f32, and cast what is stored: "
               "ts.tile.cast(acc, ts.i32)" if dtype.kind != "float" else
               "begin with ts.tile.zeros(shape, ts.i32), and cast the sum")
    return t.ir.emit("matmul", [a, b, *extra], dtype=dtype, precision=precision)


def _within(t: OpTracer, x: Handle, axis: int) -> Handle:
    """x as a tile where it is a place in shared memory that needs a mask."""
    if not isinstance(x.type, TileType | View | Buffer) or len(x.type.shape) != 2:  # the rule says
        return x
    edge = t.facts.of(x).at(axis)
    if isinstance(x.type, TileType) or edge is None or not edges.open_(edge) or edge.zero:
        return x
    return _loaded(t, x)


def _same_operands(t: OpTracer, what: str, a: Handle, b: Handle, precision: Any) -> tuple:
    """An f32 tile beside a float of 16 bits is rounded to that type; a narrower one is widened."""
    da, db = a.type.dtype, b.type.dtype
    if da is db:
        return a, b
    if (da.kind == "float") != (db.kind == "float"):
        t.fail(f"{what} of {describe(a)} and {describe(b)}: one is a float, one is not",
               "cast one: ts.tile.cast(x, ts.f32)")
    for x, y, first in ((a, b, True), (b, a, False)):
        if x.type.dtype is f32 and isinstance(x.type, TileType) and y.type.dtype.bits == 16:
            if precision is not None:
                y = t.ir.cast(_loaded(t, y), f32)
            else:
                x = t.ir.cast(x, y.type.dtype)
            return (x, y) if first else (y, x)
    if da.bits <= 8 and db.bits <= 8:
        return a, b
    wider = da if da.bits >= db.bits else db
    if da.bits == db.bits:
        t.fail(f"{what} of {describe(a)} and {describe(b)}: the types differ",
               "cast one of them: ts.tile.cast(x, dtype)")
    return (tuple(x if x.type.dtype is wider else t.ir.cast(_loaded(t, x), wider) for x in (a, b)))


def _loaded(t: OpTracer, x: Handle) -> Handle:
    if isinstance(x.type, TileType):
        return x
    return t.call_op(OPS["load"], [x], {})


@macro()
def mma(t: OpTracer, a: Any, b: Any, accumulator: Any = None, *, precision: Any = None) -> Any:
    """The matmul of two tiles or shared buffers, (M, K) x (K, N) -> (M, N), summed in f32.

    accumulator: a dtype to sum in, or a tile that the matmul is added to. An f32 tile beside a
    16-bit operand is rounded to its type; precision='tf32' | 'f32' keeps more.
    """
    return _multiply(t, "mma", a, b, accumulator, precision)


def _eager(a: Any, b: Any, accumulator: Any = None, **options: Any) -> Any:
    """Outside of kernels: ts.matmul of whole arrays."""
    if accumulator is not None or options:
        raise ArgumentError("tile.dot of whole arrays takes two arrays only")
    return OPERATORS["__matmul__"](as_tensor(a), as_tensor(b))


@macro(eager=_eager)
def dot(t: OpTracer, a: Any, b: Any, accumulator: Any = None, *, precision: Any = None) -> Any:
    """mma with f32 sums; of whole arrays outside of kernels it is ts.matmul."""
    return _multiply(t, "dot", a, b, accumulator, precision)


__all__ = ["operand_array"]
