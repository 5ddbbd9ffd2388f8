"""Nested arguments and results as flat lists: tuples, lists, dicts, None, dataclasses, registered
classes."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ArgumentError
from ..lazy_dataclass import dataclass


@dataclass(frozen=True)
class TreeDef:
    """The structure of a value: its node kind, fixed data of that node, and its children."""

    kind: Any  # type of the container, or None for a leaf
    data: Any = None  # dict keys or the fixed part of a registered class
    children: tuple[TreeDef, ...] = ()

    def __str__(self) -> str:
        if self.kind is None:
            return "*"
        inner = ", ".join(map(str, self.children))
        return f"{getattr(self.kind, '__name__', self.kind)}({inner})"


LEAF = TreeDef(None)
_REGISTERED: dict[type, tuple[Callable, Callable]] = {
    OrderedDict: (lambda d: (tuple(d.values()), tuple(d)),
                  lambda keys, values: OrderedDict(zip(keys, values, strict=True)))}


def register_tree(cls: type, flatten: Callable, unflatten: Callable) -> type:
    """Let instances of `cls` pass through jit, grad, vmap and scan.

    flatten(x) -> (children, fixed data, hashable); unflatten(data, children) -> x.
    """
    if cls in _REGISTERED:
        raise ArgumentError(f"{cls.__name__} is registered already")
    _REGISTERED[cls] = (flatten, unflatten)
    return cls


def is_registered(cls: type) -> bool:
    return cls in _REGISTERED


def flatten(tree: Any) -> tuple[list, TreeDef]:
    """(leaves, structure) of a nested value. None has no leaves."""
    leaves: list = []
    return leaves, _flatten(tree, leaves)


def _flatten(tree: Any, leaves: list) -> TreeDef:
    kind = type(tree)
    if kind is tuple or kind is list:
        return TreeDef(kind, None, tuple(_flatten(x, leaves) for x in tree))
    if kind is dict:
        keys = tuple(tree)
        return TreeDef(dict, keys, tuple(_flatten(tree[k], leaves) for k in keys))
    if tree is None:
        return TreeDef(type(None))
    if kind in _REGISTERED:
        children, data = _REGISTERED[kind][0](tree)
        return TreeDef(kind, data, tuple(_flatten(x, leaves) for x in children))
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):  # a named tuple
        return TreeDef(kind, None, tuple(_flatten(x, leaves) for x in tree))
    fields = _tree_fields(kind)  # type: ignore[arg-type]  # a class is hashable
    if fields is not None:
        return _flatten_fields(tree, fields, leaves)
    leaves.append(tree)
    return LEAF


# --- dataclasses ------------------------------------------------------------------------------
@dataclass(frozen=True)
class DataclassFields:
    """The fields of a dataclass: those that hold parts of the tree, and the fixed ones."""

    parts: tuple[str, ...]
    fixed: tuple[tuple[str, Any], ...]

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DataclassFields) and self._key == other._key

    @property
    def _key(self) -> tuple:
        """By value, 0.0 apart from -0.0."""
        return self.parts, tuple((name, type(v), repr(v) if isinstance(v, float) else v)
                                 for name, v in self.fixed)


_PLAIN = (int, float, complex, bool, str, bytes, type(None), type, Callable, Ellipsis)


@functools.cache
def _tree_fields(kind: Any) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    return _sorted_fields(kind, frozenset())


def _sorted_fields(kind: type, around: frozenset[type]) -> tuple | None:
    """(fields that are parts, fixed fields) of a dataclass; None for what is a leaf.

    Fixed are those whose annotation says a plain Python value, such as `heads: int`; a field's
    metadata {"static": True or False} decides otherwise. A class all of whose fields are fixed is
    a configuration, compared by value: a leaf, and an annotation of it is plain too. So are the
    classes of this package. Where it has no hash, as it may change, it is a node without parts.
    around: the classes whose fields are being looked at.
    """
    if not dataclasses.is_dataclass(kind) or kind.__module__.partition(".")[0] == "tessera":
        return None
    try:
        hints = typing.get_type_hints(kind)
    except Exception:  # an annotation whose names are gone: what it says is read as text
        hints = {}
    parts: list[str] = []
    fixed: list[str] = []
    for f in dataclasses.fields(kind):
        plain = f.metadata.get("static", _is_plain(hints.get(f.name, f.type), around | {kind}))
        (fixed if plain else parts).append(f.name)
    return (tuple(parts), tuple(fixed)) if parts or kind.__hash__ is None else None


def _is_plain(annotation: Any, around: frozenset[type]) -> bool:
    if isinstance(annotation, str):
        words = annotation.replace("|", " ").split()
        return all(w in {"int", "float", "complex", "bool", "str", "bytes", "None"} for w in words)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType, tuple):
        return bool(args) and all(_is_plain(a, around) for a in args)
    if origin in (typing.Literal, Callable, type):
        return True
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return annotation not in around and _sorted_fields(annotation, around) is None
    return annotation in _PLAIN


def _flatten_fields(tree: Any, fields: tuple, leaves: list) -> TreeDef:
    parts, fixed = fields
    data = DataclassFields(parts, tuple((name, getattr(tree, name)) for name in fixed))
    try:
        hash(data)
    except TypeError:
        odd = next(name for name, v in data.fixed if type(v).__hash__ is None)
        raise ArgumentError(
            f"{type(tree).__name__}.{odd} = {getattr(tree, odd)!r} is fixed but cannot be hashed",
            hint="a tuple instead of a list; or field(metadata={'static': False}) makes it a part "
            "of the tree",
        ) from None
    return TreeDef(type(tree), data, tuple(_flatten(getattr(tree, n), leaves) for n in parts))


def fields_data(tree: Any) -> DataclassFields | None:
    """What is fixed of a dataclass of the user's."""
    fields = _tree_fields(type(tree))  # type: ignore[arg-type]  # a class is hashable
    if fields is None:
        return None
    return DataclassFields(fields[0], tuple((name, getattr(tree, name)) for name in fields[1]))


