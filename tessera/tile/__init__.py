"""The tile language: ts.tile.<op> inside @ts.kernel functions.

Names come from the registry of ops (tile/ops): `ts.tile.exp` is the record of the op.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tessera.errors import UnknownNameError
from tessera.foreign import TILE
from tessera.tile.ops import OPS


class _TileModule(ModuleType):
    """ts.tile is the language; called, ts.tile(x, repeats) is the op of that name (np.tile)."""

    repeat: Callable[..., Any]  # set by tessera/__init__, which knows the ops of tensors

    def __call__(self, x: Any, repeats: Any) -> Any:
        return self.repeat(x, repeats)


MODULE: Any = sys.modules[__name__]
MODULE.__class__ = _TileModule


def __getattr__(name: str) -> Any:
    if name in OPS and OPS[name].public:
        return OPS[name]
    if name.startswith("__"):
        raise AttributeError(name)
    raise UnknownNameError(f"ts.tile has no {name!r}", name, public_names, TILE)


def public_names() -> list[str]:
    """The names of ts.tile."""
    return sorted(o.name for o in OPS.values() if o.public)


def __dir__() -> list[str]:
    return public_names()
