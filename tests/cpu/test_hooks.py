"""Calls that go up: importing the package fills each hook, by the module that it names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import tessera
from tessera import hooks
from tessera.errors import TesseraError

PACKAGE = Path(tessera.__file__).parent
ONE = {name: value for name, value in vars(hooks).items() if isinstance(value, hooks.Hook)}


@pytest.mark.parametrize("name", ONE)
def test_a_hook_is_filled_by_the_module_that_it_names(name):
    hook = ONE[name]
    assert hook.name == name and hook.get() is not None
    path = PACKAGE / hook.filler.replace(".", "/")
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    assert f"hooks.{name}.fill(" in file.read_text()


def test_an_empty_hook_says_what_fills_it():
    with pytest.raises(TesseraError, match=r"nothing fills the hook 'x': tessera\.mesh\.world"):
        hooks.Hook("x", "mesh.world").get()


def test_a_hook_is_filled_once():
    hook = hooks.Hook("x", "mesh.world")
    hook.fill(1)
    with pytest.raises(TesseraError, match="filled twice: 1 and 2"):
        hook.fill(2)
    assert hook.get() == 1


def test_no_module_offers_a_list_that_another_fills():
    """A call that goes up stands in hooks.py, where its type is written, not in an empty list."""
    found = [f"{file.relative_to(PACKAGE)}:{node.lineno} {node.target.id}"
             for file in sorted(PACKAGE.rglob("*.py")) if file.name != "hooks.py"
             if "Callable" in (text := file.read_text()) and re.search(r"=\s*\[\s*\]", text)
             for node in ast.parse(text).body
             if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
             and "Callable" in ast.unparse(node.annotation)
             and isinstance(node.value, ast.List) and not node.value.elts]
    assert found == []
