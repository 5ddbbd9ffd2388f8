"""The intrinsics of divisions by a statistic, one reciprocal for each divisor, or by a constant."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation
from tessera.tile.cuda.instruction_names import find_instruction
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


LEAST, MOST = 2.0**-60, 2.0**60  # sizes of divisors and of quotients whose rests are exact


@functools.cache
def by_constant(y: float) -> Operation:
    """(x) -> x / y, rounded once: with r the nearest to 1 / y, q = x r is within 1.5 ulp, x - q y
    is exact, and q + (x - q y) r is rounded correctly, unless all bits of y are ones (Markstein,
    IBM J. Res. Dev. 34, 1990, theorem 5). Zeros, infinities and NaN are q, and quotients outside of
    2^-60 to 2^60: within 1.5 ulp, as by a statistic."""
    inverse = float(np.float32(1) / np.float32(y))

    def body(b: Builder, x: LLVM) -> LLVM:
        fma = find_instruction("fma_rn")
        q, r = b.fmul(x, b.like(x, inverse)), b.like(x, inverse)
        near = b.call(fma, b.call(fma, q, b.like(x, -y), x), r, q)
        size = b.library("__nv_fabsf", q)
        inside = b.and_(b.compare(">=", size, b.like(x, LEAST)),
                        b.compare("<=", size, b.like(x, MOST)))
        return b.select(inside, near, q)

    return fragments.elementwise("quotient_by_constant", 1, body)


def has_quick_constant(y: float) -> bool:
    """Whether by_constant divides by it."""
    return LEAST <= abs(y) <= MOST and np.float32(y).view(np.uint32) & 0x7FFFFF != 0x7FFFFF


def _or_zero(b: Builder, x: LLVM, s: LLVM, r: LLVM, y: LLVM) -> LLVM:
    """0 for 0 / 0."""
    both = b.and_(b.compare("==", x, b.zero(x)), b.compare("==", y, b.zero(y)))
    return b.select(both, b.zero(x), b.fmul(b.fmul(x, s), r))


div_or_zero = fragments.elementwise("quotient_or_zero", 4, _or_zero)
