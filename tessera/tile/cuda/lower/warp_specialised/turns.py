"""Turns of consumer warpgroups: one after another they issue the matmuls of an iteration.

Whoever issues first has its scores first, and computes while the others' matmuls run. Without turns
warpgroups share tensor cores and exponentials evenly and so do the same at the same time: all wait
for scores, then all compute. A turn goes with each slot of the ring that an iteration waits for
first, whether its warpgroup multiplies what lies there or only gives it back: all have as many, and
none waits for one that has gone.
"""

from __future__ import annotations

from tessera.tile.cuda.lower.warp_specialised.rewrite import (
    Maker,
    Nodes,
    is_op,
    map_blocks,
)
from tessera.tile.ir.ir import For, Node, walk


def place_turns(nodes: Nodes, maker: Maker) -> Nodes:
    """A consumer's nodes with turns around what each iteration issues."""
    ring = _first_ring(nodes)
    if ring is None:
        return nodes

    def block(nodes: Nodes) -> list[Node]:
        kept, at = list[Node](), 0
        for i, node in enumerate(nodes):
            if _waits_for(node, ring):
                first, end = _issued(nodes, i + 1, ring)
                kept += [*nodes[at:first], maker.op("turn_take", ()), *nodes[first:end],
                         maker.op("turn_pass", ())]
                at = end
        return [*kept, *nodes[at:]]

    return (maker.op("turn_begin", ()), *map_blocks(nodes, block))


def _issued(nodes: Nodes, start: int, ring: str) -> tuple[int, int]:
    """Where the matmuls behind a slot's wait begin and end, up to where any is waited for; nothing
    right behind that wait where there are none."""
    stop = next((i for i in range(start, len(nodes)) if is_op(nodes[i], "matmul_wait")
                 or _waits_for(nodes[i], ring)), len(nodes))
    found = [i for i in range(start, stop) if is_op(nodes[i], "async_matmul")]
    return (found[0], found[-1] + 1) if found else (start, start)


def _waits_for(node: Node, ring: str) -> bool:
    return is_op(node, "ring_wait") and node.attr["ring"] == ring


def _first_ring(nodes: Nodes) -> str | None:
    """The ring whose slots an innermost loop that multiplies waits for first."""
    for loop in walk(nodes):
        if isinstance(loop, For) and any(is_op(n, "async_matmul") for n in loop.body) and not any(
                isinstance(n, For) for n in walk(loop.body)):
            return next((n.attr["ring"] for n in loop.body if is_op(n, "ring_wait")), None)
    return None


__all__ = ["place_turns"]
