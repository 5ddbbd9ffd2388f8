"""The kinds of groups that have a kernel of a text of their own, each declared beside that text."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from ....errors import ArgumentError
from ....lazy_dataclass import dataclass
from ...op import GraphOp
from ...schedule.groups import FusionGroup
from ...schedule.ir import ScheduledGroup
from .kernel_text import KernelText


@dataclass(frozen=True)
class KernelKind:
    """work: the sort of work that it is.  source: a scheduled group to the text of its kernel.
    schedule: its blocks, grid and operands; None: the method of its name in lower.py, or another
    kind's.  ops: of the nodes that are such a group each"""

    name: str
    work: str
    source: Callable[[ScheduledGroup], KernelText]
    schedule: Callable[[Any, FusionGroup], None] | None = None
    ops: frozenset[GraphOp] = frozenset()


_DECLARED: dict[str, KernelKind] = {}


def kernel_kind(name: str, work: str, source: Callable[[ScheduledGroup], KernelText],
                schedule: Callable[[Any, FusionGroup], None] | None = None,
                ops: Iterable[GraphOp] = ()) -> None:
    """Declares a kind. Raises ArgumentError for a second of that name."""
    if name in _DECLARED:
        raise ArgumentError(f"the kind of kernels {name!r} is declared twice")
    _DECLARED[name] = KernelKind(name, work, source, schedule, frozenset(ops))


@cache
def kernel_kinds() -> Mapping[str, KernelKind]:
    """By name: what all modules of this folder declare."""
    folder = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(importlib.import_module(folder).__path__):
        importlib.import_module(f"{folder}.{module.name}")
    return _DECLARED


@cache
def kinds_by_op() -> Mapping[GraphOp, str]:
    return {op: kind.name for kind in kernel_kinds().values() for op in kind.ops}


__all__ = ["KernelKind", "kernel_kind", "kernel_kinds", "kinds_by_op"]
