"""Ranges: which loop of the IR a ts.tile.range becomes, and how its iterations are shared."""

from __future__ import annotations

import ast
from typing import Any

from tessera.numerics import i64
from tessera.tile.builder.kernel_spec import DimInt
from tessera.tile.frontend.constructs.assignments import assign
from tessera.tile.frontend.constructs.loops import for_loop, resets, rewind, snapshot, while_loop
from tessera.tile.frontend.exits import guard
from tessera.tile.frontend.tracer import KernelTracer, statement
from tessera.tile.ir.handles import Handle, LoopRange, describe, is_number
from tessera.tile.ir.ir import For, Op, walk
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import Buffer, GlobalTensor, TileType
from tessera.tile.passes.independent_iterations import why_dependent


@statement(ast.For)
def for_statement(t: KernelTracer, s: ast.For) -> None:
    items = t.expr(s.iter)
    if isinstance(items, LoopRange):
        if not isinstance(s.target, ast.Name):
            t.fail("a range gives one number: for i in ts.tile.range(...)")
        range_loop(t, s, items)
    elif isinstance(items, tuple | list):
        unroll(t, s, items)
    else:
        tile = isinstance(items, Handle) and isinstance(items.type, TileType)
        t.fail(f"a loop over {describe(items)}", "it has all elements at once: compute with whole "
               "tiles, or reduce it, ts.tile.reduce_sum(t)" if tile else
               "loop over ts.tile.range(...), range(...) or a compile-time tuple")


def unroll(t: KernelTracer, s: ast.For, items: Any) -> None:
    """An iteration for each item, one after the other; where one may leave the loop, those behind
    it stand under the flags that it may have set."""
    body = resets(s) + s.body
    if exits := getattr(s, "exits", ()):
        body = [guard(exits, body, s)]
    for item in items:
        assign(t, s.target, item, t.ir.last())
        t.statements(body)


def range_loop(t: KernelTracer, s: Any, r: LoopRange) -> None:
    body = resets(s) + s.body
    if r.prefetch is not None:
        t.ir.constant_int(r.prefetch, "prefetch")
    if getattr(s, "exits", ()):
        until(t, s, r, body)
        return
    lane = not all(map(t.ir.is_uniform, (r.lo, r.hi, r.step)))
    if r.over == "serial" or lane or t.ir.divergent:
        if r.over in ("lanes", "groups"):
            t.fail(f"over={r.over!r}: the range depends on the lane already",
                   "leave out over=, each lane runs its own range")
        for_loop(t, s, r.lo, r.hi, r.step, "serial", body)
        return
    dim = output_dim(t, r)
    if dim is not None and r.over is None:
        block_loop(t, s, r, dim, body)
        return
    wanted = r.over or natural_spread(t, r)
    if wanted is None:
        for_loop(t, s, r.lo, r.hi, r.step, "serial", body)
    else:
        spread_loop(t, s, r, wanted, body)


def natural_spread(t: KernelTracer, r: LoopRange) -> str | None:
    """How a range with no over= may be spread, when its iterations are independent."""
    if not r.has_step:
        return "lanes"
    if t.depth == 0 and is_zero(r.lo) and dim_name(t, r.hi) is not None and not t.grid.numbered:
        return "groups"
    return None


def spread_loop(t: KernelTracer, s: Any, r: LoopRange, over: str, body: list[ast.stmt]) -> None:
    """Traced serially first: the iterations are spread when they are independent."""
    begin = snapshot(t)
    node = for_loop(t, s, r.lo, r.hi, r.step, "serial", body)
    why = why_dependent(node, t.values.forms, t.values.loop_bounds, t.values.defined_by)
    if why is None and over == "lanes" and uses_group_ops(node):
        why = "it has ops of the whole group"
    if why is None and over == "groups" and t.depth:
        why = "it stands inside another loop"
    if why is None and over == "groups" and r.over is None and t.grid.numbered:
        why = "it asks for the number of the group"
    if why is not None:
        if r.over is not None:
            t.fail(f"over={over!r}: the iterations of this loop are not independent: {why}",
                   "leave out over=: the loop then runs in order")
        return
    rewind(t, begin)
    if over == "lanes":
        lane = t.ir.emit("local_id", [])
        size = t.ir.emit("group_size", [])
        lo = t.ir.arithmetic("add", (r.lo, t.ir.arithmetic("mul", (lane, r.step))))
        step = t.ir.arithmetic("mul", (size, r.step))
        bounds = t.ir.operand(r.lo), t.ir.operand(r.hi), t.ir.operand(r.step)
        node = for_loop(t, s, lo, r.hi, step, "lanes", body)
        t.values.loop_bounds[node.var.value] = bounds
        order_lanes(t, node)
        return
    t.grid.ranges_spread |= r.over is None
    step = t.ir.constant_int(r.step, "the step of a range spread over groups")
    name = dim_name(t, r.hi) or extent_text(t, r.hi)
    axis = t.grid.axis(name, step, extent_text(t, r.lo), stride=True)
    start = t.ir.arithmetic("mul", (counted(t, t.grid.group_coordinate(axis), name), step))
    count = counted(t, t.ir.emit("num_groups", [], axis=axis), name)
    for_loop(t, s, t.ir.arithmetic("add", (r.lo, start)), r.hi,
             t.ir.arithmetic("mul", (count, step)), "groups", body)


