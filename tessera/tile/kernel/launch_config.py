"""k[groups, lanes]: what stands in the brackets, and the launch that they make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.errors import ArgumentError, user_line
from tessera.tile.interpreter.launch import Config

if TYPE_CHECKING:
    from tessera.tile.kernel.kernel import Kernel


class Launch:
    """k[groups, lanes]: call it with the kernel's arguments."""

    __slots__ = ("kernel", "config")

    def __init__(self, kernel: Kernel, config: Config):
        self.kernel, self.config = kernel, config

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.kernel._launch(self.config, args, kwargs)

    def __getitem__(self, more: Any) -> Any:
        given = ", ".join(map(str, self.config.groups or ()))
        said = f"({given})" if len(self.config.groups or ()) > 1 else given
        name = self.kernel.__name__
        raise ArgumentError(f"{name}[{given}] is a launch already", where=user_line(),
                            hint=f"groups and lanes at once: {name}[{said}, {more}](...)")

    def __repr__(self) -> str:
        return f"<launch of {self.kernel.__name__}: {self.config}>"


def config_of(name: str, given: Any) -> Config:
    """What stands in the brackets of k[...]."""
    items = given if isinstance(given, tuple) else (given,)
    if len(items) > 1 and not isinstance(items[0], tuple | list) and None not in items:
        groups = groups_of(items[:1])
        for lanes in items[1:]:
            if not isinstance(lanes, int | np.integer) or isinstance(lanes, bool) or lanes < 0:
                lanes_given(lanes)
        assert groups is not None
        return Config(groups, int(items[1]), tuple(map(int, items)))
    if len(items) > 2:
        raise ArgumentError(f"{name}[{', '.join(map(str, items))}]: a launch is [groups] or "
                            "[groups, lanes]", where=user_line(),
                            hint="a grid of several axes is a tuple: k[(gx, gy), lanes](...)")
    return Config(groups_of(items[0] if items else ()),
                  lanes_given(items[1]) if len(items) > 1 else None)


def groups_of(groups: Any) -> tuple[int, ...] | None:
    """A number, or numbers by axis, as a grid. Raises ArgumentError."""
    if groups is None:
        return None
    items = tuple(groups) if isinstance(groups, tuple | list) else (groups,)
    if not items or not all(isinstance(n, int | np.integer) and not isinstance(n, bool) and n >= 0
                            for n in items):
        raise ArgumentError(f"groups of a launch are numbers >= 0, got {_groups_text(groups)}",
                            hint="k[groups, lanes](...), k[(gx, gy), lanes](...)",
                            where=user_line())
    return tuple(int(n) for n in items)


def _groups_text(groups: Any) -> str:
    one = isinstance(groups, tuple) and len(groups) == 1
    return repr(groups[0] if one else groups)


def lanes_given(lanes: Any) -> int | None:
    """Raises ArgumentError for what is no number of lanes."""
    if lanes is not None and (not isinstance(lanes, int | np.integer) or lanes < 1):
        hint = ("lanes have no axes: k[(2, 1, 1), 32], and a thread's place is computed, "
                "ts.tile.local_id() % 8") if isinstance(lanes, tuple) else None
        raise ArgumentError(f"lanes of a launch is a number >= 1, got {lanes!r}",
                            where=user_line(), hint=hint)
    return None if lanes is None else int(lanes)


__all__ = ["Launch", "config_of", "groups_of", "lanes_given"]
