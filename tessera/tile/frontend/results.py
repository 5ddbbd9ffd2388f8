"""What a kernel returns: nothing, parameters, or numbers or new tensors, one or several."""

from __future__ import annotations

from typing import Any

from tessera.numerics import NumericType, as_type
from tessera.tensor import TensorType
from tessera.tile.frontend.exits import RETURN
from tessera.tile.frontend.parameters import composite_axes, output
from tessera.tile.frontend.tracer import KernelTracer
from tessera.tile.ir.handles import UNSET, Handle, TensorRow, Undefined, describe
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import Buffer, GlobalTensor, Scalar, TileType, View
from tessera.tile.ops.macros import store_tile


def finish(t: KernelTracer) -> None:
    """What the call returns: nothing, parameters, or numbers or new tensors, one or several."""
    value = t.env[RETURN]
    if t.exits.returns:
        t.position.node = t.exits.returns[-1]
    if isinstance(value, Undefined):
        t.fail("the kernel returns a value on some paths only", "return at the end")
    if value is None or value is UNSET:
        if t.spec.results:
            t.fail("the kernel is annotated with a result and returns none",
                   "return a parameter, a number or a tile")
        return
    items = value if isinstance(value, tuple) else (value,)
    arguments = [isinstance(v, Handle) and isinstance(v.type, GlobalTensor) for v in items]
    if all(arguments):
        t.result = ("param", *(v.value.name for v in items))
        return
    if any(arguments):
        t.fail(f"the kernel returns {len(items)} values, of which some are arguments of it",
               "the caller has its arguments: return the others alone")
    require_count(t, len(items))
    made = [return_one(t, i, v) for i, v in enumerate(items)]
    kinds = {kind for kind, _ in made}
    if len(kinds) > 1:
        t.fail("the kernel returns tiles and numbers: a number is that of the only group, and a "
               "tile is the block of one of several",
               "return the number as a tile of one element, or store it into an argument")
    t.result = (kinds.pop(), *(name for _, name in made))


def require_count(t: KernelTracer, count: int) -> None:
    """As many results as the annotation says."""
    told = len(t.spec.results)
    if not told or told == count:
        return
    t.fail(f"the kernel returns {count} {'value' if count == 1 else 'values'}, its annotation "
           f"names {told}", 'annotate each: -> tuple[ts.Tensor["M", "N", ts.f32], '
           'ts.Tensor["M", ts.f32]]')


def return_one(t: KernelTracer, i: int, value: Any) -> tuple[str, str]:
    """Result i: its kind, and the name of the output that holds it."""
    if i not in t.outputs and not t.spec.results and isinstance(value, Handle):
        like_the_rows(t, i, value)
    if i in t.outputs or (t.spec.results and isinstance(t.spec.results[i], TensorType)):
        return return_tile(t, i, value)
    return return_number(t, i, value)


def like_the_rows(t: KernelTracer, i: int, value: Handle) -> None:
    """The result of a kernel without an annotation for it, when the tile it returns is the
    group's own block of its first matrix: a tensor like that, with the tile's elements."""
    first = next((kind for _, kind in t.spec.params if isinstance(kind, GlobalTensor)), None)
    if first is None or not isinstance(value.type, TileType):
        return
    hidden = composite_axes(t, first)
    own = first.dims[len(hidden):]
    if len(own) != len(value.type.shape) or str(own[0]) not in t.grid.origins:
        return
    output(t, i, GlobalTensor(NumericType(value.type.dtype), first.dims), hidden)


