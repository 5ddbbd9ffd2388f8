"""Passes on Tile IR: pure functions, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable

from tessera.tile.ir.ir import Function
from tessera.tile.passes.merge import merge
from tessera.tile.passes.simplify import simplify
from tessera.tile.passes.verify import verify

PIPELINE: tuple[Callable[[Function], Function], ...] = (simplify, merge, simplify, verify)

__all__ = ["PIPELINE", "merge", "simplify", "verify"]
