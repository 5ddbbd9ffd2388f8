"""Blocks of a cluster do a tile together: each takes some of the iterations of its sum.

A block whose tile has more rows reads less of the other operand for each of them, and where a grid
has too few tiles of that height for all multiprocessors, two blocks make one. Each takes every
second iteration. Then a warpgroup of one block sends what it has summed to the one of its number in
the other, which stores these rows: of two warpgroups each block has one that sends and one that
stores, and they change about from tile to tile. Where results leave by stores in which warpgroups
wait for each other, both send, and the first block stores.
"""

from __future__ import annotations

from dataclasses import replace

from tessera.tile.cuda.lower.warp_specialised.program import PipelineKnobs
from tessera.tile.cuda.lower.warp_specialised.rewrite import (
    Maker,
    Nodes,
    is_op,
    map_blocks,
    ops_in,
    out,
    substituted,
    with_attrs,
)
from tessera.tile.ir.ir import Const, For, Function, If, Node, Op, SSAValue, walk
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import TileType

MOST = 2  # blocks: of two summands the order does not matter


def divide_iterations(function: Function, pipeline: PipelineKnobs, maker: Maker
                      ) -> tuple[Function, PipelineKnobs]:
    """The function whose loop of matmuls takes a block's share of iterations, where it is the only
    one that multiplies and begins with zeros; else as it was, with clusters of one."""
    loops = [n for n in function.body if ops_in((n,), "async_matmul")]
    if pipeline.divided == 1:
        return function, pipeline
    if pipeline.divided > MOST or pipeline.cluster > 1 or pipeline.tiles == "dynamic" or not (
            len(loops) == 1 and isinstance(loops[0], For) and _sums(function, loops[0], maker)):
        return function, replace(pipeline, divided=1)
    at = function.body.index(loops[0])
    if any(OPS[n.name].writes and n.name != "store_tile"
           for n in walk(function.body[at + 1:]) if isinstance(n, Op)):
        return function, replace(pipeline, divided=1)
    made = _divided(loops[0], pipeline.divided, maker, function.body[at + 1:])
    return replace(function, body=(*function.body[:at], *made)), pipeline


def _sums(function: Function, loop: For, maker: Maker) -> bool:
    """Whether a loop carries sums in f32 alone, from zeros on."""
    made = {out(n): n for n in function.body if isinstance(n, Op) and len(n.outs) == 1}

    def zeros(x: object) -> bool:
        op = made.get(x) if isinstance(x, SSAValue) else None
        return is_op(op, "full") and op.attr["value"] == 0

    last = {out(n) for n in loop.body if is_op(n, "async_matmul", "add")}
    return len(loop.carried) == 1 and zeros(loop.inits[0]) and loop.yields[0] in last and all(
        isinstance(d.type, TileType) and d.type.dtype.name == "f32" for d in loop.carried)


def _as_many(loop: For, parts: int) -> bool:
    """Whether each block surely has as many iterations as the others."""
    bounds = loop.lo, loop.hi, loop.step
    if not all(isinstance(x, Const) for x in bounds):
        return False
    lo, hi, step = (x.value for x in bounds)  # type: ignore[union-attr]
    return (hi - lo) % (parts * step) == 0


def _divided(loop: For, parts: int, maker: Maker, rest: Nodes) -> list[Node]:
    (total,) = loop.carried
    count = maker.op("part_count", (), "parts", parts=parts)
    mine = maker.op("part_number", (), "part", parts=parts)
    first = maker.op("mul", (out(mine), loop.step), "first")
    step = maker.op("mul", (out(count), loop.step), "step")
    if _as_many(loop, parts):  # the assembler sees that lanes leave the loop together
        var = maker.define(loop.var.value.name, loop.var.type)
        at = maker.op("add", (var.value, out(first)), loop.var.value.name)
        loop = replace(loop, var=var, body=(at, *substituted(loop.body, {loop.var.value: out(at)})))
        begin = []
    else:
        begin = [maker.op("add", (loop.lo, out(first)), "first")]
        loop = replace(loop, lo=out(begin[0]))
    part = maker.define(total.value.name, total.type)
    body = substituted(loop.body, {total.value: part.value})
    made = Op("sum_across", (part.value,), (total,), (("all", False), ("parts", parts)), loop.where)
    loop = replace(loop, step=out(step), carried=(part,), body=body)
    has = maker.op("has_sums", (total.value,), "has_sums", all=False)

    def stored(nodes: Nodes) -> list[Node]:
        return [If(out(has), (n,), (), (), (), ()) if is_op(n, "store_tile") else n for n in nodes]

    return [count, mine, first, *begin, step, loop, made, has, *map_blocks(rest, stored)]


def store_together(nodes: Nodes) -> Nodes:
    """The same with all sums in both blocks, of which the first stores."""
    return map_blocks(nodes, lambda block: [
        with_attrs(n, all=True) if is_op(n, "sum_across", "has_sums") else n for n in block])


__all__ = ["divide_iterations", "store_together"]
