"""What a traced function does that its compiled form does not: it changes arguments in place, or
hides traced tensors in its result."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

from ..errors import ArgumentError, TraceError, warn_user
from . import tree
from .trace import Tracer

AFTERWARDS: dict[Callable[[Any], bool], str] = {
    inspect.isgenerator: "a generator", inspect.isasyncgen: "an asynchronous generator",
    inspect.iscoroutine: "a coroutine"}
HINT = ("return tensors, in tuples, lists and dicts; ts.register_tree lets a class of yours "
        "through")


class LostChangeWarning(UserWarning):
    """A traced function changes a list, dict or object that it was given."""


class Arguments:
    """Nested arguments as they are before a function is traced, by name."""

    def __init__(self, given: dict[str, Any]):
        self._given = given
        self._before = {name: tree.flatten(x) for name, x in given.items()}

    def tell_of_changes(self, result: Any, function: str) -> None:
        """Warn of one that is not what it was, and is not returned: the caller's stays as it is."""
        changed = [name for name, x in self._given.items() if not self._is_as_before(name, x)]
        if not changed or set(_containers(changed, self._given)) & set(_containers([""], {
                "": result})):
            return
        which = f"its argument {changed[0]!r}" if changed[0] else "an argument"
        warn_user(f"{function} changes {which} in place. When it is compiled "
                  "or differentiated it has a copy, and what it was given stays as it was: return "
                  "what is new", LostChangeWarning)

    def _is_as_before(self, name: str, value: Any) -> bool:
        leaves, structure = self._before[name]
        now, after = tree.flatten(value)
        return bool(structure == after) and all(map(is_, leaves, now))


def _containers(names: Iterable[str], values: dict[str, Any]) -> Iterable[int]:
    """Which lists, dicts and objects there are in values, by id."""
    todo = [values[name] for name in names]
    while todo:
        x = todo.pop()
        if isinstance(x, list | dict | tuple) or tree.is_registered(type(x)):
            if not isinstance(x, tuple):
                yield id(x)
            todo += x.values() if isinstance(x, dict) else x if isinstance(
                x, list | tuple) else tree.parts_of(x)[0]


def refuse_hidden(leaf: Any) -> None:
    """Raise where a leaf of a result, no tensor, has traced tensors inside, or would run later."""
    for is_kind, kind in AFTERWARDS.items():
        if is_kind(leaf):
            if is_kind is inspect.iscoroutine:
                leaf.close()  # else Python warns of one that nobody awaits
            raise ArgumentError(f"a traced function returns {kind}, which would run when the trace "
                                "has ended", hint=HINT)
    held = leaf if isinstance(leaf, set | frozenset) else getattr(leaf, "__dict__", {}).values()
    if any(isinstance(x, Tracer) for x in held):
        raise TraceError(f"a traced function returns a {type(leaf).__name__} with a traced tensor "
                         "inside", hint=HINT)


__all__ = ["Arguments", "LostChangeWarning", "refuse_hidden"]
