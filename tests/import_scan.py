"""What a package imports, read from its source."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Import:
    """dotted: what is imported; a from-import's name is its end.  for_types: under `if
    TYPE_CHECKING:`, which does not run.  in_function: when that runs."""

    file: Path
    line: int
    parts: tuple[str, ...]  # of the module that imports: (tessera, tile, ops)
    dotted: tuple[str, ...]
    in_function: bool
    for_types: bool

    @property
    def module(self) -> str:
        return ".".join(self.parts)

    def among(self, modules: set[str]) -> str | None:
        """The module that it names, or a name in which: the longer first."""
        return next((n for n in (".".join(self.dotted), ".".join(self.dotted[:-1]))
                     if n in modules), None)


def modules_of(package: Path) -> dict[str, Path]:
    """The modules of a package with their files; a folder's __init__.py is the folder itself."""
    return {".".join(_parts(f, package)): f for f in sorted(package.rglob("*.py"))}


@functools.cache
def imports_of(package: Path) -> tuple[Import, ...]:
    """Every import of every module, in functions too, and of names that are given as text."""
    return tuple(i for file in modules_of(package).values() for i in _imports(file, package))


def _parts(file: Path, package: Path) -> tuple[str, ...]:
    """tessera/tile/ops.py -> (tessera, tile, ops)"""
    parts = (package.name, *file.relative_to(package).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts


def _imports(file: Path, package: Path) -> Iterator[Import]:
    text, parts = file.read_text(), _parts(file, package)
    # A call that imports may stand in any expression; a statement that does stands among others.
    kinds = ast.AST if "import_module" in text or "__import__" in text else (
        ast.stmt, ast.excepthandler, ast.match_case)

    def look(node: ast.AST, in_function: bool, for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call):
            for dotted in _dotted(node, parts, file.name == "__init__.py"):
                yield Import(file, node.lineno, parts, dotted, in_function, for_types)
        guarded = {*node.body} if isinstance(node, ast.If) and isinstance(
            node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else ()
        inside = in_function or isinstance(node, ast.FunctionDef)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, kinds):
                yield from look(child, inside, for_types or child in guarded)

    yield from look(ast.parse(text), False, False)


def _dotted(node: ast.AST, parts: tuple[str, ...], is_folder: bool) -> Iterator[tuple[str, ...]]:
    if isinstance(node, ast.Import):
        yield from (tuple(alias.name.split(".")) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = tuple(node.module.split(".")) if node.module else ()
        if node.level:
            base = parts[: len(parts) - node.level + is_folder] + base
        yield from ((*base, alias.name) for alias in node.names)
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else \
            getattr(node.func, "id", "")
        if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
            yield tuple(node.args[0].value.split("."))
