"""Which op of a kernel made the NaN or infinity that lies in a value or a memory.

Followed while a kernel is interpreted with sentinels on: an op that makes a bad value out of
finite ones is its source, and whatever is computed, stored or carried on from there keeps it. So
is a store of finite values that the type of the memory does not hold. An infinity that was written
down (by an op without operands, too: `tile.full`), or read, is deliberate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.lazy_dataclass import dataclass
from tessera.numerics import DType, Policy, decode, encode
from tessera.tile.interpreter.memory import Memory, MemoryBox
from tessera.tile.ir.ir import Op
from tessera.tile.ir.op_record import OPS

if TYPE_CHECKING:
    from tessera.tile.interpreter.machine import Machine


@dataclass(frozen=True, eq=False)
class BlamedOp:
    """An op that made bad values. value: [groups, ...], `groups` their numbers; args: likewise;
    dtype: of the value. exists: which elements lie inside of the tensors that they were read from
    or are stored to, of value's shape; None: all."""

    op: Op
    dtype: DType
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

    def op(self, machine: Machine, op: Op, args: Sequence[Any]) -> None:
        """An op has run."""
        record = OPS[op.name]
        computes = not (record.reads or record.writes)
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
            elif computes and args and not any(k in ("nan", kind) for k in map(_worst_operand,
                                                                               args)):
                self.by[made.value] = BlamedOp(op, made.type.dtype, kind, value, tuple(args),
                                               machine.groups[:, 0], exists)
        if computes:
            return
        for a in args:  # where it may have been stored
            if isinstance(a, MemoryBox) and a.memory.written and a.memory not in self.by:
                source = found or _overflow(machine, op, args, a.memory)
                if source is not None:
                    inside = _union_mask(source.exists, a.addresses(machine.groups)[1],
                                         source.value)
                    self.by[a.memory] = replace(source, exists=inside)

    def _inside(self, machine: Machine, op: Op, args: Sequence[Any], value: Any
                ) -> np.ndarray | None:
        """Which elements of a result exist: of a tile that was read, of what was made of it."""
        found: np.ndarray | None = None
        for operand, a in zip(op.args, args, strict=True):
            known = a.addresses(machine.groups)[1] if isinstance(a, MemoryBox) else \
                self._exists.get(operand)
            found = found if known is None else _union_mask(found, known, value)
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


def _union_mask(found: np.ndarray | None, known: np.ndarray, value: Any) -> np.ndarray | None:
    """Of two masks; one of another shape than the value's says nothing of its elements."""
    if known.shape != np.shape(value):
        return found
    return known if found is None else found & known


def _overflow(machine: Machine, op: Op, args: Sequence[Any], memory: Memory) -> BlamedOp | None:
    """The op, where one of its finite values is beyond the range of the memory it is stored in."""
    dtype, policy = memory.numeric.dtype, memory.numeric.policy
    if dtype.kind != "float" or dtype.special == "none" or policy.saturate:
        return None
    for value in args:
        if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
            continue
        if not (np.abs(value) > dtype.max).any():
            continue
        stored = decode(encode(value, dtype, rounding=_rounding(policy)), dtype)
        lost = np.where(np.isfinite(value), stored, stored.dtype.type(0))
        kind = kind_of(machine, lost)
        if kind is not None:
            return BlamedOp(op, dtype, kind, lost, (value,), machine.groups[:, 0])
    return None


def _rounding(policy: Policy) -> str:
    """That of a policy; what is to be drawn is as beyond the range as what is nearest to it."""
    return "nearest_even" if policy.rounding == "stochastic" else policy.rounding


def kind_of(machine: Machine, value: Any) -> str | None:
    """The worse of what the active elements hold: "nan", "inf", or None."""
    if _worst(value) is None or machine.mask is None:
        return _worst(value)
    return _worst(np.where(machine.wide_mask(value), value, value.dtype.type(0)))


def _worst_operand(operand: Any) -> str | None:
    """The worse of what an operand holds, or the memory that it is a place in."""
    if not isinstance(operand, MemoryBox):
        return _worst(operand)
    memory = operand.memory
    return _worst(decode(memory.flat, memory.numeric.dtype))


def _worst(value: Any) -> str | None:
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or np.isfinite(value).all():
        return None
    return "nan" if np.isnan(value).any() else "inf"


__all__ = ["Blame", "BlamedOp"]
