"""A call of an op: its arguments bound, then one op of the IR or what its record says."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.tile.ir.handles import Handle, TensorRow, is_number
from tessera.tile.ir.op_record import OPS, TileOp
from tessera.tile.ops.elementwise import as_float, exponential

if TYPE_CHECKING:
    from tessera.tile.frontend.tracer import KernelTracer


def call_op(t: KernelTracer, op: TileOp, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if op.lower is not None:
        return call_macro(t, op, args, kwargs)
    bound = bind_op(t, op, args, kwargs)
    if op.family == "elementwise":
        xs = [bound[n] for n in op.operands]
        if all(map(is_number, xs)):
            return fold_op(t, op, xs)
        if op.name == "exp":
            return exponential(t, xs[0])
        if op.name in ("exp2", "sqrt", "rsqrt") or op.rule is OPS["exp"].rule:
            xs = [as_float(t, x) for x in xs]
        return t.ir.arithmetic(op.name, xs)
    xs = [resolve_row(t, bound[n]) for n in op.operands]
    return t.ir.emit(op.name, xs, **{n: bound[n] for n in op.attrs})


def call_macro(t: KernelTracer, op: TileOp, args: list[Any], kwargs: dict[str, Any]) -> Any:
    assert op.lower is not None
    try:
        inspect.signature(op.lower).bind(t, *args, **kwargs)
    except TypeError as err:
        t.fail(f"{op.name}: {err}", f"ts.tile.{op.signature}")
    return op.lower(t, *args, **kwargs)


def bind_op(t: KernelTracer, op: TileOp, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = (*op.operands, *op.attrs)
    if len(args) > len(names) or set(kwargs) - set(names):
        t.fail(f"{op.name} does not take these arguments", f"ts.tile.{op.signature}")
    bound = dict(op.defaults) | dict(zip(names, args, strict=False)) | kwargs
    missing = [n for n in names if n not in bound]
    if missing:
        t.fail(f"{op.name} needs {', '.join(missing)}", f"ts.tile.{op.signature}")
    for n in op.attrs:
        if isinstance(bound[n], Handle):
            bound[n] = t.ir.constant_int(bound[n], f"{n} of {op.name}")
    return bound


def resolve_row(t: KernelTracer, x: Any) -> Any:
    return t.memory.view_of_row(x) if isinstance(x, TensorRow) else x


def fold_op(t: KernelTracer, op: TileOp, xs: list[Any]) -> Any:
    """An elementwise op on compile-time numbers, by its own meaning in f64."""
    if op.name in ("maximum", "minimum", "abs"):
        return t.ir.fold(op.name, xs)
    out = op.numpy(*(np.float64(x) for x in xs))  # type: ignore[misc]
    return out.item()
