"""Checks what a trace says about edges, from the IR it made: raises TileIRError.

No op whose elements meet each other sees what may lie beyond an edge, every result knows at least
what the rule of its op says, and what branches and loops carry knows what each of its values does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from tessera.tile.builder.edge_facts import EdgeFacts
from tessera.tile.builder.edge_masks import visible_edge
from tessera.tile.builder.edge_rules import Carry
from tessera.tile.ir.edges import TileEdges, open_
from tessera.tile.ir.errors import TileIRError
from tessera.tile.ir.ir import For, If, Node, Op, SSAValue, While, walk
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import TileType, space_of


def check_edges(known: EdgeFacts, nodes: Sequence[Node]) -> None:
    """known: what the trace that made the nodes says."""
    for node in walk(tuple(nodes)):
        if isinstance(node, Op):
            _op(known, node)
        elif isinstance(node, If):
            for d, *ways in zip(node.outs, node.thens, node.elses, strict=True):
                _check_merge(known, node, d, ways)
        else:
            for d, *ways in zip(node.carried, node.inits, node.yields, strict=True):
                _check_merge(known, node, d, ways)


def _op(known: EdgeFacts, op: Op) -> None:
    record, types = OPS[op.name], known.values.type_of_args(op)
    facts = [known.of(x) for x in op.args]
    if not any(f.axes for f in facts):
        return
    for a in record.combines(types, op.attr) if record.combines is not None else ():
        if visible_edge(known, a, op.args, types) is not None:
            _fail(op, f"{op.name} sees elements beyond an edge along axis {a.axis}")
    if op.name == "load_tile" and space_of(types[0]) == "shared":
        return  # what the buffer held then is not known any more
    for d in op.outs:
        if isinstance(d.type, TileType) and d.value not in known.stated:
            rule = known.carried(record, Carry(known.values, known.implied, op, tuple(types),
                                               tuple(facts), d.type))
            _knows(op, known.of(d.value), rule, d)


def _check_merge(known: EdgeFacts, node: For | While | If, d: Any, ways: Sequence[Any]) -> None:
    if isinstance(d.type, TileType):
        for x in ways:
            if isinstance(x, SSAValue):
                _knows(node, known.of(d.value), known.of(x), d)


def _knows(node: Node, known: TileEdges, wanted: TileEdges, d: Any) -> None:
    for i, axis in enumerate(wanted.axes):
        if open_(axis) and not open_(known.at(i)):
            _fail(node, f"{d} lost the edge of axis {i}")


def _fail(node: Node, message: str) -> NoReturn:
    raise TileIRError(f"ill-formed Tile IR: {message}", where=node.where)


__all__ = ["check_edges"]
