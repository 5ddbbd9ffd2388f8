"""By which names a traced function reached what it read from outside, so that a name bound to
something else since is seen: of tensors and of Python values, such as numbers and functions.

A trace holds tensors, Python holds names: `w = w - 0.1 * g` makes a new tensor, which a trace of
`lambda x: x * w` does not know; `rate = 0.1` and `model.training = False` are other constants of
what reads them. Looked through are closures, globals that the code reads, functions, methods and
properties that it calls so, and lists, dicts and attributes of objects and of their classes in
them. What a function computes to find a value is not followed, and what it writes itself, such as a
counter of its traces, is nothing that it waits for. A call of a function that reads no such name
looks at nothing.

Of a package that is installed, and not the function's own, objects have what the user's code reads
of them by name, and functions the settings among their globals: one axis of a plot leads to
thousands of objects, none of which a user binds anew.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from operator import is_, itemgetter
from typing import Any, NamedTuple

import numpy as np

from ..tensor import Tensor
from . import tree
from .code_names import code_names, is_installed
from .signature import Static

DEEPEST = 8  # containers in containers
MOST = 20_000  # objects looked at
MOST_PLAIN = 1000  # entries of a list or dict whose plain values are compared
MANY = 4  # of one list or dict that are looked at together
OURS = __name__.partition(".")[0]
PLAIN = (str, bytes, int, float, complex, bool, type(None), np.generic, enum.Enum, np.dtype, range,
         slice)
# Compared by which it is, where a name holds it.
CALLED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, type,
          np.ufunc)

# Methods that an object's class may have and no code names.
SPECIAL = frozenset(f"__{n}__" for n in (
    "getattr getitem iter next len contains bool int float index complex enter eq ne lt le gt "
    "ge neg pos abs invert round hash add sub mul matmul truediv floordiv mod pow and or xor "
    "lshift rshift radd rsub rmul rmatmul rtruediv rfloordiv rmod rpow rand ror rxor").split())


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
        if isinstance(self.holder, dict | types.MappingProxyType):
            return self.holder.get(self.key, self)
        if isinstance(self.holder, list):
            return self.holder[self.key] if self.key < len(self.holder) else self
        return getattr(self.holder, self.key, self)


class LengthLink(NamedTuple):
    """How many entries a list or dict has that a function goes through."""

    holder: list | dict
    value: int
    name: str
    key: str = "its length"  # no key of a list, and not among those of a dict that is gone through

    @property
    def now(self) -> int:
        return len(self.holder)


class ContentLink(NamedTuple):
    """What a set or deque has in it."""

    holder: set | deque
    value: frozenset | tuple
    name: str
    key: str = "its content"

    @staticmethod
    def of(holder: set | deque, name: str) -> ContentLink:
        held = frozenset(holder) if isinstance(holder, set) else tuple(holder)
        return ContentLink(holder, held, name)

    @property
    def now(self) -> frozenset | tuple:
        return ContentLink.of(self.holder, self.name).value


Link = NameLink | LengthLink | ContentLink


def _same_constant(now: Any, value: Any) -> bool:
    """Whether two values are the same constant of a trace."""
    if now is value:
        return True
    if type(now) is not type(value):
        return False
    if isinstance(value, tuple):
        return len(now) == len(value) and all(map(_same_constant, now, value))
    if isinstance(value, frozenset):
        return bool(now == value)
    if isinstance(value, types.FunctionType):
        return _is_made_again(now, value)
    if _is_record(value):
        return all(_same_constant(getattr(now, f.name), getattr(value, f.name))
                   for f in fields(value))
    return (isinstance(value, (*PLAIN, types.MethodType)) or _is_numeric(value)) and \
        Static(now) == Static(value)


def _is_made_again(now: types.FunctionType, value: types.FunctionType) -> bool:
    """Whether two functions are of one line and see the same, as one that a loop makes."""
    cells, own = now.__closure__ or (), value.__closure__ or ()
    return now.__code__ is value.__code__ and now.__globals__ is value.__globals__ and (
        now.__defaults__ is value.__defaults__ and now.__kwdefaults__ is value.__kwdefaults__
        and all(map(_filled, (*cells, *own)))
        and all(a is b or (isinstance(b, PLAIN) and _same_constant(a, b)) for a, b in zip(
            (c.cell_contents for c in cells), (c.cell_contents for c in own), strict=True)))


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


class Rebound(NamedTuple):
    """A name of the user's program. setting: whether it held a number, string, bool or enum, a
    tuple of such, or a function."""

    name: str
    setting: bool


class CapturedNames:
    """The links that lead to captured tensors and to settings."""

    def __init__(self, roots: Iterable[Any], captures: Iterable[Tensor]):
        found = _Search(captures).links_from(list(roots))
        self._entries, rest = _entry_links(found)
        self._items = [(k.holder, k.key, k.value) for k in rest
                       if isinstance(k, NameLink) and isinstance(k.holder, dict)]
        self._others = [k for k in rest
                        if not (isinstance(k, NameLink) and isinstance(k.holder, dict))]
        self._names = {(id(k.holder), k.key): k.name for k in found}

    def rebound(self) -> Rebound | None:
        """A name that holds something else than when the function was traced."""
        for holder, key, value in self._items:  # the way of most, of whole models
            if holder.get(key) is not value and not _same_constant(holder.get(key), value):
                return Rebound(self._names[id(holder), key], _is_setting(value))
        for links in [e.links for e in self._entries if not e.holds()] + [self._others]:
            other = next((k for k in links if not _same_constant(k.now, k.value)), None)
            if other is not None:
                return Rebound(other.name, isinstance(other, NameLink) and _is_setting(other.value))
        return None

    def __bool__(self) -> bool:
        return bool(self._items or self._entries or self._others)


class _EntryLinks(NamedTuple):
    """Links to entries of one list or dict, which are looked at by one call where all are there."""

    links: Sequence[NameLink]
    take: Callable[[Any], tuple]
    values: tuple

    def holds(self) -> bool:
        """Whether all are the objects that they were; others may be as good."""
        try:
            return all(map(is_, self.take(self.links[0].holder), self.values))
        except LookupError:
            return False


def _entry_links(found: Iterable[Link]) -> tuple[list[_EntryLinks], list[Link]]:
    """Those of lists and dicts of which there are many, and the others."""
    by_holder: dict[int, list[NameLink]] = {}
    for k in found:
        if isinstance(k, NameLink) and type(k.holder) in (list, dict):
            by_holder.setdefault(id(k.holder), []).append(k)
    many = [links for links in by_holder.values() if len(links) >= MANY]
    together = {id(k) for links in many for k in links}
    return [_EntryLinks(links, itemgetter(*(k.key for k in links)), tuple(k.value for k in links))
            for links in many], [k for k in found if id(k) not in together]


class _Search:
    def __init__(self, captures: Iterable[Tensor]):
        self.ids = {id(t) for t in captures}
        self.names = {"__call__"}  # and those in the code of the functions so far
        self.written: set[str] = set()  # what it writes, such as counters of its traces
        self.constants: set[str] = set()  # strings, which may be keys
        self.seen: dict[tuple[int, bool], bool] = {}
        self.alive: list[Any] = []  # what `seen` knows by id
        self.packages: set[str] = set()  # of the functions that are traced
        self.links: dict[tuple[int, Any], Link] = {}

    def links_from(self, roots: Sequence[Any]) -> Sequence[Link]:
        """Looked for until no function is found that names more: a module or an object may have
        been looked through before it."""
        self.packages = {_package(x) for root in roots for x in _unwrapped(root)}
        known = -1
        while known < self._known():
            known = self._known()
            self.seen, self.links = {}, {}
            for root in roots:
                self.look(root, 0, True)
        return [*self.links.values()]

    def _known(self) -> int:
        return len(self.names) + len(self.written) + len(self.constants)

    def look(self, value: Any, depth: int, read: bool, name: str = "...") -> bool:
        """Whether a captured tensor or a setting is reached through a value, or an array, which is
        captured as a tensor that is made of it; the links to it are kept. read: whether a name of
        the code leads to the value, so that the settings in a list or dict count."""
        if isinstance(value, Tensor):
            return id(value) in self.ids or id(value.scale) in self.ids
        if isinstance(value, np.ndarray):
            return True
        if isinstance(value, PLAIN) or depth > DEEPEST or len(self.seen) > MOST:
            return False
        at, foreign = (id(value), read), self._is_foreign(value)
        if foreign and not read and not isinstance(value, types.FunctionType | type):
            return False
        if at not in self.seen:
            self.seen[at] = False
            self.alive.append(value)
            code = code_names(value)
            self.names |= code.names
            self.written |= code.written
            self.constants |= code.constants
            self.seen[at] = any([self._leads(value, link, child, depth, read)
                                 for link, child in _linked_parts(value, self.names, name,
                                                                  foreign)])
            more = _content(value, name, self.constants) if read else None
            if more is not None:
                self.seen[at] = True
                self.links[id(value), more.key] = more
        return self.seen[at]

    def _is_foreign(self, value: Any) -> bool:
        """Whether a function, class or object is of an installed package that is not the traced
        function's own."""
        return _is_installed(value) and _package(value) not in (*self.packages, OURS)

    def _leads(self, value: Any, link: NameLink | None, child: Any, depth: int,
               read: bool) -> bool:
        """Whether a captured tensor or a setting is reached through a part of a value."""
        if link is None:
            return self.look(child, depth + 1, read)
        named = self._is_read(value, link, read)
        leads = named if isinstance(child, np.ndarray) and _is_attribute(value, link) else \
            self.look(child, depth + 1, named, link.name)
        if leads or (named and _is_setting(child) and _may_be_set(value, link, child)):
            self.links.setdefault((id(link.holder), link.key), link)
            return True
        return False

    def _is_read(self, value: Any, link: NameLink, read: bool) -> bool:
        """Whether the code reads a part by its name, and does not write it itself."""
        if isinstance(value, list):
            return read
        if isinstance(value, dict):
            return read and (link.key in self.constants or _is_gone_through(value, self.constants)
                             or (type(value) is not dict and link.key in self.names))
        name = link.name if link.key is None else link.key
        return name not in self.written and (
            isinstance(value, types.FunctionType) or name in self.names)


