"""Pins in front of the waits of a rotated loop: see the op `pin`."""

from __future__ import annotations

from tessera.tile.cuda.lower.warp_specialised.rewrite import Maker, Nodes, is_op, map_blocks
from tessera.tile.ir.ir import For, Node, Op, Operand, with_regions


def place_pins(nodes: Nodes, maker: Maker, registers: int) -> Nodes:
    """In loops: what was summed along rows before a wait is pinned in front of it."""
    def block(nodes: Nodes) -> list[Node]:
        return [with_regions(n, lambda inner: tuple(_pinned(inner, maker, registers)))
                if isinstance(n, For) else n for n in nodes]

    return map_blocks(nodes, block)


def _pinned(nodes: Nodes, maker: Maker, registers: int) -> list[Node]:
    kept: list[Node] = []
    summed: Operand | None = None
    for node in nodes:
        if is_op(node, "lane_sum", "reduce_sum"):
            assert isinstance(node, Op)
            summed = node.args[0]
        if is_op(node, "matmul_wait") and summed is not None:
            kept.append(maker.op("pin", (summed,), registers=registers))
            summed = None
        kept.append(node)
    return kept
