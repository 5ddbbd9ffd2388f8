"""Trees of one structure taken apart and put together by Python that is written for it.

    flatten = flattener(structure)        # flatten(value): the leaves, None for another structure
    unflatten = unflattener(structure)    # unflatten(leaves): the value

A dict of twelve tensors is one unpacking, where walking the structure is a call for each: trees of
hundreds of leaves at each call of a compiled function are why. Leaves are not looked at: one may be
a container in a value of another structure, which its type tells.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .tree import (
    DataclassFields,
    TreeDef,
    fields_data,
    from_parts,
    parts_of,
    unflatten,
)

DEEPEST = 40  # levels; Python's own parser has a limit


@functools.lru_cache(maxsize=256)
def flattener(structure: TreeDef) -> Callable[[Any], list | None] | None:
    """None for a structure that is too deep."""
    if depth(structure) > DEEPEST:
        return None
    writer = Flattening()
    writer.node("v", structure)
    return writer.finish()


@functools.lru_cache(maxsize=256)
def unflattener(structure: TreeDef) -> Callable[[Sequence[Any]], Any]:
    if depth(structure) > DEEPEST:
        return functools.partial(unflatten, structure)
    scope: dict[str, Any] = {}
    count = itertools.count()
    made = expression(structure, scope, lambda s: f"x{next(count)}" if s.kind is None else None)
    leaves = "".join(f"x{i}, " for i in range(next(count)))
    unpack = f"    ({leaves}) = leaves\n" if leaves else ""
    exec(f"def put(leaves):\n{unpack}    return {made}\n", scope)  # noqa: S102
    return scope["put"]


def depth(structure: TreeDef) -> int:
    return 1 + max(map(depth, structure.children), default=0)


class Flattening:
    """Gathers the lines of one function."""

    def __init__(self) -> None:
        self.scope: dict[str, Any] = {"parts_of": parts_of, "fields_data": fields_data}
        self.lines: list[str] = []
        self.leaves: list[str] = []
        self.names = map("v{}".format, itertools.count())

    def node(self, name: str, structure: TreeDef) -> None:
        """The lines for a value that has a name."""
        kind = structure.kind
        if kind is None:
            self.leaves.append(name)
            return
        if kind is type(None):
            self.need(f"{name} is None")
            return
        self.need(f"type({name}) is {self.known(kind)}")
        if kind in (dict, tuple, list) and all(c.kind is None for c in structure.children):
            self.of_leaves(name, structure)
            return
        self.one_by_one(name, structure)

    def one_by_one(self, name: str, structure: TreeDef) -> None:
        """The lines for the parts of a container, each of which has a name."""
        parts = [next(self.names) for _ in structure.children]
        for line in self.taken_apart(name, structure, len(parts)):
            self.lines.append(line.replace("<parts>", "".join(f"{p}, " for p in parts)))
        for part, child in zip(parts, structure.children, strict=True):
            self.node(part, child)

    def of_leaves(self, name: str, structure: TreeDef) -> None:
        """The lines for a container that has nothing but leaves."""
        if structure.kind is dict:
            self.need(f"tuple({name}) == {self.known(structure.data)}")
            self.leaves.append(f"*{name}.values()")
        else:
            self.need(f"len({name}) == {len(structure.children)}")
            self.leaves.append(f"*{name}")

    def taken_apart(self, name: str, structure: TreeDef, count: int) -> Iterator[str]:
        kind, given = structure.kind, name
        if kind is dict:
            self.need(f"tuple({name}) == {self.known(structure.data)}")
            given = f"{name}.values()"
        elif type(structure.data) is DataclassFields:
            self.need(f"fields_data({name}) == {self.known(structure.data)}")
            given = "".join(f"{name}.{part}, " for part in structure.data.parts)
        elif kind is tuple or kind is list:
            self.need(f"len({name}) == {count}")
        else:  # a registered class, or a named tuple
            given = next(self.names)
            yield f"{given}, d{given} = parts_of({name})"
            yield f"if d{given} != {self.known(structure.data)} or len({given}) != {count}: " \
                  "return None"
        if count:
            yield f"(<parts>) = {given}"

    def need(self, test: str) -> None:
        self.lines.append(f"if not ({test}): return None")

    def known(self, value: Any) -> str:
        name = f"k{len(self.scope)}"
        self.scope[name] = value
        return name

    def result(self) -> str:
        return f"[{', '.join(self.leaves)}]"

    def finish(self) -> Callable[[Any], Any]:
        lines = [*self.lines, f"return {self.result()}"]
        text = "def take(v):\n" + "".join(f"    {line}\n" for line in lines)
        exec(text, self.scope)  # noqa: S102
        return self.scope["take"]


def expression(structure: TreeDef, scope: dict[str, Any],
               of: Callable[[TreeDef], str | None]) -> str:
    """What makes a value. of: the text of what is there, each leaf and perhaps more; None of
    others."""
    kind, there = structure.kind, of(structure)
    if there is not None:
        return there
    if kind is type(None):
        return "None"
    parts = [expression(c, scope, of) for c in structure.children]
    if kind is tuple:
        return f"({''.join(f'{p}, ' for p in parts)})"
    if kind is list:
        return f"[{', '.join(parts)}]"

    def known(value: Any) -> str:
        name = f"k{len(scope)}"
        scope[name] = value
        return name

    if kind is dict:
        keys = [repr(k) if type(k) is str else known(k) for k in structure.data]
        return "{" + ", ".join(f"{k}: {p}" for k, p in zip(keys, parts, strict=True)) + "}"
    return f"{known(functools.partial(from_parts, kind, structure.data))}([{', '.join(parts)}])"


__all__ = ["DEEPEST", "Flattening", "depth", "expression", "flattener", "unflattener"]
