"""By which names a traced function reached what it read from outside, so that a name bound to
something else since is seen: of tensors, and of numbers, strings and bools that objects hold.

A trace holds tensors, Python holds names: `w = w - 0.1 * g` makes a new tensor, which a trace of
`lambda x: x * w` does not know; `model.training = False` is another constant of `model(x)`. Looked
through are closures, globals that the code names, functions, methods and properties that it calls
so, and lists, dicts and attributes of objects and of their classes in them. What a function
computes to find a tensor is not followed, nor how long a list or dict is. A call of a function that
captured no tensor, and has no object as an argument, looks at nothing.
"""

from __future__ import annotations

import dis
import enum
import functools
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..tensor import Tensor
from . import tree

DEEPEST = 8  # containers in containers
MOST = 20_000  # objects looked at
OURS = __name__.partition(".")[0]
PLAIN = (str, bytes, int, float, complex, bool, type(None), np.generic, enum.Enum)


class NameLink(NamedTuple):
    """What `holder` has under a key when a function is traced. A cell has no key."""

    holder: Any
    key: Any
    value: Any
    name: str

    @property
    def now(self) -> Any:
        """What is there now; the link itself, which is nobody's value, where there is nothing."""
        if isinstance(self.holder, types.CellType):
            return self.holder.cell_contents if _filled(self.holder) else self
        if isinstance(self.holder, Mapping):
            return self.holder.get(self.key, self)
        if isinstance(self.holder, list):
            return self.holder[self.key] if self.key < len(self.holder) else self
        return getattr(self.holder, self.key, self)


def _same(now: Any, value: Any) -> bool:
    return now is value or (isinstance(value, PLAIN) and type(now) is type(value) and now == value)


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


class Rebound(NamedTuple):
    """A name of the user's program. setting: whether it held a number, string, bool or enum."""

    name: str
    setting: bool


class CapturedNames:
    """The links that lead to captured tensors and to settings of objects."""

    def __init__(self, roots: Iterable[Any], captures: Iterable[Tensor]):
        found = _Search(captures).links_from(list(roots))
        self._items = [(k.holder, k.key, k.value) for k in found if type(k.holder) is dict]
        self._others = [k for k in found if type(k.holder) is not dict]
        self._names = {(id(k.holder), k.key): k.name for k in found}

    def rebound(self) -> Rebound | None:
        """A name that holds something else than when the function was traced."""
        for holder, key, value in self._items:  # the way of most, of whole models
            if holder.get(key) is not value and not _same(holder.get(key), value):
                return Rebound(self._names[id(holder), key], isinstance(value, PLAIN))
        other = next((k for k in self._others if not _same(k.now, k.value)), None)
        return None if other is None else Rebound(other.name, isinstance(other.value, PLAIN))

    def __bool__(self) -> bool:
        return bool(self._items or self._others)


class _Search:
    def __init__(self, captures: Iterable[Tensor]):
        self.ids = {id(t) for t in captures}
        self.names: set[str] = set()  # in the code of the functions so far
        self.written: set[str] = set()  # attributes that it writes, such as counters of its traces
        self.seen: dict[int, bool] = {}
        self.alive: list[Any] = []  # what `seen` knows by id
        self.links: list[NameLink] = []

    def links_from(self, roots: Sequence[Any]) -> list[NameLink]:
        """Looked for until no function is found that names more: a module or an object may have
        been looked through before it."""
        known = -1
        while known < len(self.names) + len(self.written):
            known = len(self.names) + len(self.written)
            self.seen, self.links = {}, []
            for root in roots:
                self.look(root, 0)
        return self.links

    def look(self, value: Any, depth: int) -> bool:
        """Whether a captured tensor is reached through a value, or an array, which is captured as
        a tensor that is made of it; the links to it are kept."""
        if isinstance(value, Tensor):
            return id(value) in self.ids or id(value.scale) in self.ids
        if isinstance(value, np.ndarray):
            return True
        if isinstance(value, PLAIN) or depth > DEEPEST or len(self.seen) > MOST:
            return False
        if id(value) not in self.seen:
            self.seen[id(value)] = False
            self.alive.append(value)
            self.names |= _names_of(value)
            self.written |= _written_by(value)
            for link, child in _parts(value, self.names):
                if self._leads(value, link, child, depth):
                    self.seen[id(value)] = True
                    self.links += [] if link is None else [link]
        return self.seen[id(value)]

    def _leads(self, value: Any, link: NameLink | None, child: Any, depth: int) -> bool:
        """Whether a captured tensor is reached through a part of a value, or it is an attribute
        that the code names: an array, since nothing tells which are captured, or a setting."""
        if link is None or not isinstance(child, (*PLAIN, np.ndarray)) or not _is_attribute(
                value, link):
            return self.look(child, depth + 1)
        return link.key in self.names and (
            isinstance(child, np.ndarray) or link.key not in self.written)


def _is_attribute(value: Any, link: NameLink) -> bool:
    """Whether a link is to what an object, or a class, has as an attribute."""
    mine = link.holder is value or link.holder is getattr(value, "__dict__", None) or isinstance(
        link.holder, types.MappingProxyType)
    return mine and not isinstance(value, types.ModuleType | dict | list)


