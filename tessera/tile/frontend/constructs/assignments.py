"""Assignments: names, tuples, elements and boxes."""

from __future__ import annotations

import ast
from typing import Any

from tessera.numerics import f32, i32
from tessera.tile.frontend.constructs.names import named_value
from tessera.tile.frontend.constructs.operators import BINARY, binary
from tessera.tile.frontend.constructs.subscripts import index_parts, indexed_region, tile_index
from tessera.tile.frontend.tracer import KernelTracer, statement
from tessera.tile.ir.handles import AxisSlice, Handle, TensorRow, describe
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import Buffer, GlobalTensor, Scalar, TileType, View
from tessera.tile.ops.macros import store_tile


@statement(ast.Assign)
def assignment(t: KernelTracer, s: ast.Assign) -> None:
    for target in s.targets:
        require_no_argument(t, target, s.value)
    if len(s.targets) == 1 and isinstance(s.targets[0], ast.Tuple) and isinstance(
            s.value, ast.Tuple) and len(s.targets[0].elts) == len(s.value.elts):
        values = []
        for to, e in zip(s.targets[0].elts, s.value.elts, strict=True):
            before, value = t.ir.last(), t.expr(e)
            values.append(t.ir.named(value, to.id, before) if isinstance(to, ast.Name) else value)
        assign(t, s.targets[0], tuple(values), t.ir.last())
        return
    before, value = t.ir.last(), t.expr(s.value)
    for target in s.targets:
        assign(t, target, value, before)


@statement(ast.AnnAssign)
def annotated_assignment(t: KernelTracer, s: ast.AnnAssign) -> None:
    if s.value is None:
        return
    require_no_argument(t, s.target, s.value)
    before, value, kind = t.ir.last(), t.expr(s.value), t.expr(s.annotation)
    if isinstance(kind, type) and kind in (int, float, bool):
        kind = {int: i32, float: f32, bool: bool}[kind]
    assign(t, s.target, t.call_op(OPS["cast"], [value, kind], {}), before)


def require_no_argument(t: KernelTracer, target: ast.expr, value: ast.expr) -> None:
    """`y = t` stores nothing in the argument y. `x = tile.load(x)` is meant as it stands."""
    if isinstance(target, ast.Tuple | ast.List):
        for part in target.elts:
            require_no_argument(t, part, value)
        return
    known = t.env.get(target.id) if isinstance(target, ast.Name) else None
    if not isinstance(target, ast.Name) or target.id not in t.argument_names or not (
            isinstance(known, Handle) and isinstance(known.type, GlobalTensor)):
        return
    if not any(isinstance(n, ast.Name) and n.id == target.id for n in ast.walk(value)):
        name = target.id
        t.fail(f"{ast.unparse(target)} is an argument: this gives its name to another "
               "value, and nothing is stored in it",
               f"{name}[...] = t stores a tile as the whole of it, {name}[a:a+64] = t as a "
               f"part, ts.tile.store({name}, t) as the group's block; for a value of its "
               "own take another name")


def assign(t: KernelTracer, target: ast.expr, value: Any, before: Any) -> None:
    """before: what was emitted last before the value's expression was evaluated."""
    if isinstance(target, ast.Starred):
        target = target.value
    if isinstance(target, ast.Name):
        t.env[target.id] = t.ir.named(value, target.id, before)
    elif isinstance(target, ast.Tuple | ast.List):
        items = value
        if not isinstance(items, tuple | list):
            t.fail(f"{describe(value)} cannot be unpacked into {len(target.elts)} names")
        stars = [i for i, p in enumerate(target.elts) if isinstance(p, ast.Starred)]
        if stars and len(items) >= len(target.elts) - 1:  # Python has one star at most
            (at,) = stars
            end = len(items) - (len(target.elts) - 1 - at)
            items = [*items[:at], list(items[at:end]), *items[end:]]
        if len(items) != len(target.elts):
            t.fail(f"{describe(value)} cannot be unpacked into {len(target.elts)} names")
        for part, v in zip(target.elts, items, strict=True):
            assign(t, part, v, before)
    elif isinstance(target, ast.Subscript):
        store(t, target, value)
    else:
        t.fail(f"assignment to {ast.unparse(target)}",
               "names, tuples and x[i] can be assigned")


