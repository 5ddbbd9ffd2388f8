"""Programs that only a GPU runs, tests and benchmarks, name what the package has."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*ROOT.glob("tests/gpu/*.py"), *ROOT.glob("benchmarks/*.py")])


def named(name: str) -> ModuleType | None:
    """A module of the package; None where it is not there, or needs a library that is not."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name and e.name.startswith("tessera"):
            return None
        pytest.skip(f"needs {e.name}")


def attribute(of: ModuleType, name: str) -> object | None:
    found = getattr(of, name, None)
    return named(f"{of.__name__}.{name}") if found is None and hasattr(of, "__path__") else found


def missing(path: Path) -> Iterator[str]:
    """Names of the package, and of modules of it, that a file uses and are not there."""
    tree, modules = ast.parse(path.read_text()), {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module or \
                node.module.partition(".")[0] != "tessera":
            continue
        of = named(node.module)
        for name in node.names:
            found = of and attribute(of, name.name)
            if isinstance(found, ModuleType):
                modules[name.asname or name.name] = found
            elif not hasattr(of, name.name):
                yield f"{path.name}:{node.lineno}: {node.module} has no `{name.name}`"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and \
                (of := modules.get(node.value.id)) and not hasattr(of, node.attr) and \
                attribute(of, node.attr) is None:
            yield f"{path.name}:{node.lineno}: {of.__name__} has no `{node.attr}`"


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_what_it_names_is_there(path):
    assert not [*missing(path)]


def test_a_name_that_went_away_is_found(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("from tessera.graph.cuda.program import call_steps, workspace\n"
                       "from tessera.runtime.device import nobody\n"
                       "workspace.overlapped = call_steps.overlapped\n")
    assert [*missing(program)] == ["program.py:2: tessera.runtime.device has no `nobody`",
                                   "program.py:3: tessera.graph.cuda.program.workspace has "
                                   "no `overlapped`"]
