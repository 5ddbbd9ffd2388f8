"""Loops of one iteration become what they do: `for h in range(c, c + 1)`, as a loop over the heads
of a group is where groups have one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tessera.tile.ir.ir import (
    Const,
    For,
    Function,
    Node,
    Op,
    Operand,
    SSAValue,
    defining_ops,
    map_operands,
    with_regions,
)


def inline_single_iterations(function: Function) -> Function:
    """The function without loops whose end is their start plus at most one step."""
    made = defining_ops(function.body)
    table: dict[SSAValue, Operand] = {}

    def follow(x: Operand) -> Operand:
        while isinstance(x, SSAValue) and x in table:
            x = table[x]
        return x

    def block(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        kept: list[Node] = []
        for node in nodes:
            node = map_operands(node, follow)
            if isinstance(node, For) and 0 < extent_of(node, made) <= _step(node):
                table[node.var.value] = node.lo
                table.update({d.value: i for d, i in zip(node.carried, node.inits, strict=True)})
                kept += block(node.body)
                table.update({d.value: follow(y) for d, y in zip(
                    node.carried, node.yields, strict=True)})
            else:
                node = with_regions(node, block)
                kept.append(map_operands(node, follow))  # what it yields may come from such a loop
        return tuple(kept)

    return replace(function, body=block(function.body))


def extent_of(loop: For, made: Mapping[Operand, Op]) -> int:
    """hi - lo where that is a positive number, else 0. made: the op of each value."""
    op = made.get(loop.hi)
    if op is not None and op.name == "add" and isinstance(op.args[1], Const) and (
            op.args[0] == loop.lo):
        return max(0, int(op.args[1].value))
    if isinstance(loop.lo, Const) and isinstance(loop.hi, Const):
        return max(0, int(loop.hi.value) - int(loop.lo.value))
    return 0


def _step(loop: For) -> int:
    return int(loop.step.value) if isinstance(loop.step, Const) else 0


__all__ = ["extent_of", "inline_single_iterations"]
