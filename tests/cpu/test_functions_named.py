"""graph/functions.py names each public op function where it is declared, for type checkers too."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

from tessera.graph import functions
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


def test_what_a_type_checker_reads_is_what_runs():
    for name, (module, inside) in named().items():
        found = getattr(importlib.import_module(f"tessera.graph.{module}"), inside)
        assert found is getattr(functions, name) is PUBLIC[name], name


def test_no_function_of_the_graph_is_left_out():
    """Those of the floors above, ts.shard say, are imported from there."""
    of_graph = {n for n, f in PUBLIC.items() if f.__module__.startswith("tessera.graph.")}
    assert of_graph == named().keys()
    assert len(of_graph) > 200


def test_no_function_is_looked_up_by_text():
    """F.reshape can be searched for and is type-checked, PUBLIC["reshape"] is neither."""
    package = Path(functions.__file__).parents[1]
    found = [str(f.relative_to(package)) for f in package.rglob("*.py")
             if 'PUBLIC["' in f.read_text()]
    assert not found, f"write F.name (graph/functions.py): {found}"
