"""Arguments of a step taken apart into copies of their containers, of which results of a later step
are put together.

A step returns the tensors of its set in dicts and lists that are new to their user. Most of these
hold nothing else: each is a copy that was made of an argument's one step before, when it was taken
apart, in one call where entry by entry would be a dozen. What is copied is looked at, not what was
given: another thread may write there meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Any, NamedTuple

from .tree import TreeDef
from .tree_code import DEEPEST, Flattening, depth, expression


class TreeCopies(NamedTuple):
    """dicts, lists: copies of the containers that hold tensors of the set alone.  singles: the
    others of the set.  rest: leaves that are not."""

    dicts: list[dict[Any, Any]]
    lists: list[list[Any]]
    singles: list[Any]
    rest: list[Any]

    def tensors(self) -> Iterator[Any]:
        """Those of the set, in order."""
        return chain(chain.from_iterable(map(dict.values, self.dicts)),
                     chain.from_iterable(self.lists), self.singles)


class CopiedTrees:
    """How trees of one structure are taken apart. order: of the set, the number of each leaf."""

    def __init__(self, structure: TreeDef, mine: Collection[int]):
        """mine: the numbers of the leaves of the set."""
        writer = _Taking({*mine})
        writer.node("v", structure)
        self.take: Callable[[Any], TreeCopies | None] = writer.finish()
        self.containers = [*writer.dicts, *writer.lists]  # of each its kind, keys and leaves
        self.order = [*chain.from_iterable(n for _, _, n in self.containers), *writer.singles]
        self.copied = len(self.order) - len(writer.singles)

    @staticmethod
    def of(structure: TreeDef, mine: Collection[int]) -> CopiedTrees | None:
        """None for a structure that is too deep."""
        return None if depth(structure) > DEEPEST else CopiedTrees(structure, mine)

    def of_tensors(self, tensors: Sequence[Any]) -> TreeCopies:
        """Containers of other tensors of the set, as if taken apart. tensors: in order."""
        dicts, lists, at = list[dict[Any, Any]](), list[list[Any]](), iter(tensors)
        for kind, keys, numbers in self.containers:
            values = [next(at) for _ in numbers]
            if kind is dict:
                dicts.append(dict(zip(keys, values, strict=True)))
            else:
                lists.append(values)
        return TreeCopies(dicts, lists, [], [])

    def puts_together(self, structure: TreeDef, places: Mapping[int, int]
                      ) -> Callable[[TreeCopies, Sequence[Any], Sequence[Any]], Any]:
        """put(taken, tensors, others): a result of this structure. places: by its leaf, the leaf of
        the arguments whose place it takes; others: the leaves that take none."""
        writer = _Putting(self, places)
        made = expression(structure, writer.scope, writer.node)
        text = f"def put(taken, t, m):\n    d, s = taken.dicts, taken.lists\n    return {made}\n"
        exec(text, writer.scope)  # noqa: S102
        put: Callable[[TreeCopies, Sequence[Any], Sequence[Any]], Any] = writer.scope["put"]
        return put


def _is_copied(structure: TreeDef) -> bool:
    return structure.kind in (dict, list) and bool(structure.children) and all(
        c.kind is None for c in structure.children)


class _Taking(Flattening):
    """The lines of `take`."""

    def __init__(self, mine: set[int]):
        super().__init__()
        self.mine = mine
        self.numbers: Iterator[int] = count()
        self.dicts: list[tuple[type, Any, list[int]]] = []
        self.lists: list[tuple[type, Any, list[int]]] = []
        self.copies: dict[type, list[str]] = {dict: [], list: []}
        self.singles: list[int] = []
        self.single_names: list[str] = []

    def node(self, name: str, structure: TreeDef) -> None:
        if structure.kind is None:
            k = next(self.numbers)
            if k in self.mine:
                self.singles.append(k)
            (self.single_names if k in self.mine else self.leaves).append(name)
            return
        super().node(name, structure)

    def of_leaves(self, name: str, structure: TreeDef) -> None:
        """A container that has nothing but leaves: copied where all are of the set."""
        numbers = [next(self.numbers) for _ in structure.children]
        if not (_is_copied(structure) and self.mine.issuperset(numbers)):
            self.numbers = chain(numbers, self.numbers)
            return self.one_by_one(name, structure)
        copy, kind = next(self.names), structure.kind
        self.lines.append(f"{copy} = {name}.copy()")
        self.need(f"[*{copy}] == {self.known([*structure.data])}" if kind is dict
                  else f"len({copy}) == {len(numbers)}")
        self.copies[kind].append(copy)
        (self.dicts if kind is dict else self.lists).append((kind, structure.data, numbers))

    def result(self) -> str:
        parts = (*self.copies.values(), self.single_names, self.leaves)
        self.scope["Taken"] = TreeCopies
        return f"Taken({', '.join('[' + ', '.join(p) + ']' for p in parts)})"


class _Putting:
    """The parts of an expression that are copies, tensors of the set or others."""

    def __init__(self, trees: CopiedTrees, places: Mapping[int, int]):
        self.places, self.scope = places, dict[str, Any]()
        self.numbers: Iterator[int] = count()
        self.at = {k: i for i, k in enumerate(trees.order)}
        self.copies = dict[tuple[Any, ...], str]()
        for kind, name in ((dict, "d"), (list, "s")):
            of_kind = [(keys, numbers) for k, keys, numbers in trees.containers if k is kind]
            self.copies |= {_key(kind, keys, numbers): f"{name}[{i}]"
                            for i, (keys, numbers) in enumerate(of_kind)}

    def node(self, structure: TreeDef) -> str | None:
        """The text of a leaf, or of a container that is a copy; None of another one."""
        if structure.kind is None:
            j = next(self.numbers)
            others = j - sum(k < j for k in self.places)
            return f"t[{self.at[self.places[j]]}]" if j in self.places else f"m[{others}]"
        if not _is_copied(structure):
            return None
        numbers = [next(self.numbers) for _ in structure.children]
        there = [self.places.get(j) for j in numbers]
        made = self.copies.get(_key(structure.kind, structure.data, there))
        if made is None:
            self.numbers = chain(numbers, self.numbers)
        return made


def _key(kind: type, keys: Sequence[Any] | None, numbers: Sequence[int | None]) -> tuple[Any, ...]:
    """Of a container: equal for those that are equal, keys with their types."""
    return kind, keys, tuple(map(type, keys or ())), tuple(numbers)


__all__ = ["CopiedTrees", "TreeCopies"]
