"""`@ts.pure` and `@ts.effects("random")`: promises about what a function does beside computing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import ArgumentError, did_you_mean
from .graph.jit import JitFunction

EFFECTS = ("random", "io", "state", "movement", "collective")


def pure(fn: Callable) -> Any:
    """fn, compiled, with the promise that it has no effects: equal arguments, equal results.

    Raises EffectError when a trace of it finds one, naming the op and the line.
    """
    return effects()(fn)


def effects(*allowed: str) -> Callable[[Callable], Any]:
    """Decorator: fn, compiled, has none but these effects: random, io, state, movement, collective.

    Raises EffectError when a trace finds another; ArgumentError for an unknown effect.
    """
    for name in allowed:
        if name not in EFFECTS:
            raise ArgumentError(f"there is no effect {name!r}",
                                hint=did_you_mean(str(name), EFFECTS))

    def decorate(fn: Callable) -> Any:
        if isinstance(fn, JitFunction):
            return JitFunction(fn.fn, static=tuple(fn.static), name=fn.name, target=fn.target,
                               allowed=frozenset(allowed), cast=fn.cast,
                               capture_graph=fn.capture_graph, donate=tuple(fn.donate))
        return JitFunction(fn, allowed=frozenset(allowed))

    return decorate


__all__ = ["EFFECTS", "effects", "pure"]
