"""Which op of a kernel made the NaN or infinity that lies in a value or a memory.

Followed while a kernel is interpreted with sentinels on: an op that makes a bad value out of
finite ones is its source, and whatever is computed, stored or carried on from there keeps it. An
infinity that was written down, or read, is deliberate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.tile.interpreter.memory import MemoryBox
from tessera.tile.ir.ir import Op

if TYPE_CHECKING:
    from tessera.tile.interpreter.machine import Machine


@dataclass(frozen=True, eq=False)
class BlamedOp:
    """An op that made bad values. value: [groups, ...], `groups` their numbers; args: likewise.
    exists: which elements lie inside of the tensors that they were read from or are stored to, of
    value's shape; None: all."""

    op: Op
    kind: str  # "nan" | "inf"
    value: np.ndarray
    args: tuple[Any, ...]
    groups: np.ndarray
    exists: np.ndarray | None = None


class Blame:
    """Sources by what holds their values: values of the IR, and memories."""

    def __init__(self) -> None:
        self.by: dict[Any, BlamedOp] = {}
        self._exists: dict[Any, np.ndarray] = {}  # by values of the IR: as BlamedOp.exists

    def op(self, machine: Machine, op: Op, args: Sequence[Any], pure: bool) -> None:
        """An op has run."""
        found = next((s for s in map(self._of, op.args, args) if s is not None), None)
        for made in op.outs:
            value = machine.env[made.value]
            kind, exists = kind_of(machine, value), self._inside(machine, op, args, value)
            if exists is not None:
                self._exists[made.value] = exists
            if kind is None:
                self.by.pop(made.value, None)
            elif found is not None:
                self.by[made.value] = found
            elif pure and not any(k == "nan" or k == kind for k in map(_worst, args)):
                self.by[made.value] = BlamedOp(op, kind, value, tuple(args), machine.groups[:, 0],
                                               exists)
        if found is not None and not pure:
            for a in args:  # where it may have been stored
                if isinstance(a, MemoryBox) and a.memory.written:
                    inside = _both(found.exists, a.addresses(machine.groups)[1], found.value)
                    self.by.setdefault(a.memory, replace(found, exists=inside))

    def _inside(self, machine: Machine, op: Op, args: Sequence[Any], value: Any
                ) -> np.ndarray | None:
        """Which elements of a result exist: of a tile that was read, of what was made of it."""
        found: np.ndarray | None = None
        for operand, a in zip(op.args, args, strict=True):
            known = a.addresses(machine.groups)[1] if isinstance(a, MemoryBox) else \
                self._exists.get(operand)
            found = found if known is None else _both(found, known, value)
        return found

    def _of(self, operand: Any, value: Any) -> BlamedOp | None:
        if isinstance(value, MemoryBox):
            return self.by.get(value.memory)
        return self.by.get(operand) if _worst(value) is not None else None

    def passes(self, value: Any, operands: Iterable[Any]) -> None:
        """A value of a loop or a branch is one of these."""
        found = next((s for o in operands if (s := self.by.get(o)) is not None), None)
        if found is not None:
            self.by[value] = found


def _both(found: np.ndarray | None, known: np.ndarray, value: Any) -> np.ndarray | None:
    """Of two masks; one of another shape than the value's says nothing of its elements."""
    if known.shape != np.shape(value):
        return found
    return known if found is None else found & known


def kind_of(machine: Machine, value: Any) -> str | None:
    """The worse of what the active elements hold: "nan", "inf", or None."""
    if _worst(value) is None or machine.mask is None:
        return _worst(value)
    return _worst(np.where(machine.wide_mask(value), value, value.dtype.type(0)))


def _worst(value: Any) -> str | None:
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or np.isfinite(value).all():
        return None
    return "nan" if np.isnan(value).any() else "inf"


__all__ = ["Blame", "BlamedOp"]
