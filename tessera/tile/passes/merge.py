"""Merges equal pure ops: one local_id(), one product of the same values, where one dominates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tessera.tile.ir.ir import For, Function, If, Node, Op, Operand, SSAValue, While, map_operands
from tessera.tile.ir.op_record import OPS


def merge(function: Function) -> Function:
    """The same function in which no pure op is computed again where its value is known."""
    table: dict[SSAValue, Operand] = {}
    return replace(function, body=_block(function.body, {}, table))


def _block(nodes: tuple[Node, ...], known: dict[Any, Op], table: dict[SSAValue, Operand]
           ) -> tuple[Node, ...]:
    def follow(x: Operand) -> Operand:
        return table.get(x, x) if isinstance(x, SSAValue) else x

    known = dict(known)
    out: list[Node] = []
    for node in nodes:
        if isinstance(node, Op):
            node = replace(node, args=tuple(map(follow, node.args)))
            key = (node.name, node.args, node.attrs)
            if OPS[node.name].effect == "pure" and key in known:
                same = known[key]
                table |= {d.value: s.value for d, s in zip(node.outs, same.outs, strict=True)}
                continue
            known[key] = node
            out.append(node)
        else:
            out.append(_nested(node, known, table, follow))
    return tuple(out)


def _nested(node: For | While | If, known: dict[Any, Op], table: dict[SSAValue, Operand],
            follow: Any) -> Node:
    """Regions see what is known before them; their own ops are not known after them."""
    if isinstance(node, For):
        node = replace(node, body=_block(node.body, known, table))
    elif isinstance(node, While):
        node = replace(node, test=_block(node.test, known, table),
                       body=_block(node.body, known, table))
    else:
        node = replace(node, then=_block(node.then, known, table),
                       orelse=_block(node.orelse, known, table))
    return map_operands(node, follow)
