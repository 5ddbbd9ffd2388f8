"""Which op of a kernel made the NaN or infinity that lies in a value or a memory.

Followed while a kernel is interpreted with sentinels on: an op that makes a bad value out of
finite ones is its source, and whatever is computed, stored or carried on from there keeps it. So
is a store of finite values that the type of the memory does not hold. An infinity that was written
down (by an op without operands, too: `tile.full`), or read, is deliberate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.numerics import DType, Policy, decode, encode
from tessera.tile.interpreter.memory import Memory, MemoryBox
from tessera.tile.ir.ir import Op
from tessera.tile.ir.op_record import OPS

if TYPE_CHECKING:
    from tessera.tile.interpreter.machine import Machine


@dataclass(frozen=True, eq=False)
class BlamedOp:
    """An op that made bad values. value: [groups, ...], `groups` their numbers; args: likewise;
    dtype: of the value."""

    op: Op
    dtype: DType
    kind: str  # "nan" | "inf"
    value: np.ndarray
    args: tuple[Any, ...]
    groups: np.ndarray


class Blame:
    """Sources by what holds their values: values of the IR, and memories."""

    def __init__(self) -> None:
        self.by: dict[Any, BlamedOp] = {}

    def op(self, machine: Machine, op: Op, args: Sequence[Any]) -> None:
        """An op has run."""
        record = OPS[op.name]
        computes = not (record.reads or record.writes)
        found = next((s for s in map(self._of, op.args, args) if s is not None), None)
        for made in op.outs:
            value = machine.env[made.value]
            kind = kind_of(machine, value)
            if kind is None:
                self.by.pop(made.value, None)
            elif found is not None:
                self.by[made.value] = found
            elif computes and args and not any(k in ("nan", kind) for k in map(_held, args)):
                self.by[made.value] = BlamedOp(op, made.type.dtype, kind, value, tuple(args),
                                               machine.groups[:, 0])
        if computes:
            return
        for a in args:  # where it may have been stored
            if isinstance(a, MemoryBox) and a.memory.written and a.memory not in self.by:
                source = found or _overflow(machine, op, args, a.memory)
                if source is not None:
                    self.by[a.memory] = source

    def _of(self, operand: Any, value: Any) -> BlamedOp | None:
        if isinstance(value, MemoryBox):
            return self.by.get(value.memory)
        return self.by.get(operand) if _worst(value) is not None else None

    def passes(self, value: Any, operands: Iterable[Any]) -> None:
        """A value of a loop or a branch is one of these."""
        found = next((s for o in operands if (s := self.by.get(o)) is not None), None)
        if found is not None:
            self.by[value] = found


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


def _held(operand: Any) -> str | None:
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
