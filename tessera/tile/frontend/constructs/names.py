"""Names and attributes: of values, and of what the kernel reads from outside."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable
from difflib import get_close_matches
from types import ModuleType
from typing import Any

from tessera.foreign import TILE, instead
from tessera.lazy_dataclass import dataclass
from tessera.tile.frontend.block_origins import PREFIXES
from tessera.tile.frontend.tracer import KernelTracer, expression
from tessera.tile.ir.errors import TileError
from tessera.tile.ir.handles import Handle, TensorRow, Undefined, plain_number
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import GlobalTensor, Scalar, TileType, space_of


@dataclass(frozen=True, eq=False)
class ValueMethod:
    """A method of a traced value, such as x.astype."""

    method: Callable[..., Any]


@expression(ast.Name)
def named_value(t: KernelTracer, e: ast.Name) -> Any:
    found = lookup(t, e.id)
    if isinstance(found, Undefined):
        t.fail(found.why, "give it a value before", also=(("there", found.where),)
               if found.where else ())
    return found


def lookup(t: KernelTracer, name: str) -> Any:
    if name in t.env:
        return t.env[name]
    if name in t.globals:
        t.captured.name(t.active_calls[-1], name, t.globals[name])
        return plain_number(t.globals[name])
    if name in vars(builtins):
        return vars(builtins)[name]
    known = [n for n in (*t.env, *t.globals) if not n.startswith("_")]
    near = [n for n in known if n.lower() == name.lower()]
    if name.startswith(PREFIXES):
        t.fail(f"{name!r} is not defined", unknown_origin(t, name), code="E_UNDEFINED_NAME")
    if not near and len(name) >= 3:
        near = get_close_matches(name, known, n=1, cutoff=0.7)
    hint = f"did you mean {near[0]!r}?" if near else unknown_name(name)
    t.fail(f"{name!r} is not defined", hint, code="E_UNDEFINED_NAME")


def unknown_origin(t: KernelTracer, name: str) -> str:
    """What to do about the block of an extent that no annotation names."""
    arguments = {n for n, _ in t.spec.params}  # x_0 is an extent of x that has no name
    dims = [d for d in (*t.grid.fixed, *t.grid.loaded_dims) if d[:-2] not in arguments]
    prefix, _, dim = name.partition("_")
    if len(t.active_calls) > 1:
        return (f"{t.active_calls[-1].__name__} is written out where it is called, and has no "
                f"groups of its own: give it {name} or views as arguments")
    if not dims:
        return f'name the extents of the arguments: x: ts.Tensor["{dim.upper()}", ts.f32]'
    return (f"no extent is called {dim.upper()}; the group has a block along a named one: "
            + ", ".join(f"{prefix}_{d.lower()}" for d in dims))


def unknown_name(name: str) -> str:
    """What to do about a name that nothing resembles."""
    if len(name) == 1 and name.islower():
        return (f"number the lanes, {name} = ts.tile.linear_id(), loop, for {name} in "
                "ts.tile.range(N), or take the group's block: i, j = block_m, block_n")
    return ("define it before the kernel, or in its body; the extents of annotations, "
            "tile_<dim> and block_<dim> are known by name")


@expression(ast.Attribute)
def attribute_expression(t: KernelTracer, e: ast.Attribute) -> Any:
    return attribute(t, t.expr(e.value), e.attr)


def attribute(t: KernelTracer, x: Any, name: str) -> Any:
    if isinstance(x, TensorRow):
        x = t.memory.view_of_row(x)
    if isinstance(x, Handle):
        return value_attribute(t, x, name)
    try:
        found = getattr(x, name)
        t.captured.attribute(x, name, found)
        return plain_number(found)
    except TileError as err:
        t.fail(err.message, err.hint)
    except AttributeError as err:
        if isinstance(x, ModuleType) and x.__name__ == "tessera.tile":
            public = [o.name for o in OPS.values() if o.public]
            hint = (instead(name, TILE, public)
                    or "docs/reference/tile_ops.md lists all operations")
            t.fail(f"ts.tile has no {name!r}", hint, code="E_NAME")
        t.fail(str(err))


def value_attribute(t: KernelTracer, x: Handle, name: str) -> Any:
    type_ = x.type
    if name == "T" and not isinstance(type_, Scalar):
        if isinstance(type_, GlobalTensor):
            t.fail("the transpose of a whole tensor", "slice first: A[m:m+64, k:k+32].T")
        return t.call_op(OPS["transpose"], [x], {})
    if name == "dtype":
        return type_.dtype
    if name == "space":
        return space_of(type_)
    if name == "shape" and not isinstance(type_, Scalar):
        return t.memory.shape_of(x)
    if name == "ndim" and not isinstance(type_, Scalar):
        return len(t.memory.shape_of(x))
    whole = isinstance(type_, Scalar) and type_.dtype.kind in ("int", "uint")
    if whole and name in ("bit_length", "bit_count"):
        return getattr(t.ir.constant_int(x, f"a number whose .{name}() is asked"), name)
    if name in ("astype", "to"):
        return ValueMethod(lambda dtype: t.call_op(OPS["cast"], [x, dtype], {}))
    kind = {GlobalTensor: "tensor", TileType: "tile"}.get(type(type_), type(type_).__name__.lower())
    hint = f"ts.tile.{name}(x)" if name in OPS else (
        instead(name, TILE, ()) or "a value has .T .shape .dtype .ndim .astype")
    t.fail(f"a {kind} has no attribute {name!r}", hint)
