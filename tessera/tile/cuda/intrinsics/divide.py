"""The intrinsics of a division by a statistic: one reciprocal for each divisor."""

from __future__ import annotations

import functools
from typing import Any

from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation
from tessera.tile.cuda.intrinsics import fragments

LLVM = Any
# (magnitudes whose reciprocal is a normal number lie between 2^-a and 2^a, power of the scale)
RANGES = {"f32": (126, 64), "f64": (1022, 512)}


@functools.cache
def inverses(kind: str) -> Operation:
    """(divisors) -> (their scales, the reciprocals of the scaled divisors)"""
    most, power = RANGES[kind]

    def rule(y: Operand) -> InstructionForm:
        def one(b: Builder, v: LLVM) -> tuple[LLVM, LLVM]:
            size = b.select(b.compare("<", v, b.zero(v)), b.fneg(v), v)
            small = b.compare("<", size, b.like(v, 2.0 ** -most))
            large = b.compare(">", size, b.like(v, 2.0 ** most))
            scale = b.select(small, b.like(v, 2.0 ** power),
                             b.select(large, b.like(v, 2.0 ** -power), b.like(v, 1.0)))
            return scale, b.fdiv(b.like(v, 1.0), b.fmul(v, scale))

        def body(b: Builder, values: Any) -> Any:
            if not y.count:
                return one(b, values)
            found = [one(b, v) for v in values]
            return [[s for s, _ in found], [r for _, r in found]]

        out = Operand("d", y.kind, y.count)
        return InstructionForm((y,), (out, out), body)

    return Operation("inverses", 1, rule)


div = fragments.elementwise("quotient", 3, lambda b, x, s, r: b.fmul(b.fmul(x, s), r))


def _or_zero(b: Builder, x: LLVM, s: LLVM, r: LLVM, y: LLVM) -> LLVM:
    """0 for 0 / 0."""
    both = b.and_(b.compare("==", x, b.zero(x)), b.compare("==", y, b.zero(y)))
    return b.select(both, b.zero(x), b.fmul(b.fmul(x, s), r))


div_or_zero = fragments.elementwise("quotient_or_zero", 4, _or_zero)
