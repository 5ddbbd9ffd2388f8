"""How a call gives its arguments: which parameters, by position or by name.

Calls of one form are told apart by what they give alone: a parameter that is left at its default is
the same constant in each of them; if it is changed where it lies, the trace is outdated
(captured_names.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from ..lazy_dataclass import dataclass
from .signature import Static

BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
PLAIN = (*BY_POSITION, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class CallForm:
    """given: the parameters, in the order of the signature; None: all arguments by position.
    order: of arguments by position and then by name, so that they are in that order."""

    given: tuple[str, ...] | None
    order: tuple[int, ...] | None = None

    def values(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple:
        if self.order is None:
            return args
        every = (*args, *kwargs.values())
        return tuple([every[i] for i in self.order])


EVERY = CallForm(None)


class CallForms:
    """Those of a function.

    names: its parameters, where it takes just these, by position; None of any other
    keeps: whether an argument that is named is not what it is by position
    """

    def __init__(self, signature: inspect.Signature | None, keeps: bool):
        found = [] if signature is None else [*signature.parameters.values()]
        plain = signature is not None and all(p.kind in PLAIN for p in found)
        self.every = tuple(p.name for p in found) if plain and not keeps else None
        self.positional = [p.name for p in found if p.kind in BY_POSITION]
        self.named = {p.name for p in found if p.kind is not inspect.Parameter.POSITIONAL_ONLY}
        whole = plain and len(self.positional) == len(found)
        self.names = tuple(self.positional) if whole else None
        self._known: dict[tuple, CallForm | None] = {}

    def of(self, args: tuple, kwargs: Mapping[str, Any]) -> CallForm | None:
        """None of a call that is not told apart so, or that is none of this function."""
        if not kwargs and (self.every is None or len(args) == len(self.every)):
            return EVERY
        if self.every is None:
            return None
        key = (len(args), *kwargs)
        try:
            return self._known[key]
        except KeyError:
            made = self._known[key] = self._made(len(args), [*kwargs])
            return made

    def by_position(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Arguments by parameter, of a call that gives all of them by position."""
        if kwargs or self.names is None or len(args) != len(self.names):
            return None
        return dict(zip(self.names, args, strict=True))

    def _made(self, many: int, named: Sequence[str]) -> CallForm | None:
        given = [*self.positional[:many], *named]
        assert self.every is not None
        if many > len(self.positional) or len({*given}) < len(given) or not (
                self.named.issuperset(named)):
            return None
        place = {name: i for i, name in enumerate(self.every)}
        order = sorted(range(len(given)), key=lambda i: place[given[i]])
        return CallForm(tuple(given[i] for i in order), tuple(order))


def given_leaves(form: CallForm, names: Sequence[str], statics: Mapping[int, Static]
                 ) -> tuple[list[str], dict[int, Static]] | None:
    """Of the leaves of all parameters those that calls of a form give: their parameters, and which
    of them are constants of the trace, by number. None where one that it does not give is no
    constant. names: the parameter of each leaf."""
    if form.given is None:
        return [*names], dict(statics)
    chosen = [i for i, name in enumerate(names) if name in form.given]
    if len(names) - len(chosen) > sum(i in statics for i in {*range(len(names))} - {*chosen}):
        return None
    return [names[i] for i in chosen], {k: statics[i] for k, i in enumerate(chosen) if i in statics}


__all__ = ["EVERY", "CallForm", "CallForms", "given_leaves"]
