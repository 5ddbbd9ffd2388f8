"""Nested arguments and results as flat lists: tuples, lists, dicts, None, registered classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError


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
_REGISTERED: dict[type, tuple[Callable, Callable]] = {}


def register_tree(cls: type, flatten: Callable, unflatten: Callable) -> type:
    """Let instances of `cls` pass through jit, grad, vmap and scan.

    flatten(x) -> (children, fixed data, hashable); unflatten(data, children) -> x.
    """
    if cls in _REGISTERED:
        raise ArgumentError(f"{cls.__name__} is registered already")
    _REGISTERED[cls] = (flatten, unflatten)
    return cls


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
    leaves.append(tree)
    return LEAF


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
    if kind in _REGISTERED:
        return _REGISTERED[kind][1](treedef.data, children)
    return kind(*children)


def map_tree(f: Callable, tree: Any, *rest: Any) -> Any:
    """Apply f to the leaves of trees of one structure."""
    leaves, treedef = flatten(tree)
    others = []
    for other in rest:
        more, structure = flatten(other)
        if structure != treedef:
            raise ArgumentError(f"structures differ: {treedef} and {structure}")
        others.append(more)
    return unflatten(treedef, [f(*xs) for xs in zip(leaves, *others, strict=True)])


def paths(treedef: TreeDef, prefix: str = "") -> list[str]:
    """A name per leaf, in order: dict keys and positions joined by dots, "blocks.0.qkv"."""
    if treedef.kind is None:
        return [prefix]
    keys = treedef.data if treedef.kind is dict else range(len(treedef.children))
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


def _collect_like(value: Any, treedef: TreeDef, leaves: list) -> bool:
    if treedef.kind is dict:
        return (
            type(value) is dict and set(value) == set(treedef.data)
            and all(_collect_like(value[k], c, leaves)
                    for k, c in zip(treedef.data, treedef.children, strict=True))
        )
    if treedef.kind in (tuple, list):
        return (
            type(value) is treedef.kind and len(value) == len(treedef.children)
            and all(_collect_like(x, c, leaves)
                    for x, c in zip(value, treedef.children, strict=True))
        )
    found, structure = flatten(value)
    leaves.extend(found)
    return structure == treedef
