"""Passes on Tile IR: pure functions, in the order in which they run."""

from __future__ import annotations

from tessera.tile.passes.merge import merge
from tessera.tile.passes.registered import (
    PIPELINE,
    map_ops,
    register_pass,
    run_passes,
    unregister_pass,
)
from tessera.tile.passes.simplify import simplify
from tessera.tile.passes.verify import verify

__all__ = ["PIPELINE", "map_ops", "merge", "register_pass", "run_passes", "simplify",
           "unregister_pass", "verify"]
