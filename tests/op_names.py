"""Names of ops in the text of the package: collections of them, and comparisons with them."""

from __future__ import annotations

import ast
import functools
import re
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
    for owner, line, names in named_in(file)[0]:
        if sum(n in ops for n in names) >= 2:
            yield Table(f"{rel}:{owner}", line, names)


def compared(file: Path) -> list[tuple[int, str]]:
    """(line, text) of each name with which the name of an op is compared, in which it is looked up,
    or by which an op is asked for."""
    return named_in(file)[1]


@functools.cache  # two tests ask for each file of the package
def named_in(file: Path) -> tuple[list[tuple[str, int, tuple[str, ...]]], list[tuple[int, str]]]:
    """Collections of two texts or more, (owner, line, texts), and what `compared` gives."""
    nodes = owned(ast.parse(text := file.read_text()))
    tables = [(owner, node.lineno, names) for owner, node in nodes
              if isinstance(node, COLLECTIONS) and len(names := texts(node)) >= 2]
    return tables, list(_compared(nodes)) if re.search(r"\.name\b|OPS|made_by|emit", text) else []


def owned(tree: ast.AST) -> list[tuple[str, ast.AST]]:
    """Every node with the name it is assigned to, or that of the function around it."""
    found: list[tuple[str, ast.AST]] = []
    left = [("", child) for child in ast.iter_child_nodes(tree)][::-1]
    while left:
        owner, node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            owner = node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            owner = target.id if isinstance(target, ast.Name) else owner
        found.append((owner, node))
        left += [(owner, child) for child in ast.iter_child_nodes(node)][::-1]
    return found


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


def _compared(nodes: list[tuple[str, ast.AST]]) -> Iterator[tuple[int, str]]:
    constants = {owner: node.value for owner, node in nodes
                 if isinstance(node, ast.Assign | ast.AnnAssign)}
    for _, node in nodes:
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
