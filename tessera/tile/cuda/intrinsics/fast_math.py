"""Bodies of elementwise ops of f32 in kernels with fast maths: one or two approximations of the
hardware in place of a division that is rounded correctly, or of a function of libdevice.

Errors follow from those that ptx/arithmetic.py states; docs/reference/gpu.md lists them. All flush
subnormal operands and results. Ops that are not here are computed as without it: `+ - *`, casts,
pow, erf, expm1, log1p, atan, atan2, floordiv, mod, and all of f64.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import Operation
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics import fragments
from tessera.tile.cuda.intrinsics.elementwise import BODIES, Body

FAST: dict[str, tuple[int, Body]] = {
    "exp": BODIES["exp_approx", "f32"][:2], "sigmoid": BODIES["sigmoid_approx", "f32"][:2]}


def _instruction(name: str, instruction: str, arity: int = 1, factor: float = 1.0) -> None:
    """An op that is one instruction, times a number."""
    def body(b: Builder, *x: Any) -> Any:
        made = b.call(find_instruction(instruction), *x)
        return made if factor == 1.0 else b.fmul(made, b.like(made, factor))

    FAST[name] = arity, body


_instruction("log2", "lg2_approx")
_instruction("log", "lg2_approx", factor=math.log(2.0))
_instruction("sin", "sin_approx")
_instruction("cos", "cos_approx")
_instruction("tanh", "tanh_approx")
_instruction("sqrt", "sqrt_approx")
_instruction("rsqrt", "rsqrt_approx")
_instruction("div", "div_approx", arity=2)


def _tan(b: Builder, x: Any) -> Any:
    sine, cosine = (b.call(find_instruction(f"{f}_approx"), x) for f in ("sin", "cos"))
    return b.call(find_instruction("div_approx"), sine, cosine)


def _exp_sub(b: Builder, x: Any, y: Any) -> Any:
    """e^(x - y), 0 where x is -inf."""
    value = FAST["exp"][1](b, b.fsub(x, y))
    return b.select(b.compare("==", x, b.like(x, -math.inf)), b.zero(x), value)


def _div_or_zero(b: Builder, x: Any, y: Any) -> Any:
    """x / y, 0 for 0 / 0."""
    both = b.and_(b.compare("==", x, b.zero(x)), b.compare("==", y, b.zero(y)))
    return b.select(both, b.zero(x), b.call(find_instruction("div_approx"), x, y))


FAST |= {"tan": (1, _tan), "exp_sub": (2, _exp_sub), "div_or_zero": (2, _div_or_zero)}


@functools.cache
def operation(name: str) -> Operation:
    """The intrinsic of an op on registers of f32."""
    arity, body = FAST[name]
    return fragments.elementwise(name, arity, body)


__all__ = ["FAST", "operation"]
