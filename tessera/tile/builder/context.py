"""ts.tile.context(): tuned parameters under all their names, and the named extents."""

from __future__ import annotations

from typing import Any

from tessera.errors import did_you_mean
from tessera.tile.ir.errors import TileError
from tessera.tile.ir.schedule import ALIASES, Schedule


class Context:
    """Attributes are compile-time numbers (schedule) or extents of the kernel's tensors."""

    def __init__(self, schedule: Schedule, dims: dict[str, Any]):
        self._schedule, self._dims = schedule, dims

    def __getattr__(self, name: str) -> Any:
        if name in self._dims:
            return self._dims[name]
        if name in self._schedule.extra_names:
            return self._schedule.extra_value(name)
        if name in ALIASES:
            value = self._schedule.value(ALIASES[name])
            if value is None and ALIASES[name] == "d":
                return self._inner()
            return value
        raise TileError(f"the context has no {name!r}",
                        hint=did_you_mean(name, [*ALIASES, *self._dims]))

    def _inner(self) -> Any:
        """d without a choice: the head size, named D, D_h or d."""
        for name in ("D_h", "D", "d"):
            if name in self._dims:
                return self._dims[name]
        raise TileError("the context has no d: nothing sets BD and no extent is named D or D_h")
