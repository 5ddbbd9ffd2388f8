"""The table of optimizers in the guide, made of their records."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from math import prod

import tessera as ts
from guide_library_tables import markdown
from tessera.optim import OPTIMIZERS, OptimizerRecord


def optimizers_table() -> str:
    """Each record with its first sentence, what it holds of a large matrix, and its settings."""
    rows = []
    for name, kind in OPTIMIZERS.items():
        first = " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
        rows.append((f"[`{name}`](../reference/api/modules.md#class-tsoptim{name.lower()})", first,
                     _held(kind()), _settings(kind)))
    return markdown(("OptimizerRecord", "What it does", "Holds", "Settings"), rows)


def _held(record: OptimizerRecord) -> str:
    """Numbers for each of a matrix of 1024 x 1024."""
    state = record.init({"w": ts.param(ts.zeros((1024, 1024)))})
    count = sum(prod(x.shape) for m in record.holds for x in state[m].values())
    return "nothing" if not count else f"{count / 2**20:.2g} for each element"


def _settings(kind: type) -> str:
    shown = [f"{p.name}={getattr(p.default, '__name__', p.default)}"
             for p in inspect.signature(kind).parameters.values()]
    return ", ".join(f"`{s}`" for s in shown)


OPTIMIZER: dict[str, Callable[[], str | None]] = {"optimizers": optimizers_table}
