"""Loop-invariant first operands in registers: read from shared memory once, not in every
iteration."""

from __future__ import annotations

from tessera.tile.cuda.lower.warp_specialised.rewrite import (
    Maker,
    Nodes,
    Table,
    is_op,
    map_blocks,
    ops_in,
    out,
    reads,
    substituted,
)
from tessera.tile.ir.ir import For, Node, Op, SSAValue, While


def hold_operands(nodes: Nodes, maker: Maker) -> Nodes:
    """slot_tile that is read only as a K-major first operand, in a loop too -> hold_operand."""
    def block(nodes: Nodes) -> list[Node]:
        table: Table = {}
        kept: list[Node] = []
        for i, node in enumerate(nodes):
            kept += substituted((node,), table)
            if isinstance(node, Op) and node.name == "slot_tile" and _multiplies_in_loops(
                    out(node), nodes[i + 1:]):
                kept.append(maker.op("hold_operand", (out(node),), out(node).name,
                                     where=node.where))
                table[out(node)] = out(kept[-1])  # type: ignore[arg-type]
        return kept

    return map_blocks(nodes, block)


def _multiplies_in_loops(x: SSAValue, after: Nodes) -> bool:
    readers = [n for n in after if x in reads(n)]
    if not any(isinstance(n, For | While) for n in readers) or not all(
            isinstance(n, For | While) or is_op(n, "async_matmul") for n in readers):
        return False
    matmuls = [p for p in ops_in(tuple(readers), "async_matmul") if x in p.args]
    return all(p.args[0] == x and p.args[1] != x and p.attr["a_major"] == "K" for p in matmuls)
