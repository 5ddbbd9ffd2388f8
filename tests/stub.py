"""The type stub of the package: `tessera/__init__.pyi`, written from the registry of functions.

The functions of `ts.` are declared once, where they are defined; an editor and a type checker read
their signatures here.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import tessera
import tessera.ad
import tessera.numerics.public
from tessera.graph.operand import PUBLIC

STUB = Path(tessera.__file__).with_suffix(".pyi")
HEAD = '# Generated: TESSERA_ACCEPT=1 pytest tests/cpu/test_stub.py writes it anew.\n'


def render() -> str:
    """The package's own imports, then one line per public function."""
    source = Path(tessera.__file__).read_text()
    body = source[source.index("from __future__"):source.index("from .graph.functions import *")]
    imports = [
        line.strip() for line in body.splitlines()
        if line.strip() and not re.search("__future__| as _|^with ", line)
    ]
    aliases = [line for line in imports if " import " not in line]
    imports = [line for line in imports if " import " in line]
    functions = [declared(name) for name in sorted(PUBLIC)]
    lines = [HEAD.rstrip(), "from collections.abc import Callable, Sequence",
             "from contextlib import AbstractContextManager",
             "from typing import Any", "", *imports,
             "from .tensor import TensorType as TensorType", "", "INF: float", "__version__: str",
             *aliases, ""]
    return "\n".join(lines + functions) + "\n"


def declared(name: str) -> str:
    """A function; one that has others as its attributes is the object of a class."""
    others = [n for n in sorted(vars(PUBLIC[name])) if n in PUBLIC]
    if not others:
        return declaration(name)
    call = declaration(name).replace(f"def {name}(", "def __call__(self, ")
    methods = [line for n in others for line in ("@staticmethod", declaration(n))]
    return "\n    ".join([f"class _{name}:", call, *methods]) + f"\n{name}: _{name}"


def declaration(name: str) -> str:
    signature = inspect.signature(PUBLIC[name])
    parameters = [
        p.replace(default=inspect.Parameter.empty if p.default is p.empty else Default(p.default))
        for p in signature.parameters.values()
    ]
    text = str(signature.replace(parameters=parameters)).replace("'", "")
    shadows = name in tessera.numerics.public.__all__ or name in tessera.ad.__all__
    return f"def {name}{text}: ..." + ("  # type: ignore[no-redef]" if shadows else "")


class Default:
    """A default as a stub shows it: a literal, or `...` for anything else."""

    def __init__(self, value: object):
        plain = value is None or isinstance(value, bool | int | float)
        self.text = repr(value) if plain else "..."

    def __repr__(self) -> str:
        return self.text