def _is_setting(value: Any) -> bool:
    """Whether a value is compared where a name holds it: no tensor, and nothing with parts that
    change."""
    if isinstance(value, tuple | frozenset):
        return all(map(_is_setting, value))
    return isinstance(value, (*PLAIN, *CALLED)) or _is_numeric(value) or _is_record(value) or (
        _is_ours(value) and callable(value))


def _is_value(value: Any) -> bool:
    """Whether a value is a tensor, an array or a setting, and no function or class."""
    return isinstance(value, Tensor | np.ndarray) or (
        _is_setting(value) and not isinstance(value, CALLED))


def _is_numeric(value: Any) -> bool:
    """A dtype, policy or type."""
    return type(value).__module__.startswith(f"{OURS}.numerics.")


def _is_record(value: Any) -> bool:
    """What this package has of choices that do not change, such as an optimizer: compared by its
    fields. A class of the user's is looked through."""
    params = getattr(type(value), "__dataclass_params__", None)
    return params is not None and params.frozen and _is_ours(value) and not tree.is_registered(
        type(value))


def _is_ours(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == OURS


def _content(value: Any, name: str, constants: set[str]) -> LengthLink | ContentLink | None:
    """What is compared of a container beside its entries."""
    if isinstance(value, set | deque) and len(value) <= MOST_PLAIN:
        return ContentLink.of(value, name)
    return LengthLink(value, len(value), f"len({name})") if _is_gone_through(
        value, constants) else None


def _is_gone_through(value: Any, constants: set[str]) -> bool:
    """Whether code may read all entries: a list's, or a dict's of which it has no key."""
    return isinstance(value, list) or (isinstance(value, dict) and constants.isdisjoint(value))


def _may_be_set(value: Any, link: NameLink, child: Any) -> bool:
    """Whether somebody may bind a setting anew: not in the standard library, nor a method."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] not in sys.stdlib_module_names
    if isinstance(value, list | dict):
        return len(value) <= MOST_PLAIN
    return not (isinstance(link.holder, types.MappingProxyType) and isinstance(child, CALLED))


def _is_attribute(value: Any, link: NameLink) -> bool:
    """Whether a link is to what an object, or a class, has as an attribute."""
    mine = link.holder is value or link.holder is _own_attributes(value) or isinstance(
        link.holder, types.MappingProxyType)
    return mine and not isinstance(value, types.ModuleType | dict | list)


def _linked_parts(value: Any, names: set[str], name: str, foreign: bool
                  ) -> Iterator[tuple[NameLink | None, Any]]:
    """What is reached through a value: links, or None for what cannot be bound anew. name: its."""
    if isinstance(value, types.FunctionType):
        yield from _of_function(value, foreign)
    elif isinstance(value, types.MethodType):
        yield from ((None, x) for x in (value.__func__, value.__self__))
    elif isinstance(value, functools.partial):
        yield from ((None, x) for x in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, dict | list | tuple | set | frozenset) and len(value) > MOST:
        return
    elif isinstance(value, dict):
        yield from ((NameLink(value, k, x, f"{name}[{k!r}]"), x) for k, x in value.items())
    elif isinstance(value, list):
        yield from ((NameLink(value, i, x, f"{name}[{i}]"), x) for i, x in enumerate(value))
    elif isinstance(value, tuple | set | frozenset):
        yield from ((None, x) for x in value)
    elif isinstance(value, UserDict | UserList):
        yield None, value.data
    elif isinstance(value, ChainMap):
        yield from ((None, x) for x in value.maps)
    elif isinstance(value, types.ModuleType):  # those names alone that the code has
        if value.__name__.partition(".")[0] not in (OURS, "numpy"):
            yield from _items(vars(value), names)
    elif isinstance(value, type):
        for kind in _classes(value):
            yield from _items(vars(kind), names)
    elif _is_ours(value):
        yield from ((None, x) for x in _of_ours(value))
    else:
        special = SPECIAL if _is_users(type(value)) else frozenset()
        if not foreign:
            yield from ((None, method) for method in _methods(type(value), names | special))
        yield from _items(_own_attributes(value), _own_attributes(value))
        slots = [n for kind in type(value).__mro__ for n in _slots(kind)]
        yield from ((NameLink(value, n, getattr(value, n), n), getattr(value, n))
                    for n in slots if hasattr(value, n))
        yield from _of_class(value, names)


def _own_attributes(value: Any) -> dict:
    """The attributes of an object itself, which is not asked: some have any that one asks for."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}


def _is_users(kind: type) -> bool:
    """Whether a class is of the user's program."""
    return not _is_installed(kind) and _package(kind) not in sys.stdlib_module_names


def _is_installed(value: Any) -> bool:
    """Whether a function, class or object is of an installed package."""
    if isinstance(value, types.FunctionType):
        return is_installed(value.__code__.co_filename)
    kind = value if isinstance(value, type) else type(value)
    return is_installed(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


def _package(value: Any) -> str:
    """The package that a function, class or object is of."""
    kind = value if isinstance(value, types.FunctionType | type) else type(value)
    return (kind.__module__ or "").partition(".")[0]


def _unwrapped(root: Any) -> Iterator[Any]:
    """A callable, the function of a partial one, the function and object of a method."""
    yield root
    if isinstance(root, functools.partial):
        yield from _unwrapped(root.func)
    elif isinstance(root, types.MethodType):
        yield from (root.__func__, root.__self__)


def _of_class(value: Any, names: set[str]) -> Iterator[tuple[NameLink, Any]]:
    """What an object has by its class, under names of the code: not methods and properties, which
    may stand for what a class further back has. Nothing of the object's runs."""
    seen, classes = set(_own_attributes(value)), _classes(type(value))
    for kind in type(value).__mro__:
        for n in (vars(kind).keys() & names) - seen:
            seen.add(n)
            member = vars(kind)[n]
            if kind in classes and not hasattr(type(member), "__get__"):
                yield NameLink(value, n, member, n), member


def _classes(kind: type) -> list[type]:
    """A class and its bases, those of the user's and of other packages."""
    return [k for k in kind.__mro__
            if k is not object and k.__module__.partition(".")[0] not in (OURS, "numpy")]


def _methods(kind: type, names: set[str]) -> Iterator[Any]:
    """Those that the code names, properties too; what these name may be further ones."""
    done: set[tuple[type, str]] = set()
    while more := [(k, n) for k in kind.__mro__ for n in sorted(vars(k).keys() & names)
                   if (k, n) not in done]:
        done.update(more)
        found = (_function_of(vars(k)[n]) for k, n in more)
        yield from [m for m in found if isinstance(m, types.FunctionType) or (
            _is_ours(m) and hasattr(m, "fn"))]


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
    """The user's functions in a compiled or derived one, the parts of a state object."""
    held = getattr(value, "__dict__", {})
    if "fn" in held:
        return [held["fn"], *(x for x in held.values() if isinstance(x, types.FunctionType))]
    return tree.parts_of(value)[0] if tree.is_registered(type(value)) else ()


def _of_function(fn: types.FunctionType, foreign: bool) -> Iterator[tuple[NameLink | None, Any]]:
    root = (fn.__module__ or "").partition(".")[0]
    if root in sys.stdlib_module_names:
        return
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        if _filled(cell):
            link = NameLink(cell, None, cell.cell_contents, name)
            yield None if root == OURS else link, cell.cell_contents
    if root != OURS:
        read = _items(fn.__globals__, sorted(code_names(fn).read))
        yield from (r for r in read if not foreign or _is_value(r[1]))
        yield from ((None, m) for m in _imported(fn))
    yield from ((None, x) for x in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()))
    if hasattr(fn, "__wrapped__"):
        yield None, fn.__wrapped__


def _imported(fn: types.FunctionType) -> Iterator[types.ModuleType]:
    """The modules that a function imports in its body: a and a.b of `import a.b`."""
    package = fn.__globals__.get("__package__") or ""
    for level, name in sorted(code_names(fn).imported):
        back = package.rsplit(".", level - 1)[0] if level else ""
        parts = [p for p in (back, name) if p]
        whole = ".".join(parts)
        every = (whole[:i] for i in range(1, len(whole) + 1) if whole[i:i + 1] in ("", "."))
        yield from (sys.modules[m] for m in every if m in sys.modules)


__all__ = ["CapturedNames"]
