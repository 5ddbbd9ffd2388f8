"""What a kernel returns: nothing, parameters, a number or a new tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tessera.numerics import NumericType, as_type
from tessera.tensor import TensorType
from tessera.tile.frontend.exits import RETURN
from tessera.tile.frontend.parameters import composite_axes, parameter
from tessera.tile.frontend.tracer import KernelTracer
from tessera.tile.ir.handles import UNSET, Handle, TensorRow, Undefined, describe
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import Buffer, GlobalTensor, Scalar, TileType, View
from tessera.tile.ops.macros import store_tile


def finish(t: KernelTracer) -> None:
    """What the call returns: nothing, parameters, a number or a new tensor."""
    value = t.env[RETURN]
    if t.exits.returns:
        t.position.node = t.exits.returns[-1]
    if isinstance(value, Undefined):
        t.fail("the kernel returns a value on some paths only", "return at the end")
    if value is None or value is UNSET:
        if t.spec.result is not None and t.spec.result is not type(None):
            t.fail("the kernel is annotated with a result and returns none",
                   "return a parameter, a number or a tile")
        return
    items = value if isinstance(value, tuple) else (value,)
    if all(isinstance(v, Handle) and isinstance(v.type, GlobalTensor) for v in items):
        t.result = ("param", *(v.value.name for v in items))
        return
    if isinstance(value, tuple):
        t.fail(f"the kernel returns {len(value)} values, which are not all arguments of it",
               "it returns one tile, one number, or arguments: store the others into arguments, "
               "S[tile_m:tile_m+8] = s")
    if t.output is None and t.spec.result is None and isinstance(value, Handle):
        t.output = like_the_rows(t, value)
    if t.output is not None or isinstance(t.spec.result, TensorType):
        return_tile(t, value)
    else:
        return_number(t, value)


def like_the_rows(t: KernelTracer, value: Handle) -> Handle | None:
    """The result of a kernel without an annotation for it, when the tile it returns is the
    group's own block of its first matrix: a tensor like that, with the tile's elements."""
    first = next((kind for _, kind in t.spec.params if isinstance(kind, GlobalTensor)), None)
    if first is None or not isinstance(value.type, TileType):
        return None
    hidden = composite_axes(t, first)
    own = first.dims[len(hidden):]
    if len(own) != len(value.type.shape) or str(own[0]) not in t.grid.origins:
        return None
    out = GlobalTensor(NumericType(value.type.dtype), first.dims)
    return replace(parameter(t, "result", out, "output"), hidden=hidden)


def return_tile(t: KernelTracer, value: Any) -> None:
    if isinstance(value, TensorRow):
        value = t.memory.view_of_row(value)
    if isinstance(value, Handle) and isinstance(value.type, View | Buffer):
        value = t.call_op(OPS["load"], [value], {})
    if not isinstance(value, Handle) or not isinstance(value.type, TileType):
        t.fail(f"the kernel returns {describe(value)}, its annotation says "
               f"{t.spec.result}", "return a tile, or a parameter")
    if t.output is None:  # annotated without a type: that of the tile
        out = GlobalTensor(NumericType(value.type.dtype), t.spec.result.shape)
        t.output = replace(parameter(t, "result", out, "output"), hidden=composite_axes(t, out))
    store_tile(t, t.memory.own_block(t.output, value.type.shape), value)
    t.result = ("tensor", t.output.value.name)


def return_number(t: KernelTracer, value: Any) -> None:
    value = t.ir.value_of(value)
    kind = t.spec.result
    if isinstance(value, Handle) and not isinstance(value.type, Scalar):
        t.fail(f"the kernel returns {describe(value)}",
               'annotate the result: -> ts.Tensor["M", "N", ts.f32]')
    if kind is None:
        t.fail("the kernel returns a number and has no annotation for it",
               "annotate it: def kernel(...) -> ts.f32")
    numeric = kind if isinstance(kind, NumericType) else as_type(kind)
    out = parameter(t, "result", GlobalTensor(numeric, (1,)), "output")
    if not t.ir.is_uniform(value) or t.ir.divergent:
        t.fail("the returned number differs between lanes",
               "reduce it over the group, or return one element of a shared buffer")
    t.memory.store_element(out, [0], value)
    t.result = ("scalar", out.value.name)
