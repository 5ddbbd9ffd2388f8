"""Calls outside of traces that are like ones before: known by what is seen of their arguments at a
glance, and run as programs that were written for them.

    calls = EagerCalls("ts.add", add)
    made = calls.read(args, kwargs)      # the result; UNKNOWN or LONG_WAY where none has run
    calls.met(args, kwargs)              # behind a call that went the long way, on the host
    calls.keep(args, kwargs, run, ...)   # a program for a GPU is there

A reader is written for the classes of the arguments: it makes the key of a call, its form, of the
extents, types and places of tensors and the values of all else, and takes the memory of the
tensors: arrays, or buffers of GPUs. The form finds a function of that memory. On the host it is met
a few times before a program is written for it (host_programs.py); for a GPU the first call has
compiled one (cuda/program/eager.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import config, hooks
from ..config import SETTINGS, WATCHERS
from ..errors import TesseraError
from ..numerics import DType, NumericType
from ..runtime.buffer import Borrowed
from ..tensor import Tensor
from ..tile.launch.memory_turns import InTurn
from ..tile.launch.resident import Resident
from ..tile.launch.shared_views import SharedView
from .host_programs import LONG_WAY, Outcome, host_program
from .placed_leaves import OURS
from .weak_numbers import is_internal

UNKNOWN = Outcome("UNKNOWN")  # a call of a form that may become known
MEETINGS = 3  # of a form, before a program is written for it
MOST_FORMS = 512  # of a function and classes of arguments
MOST_ITEMS = 64  # of a container that is looked into
SLOWER_BY = 16  # programs of a function for which a form has to be met once more
VALUES = frozenset({int, bool, str, type(None), type(...)})
TYPES = frozenset({NumericType, DType})


class Settings:
    """number: of the settings that hold, for keys; the same ones have the same number again, also
    where one of them has been asked for meanwhile."""

    def __init__(self) -> None:
        self.number = 0
        self._numbers: dict[tuple, int] = {}
        self._unasked: dict[tuple[str, str], Any] = {}  # by name and the text of the environment
        for name in SETTINGS:
            WATCHERS.setdefault(name, []).append(self._changed)
        self._changed(None)

    def _changed(self, value: Any) -> None:
        there = vars(config)
        held = tuple([there[name] if name in there else self._resolved(setting)
                      for name, setting in SETTINGS.items()])
        self.number = self._numbers.setdefault(held, len(self._numbers))

    def _resolved(self, setting: config.Setting) -> Any:
        key = setting.name, os.environ.get(setting.env, "")
        if key not in self._unasked:
            try:
                self._unasked[key] = setting.resolve()
            except TesseraError:  # who asks for it hears of it
                self._unasked[key] = key
        return self._unasked[key]


SETTINGS_NOW = Settings()


class Unread(Exception):
    """An argument whose value is not seen at a glance."""


def meaning(name: str) -> Any:
    """Of the name of a tensor: True of one that its user gave it, which decides nothing; the name
    of one that stands for a number."""
    return name if is_internal(name) else True


def noted(a: Any, held: list[Any]) -> Any:
    """The part of an argument in the form of its call. held: takes the memory of tensors in it."""
    kind = a.__class__
    if kind is Tensor:
        held.append(a._buffer)
        return a._shape, id(a.type), a._scale is None, a._name is None or meaning(a._name)
    if kind is Resident:
        return _noted_there(a, held)
    if kind is tuple or kind is list:
        if len(a) > MOST_ITEMS:
            raise Unread
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


def _noted_there(a: Resident, held: list[Any]) -> Any:
    """In place of a view that has no elements of its own, what it is a view of, and the view."""
    memory, chain, shape = a._storage, None, a._shape
    if type(memory) is SharedView:
        chain, shape = memory.chain, memory.shape if memory.chain is not None else shape
        memory = memory.memory
    elif type(memory) is InTurn:
        memory = a.held_now()
    if type(memory) not in OURS and type(memory) is not Borrowed:
        raise Unread
    held.append(memory)
    return (shape, id(a.type), a._scale is None, a._name is None or meaning(a._name),
            memory.device.index, chain, type(memory) is Borrowed)


_READ = """\
def written(scope):
    {names} = scope

    def form({parameters}):
        _held = []
        return ({general}), _held

    def read({parameters}):
        if _eager_ops or _timed_ops or _exits:
            return _LONG_WAY
{lines}
        if _run is None:
            return _UNKNOWN
        return _run({given})
    return form, read
