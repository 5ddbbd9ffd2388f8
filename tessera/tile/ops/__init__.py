"""The ops of the tile language, one file per family. Every module of this folder is loaded, and its
ops register themselves."""

from __future__ import annotations

import importlib
import pkgutil

from tessera.tile.ir.op_record import OPS, TileOp

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["OPS", "TileOp"]