def _parts(value: Any, names: set[str]) -> Iterator[tuple[NameLink | None, Any]]:
    """What is reached through a value: links, or None for what cannot be bound anew."""
    if isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, types.MethodType):
        yield from ((None, x) for x in (value.__func__, value.__self__))
    elif isinstance(value, functools.partial):
        yield from ((None, x) for x in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, dict | list | tuple | set | frozenset) and len(value) > MOST:
        return
    elif isinstance(value, dict):
        yield from _items(value, value)
    elif isinstance(value, list):
        yield from ((NameLink(value, i, x, f"[{i}]"), x) for i, x in enumerate(value))
    elif isinstance(value, tuple | set | frozenset):
        yield from ((None, x) for x in value)
    elif isinstance(value, types.ModuleType):  # those names alone that the code has
        if value.__name__.partition(".")[0] not in (OURS, "numpy"):
            yield from _items(vars(value), names)
    elif isinstance(value, type):
        for kind in _classes(value):
            yield from _items(vars(kind), names)
    elif type(value).__module__.partition(".")[0] == OURS:
        yield from ((None, x) for x in _of_ours(value))
    else:
        yield from ((None, method) for method in _methods(type(value), names))
        yield from _items(getattr(value, "__dict__", {}), getattr(value, "__dict__", {}))
        slots = [n for kind in type(value).__mro__ for n in _slots(kind)]
        yield from ((NameLink(value, n, getattr(value, n), n), getattr(value, n))
                    for n in slots if hasattr(value, n))
        yield from _of_class(value, names)


def _of_class(value: Any, names: set[str]) -> Iterator[tuple[NameLink, Any]]:
    """What an object has by its class, under names of the code: not methods and properties."""
    own = getattr(value, "__dict__", {})
    for kind in _classes(type(value)):
        for n in (vars(kind).keys() & names) - own.keys():
            if not hasattr(vars(kind)[n], "__get__"):
                yield NameLink(value, n, getattr(value, n), n), getattr(value, n)


def _classes(kind: type) -> list[type]:
    """A class and its bases, those of the user's and of other packages."""
    return [k for k in kind.__mro__
            if k is not object and k.__module__.partition(".")[0] not in (OURS, "numpy")]


def _methods(kind: type, names: set[str]) -> Iterator[Any]:
    """Those that the code names, properties too; what these name may be further ones."""
    done: set[str] = set()
    while more := ({"__call__"} | names) - done:
        done |= more
        found = (_function_of(vars(k)[n]) for k in kind.__mro__ for n in sorted(more)
                 if n in vars(k))
        yield from [m for m in found if isinstance(m, types.FunctionType) or hasattr(m, "fn")]


def _function_of(member: Any) -> Any:
    """Of what a class has, the function that is called."""
    if isinstance(member, property):
        return member.fget
    if isinstance(member, staticmethod | classmethod):
        return member.__func__
    return member.func if isinstance(member, functools.cached_property) else member


def _slots(kind: type) -> Sequence[str]:
    found = vars(kind).get("__slots__", ())
    return () if isinstance(found, str) else [n for n in found if not n.startswith("__")]


def _items(holder: Mapping, keys: Iterable) -> Iterator[tuple[NameLink, Any]]:
    for key in [k for k in keys if k in holder]:
        yield NameLink(holder, key, holder[key], str(key)), holder[key]


def _of_ours(value: Any) -> Sequence[Any]:
    """The user's function in a compiled or derived one, the parts of a state object."""
    inner = getattr(value, "__dict__", {}).get("fn")
    return [inner] if inner is not None else tree.parts_of(value)[0] if tree.is_registered(
        type(value)) else ()


def _of_function(fn: types.FunctionType) -> Iterator[tuple[NameLink | None, Any]]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        if _filled(cell):
            yield NameLink(cell, None, cell.cell_contents, name), cell.cell_contents
    if fn.__module__ is None or fn.__module__.partition(".")[0] != OURS:
        yield from _items(fn.__globals__, _names_of(fn))
    yield from ((None, x) for x in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()))
    if hasattr(fn, "__wrapped__"):
        yield None, fn.__wrapped__


def _names_of(value: Any) -> frozenset[str]:
    """The names of globals and attributes in the code of a function, and of those inside of it."""
    code = getattr(value, "__code__", None)
    return frozenset() if code is None else _names_in(code)


def _written_by(value: Any) -> frozenset[str]:
    code = getattr(value, "__code__", None)
    return frozenset() if code is None else _written_in(code)


@functools.lru_cache(maxsize=256)
def _names_in(code: types.CodeType) -> frozenset[str]:
    return frozenset(code.co_names).union(*map(_names_in, _codes_in(code)))


@functools.lru_cache(maxsize=256)
def _written_in(code: types.CodeType) -> frozenset[str]:
    own = (i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR")
    return frozenset(own).union(*map(_written_in, _codes_in(code)))


def _codes_in(code: types.CodeType) -> list[types.CodeType]:
    return [c for c in code.co_consts if isinstance(c, types.CodeType)]


__all__ = ["PLAIN", "CapturedNames"]