"""  # underscores: words of a call are names here
_FIND = "        _run = _find(({key}))"
_FIND_GENERAL = """\
        _held = []
        try:
            _run = _find(({general}))
        except _Unread:
            return _LONG_WAY"""
_FIND_THERE = """\
{memories}
        if {ours}:
            _run = _find(({key}))
        else:
            _held = []
            try:
                _run = _find(({general}))
            except _Unread:
                return _LONG_WAY
            return _UNKNOWN if _run is None else _run(*_held)"""


class CallReader:
    """Of calls with arguments of these classes. form(...) -> the key, and the memory of tensors.

    read(...) -> the result. forms: programs by key.
    """

    def __init__(self, classes: list[type], words: list[str]):
        """words: by which the last of them are given."""
        self.forms: dict[Any, Callable] = {}
        self.counts: dict[Any, int] = {}
        self.kept: list[Any] = []  # whose ids keys have
        at = len(classes) - len(words)
        names = [f"_a{i}" for i in range(at)] + words
        kinds = dict(zip(names, classes, strict=True))
        there = Resident in classes  # where floats are data
        key, general, given, memories = ["_settings.number"], ["_settings.number"], [], []
        for name in names:
            kind, seen, memory = kinds[name], "", ""
            if kind in TENSORS:
                seen = f"{name}._shape, _id({name}.type), {name}._scale is None, " \
                    f"{name}._name is None or _meaning({name}._name)"
                memory = f"{name}._buffer"
            if kind is Resident:
                memory = f"_m_{name}"
                seen += f", {memory}.device.index, None, False"
                memories.append((memory, f"{name}._storage"))
            elif kind is float:
                seen, memory = ("_float", name) if there else (
                    f"_float, {name} or _repr({name})", "")
            elif kind in TYPES:
                seen = f"_id({name})"
            elif kind in VALUES:
                seen = name
            key.append(seen)
            given += [memory] * bool(memory)
            general.append(f"*_noted({name}, _held)" if kind in TENSORS else
                           f"_add({name}, _held)" if kind is float and there else
                           f"_noted({name}, _held)" if kind in NESTED else seen)
        scope = {"_eager_ops": hooks.eager_ops, "_timed_ops": hooks.timed_ops, "_id": id,
                 "_exits": hooks.exits, "_LONG_WAY": LONG_WAY, "_UNKNOWN": UNKNOWN, "_repr": repr,
                 "_find": self.forms.get, "_add": _add, "_settings": SETTINGS_NOW, "_float": float,
                 "_noted": noted, "_Unread": Unread, "_OURS": OURS, "_meaning": meaning}
        nested = not NESTED.isdisjoint(classes)
        find = _FIND_GENERAL if nested else _FIND_THERE if memories else _FIND
        spelled = {"key": ", ".join(key) + ",", "general": ", ".join(general) + ",",
                   "memories": "\n".join(f"        {m} = {held}" for m, held in memories),
                   "ours": " and ".join(f"{m}.__class__ in _OURS" for m, _ in memories)}
        made: dict[str, Any] = {}
        exec(compile(_READ.format(
            names=", ".join(scope), lines=find.format(**spelled), general=spelled["general"],
            parameters=", ".join([*names[:at], "*", *words] if words else names),
            given="*_held" if nested else ", ".join(given)), "<a reader of calls>", "exec"), made)
        self.form, self.read = made["written"](tuple(scope.values()))

    def keep(self, key: Any, run: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        """With the types whose ids the key has."""
        if len(self.forms) > MOST_FORMS:
            self.forms.clear()
            self.kept.clear()
        self.forms[key] = run
        every = (*args, *kwargs.values())
        self.kept += [x for x in every if type(x) in TYPES] + [x.type for x in tensors_in(every)]


def tensors_in(value: Any) -> list[Tensor]:
    """Tensors in arguments."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = (*value.values(),)
    return [t for x in value for t in tensors_in(x)] if isinstance(value, tuple | list) else []


def _add(a: float, held: list[Any]) -> type:
    held.append(a)
    return float


