"""The ops of the tile language, one file per family; importing them fills the registry."""

from __future__ import annotations

from tessera.tile.ir.op_record import OPS, TileOp
from tessera.tile.ops import (
    atomics,
    attention,
    cluster,
    combines,
    create,
    debug,
    dependents,
    elementwise,
    ids,
    indexed,
    macros,
    matmul,
    memory,
    packed,
    random,
    reduce,
    vector,
    warp,
    windows,
)

__all__ = [
    "OPS", "TileOp", "atomics", "attention", "cluster", "combines", "create", "debug",
    "dependents", "elementwise", "ids", "indexed", "macros", "matmul", "memory", "packed",
    "random", "reduce", "vector", "warp", "windows",
]
