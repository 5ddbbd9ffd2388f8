"""Sums and products of bf16 numbers that are rounded to bf16, two by an instruction.

In f32 registers, as all narrow floats are held, such an op is two operations and a conversion that
packs both results, which the next op unpacks. The instruction rounds once, and so do these: the sum
or product of two numbers of 8 bits, rounded to the 24 of f32 and then to 8, is what is rounded at
once (24 >= 2 * 8 + 2; Figueroa 1995), down to 2^-126.
"""

from __future__ import annotations

import functools
from typing import Any

from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics.formats import bf16_to_f32

LLVM = Any
NAMES = ("add", "sub", "mul")


@functools.cache
def rounded(name: str) -> Operation:
    """(x, y) of bf16 numbers in f32 registers -> x + y, x - y or x * y as the nearest bf16
    numbers. Scalars meet every element of a fragment; its elements are even in number."""
    def rule(x: Operand, y: Operand) -> InstructionForm:
        count = max(x.count, y.count)

        def body(b: Builder, *values: Any) -> Any:
            x, y = (v if isinstance(v, list) else [v] * count for v in values)
            made = [b.call(find_instruction(f"{name}_bf16x2"), _pair(b, x[i:i + 2]),
                           _pair(b, y[i:i + 2])) for i in range(0, count, 2)]
            return [bf16_to_f32(b, word, at) for word in made for at in (0, 1)]

        args = tuple(Operand(o.name, "f32", o.count) for o in (x, y))
        return InstructionForm(args, (Operand("d", "f32", count),), body)

    return Operation(f"{name}_bf16", 2, rule)


def _pair(b: Builder, values: list[LLVM]) -> LLVM:
    """Their upper halves side by side, in plain arithmetic: of neighbours that an instruction or an
    access gave in one word, the optimiser finds that word."""
    low, high = (b.bitcast(v, "i32") for v in values)
    return b.or_(b.lshr(low, b.i32(16)), b.and_(high, b.i32(0xFFFF0000)))


__all__ = ["NAMES", "rounded"]