def parts_of(tree: Any) -> tuple[Any, Any]:
    """(children, fixed data) of an instance of a registered class; of a named tuple, its values."""
    found = _REGISTERED.get(type(tree))
    return (tuple(tree), None) if found is None else found[0](tree)


def from_parts(kind: Any, data: Any, children: list) -> Any:
    """What has this kind and fixed data, of its children."""
    if kind in _REGISTERED:
        return _REGISTERED[kind][1](data, children)
    return _from_fields(kind, data, children) if type(data) is DataclassFields else kind(*children)


def _from_fields(kind: type, data: DataclassFields, children: list) -> Any:
    """An instance with these values. __init__ and __post_init__ are not called: they may check or
    change what is only a stand-in here."""
    made: Any = object.__new__(kind)
    for name, value in (*data.fixed, *zip(data.parts, children, strict=True)):
        object.__setattr__(made, name, value)
    return made


def unflatten(treedef: TreeDef, leaves: Any) -> Any:
    """The nested value with this structure and these leaves, in order."""
    return _unflatten(treedef, iter(leaves))


def _unflatten(treedef: TreeDef, leaves: Any) -> Any:
    kind = treedef.kind
    if kind is None:
        return next(leaves)
    if kind is type(None):
        return None
    children = [_unflatten(c, leaves) for c in treedef.children]
    if kind is tuple or kind is list:
        return kind(children)
    if kind is dict:
        return dict(zip(treedef.data, children, strict=True))
    return from_parts(kind, treedef.data, children)


def map_tree(f: Callable, tree: Any, *rest: Any) -> Any:
    """f of each leaf, in a tree of the same form: `ts.map_tree(lambda p, g: p - lr * g, p, g)`.

    rest: trees of the same form, whose leaves f gets too. None in the place of a leaf is given as
    it is: gradients have it where a leaf is no parameter. Where a list meets the gradients of a
    pipeline, which know its stages, so does what comes out.
    Raises ArgumentError where forms differ.
    """
    leaves, treedef = flatten(tree)
    others: list[list] = []
    for other in rest:
        if treedef.kind is list and _lists(type(other), list):
            treedef = TreeDef(type(other), parts_of(other)[1], treedef.children)
        others.append([])
        if not _collect_like(other, treedef, others[-1], gaps=True):
            raise ArgumentError(f"map_tree: {_difference(treedef, flatten(other)[1])}")
    return unflatten(treedef, [f(*xs) for xs in zip(leaves, *others, strict=True)])


