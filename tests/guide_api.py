"""The API reference, docs/reference/api: signatures and docstrings of the public names."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tessera as ts
import tessera.stdlib
from tessera import errors, numerics
from tessera.graph.operand import PUBLIC
from tessera.kernels.routine import Routine
from tessera.tile.ir.op_record import TileOp
from tessera.tile.ops import OPS as TILE_OPS

NO_CALL = (ts.DType, numerics.Modifier, float, type(ts))  # formats, modifiers, numbers, modules
WIDTH = 100


def module_of(x: Any) -> str:
    """Where a name is declared, without the package: `graph.ops.softmax`."""
    name = getattr(inspect.unwrap(x) if callable(x) else x, "__module__", "") or ""
    return name.removeprefix("tessera.") if name.startswith("tessera.") else ""


def names_of(module: Any) -> list[str]:
    """The public names of a module: `__all__`, else what it declares itself."""
    own = getattr(module, "__all__", None)
    return sorted(own or [n for n, x in vars(module).items() if n[0] != "_" and callable(x)
                          and (getattr(x, "__module__", "") + ".").startswith(
                              module.__name__ + ".")])


def signature(name: str, x: Any) -> str:
    """The call as one writes it, without annotations; only the name where there is none."""
    if isinstance(x, TileOp):
        return f"{name}{x.signature.removeprefix(x.name)}"
    try:
        found = inspect.signature(x)
    except (TypeError, ValueError):
        return name
    kept = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()
            if p.name not in ("self", "run")]  # run: what calls a library function gives it
    text = str(found.replace(parameters=kept, return_annotation=inspect.Signature.empty))
    return name + re.sub(r"<function (\w+) at 0x\w+>", r"\1", text)


def doc_of(x: Any) -> str:
    return inspect.cleandoc(x.doc if isinstance(x, TileOp) else getattr(x, "__doc__", "") or "")


def block(lines: str) -> str:
    return f"```\n{lines.rstrip()}\n```\n"


def filled(text: str, first: str = "", later: str = " " * 8) -> str:
    """One paragraph, broken where it is long."""
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=later,
                         break_long_words=False, break_on_hyphens=False)


def called(name: str, x: Any) -> str:
    """The signature and the docstring as it stands in the code."""
    head = filled(signature(name, x))
    return f"### `{name}`\n\n" + block(f"{head}\n\n{textwrap.indent(doc_of(x), ' ' * 4)}")


def methods(cls: type) -> Iterator[str]:
    """The public methods and properties that the class declares, with what they say."""
    for name, x in sorted(vars(cls).items()):
        plain = x.__func__ if isinstance(x, staticmethod | classmethod) else x
        said = doc_of(plain).split("\n\n")[0].replace("\n", " ")
        if name[0] == "_" or not said or not (
                callable(plain) or isinstance(plain, property)) or isinstance(plain, type):
            continue
        head = name if isinstance(plain, property) else signature(name, plain)
        yield filled(f".{head}", " " * 4, " " * 12) + "\n" + filled(said, " " * 8)


def described(name: str, cls: type) -> str:
    listed = "\n".join(methods(cls))
    text = textwrap.indent(doc_of(cls), " " * 4)
    head = filled(f"class {signature(name, cls)}")
    return f"### class `{name}`\n\n" + block(f"{head}\n\n{text}\n\n{listed}")


def grouped(found: Iterable[tuple[str, Any]]) -> str:
    """Entries by the module that declares them, below its name and its own sentence."""
    groups: dict[str, list[tuple[str, Any]]] = {}
    for name, x in found:
        groups.setdefault(module_of(x), []).append((name, x))
    parts = []
    for module in sorted(groups):
        said = inspect.getdoc(importlib.import_module(f"tessera.{module}")) or ""
        sentence = " ".join(said.split("\n\n")[0].split()).replace("*", "\\*").replace("<", "\\<")
        parts.append(f"## {module}\n\n{sentence}\n\n" + "\n".join(
            entry(name, x) for name, x in sorted(groups[module], key=lambda e: e[0].lower())))
    return "\n" + "\n".join(parts) + "\n"


def entry(name: str, x: Any) -> str:
    return described(name, x) if isinstance(x, type) else called(name, x)


def of_package() -> list[tuple[str, Any]]:
    """Every callable of `ts` that is declared in the package, errors and formats apart."""
    found = {name: getattr(ts, name) for name in ts.__all__ if name not in errors.__all__}
    return [(f"ts.{name}", x) for name, x in (found | PUBLIC).items()
            if callable(x) and not isinstance(x, NO_CALL) and module_of(x)]


def functions() -> str:
    return grouped((name, x) for name, x in of_package() if not isinstance(x, type))


def classes() -> str:
    return grouped((name, x) for name, x in of_package() if isinstance(x, type))


def tile_operations() -> str:
    """By the file of `tessera/tile/ops` that declares them."""
    families: dict[str, list[TileOp]] = {}
    for op in TILE_OPS.values():
        if op.public:
            families.setdefault(op.family, []).append(op)
    return "\n" + "\n".join(f"## {family}\n\n" + "\n".join(
        called(f"ts.tile.{op.name}", op) for op in ops)
        for family, ops in sorted(families.items())) + "\n"


def of_module(name: str) -> Callable[[], str]:
    def made() -> str:
        module = getattr(ts, name)
        found = [(f"ts.{name}.{n}", getattr(module, n)) for n in names_of(module)]
        return grouped((n, x) for n, x in found
                       if callable(x) and not isinstance(x, NO_CALL) and module_of(x))
    return made


def library() -> str:
    found = [(n, getattr(tessera.stdlib, n)) for n in names_of(tessera.stdlib)]
    return "\n" + "\n".join(called(n, x) for n, x in found if isinstance(x, Routine)) + "\n"


OTHERS = ("checkpoints", "config", "data", "domain", "onnx", "optim", "random", "shape", "sparse",
          "verify")


def others() -> str:
    """The small modules on one page."""
    return "".join(of_module(name)() for name in OTHERS)


API: dict[str, Callable[[], str | None]] = {
    "api ts": functions,
    "api classes": classes,
    "api tile": tile_operations,
    "api dist": of_module("dist"),
    "api debug": of_module("debug"),
    "api stdlib": library,
    "api modules": others,
}
