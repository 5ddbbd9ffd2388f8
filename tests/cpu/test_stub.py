"""The type stub names what the package has."""

from __future__ import annotations

import os

import stub
from tessera.numerics import dtypes, public


def test_the_stub_is_that_of_the_registry():
    if os.environ.get("TESSERA_ACCEPT") == "1":
        stub.STUB.write_text(stub.render())
    assert stub.STUB.read_text() == stub.render(), "rewrite it with TESSERA_ACCEPT=1"


def test_every_function_is_declared_with_its_defaults():
    text = stub.render()
    assert "def softmax(x: Any, axis: int = -1) -> Tensor: ..." in text
    assert "def dropout(x: Any, p: float | Tensor, *, key: Any = None, training: bool" in text
    assert all(f"def {name}(" in text for name in stub.PUBLIC)


def test_type_checkers_know_every_format():
    """The stub takes them from there: what is registered, under each of its names."""
    missing = set(dtypes.dtype_names()) - {"bool"} - set(public.__all__)  # ts has it as bool_
    assert not missing, f"import {sorted(missing)} in tessera/numerics/public.py"
