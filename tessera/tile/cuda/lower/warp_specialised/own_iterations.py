"""Loops of which a warpgroup does the iterations that rows of its own need (tile.own_iterations).

In front of them and behind them it waits for the slots that the producer fills for others, and
gives them back. The latter stand at the end of the tile, so that its results leave meanwhile.
"""

from __future__ import annotations

from dataclasses import replace

from tessera.tile.cuda.lower.warp_specialised.rewrite import (
    INT,
    Maker,
    Nodes,
    Table,
    is_op,
    map_blocks,
    number,
    out,
    substituted,
)
from tessera.tile.ir.ir import Const, For, Node, Op, Operand


def whole_loops(nodes: Nodes) -> Nodes:
    """For the producer: all iterations that any warpgroup needs."""
    def block(nodes: Nodes) -> list[Node]:
        table: Table = {out(n): n.args[0] for n in nodes if is_op(n, "own_iterations")}
        return list(substituted(tuple(n for n in nodes if not is_op(n, "own_iterations")), table))

    return map_blocks(nodes, block)


def own_loops(nodes: Nodes, maker: Maker, rows: int) -> Nodes:
    """For a consumer. Loops that stand where their bounds are made. rows: of tiles of which each
    warpgroup has a part."""
    def block(nodes: Nodes) -> list[Node]:
        nodes = tuple(replace(n, name="row_of_warpgroup") if isinstance(n, Op) and is_op(
            n, "own_row") and n.attr["size"] == rows else n for n in nodes)
        bounds = {out(n): n for n in nodes if is_op(n, "own_iterations")}
        kept: list[Node] = []
        behind: list[Node] = []
        for node in nodes:
            bound = bounds.get(node.hi) if isinstance(node, For) else None  # type: ignore[arg-type]
            if is_op(node, "own_iterations"):
                continue
            if bound is None or not isinstance(node, For) or not isinstance(node.step, Const):
                kept.append(node)
                continue
            before, after = _narrowed(node, bound, maker)
            kept += before
            behind += after
        left: Table = {x: n.args[0] for x, n in bounds.items()}
        return list(substituted((*kept, *behind), left))

    return map_blocks(nodes, block)


def _narrowed(loop: For, bound: Op, maker: Maker) -> tuple[list[Node], list[Node]]:
    """The loop and what is in front of it; what is behind it."""
    hi, first, stop = bound.args
    assert isinstance(loop.step, Const)
    made: list[Node] = []

    def scalar(name: str, x: Operand, y: Operand) -> Operand:
        made.append(maker.op(name, (x, y), loop.var.value.name, where=loop.where))
        return out(made[-1])  # type: ignore[arg-type]

    def whole(x: Operand) -> Operand:
        return scalar("mul", scalar("floordiv", x, loop.step), loop.step)

    begin = scalar("maximum", scalar("minimum", first, scalar("sub", hi, number(1))), loop.lo)
    begin = scalar("add", loop.lo, whole(scalar("sub", begin, loop.lo)))
    end = scalar("minimum", hi, stop)
    room = scalar("maximum", scalar("sub", end, begin), number(0))
    rest = scalar("add", begin, whole(scalar("add", room, number(int(loop.step.value) - 1))))
    before, own = _drain(loop, loop.lo, begin, maker), replace(loop, lo=begin, hi=end)
    return [*made, before, own], [_drain(loop, rest, hi, maker)]


def _drain(loop: For, lo: Operand, hi: Operand, maker: Maker) -> For:
    """Each slot goes back as soon as it was waited for."""
    kept: list[Node] = []
    for node in loop.body:
        if is_op(node, "ring_wait"):
            kept += [node, maker.op("ring_release", (out(node),), ring=node.attr["ring"])]
    body, _ = maker.copy(tuple(kept), {})
    return For(maker.define(loop.var.value.name, INT), lo, hi, loop.step, (), (), body, ())


__all__ = ["own_loops", "whole_loops"]
