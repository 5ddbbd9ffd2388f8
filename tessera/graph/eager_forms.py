"""Calls outside of traces that are like ones before: known by what is seen of their arguments at a
glance, and run as programs that were written for them.

    calls = EagerCalls("ts.add", add)
    made = calls.read(args, kwargs)      # the result; UNKNOWN or LONG_WAY where none has run
    calls.met(args, kwargs)              # behind a call that went the long way, on the host

A reader is written for the classes of the arguments: it makes the key of a call, its form, of the
extents and types of tensors and the values of all else, and takes the memory of the tensors. The
form finds a function of that memory. A form is met a few times before a program is written for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import config, hooks
from ..config import SETTINGS, WATCHERS
from ..numerics import DType, NumericType
from ..tensor import Tensor
from .host_programs import LONG_WAY, Outcome, host_program


UNKNOWN = Outcome("UNKNOWN")  # a call of a form that may become known
MEETINGS = 3  # of a form, before a program is written for it
MOST_FORMS = 512  # of a function and classes of arguments
SLOWER_BY = 16  # programs of a function for which a form has to be met once more
VALUES = frozenset({int, bool, str, type(None), type(...)})
TYPES = frozenset({NumericType, DType})


class Settings:
    """number: of the settings that hold, for keys; the same ones have the same number again."""

    def __init__(self) -> None:
        self.number = 0
        self._numbers: dict[tuple, int] = {}
        for name in SETTINGS:
            WATCHERS.setdefault(name, []).append(self._changed)

    def _changed(self, value: Any) -> None:
        held = tuple([vars(config).get(name) for name in SETTINGS])  # None: nobody has asked yet
        self.number = self._numbers.setdefault(held, len(self._numbers))


SETTINGS_NOW = Settings()


class Unread(Exception):
    """An argument whose value is not seen at a glance."""


def noted(a: Any, held: list[Any]) -> Any:
    """The part of an argument in the form of its call. held: takes the memory of tensors in it."""
    kind = a.__class__
    if kind is Tensor:
        held.append(a._buffer)
        return a._shape, id(a.type), a._scale, a._name
    if kind is tuple or kind is list:
        if {*map(type, a)} == {int}:
            return kind, int, *a
        return kind, *[noted(x, held) for x in a]
    if kind in VALUES:
        return kind, a
    if kind is float:
        return float, a or repr(a)  # 0.0 == -0.0
    if kind is slice:
        return slice, noted(a.start, held), noted(a.stop, held), noted(a.step, held)
    if kind in TYPES:
        return id(a)
    raise Unread


_READ = """\
def written(scope):
    {names} = scope

    def form({parameters}):
        held = []
        return ({key}), {held}

    def read({parameters}):
        if eager_ops or timed_ops or exits:
            return LONG_WAY
{lines}
        if run is None:
            return UNKNOWN
        return run({given})
    return form, read
"""
_FIND = "        run = find(({key}))"
_FIND_NESTED = """\
        held = []
        try:
            run = find(({key}))
        except Unread:
            return LONG_WAY"""


class CallReader:
    """Of calls with arguments of these classes. form(...) -> the key, and the memory of tensors.

    read(...) -> the result. forms: programs by key.
    """

    def __init__(self, classes: list[type], words: list[str]):
        """words: by which the last of them are given."""
        self.forms: dict[Any, Callable] = {}
        self.counts: dict[Any, int] = {}
        self.kept: list[Any] = []  # types whose ids keys have
        at = len(classes) - len(words)
        names = [f"a{i}" for i in range(at)] + words
        key, given, nested = ["settings.number"], [], False
        for name, kind in zip(names, classes, strict=True):
            if kind is Tensor:
                key += [f"{name}._shape", f"id({name}.type)", f"{name}._scale", f"{name}._name"]
                given.append(f"{name}._buffer")
            elif kind is float:
                key.append(f"{name} or repr({name})")
            elif kind in TYPES:
                key.append(f"id({name})")
            elif kind in VALUES:
                key.append(name)
            else:
                nested = True
                key.append(f"noted({name}, held)")
                given.append("*held")
        if given.count("*held") > 1 or "*held" in given[:-1]:  # in the order of the arguments
            given = ["*held"]
            key = ["settings.number", *(f"noted({name}, held)" for name in names)]
        scope = {"eager_ops": hooks.eager_ops, "timed_ops": hooks.timed_ops, "exits": hooks.exits,
                 "LONG_WAY": LONG_WAY, "UNKNOWN": UNKNOWN, "find": self.forms.get,
                 "settings": SETTINGS_NOW, "noted": noted, "Unread": Unread}
        parameters = [*names[:at], "*", *words] if words else names
        text = _READ.format(
            names=", ".join(scope), parameters=", ".join(parameters), key=", ".join(key) + ",",
            held=f"[{', '.join(given)}]", given=", ".join(given),
            lines=(_FIND_NESTED if nested else _FIND).format(key=", ".join(key) + ","))
        made: dict[str, Any] = {}
        exec(compile(text, "<a reader of calls>", "exec"), made)
        self.form, self.read = made["written"](tuple(scope.values()))


def _long_way(*args: Any, **kwargs: Any) -> Any:
    return LONG_WAY


class EagerCalls:
    """Those of one function. readers: what reads a call, by the classes of its arguments, and the
    words that it is given by and their classes."""

    def __init__(self, name: str, fn: Callable):
        self.name, self.fn, self.programs = name, fn, 0
        self.readers: dict[Any, Callable] = {}
        self._readers: dict[Any, CallReader] = {}

    def read(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        read = self.readers.get((*map(type, args), *kwargs, *map(type, kwargs.values()))
                                if kwargs else tuple(map(type, args)))
        return UNKNOWN if read is None else read(*args, **kwargs)

    def met(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """A call that was computed on the host, and of which a result is there."""
        if hooks.eager_ops or hooks.timed_ops or hooks.exits or \
                config.device not in ("auto", "cpu"):
            return
        classes = (*map(type, args), *kwargs, *map(type, kwargs.values()))
        reader = self._readers.get(classes)
        if reader is None:
            if classes in self.readers:
                return
            kinds = [*map(type, args), *map(type, kwargs.values())]
            if not READ.issuperset(kinds) or SOME.isdisjoint(kinds) or len(self.readers) > 256:
                self.readers[classes] = _long_way
                return
            reader = self._readers[classes] = CallReader(kinds, [*kwargs])
            self.readers[classes] = reader.read
        try:
            key, _ = reader.form(*args, **kwargs)
        except Unread:
            return
        seen = reader.counts[key] = reader.counts.get(key, 0) + 1
        if seen < MEETINGS + self.programs // SLOWER_BY:
            if len(reader.counts) > MOST_FORMS:
                reader.counts.clear()
            return
        reader.counts.pop(key, None)
        if len(reader.forms) > MOST_FORMS:
            reader.forms.clear()
            reader.kept.clear()
        run, types = host_program(self.name, self.fn, args, kwargs)
        self.programs += 1
        reader.kept.append((types, args if TYPES & {*map(type, args)} else None,
                            kwargs if TYPES & {*map(type, kwargs.values())} else None))
        reader.forms[key] = run or _long_way


SOME = frozenset({Tensor, tuple, list})  # one of which a call on the host has
READ = frozenset({*SOME, float, slice, *VALUES, *TYPES})

__all__ = ["LONG_WAY", "UNKNOWN", "EagerCalls"]
