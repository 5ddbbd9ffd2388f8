"""Short keys of calls: what is seen at a glance of arguments that are plain tensors, by position or
in containers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import config, hooks
from ..runtime.arrays import HOST
from ..tensor import Tensor
from ..tile.launch.resident import Resident
from . import tree
from .placed_leaves import HERE
from .tree_code import flattener

KEPT = 4  # structures of one function's arguments


class ShortKeys:
    """Those of a function, which knows the structures of some calls."""

    def __init__(self) -> None:
        self._takers: list[Callable[[Any], list[Any] | None]] = []  # take arguments apart

    def of(self, args: tuple[Any, ...], new: bool = False) -> tuple[tuple | None, Sequence[Any]]:
        """The key of a call and the tensors that are its arguments; None where something else is
        among these, or containers of a structure that is not known. new: it is, from here on."""
        key = short_key(args)
        if key is None and new:
            self._know(args)
        for number, take in enumerate(self._takers) if key is None else ():
            leaves = take(args)
            if leaves is not None:
                inside = short_key(leaves)
                return (None if inside is None else (number, *inside)), leaves
        return key, args

    def _know(self, args: tuple[Any, ...]) -> None:
        leaves, structure = tree.flatten(args)
        take = flattener(structure)
        if len(self._takers) < KEPT and take is not None and take not in self._takers and (
                short_key(leaves) is not None):
            self._takers.append(take)


def short_key(args: Sequence[Any]) -> tuple | None:
    """Of a call with plain tensors by position, which lie where they can be used at once; None for
    any other."""
    key: list[Any] = [config.device, *[look() for look in hooks.surroundings]]
    for a in args:
        if type(a) is Resident:
            memory = a.held_now()
            if type(memory) not in HERE:
                return None
            place = memory.device.index
        elif type(a) is Tensor:
            place = HOST
        else:
            return None
        if a._scale is not None:
            return None
        key += (a._shape, id(a.type), a._is_param, place)
    return tuple(key)


__all__ = ["ShortKeys", "short_key"]