class FloatsDecide:
    """Programs of a form for a GPU, by the values of the floats, which are no data there."""

    def __init__(self) -> None:
        self.programs: dict[tuple, Callable] = {}

    def __call__(self, *given: Any) -> Any:
        run = self.programs.get(_floats(given))
        return UNKNOWN if run is None else run(*[x for x in given if x.__class__ is not float])


def _floats(given: Sequence[Any]) -> tuple:
    return tuple([x or repr(x) for x in given if x.__class__ is float])


def _long_way(*args: Any, **kwargs: Any) -> Any:
    return LONG_WAY


class EagerCalls:
    """Those of one function. readers: what reads a call, by the classes of its arguments, and the
    words that it is given by and their classes."""

    def __init__(self, name: str, fn: Callable):
        self.name, self.fn, self.programs = name, fn, 0
        CALLS[fn] = self
        self.readers: dict[Any, Callable] = {}
        self._readers: dict[Any, CallReader] = {}

    def forget(self) -> None:
        """As if nobody had called it."""
        self.programs = 0
        self.readers.clear()
        self._readers.clear()

    def read(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        read = self.readers.get((*map(type, args), *kwargs, *map(type, kwargs.values()))
                                if kwargs else tuple(map(type, args)))
        return UNKNOWN if read is None else read(*args, **kwargs)

    def met(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """A call that was computed, and of which a result is there."""
        if hooks.eager_ops or hooks.timed_ops or hooks.exits or \
                config.device not in ("auto", "cpu"):
            return
        reader, key, given = self._known(args, kwargs)
        if reader is None or key in reader.forms or not all(type(x) is np.ndarray for x in given):
            return
        seen = reader.counts[key] = reader.counts.get(key, 0) + 1
        if seen < MEETINGS + self.programs // SLOWER_BY:
            if len(reader.counts) > MOST_FORMS:
                reader.counts.clear()
            return
        reader.counts.pop(key, None)
        self.programs += 1
        run = host_program(self.name, self.fn, args, kwargs)
        reader.keep(key, run or _long_way, args, kwargs)

    def keep(self, args: tuple, kwargs: dict[str, Any], operands: int,
             made: Callable[[Sequence[Any]], Callable | None]) -> None:
        """A program of so many operands for a GPU. made: of their memory and of floats: a function
        of these."""
        reader, key, given = self._known(args, kwargs)
        if reader is None or any(x._scale is not None for x in tensors_in((args, kwargs))):
            return
        if operands == len(given):
            if (run := made(given)) is not None:
                reader.keep(key, run, args, kwargs)
        elif operands == len(rest := [x for x in given if x.__class__ is not float]) and (
                run := made(rest)) is not None:
            chosen = reader.forms.get(key)
            if type(chosen) is not FloatsDecide or len(chosen.programs) > MOST_FORMS:
                reader.keep(key, chosen := FloatsDecide(), args, kwargs)
            chosen.programs[_floats(given)] = run

    def _known(self, args: tuple, kwargs: dict[str, Any]) -> tuple[CallReader | None, Any, list]:
        """What reads a call, its form, and its memory; None of one that is not seen at a glance."""
        classes = (*map(type, args), *kwargs, *map(type, kwargs.values()))
        reader = self._readers.get(classes)
        if reader is None:
            if classes in self.readers:
                return None, None, []
            kinds = [*map(type, args), *map(type, kwargs.values())]
            if not READ.issuperset(kinds) or SOME.isdisjoint(kinds) or len(self.readers) > 256:
                self.readers[classes] = _long_way
                return None, None, []
            reader = self._readers[classes] = CallReader(kinds, [*kwargs])
            self.readers[classes] = reader.read
        try:
            return reader, *reader.form(*args, **kwargs)
        except Unread:
            return None, None, []


TENSORS, NESTED = frozenset({Tensor, Resident}), frozenset({tuple, list, slice})
SOME = frozenset({*TENSORS, tuple, list})  # one of which a call has
READ = frozenset({*TENSORS, *NESTED, float, *VALUES, *TYPES})
CALLS: dict[Callable, EagerCalls] = {}  # by function

__all__ = ["CALLS", "LONG_WAY", "UNKNOWN", "EagerCalls", "Unread", "noted"]