def assigned_place(t: KernelTracer, target: ast.Subscript) -> tuple[Handle, list[Any]]:
    """The tensor or buffer of x[i] and the indices, stages resolved."""
    base: Any = t.expr(target.value)
    parts = index_parts(t, target)
    if isinstance(base, TensorRow):
        base, parts = base.base, [*base.index, *parts]
    if isinstance(base, tuple | list | dict):
        t.fail("assignment to an item of a tuple, list or dict",
               "use a shared buffer or names")
    if not isinstance(base, Handle) or isinstance(base.type, Scalar | TileType):
        hint = "a tile is a value: make a new one, for example with ts.tile.where"
        t.fail(f"assignment to a part of {describe(base)}", hint)
    if isinstance(base.type, Buffer) and base.type.stages > 1:
        base, parts = t.memory.pick_stage(base, parts[0]), parts[1:]
    return base, t.memory.expand_ellipsis(base, parts or [...])


def store(t: KernelTracer, target: ast.Subscript, value: Any) -> None:
    base, parts = assigned_place(t, target)
    store_at(t, base, parts, value)


def store_at(t: KernelTracer, base: Handle, parts: list[Any], value: Any) -> None:
    if picked := tile_index(t, parts):
        region, index, axis = indexed_region(base, parts, picked)
        t.call_op(OPS["scatter"], [region, index, value, axis], {})
        return
    elements = all(not isinstance(p, AxisSlice) for p in parts) \
        and len(parts) == t.memory.rank(base)
    for p in parts:
        if not isinstance(p, AxisSlice):
            t.memory.require_index(p)
    if elements and parts:
        t.memory.store_element(base, parts, value)
        return
    view = base if isinstance(base.type, View) else t.memory.make_view(base, parts)
    store_tile(t, view, value)


@statement(ast.AugAssign)
def augmented_assignment(t: KernelTracer, s: ast.AugAssign) -> None:
    name = BINARY.get(type(s.op))
    if name is None:
        t.fail("@= is not part of the kernel language", "x = ts.tile.dot(x, y)")
    if isinstance(s.target, ast.Name):
        old = named_value(t, ast.copy_location(ast.Name(s.target.id, ast.Load()), s.target))
        if isinstance(old, Handle) and isinstance(old.type, GlobalTensor | Buffer | View):
            update_block(t, old, name, t.expr(s.value))
            return
        before = t.ir.last()
        t.env[s.target.id] = t.ir.named(binary(t, name, old, t.expr(s.value)), s.target.id, before)
    elif isinstance(s.target, ast.Subscript):
        base, parts = assigned_place(t, s.target)
        if tile_index(t, parts):
            t.fail(f"{ast.unparse(s)} with a tile of positions: two of them may be equal",
                   "ts.tile.scatter(x, index, tile, mode='add') adds each")
        if all(not isinstance(p, AxisSlice) for p in parts) and len(parts) == t.memory.rank(base):
            old = t.memory.load_element(base, parts)
            store_at(t, base, parts, binary(t, name, old, t.expr(s.value)))
            return
        update(t, t.memory.make_view(base, parts), name, t.expr(s.value))
    else:
        t.fail(f"assignment to {ast.unparse(s.target)}")


def update(t: KernelTracer, view: Handle, name: str, value: Any) -> None:
    """view op= value: load, compute, store."""
    if isinstance(value, Handle) and isinstance(value.type, View | Buffer):
        value = t.call_op(OPS["load"], [value], {})
    old = t.call_op(OPS["load"], [view], {})
    store_tile(t, view, binary(t, name, old, value))


def update_block(t: KernelTracer, tensor: Handle, name: str, value: Any) -> None:
    """C += tile: the group's own block of C."""
    if not isinstance(value, Handle) or not isinstance(value.type, TileType):
        t.fail(f"{describe(value)} added to the whole of {describe(tensor)}",
               "add a tile (the group's block), or index elements")
    update(t, t.memory.own_block(tensor, value.type.shape), name, value)
