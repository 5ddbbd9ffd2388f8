"""Names of ops in the text of the package: collections of them, and comparisons with them."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

COLLECTIONS = (ast.Set, ast.Dict, ast.List, ast.Tuple)


@dataclass(frozen=True)
class Table:
    """A collection of texts of which at least two are names of ops.

    key: "graph/simplify.py:RULES", the file and what the collection is assigned to, else the
    function that holds it
    """

    key: str
    line: int
    names: tuple[str, ...]


def op_tables(file: Path, rel: str, ops: Collection[str]) -> Iterator[Table]:
    """The collections of a file with two names of ops among their elements or keys."""
    for owner, node in owned(ast.parse(file.read_text())):
        names = texts(node) if isinstance(node, COLLECTIONS) else ()
        if sum(n in ops for n in names) >= 2:
            yield Table(f"{rel}:{owner}", node.lineno, names)  # type: ignore[attr-defined]


def owned(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every node with the name it is assigned to, or that of the function around it."""
    for child in ast.iter_child_nodes(tree):
        inner = owner
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = child.name
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            target = child.targets[0] if isinstance(child, ast.Assign) else child.target
            inner = target.id if isinstance(target, ast.Name) else owner
        yield inner, child
        yield from owned(child, inner)


def texts(node: ast.AST | None) -> tuple[str, ...]:
    """The texts of a collection, or of one text."""
    if isinstance(node, ast.Constant):
        return (node.value,) if isinstance(node.value, str) else ()
    if isinstance(node, ast.Call) and node.args:  # frozenset({...})
        return texts(node.args[0])
    elements: list = getattr(node, "elts", []) + [k for k in getattr(node, "keys", []) if k]
    return tuple(e.value for e in elements
                 if isinstance(e, ast.Constant) and isinstance(e.value, str))


def is_op_name(node: ast.AST) -> bool:
    """`node.op.name`, `op.name`; in kernels, where a node is an op, `node.name`."""
    value = getattr(node, "value", None)
    return isinstance(node, ast.Attribute) and node.attr == "name" and (
        getattr(value, "attr", "") == "op" or getattr(value, "id", "") in ("op", "node"))


def compared(file: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each name with which the name of an op is compared, in which it is looked up,
    or by which an op is asked for."""
    tree = ast.parse(file.read_text())
    constants = {owner: node.value for owner, node in owned(tree)
                 if isinstance(node, ast.Assign | ast.AnnAssign)}
    for node in ast.walk(tree):
        found: list[ast.AST | None] = []
        if isinstance(node, ast.Compare) and is_op_name(node.left):
            found = list(node.comparators)
        elif isinstance(node, ast.Subscript):
            if is_op_name(node.slice):
                found = [node.value]
            elif getattr(node.value, "id", "") == "OPS":
                found = [node.slice]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("made_by", "emit"):
            found = list(node.args)
        for part in found:
            part = constants.get(part.id, part) if isinstance(part, ast.Name) else part
            yield from ((node.lineno, text) for text in texts(part))