def _difference(a: TreeDef, b: TreeDef) -> str:
    """Where two structures differ, by the paths of leaves that one alone has."""
    odd = sorted(set(paths(a)) ^ set(paths(b)))
    shown = ", ".join(odd[:8]) + ", ..." * (len(odd) > 8)
    return f"trees differ in {shown}" if odd else f"structures differ: {a} and {b}"


def paths(treedef: TreeDef, prefix: str = "") -> list[str]:
    """A name per leaf, in order: dict keys, fields and positions joined by dots, "blocks.0.qkv"."""
    if treedef.kind is None:
        return [prefix]
    keys: Any = range(len(treedef.children))
    if treedef.kind in (dict, OrderedDict):
        keys = treedef.data
    elif type(treedef.data) is DataclassFields:
        keys = treedef.data.parts
    dot = f"{prefix}." if prefix else ""
    return [
        path
        for key, child in zip(keys, treedef.children, strict=True)
        for path in paths(child, f"{dot}{key}")
    ]


def held_by_class(treedef: TreeDef, held: bool = False) -> list[bool]:
    """Per leaf, whether an instance of a registered class holds it."""
    if treedef.kind is None:
        return [held]
    held = held or treedef.kind in _REGISTERED
    return [flag for child in treedef.children for flag in held_by_class(child, held)]


def leaves_like(value: Any, treedef: TreeDef, what: str) -> list:
    """The leaves of a value that must have this structure, dicts in the order of its keys.

    Raises ArgumentError naming `what` and both structures.
    """
    leaves: list = []
    if not _collect_like(value, treedef, leaves):
        raise ArgumentError(f"{what} has structure {flatten(value)[1]}, expected {treedef}")
    return leaves


def _collect_like(value: Any, treedef: TreeDef, leaves: list, gaps: bool = False) -> bool:
    """Whether a value has a structure, dicts in any order, and a plain tuple for a named one or
    the other way; leaves gets its leaves. gaps: None may stand in the place of a leaf."""
    if treedef.kind is None:
        found = [None] if gaps and value is None else flatten(value)[0]
        leaves.extend(found)
        return len(found) == 1 and (found[0] is value)
    other = type(value) is not treedef.kind
    if other and not _tuples(type(value), treedef.kind) and not _lists(type(value), treedef.kind):
        return False
    if treedef.kind is dict:
        if set(value) != set(treedef.data):
            return False
        children: Sequence[Any] = [value[k] for k in treedef.data]
    else:
        children, data = children_of(value)
        if (data != treedef.data and not other) or len(children) != len(treedef.children):
            return False
    return all(_collect_like(x, c, leaves, gaps)
               for x, c in zip(children, treedef.children, strict=True))


def _tuples(a: type, b: type) -> bool:
    """Whether one is tuple and the other a class of named tuples, nodes by that."""
    named = b if a is tuple else a
    return tuple in (a, b) and issubclass(named, tuple) and hasattr(named, "_fields") and (
        named not in _REGISTERED)


def _lists(a: type, b: type) -> bool:
    """Whether one is list and the other a registered class of lists, which knows more of itself."""
    named = b if a is list else a
    return list in (a, b) and named in _REGISTERED and issubclass(named, list)


def children_of(value: Any) -> tuple[Sequence[Any], Any]:
    """The parts of a node that is no dict, and what is fixed of it."""
    if value is None or type(value) in (tuple, list):
        return value or (), None
    if (data := fields_data(value)) is not None and type(value) not in _REGISTERED:
        return [getattr(value, n) for n in data.parts], data
    return parts_of(value)
