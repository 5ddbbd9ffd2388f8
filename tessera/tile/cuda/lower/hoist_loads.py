"""Loads in front of the first reduction: all that a group reads is on its way at once.

    x = load(X);  s = row_sum(f(x));  y = load(Y)    ->    x = load(X);  y = load(Y);  s = ...

A group that waits for the statistics of one operand before it asks for the next has its memory idle
meanwhile. The assembler would move the loads back, to where registers of the first operand are free
again, past barriers too: an `arrive` of each in front of the reduction keeps them. It is for what
stands in no loop, and nothing is moved over a write or a barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from tessera.tile.ir.ir import Function, Node, Op, SSAValue, definitions
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import TileType, View

MOST_BITS = 512  # of what a thread asks for early


def hoist_loads(function: Function, threads: int) -> Function:
    """The function with loads that stand behind the first reduction in front of it."""
    body = function.body
    first = next((i for i, n in enumerate(body)
                  if isinstance(n, Op) and OPS[n.name].joined_by), len(body))
    there = {p.value for p in function.params}
    there |= {d.value for n in body[:first] if isinstance(n, Op) for d in n.outs}
    moved = _movable(function, body[first:], there, MOST_BITS * threads)
    arrive = [Op("arrive", (n.outs[0].value,), (), (), n.where) for n in moved
              if n.name == "load_tile"]
    if not arrive:
        return function
    rest = [n for n in body[first:] if n not in moved]
    return replace(function, body=(*body[:first], *moved, *arrive, *rest))


def _movable(function: Function, nodes: Sequence[Node], there: set[SSAValue], room: int
             ) -> list[Op]:
    """The loads of so many bits that follow from what is there, and their places."""
    types, moved = definitions(function), list[Op]()
    for node in nodes:
        if not isinstance(node, Op) or OPS[node.name].effect not in ("pure", "read"):
            break
        known = all(a in there or not isinstance(a, SSAValue) for a in node.args)
        if not known or any(isinstance(d.type, TileType) for d in node.outs) and not (
                node.name == "load_tile" and _is_near(types[node.args[0]])):  # type: ignore[index]
            continue
        for d in node.outs:
            if isinstance(d.type, TileType):
                room -= d.type.dtype.bits * prod(d.type.shape)
        if room < 0:
            break
        moved.append(node)
        there |= {d.value for d in node.outs}
    return moved


def _is_near(kind: object) -> bool:
    """Whether it is a box of a tensor with elements of a register or less."""
    return isinstance(kind, View) and kind.space == "global" and kind.dtype.bits <= 32


__all__ = ["hoist_loads"]
