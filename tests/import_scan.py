"""What a module imports, read from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def module_parts(file: Path, package: Path) -> list[str]:
    """tessera/tile/ops.py -> [tessera, tile, ops]; a folder's __init__.py is the folder itself."""
    parts = [package.name, *file.relative_to(package).with_suffix("").parts]
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts


def imported_modules(node: ast.AST, parts: list[str], is_folder: bool) -> Iterator[list[str]]:
    """The dotted names that a statement imports, as lists; a from-import's names are appended."""
    if isinstance(node, ast.Import):
        yield from (alias.name.split(".") for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module.split(".") if node.module else []
        if node.level:
            above = parts[: len(parts) - node.level + is_folder]
            base = above + base
        yield from ([*base, alias.name] for alias in node.names)
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else \
            getattr(node.func, "id", "")
        if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
            yield node.args[0].value.split(".")


def for_types_alone(tree: ast.Module) -> set[ast.AST]:
    """What stands under `if TYPE_CHECKING:`, which does not run."""
    guards = [n for n in tree.body if isinstance(n, ast.If) and isinstance(n.test, ast.Name)
              and n.test.id == "TYPE_CHECKING"]
    return {inner for guard in guards for line in guard.body for inner in ast.walk(line)}
