"""Who emits which op. A function `(emitter, op)` under `@emits("add")` lands in the op's record."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tessera.tile.ir.ir import Op
from tessera.tile.ir.op_record import OPS

if TYPE_CHECKING:
    from tessera.tile.cuda.emit.emitter import Emitter

Emit = Callable[["Emitter", Op], None]


def emits(*names: str) -> Callable[[Emit], Emit]:
    """Registers the emission of ops. Raises ValueError for a second one."""
    def register(f: Emit) -> Emit:
        for name in names:
            if "emit" in OPS[name].cuda:
                raise ValueError(f"the emission of {name!r} is declared twice")
            OPS[name].cuda["emit"] = f
        return f

    return register


AFTER: list[Emit] = []  # what looks at each op behind its emission


def after_each(f: Emit) -> Emit:
    """Registers what is called behind the emission of every op."""
    AFTER.append(f)
    return f


def load_all() -> None:
    """Imports the families, which register themselves."""
    import importlib
    import pkgutil

    package = importlib.import_module("tessera.tile.cuda.emit")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"tessera.tile.cuda.emit.{module.name}")
