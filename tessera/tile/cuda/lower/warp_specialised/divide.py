"""Blocks of a cluster do a tile together: each takes some of the iterations of its sum.

A block whose tile has more rows reads less of the other operand for each of them, and where a grid
has too few tiles of that height for all multiprocessors, two blocks make one. Each takes every
second iteration, and they send each other what they have summed. The first does what follows.
"""

from __future__ import annotations

from dataclasses import replace

from tessera.tile.cuda.lower.warp_specialised.program import PipelineKnobs
from tessera.tile.cuda.lower.warp_specialised.rewrite import (
    Maker,
    Nodes,
    is_op,
    number,
    ops_in,
    out,
    substituted,
)
from tessera.tile.ir.ir import For, Function, If, Node, Op, SSAValue
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


def _divided(loop: For, parts: int, maker: Maker, rest: Nodes) -> list[Node]:
    (total,) = loop.carried
    count = maker.op("part_count", (), "parts", parts=parts)
    mine = maker.op("part_number", (), "part", parts=parts)
    first = maker.op("mul", (out(mine), loop.step), "first")
    lo = maker.op("add", (loop.lo, out(first)), "first")
    step = maker.op("mul", (out(count), loop.step), "step")
    part = maker.define(total.value.name, total.type)
    body = substituted(loop.body, {total.value: part.value})
    made = Op("sum_across", (part.value,), (total,), (("parts", parts),), loop.where)
    loop = replace(loop, lo=out(lo), step=out(step), carried=(part,), body=body)
    test = maker.op("eq", (out(mine), number(0)), "first")
    return [count, mine, first, lo, step, loop, made, test, If(out(test), rest, (), (), (), ())]


__all__ = ["divide_iterations"]
