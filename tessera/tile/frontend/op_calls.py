"""A call of an op that has no lowering of its own: its arguments bound, then one op of the IR."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.foreign import TILE_KEYWORDS
from tessera.tile.builder.ir_builder import IRBuilder
from tessera.tile.builder.memory_indexing import MemoryIndexing
from tessera.tile.ir.handles import Handle, TensorRow, is_number
from tessera.tile.ir.op_record import OPS, TileOp
from tessera.tile.ops.elementwise import as_float, exponential


def emit_call(ir: IRBuilder, memory: MemoryIndexing, op: TileOp, args: list[Any],
              kwargs: dict[str, Any]) -> Any:
    bound = bind_op(ir, op, args, kwargs)
    if op.family == "elementwise":
        xs = [bound[n] for n in op.operands]
        if all(map(is_number, xs)):
            return fold_op(ir, op, xs)
        if op.name == "popcount":  # of the bits that x has: arithmetic would widen it first
            return ir.emit(op.name, [ir.value_of(xs[0])])
        if op.name == "exp":
            return exponential(ir, xs[0])
        if op.name in ("exp2", "sqrt", "rsqrt") or op.rule is OPS["exp"].rule:
            xs = [as_float(ir, x) for x in xs]
        return ir.arithmetic(op.name, xs)
    xs = [memory.view_of_row(bound[n]) if isinstance(bound[n], TensorRow) else bound[n]
          for n in op.operands]
    return ir.emit(op.name, xs, **{n: bound[n] for n in op.attrs})


def bind_op(ir: IRBuilder, op: TileOp, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = (*op.operands, *op.attrs)
    if len(args) > len(names) or set(kwargs) - set(names):
        ir.fail(f"{op.name} does not take these arguments", call_hint(op, kwargs))
    bound = dict(op.defaults) | dict(zip(names, args, strict=False)) | kwargs
    missing = [n for n in names if n not in bound]
    if missing:
        ir.fail(f"{op.name} needs {', '.join(missing)}", f"ts.tile.{op.signature}")
    for n in op.attrs:
        if isinstance(bound[n], Handle):
            bound[n] = ir.constant_int(bound[n], f"{n} of {op.name}")
    return bound


def call_hint(op: TileOp, kwargs: dict[str, Any]) -> str:
    """How the op is called, behind what to write for a keyword of another language's."""
    known = (*op.operands, *op.attrs)
    told = [f"{TILE_KEYWORDS[w]}; " for w in kwargs if w in TILE_KEYWORDS and w not in known]
    return f"{''.join(told[:1])}ts.tile.{op.signature}"


def fold_op(ir: IRBuilder, op: TileOp, xs: list[Any]) -> Any:
    """An elementwise op on compile-time numbers, by its own meaning in f64."""
    if op.name in ("maximum", "minimum", "abs", "where"):
        return ir.fold(op.name, xs)
    if op.name == "popcount":
        known = ir.literal(xs[0])
        if known.dtype.kind == "float":
            ir.fail(f"popcount of {xs[0]}", "it counts bits of integers")
        return int(op.numpy(np.asarray(known.value, known.dtype.numpy)))  # type: ignore[misc]
    out = op.numpy(*(np.float64(x) for x in xs))  # type: ignore[misc]
    return out.item()


__all__ = ["call_hint", "emit_call"]
