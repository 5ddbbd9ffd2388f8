"""Bodies of elementwise ops of f32 in kernels with fast maths: one or two approximations of the
hardware in place of a division that is rounded correctly, or of a function of libdevice.

Errors follow from those that ptx/arithmetic.py states; docs/reference/gpu.md lists them. All flush
subnormal operands and results. Ops that are not here are computed as without it: `+ - *`, casts,
pow, erf, erfc, expm1, log1p, atan, atan2, floordiv, mod, and all of f64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import Operation
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics import fragments
from tessera.tile.cuda.intrinsics.elementwise import BODIES, Body

FAST: dict[str, tuple[int, Body]] = {}


def fast_body(name: str, arity: int) -> Callable[[Body], Body]:
    """Registers the body of an op on registers of f32."""
    def register(f: Body) -> Body:
        FAST[name] = arity, f
        return f

    return register


def instruction(name: str, factor: float = 1.0) -> Body:
    """One instruction, times a number."""
    def body(b: Builder, *x: Any) -> Any:
        made = b.call(find_instruction(name), *x)
        return made if factor == 1.0 else b.fmul(made, b.like(made, factor))

    return body


exp, divide = BODIES["exp_approx", "f32"][1], instruction("div_approx")
fast_body("exp", 1)(exp)
fast_body("sigmoid", 1)(BODIES["sigmoid_approx", "f32"][1])
fast_body("log2", 1)(instruction("lg2_approx"))
fast_body("log", 1)(instruction("lg2_approx", factor=math.log(2.0)))
fast_body("sin", 1)(instruction("sin_approx"))
fast_body("cos", 1)(instruction("cos_approx"))
fast_body("tanh", 1)(instruction("tanh_approx"))
fast_body("sqrt", 1)(instruction("sqrt_approx"))
fast_body("rsqrt", 1)(instruction("rsqrt_approx"))
fast_body("div", 2)(divide)


@fast_body("tan", 1)
def _tan(b: Builder, x: Any) -> Any:
    return divide(b, instruction("sin_approx")(b, x), instruction("cos_approx")(b, x))


@fast_body("exp_sub", 2)
def _exp_sub(b: Builder, x: Any, y: Any) -> Any:
    """e^(x - y), 0 where x is -inf."""
    value = exp(b, b.fsub(x, y))
    return b.select(b.compare("==", x, b.like(x, -math.inf)), b.zero(x), value)


@fast_body("div_or_zero", 2)
def _div_or_zero(b: Builder, x: Any, y: Any) -> Any:
    """x / y, 0 for 0 / 0."""
    both = b.and_(b.compare("==", x, b.zero(x)), b.compare("==", y, b.zero(y)))
    return b.select(both, b.zero(x), divide(b, x, y))


@functools.cache
def operation(name: str) -> Operation:
    """The intrinsic of an op on registers of f32."""
    arity, body = FAST[name]
    return fragments.elementwise(name, arity, body)


__all__ = ["FAST", "operation"]
