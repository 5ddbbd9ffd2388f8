"""graph/functions.py names each public op function where it is declared, for type checkers too."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import re
from pathlib import Path

from tessera.graph import functions, ops
from tessera.graph.operand import PUBLIC


def named() -> dict[str, tuple[str, str]]:
    """name -> module and the name there, of what the file tells a type checker."""
    tree = ast.parse(Path(functions.__file__).read_text())
    (guard,) = (n for n in tree.body if isinstance(n, ast.If))
    imports = {a.name: (node.module, a.name) for node in guard.body
               if isinstance(node, ast.ImportFrom) for a in node.names}
    assigned = [node for node in guard.body if isinstance(node, ast.Assign)]
    renamed = {node.targets[0].id: imports[node.value.id] for node in assigned}
    return {n: at for n, at in imports.items() if n in PUBLIC} | renamed


def render() -> str:
    """The file with its imports written anew from the registry."""
    text = Path(functions.__file__).read_text()
    lines, renamed = [], []
    for module in sorted(pkgutil.iter_modules(ops.__path__), key=lambda m: m.name):
        values = vars(importlib.import_module(f"tessera.graph.ops.{module.name}"))
        source = Path(values["__file__"]).read_text()
        own = {name for node in ast.parse(source).body for name in declared(node)}
        of_module = {name: inside for inside in sorted(own) for name, fn in PUBLIC.items()
                     if values[inside] is fn}
        lines += [f"    from .ops.{module.name} import {inside} as {inside}"
                  for inside in sorted(set(of_module.values()), key=natural)]
        renamed += [f"    {n} = {inside}" for n, inside in of_module.items() if n != inside]
    note = "    # Declared under a shorter name, or under one that leaves Python's own alone."
    head = text[:text.index("if TYPE_CHECKING:")]
    return "\n".join([f"{head}if TYPE_CHECKING:", *lines, "", note, *renamed, ""])


def natural(name: str) -> list:
    """log2 before log10, as the linter sorts imports."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def declared(node: ast.stmt) -> list[str]:
    """The names that a statement of a module gives values."""
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [t.id for t in targets if isinstance(t, ast.Name)]


def test_the_file_is_that_of_the_registry():
    """Those of the floors above, ts.shard say, are imported from there."""
    if os.environ.get("TESSERA_ACCEPT") == "1":
        Path(functions.__file__).write_text(render())
    assert Path(functions.__file__).read_text() == render(), "rewrite it with TESSERA_ACCEPT=1"
    of_graph = {n for n, f in PUBLIC.items() if f.__module__.startswith("tessera.graph.")}
    assert of_graph == named().keys() and len(of_graph) > 200


def test_what_a_type_checker_reads_is_what_runs():
    for name, (module, inside) in named().items():
        found = getattr(importlib.import_module(f"tessera.graph.{module}"), inside)
        assert found is getattr(functions, name) is PUBLIC[name], name


def test_no_function_is_looked_up_by_text():
    """F.reshape can be searched for and is type-checked, PUBLIC["reshape"] is neither."""
    package = Path(functions.__file__).parents[1]
    found = [str(f.relative_to(package)) for f in package.rglob("*.py")
             if 'PUBLIC["' in f.read_text()]
    assert not found, f"write F.name (graph/functions.py): {found}"
