"""What a loop adds up of tiles is reduced behind it.

    for ...: s = s + reduce_sum(t)      ->  a = 0; for ...: a = a + t;  s = s + reduce_sum(a)

So lanes exchange, and warps meet, once and not in each iteration; extrema likewise. Each place of
the tile has sums of its own, of which the registers of a thread have to hold few.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

from tessera.numerics import f32, i32
from tessera.tile.cuda.lower.warp_specialised.rewrite import Maker, Nodes, map_blocks, out
from tessera.tile.ir.ir import For, Function, Node, Op, SSAValue, uses
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import TileType

MOST = 32  # elements of such a tile in a thread


def sink_reductions(function: Function, threads: int) -> Function:
    """The function with such reductions behind their loops. threads: of a group."""
    maker, used = Maker(function), uses(function.body)

    def block(nodes: Nodes) -> Iterable[Node]:
        for node in nodes:
            yield from _behind(maker, node, used, threads) if isinstance(node, For) else (node,)

    return replace(function, body=map_blocks(function.body, lambda nodes: tuple(block(nodes))))


def _behind(maker: Maker, loop: For, used: dict[SSAValue, int], threads: int) -> list[Node]:
    made = {d.value: n for n in loop.body if isinstance(n, Op) for d in n.outs}
    before, behind = list[Node](), list[Node]()
    for at in range(len(loop.carried)):
        found = _carried(maker, loop, at, made, used, threads)
        if found is None:
            continue
        joined, reduction = found
        (x,), carried, attrs = reduction.args, loop.carried[at], dict(reduction.attrs)
        type = maker.type(x)
        assert isinstance(type, TileType)
        start = maker.op("full", (), "parts", where=reduction.where, dtype=type.dtype,
                         shape=type.shape, value=OPS[reduction.name].neutral)
        parts = maker.define("parts", type)
        more = maker.op(joined.name, (parts.value, x), "parts", where=joined.where)
        whole = maker.op(reduction.name, (parts.value,), "whole", where=reduction.where, **attrs)
        before.append(start)
        behind += [whole, replace(joined, args=(loop.inits[at], out(whole)), outs=(carried,))]
        gone = {id(joined): more, id(reduction): None}
        loop = replace(
            loop, body=tuple(n for m in loop.body if (n := gone.get(id(m), m)) is not None),
            carried=(*loop.carried[:at], parts, *loop.carried[at + 1:]),
            inits=(*loop.inits[:at], out(start), *loop.inits[at + 1:]),
            yields=(*loop.yields[:at], out(more), *loop.yields[at + 1:]))
    return [*before, loop, *behind]


def _carried(maker: Maker, loop: For, at: int, made: dict[SSAValue, Op],
             used: dict[SSAValue, int], threads: int) -> tuple[Op, Op] | None:
    """What joins a carried value with a reduction, and that, where nothing else reads either."""
    last, carried = loop.yields[at], loop.carried[at].value
    joined = made.get(last) if isinstance(last, SSAValue) else None
    if joined is None or carried not in joined.args or used[last] > 1 or (  # type: ignore[index]
            uses(loop.body).get(carried) != 1):
        return None
    other = next((x for x in joined.args if x != carried), None)
    reduction = made.get(other) if isinstance(other, SSAValue) else None
    if reduction is None or used[other] > 1 or (  # type: ignore[index]
            OPS[reduction.name].joined_by != joined.name or not OPS[reduction.name].joined_by):
        return None
    type = maker.type(reduction.args[0])
    fits = isinstance(type, TileType) and type.dtype in (f32, i32) and (
        prod(type.shape) <= MOST * threads)
    return (joined, reduction) if fits else None


__all__ = ["sink_reductions"]