def counted(t: KernelTracer, groups: Handle, dim: str) -> Handle:
    """A number of groups along an extent, wide enough to be multiplied up to the extent."""
    return t.ir.cast(groups, i64) if dim in t.spec.wide_dims else groups


def order_lanes(t: KernelTracer, node: For) -> None:
    """As if in order: what the lanes wrote to shared memory is there after the loop."""
    for n in walk_ops(node):
        if n.name in ("store_element", "store_pair"):
            kind = t.values.type_of_value(n.args[0])
            if isinstance(kind, Buffer) and kind.space == "shared":
                t.ir.emit("barrier", [])
                return


def extent_text(t: KernelTracer, x: Any) -> str:
    if isinstance(x, int):
        return str(x)
    name = dim_name(t, x)
    if name is None:
        t.fail("a range over groups begins and ends at constants or named extents",
               "use over='serial', or compute the group's part from ts.tile.group_id()")
    return name


def dim_name(t: KernelTracer, x: Any) -> str | None:
    """The name of an extent, when x is one."""
    if isinstance(x, Handle):
        return t.values.dims.get(x.value)
    names = [n for n, v in t.grid.fixed.items() if v == x] if isinstance(x, DimInt) else []
    return names[0] if names else None


def output_dim(t: KernelTracer, r: LoopRange) -> str | None:
    """The extent of the returned tensor whose blocks this outermost range enumerates (Q51)."""
    if t.depth or not r.has_step or not is_zero(r.lo):
        return None
    name = dim_name(t, r.hi)
    known = {str(d) for out in t.outputs.values() if isinstance(out.type, GlobalTensor)
             for d in out.type.dims}
    return name if name in known else None


def block_loop(t: KernelTracer, s: Any, r: LoopRange, dim: str, body: list[ast.stmt]) -> None:
    """A kernel that returns a tile runs once per block of its result: the loop is the grid."""
    step = t.ir.constant_int(r.step, "the step of the range over the result's blocks")
    group = counted(t, t.grid.group_coordinate(t.grid.axis(dim, step)), dim)
    start = t.ir.arithmetic("mul", (group, step))
    t.grid.origins[dim] = t.env[s.target.id] = t.ir.named(start, s.target.id)
    t.depth += 1
    t.statements(body)
    t.depth -= 1


def until(t: KernelTracer, s: Any, r: LoopRange, body: list[ast.stmt]) -> None:
    """A range with break or return in it: a while with the counter carried."""
    if r.over in ("lanes", "groups"):
        t.fail(f"over={r.over!r} with break or return inside: the iterations depend on each "
               "other")
    if not isinstance(r.step, int):
        t.fail("a range with break or return inside needs a constant step",
               "write while i < N: with i += step at its end")
    target, at = s.target.id, f"__at_{s.target.id}"
    limit = f"__stop_{s.target.id}"
    t.env[at], t.env[limit] = r.lo, r.hi
    order: ast.cmpop = ast.Lt() if r.step > 0 else ast.Gt()
    tests: list[ast.expr] = [ast.UnaryOp(ast.Not(), _read(f)) for f in s.exits]
    tests.append(ast.Compare(_read(at), [order], [_read(limit)]))
    first = ast.Assign([ast.Name(target, ast.Store())], _read(at))
    count = ast.AugAssign(ast.Name(at, ast.Store()), ast.Add(), ast.Constant(r.step))
    new = [first, *body, count]
    test = ast.BoolOp(ast.And(), tests)
    for n in (first, count, test):
        ast.fix_missing_locations(ast.copy_location(n, s))
    while_loop(t, s, test, new)
    del t.env[at], t.env[limit]


def is_zero(x: Any) -> bool:
    return is_number(x) and x == 0


def _read(n: str) -> ast.Name:
    return ast.Name(n, ast.Load())


def walk_ops(nodes: Any) -> list[Op]:
    return [n for n in walk(tuple(nodes) if isinstance(nodes, tuple | list) else (nodes,))
            if isinstance(n, Op)]


def uses_group_ops(node: For) -> bool:
    """Whether ops of the whole group stand inside."""
    return any(OPS[n.name].group or any(isinstance(d.type, TileType) for d in n.outs)
               for n in walk_ops(node))
