"""Loads that consumers do themselves (bias, residual) stand right before their first reader.

Written early in a kernel, they would keep a tile of registers beside the accumulators for long.
"""

from __future__ import annotations

from tessera.tile.cuda.lower.warp_specialised.qualify import STORES
from tessera.tile.cuda.lower.warp_specialised.rewrite import (
    Nodes,
    made_by,
    map_blocks,
    ops_in,
    reads,
)
from tessera.tile.ir.ir import Node, Op
from tessera.tile.ir.types import TileType

LIGHT = frozenset({"load_tile", "read_row", "expand_dims", "convert"})


def sink_loads(nodes: Nodes) -> Nodes:
    """load_tile and what only reshapes or widens its result, moved down in their blocks."""
    return map_blocks(nodes, _sunk)


def _sunk(nodes: Nodes) -> list[Node]:
    kept: list[Node] = []
    for node in reversed(nodes):
        kept.insert(_sink_position(node, kept) if _is_light_load(node) else 0, node)
    return kept


def _is_light_load(node: Node) -> bool:
    return isinstance(node, Op) and node.name in LIGHT and isinstance(node.outs[0].type, TileType)


def _sink_position(node: Node, after: list[Node]) -> int:
    """In front of the first reader; a load stays in front of a store."""
    made = made_by(node)
    for i, other in enumerate(after):
        if reads(other) & made or ops_in((node,), "load_tile") and ops_in((other,), *STORES):
            return i
    return 0