def return_tile(t: KernelTracer, i: int, value: Any) -> tuple[str, str]:
    if isinstance(value, TensorRow):
        value = t.memory.view_of_row(value)
    if isinstance(value, Handle) and isinstance(value.type, View | Buffer):
        value = t.call_op(OPS["load"], [value], {})
    if not isinstance(value, Handle) or not isinstance(value.type, TileType):
        t.fail(f"the kernel returns {describe(value)}, its annotation says "
               f"{t.spec.results[i]}", "return a tile, or a parameter")
    if i not in t.outputs:  # annotated without a type: that of the tile
        out = GlobalTensor(NumericType(value.type.dtype), t.spec.results[i].shape)
        output(t, i, out, composite_axes(t, out))
    require_own_blocks(t, t.outputs[i])
    require_place(t, t.outputs[i], value)
    store_tile(t, t.memory.own_block(t.outputs[i], value.type.shape), value)
    return "tensor", t.outputs[i].value.name


def require_place(t: KernelTracer, out: Handle, value: Handle) -> None:
    """A tile that is one of several blocks of a result comes from where the block is."""
    assert isinstance(out.type, GlobalTensor) and isinstance(value.type, TileType)
    own = out.type.dims[len(out.hidden):]
    made = t.values.defined_by.get(value.value)
    if len(own) != len(value.type.shape) or t.grid.numbered or made and made.name == "full":
        return
    for dim, size in zip(own, value.type.shape, strict=True):
        if str(dim) in t.grid.origins:
            continue
        extent = t.grid.dim_value(dim)
        if isinstance(extent, Handle):
            t.ir.need_dims(t.values.forms.form(extent.value))
        if not isinstance(extent, int) or extent > size:
            hint = "return a tile of that extent"
            if str(dim).isidentifier():
                begin = f"tile_{dim}".lower()
                hint = f"load the group's own block, x[{begin}:{begin}+{size}]"
            t.fail(f"the kernel returns {value.type} for {out.type}: {size} of {extent} along "
                   f"{dim}, and nothing says which, so that every block would be the same", hint)


def require_own_blocks(t: KernelTracer, out: Handle) -> None:
    """Groups that differ along an axis of the grid write different blocks of a result."""
    assert isinstance(out.type, GlobalTensor)
    along = {str(d) for d in out.type.dims}
    for name in block_axes(t):
        if name not in along:
            t.fail(f"the result {out.type} has no axis {name}, along which each group has its own "
                   f"block: all groups would write the same elements",
                   f"say in the annotation what the result's extents are, "
                   f'ts.Tensor["{name}", ...], or add up: ts.tile.atomic_add into an argument')


def block_axes(t: KernelTracer) -> list[str]:
    """The extents along which each group has a block of its own, or a matrix of a stack."""
    return [a.dim for a in t.grid.axes if not a.stride]


def return_number(t: KernelTracer, i: int, value: Any) -> tuple[str, str]:
    value = t.ir.value_of(value)
    kind = t.spec.results[i] if t.spec.results else None
    if isinstance(value, Handle) and not isinstance(value.type, Scalar):
        named = ", ".join(f'"{d}"' for d in "MNKLPQRS"[:len(getattr(value.type, "shape", "MN"))])
        t.fail(f"the kernel returns {describe(value)}",
               f"annotate the result: -> ts.Tensor[{named}, ts.{value.type.dtype}]; several are a "
               "tuple, -> tuple[ts.Tensor[...], ts.Tensor[...]]")
    if kind is None:
        t.fail("the kernel returns a number and has no annotation for it",
               "annotate it: def kernel(...) -> ts.f32, or -> tuple[ts.f32, ts.f32] for two")
    numeric = kind if isinstance(kind, NumericType) else as_type(kind)
    if axes := block_axes(t):
        t.fail(f"the kernel returns a number, and each group has its own block along "
               f"{' and '.join(axes)}: each would return another one",
               f"one group does all: for i in range(0, {axes[0]}, 64); or add up what groups have, "
               "ts.tile.atomic_add into an argument")
    out = output(t, i, GlobalTensor(numeric, (1,)), ())
    if not t.ir.is_uniform(value) or t.ir.divergent:
        t.fail("the returned number differs between lanes",
               "reduce it over the group, or return one element of a shared buffer")
    t.memory.store_element(out, [0], value)
    return "scalar", out.value.name
