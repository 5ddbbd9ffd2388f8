"""Division: by a row statistic, one reciprocal for each divisor and two products for each element.

x / y = (x s) (1 / (y s)) with s = 1 except for a y near the ends of the range, where a power of two
keeps the reciprocal a normal number. At most 1.5 ulp from x / y; zeros, infinities and NaN as in
x / y.
"""

from __future__ import annotations

import functools
from typing import Any

from tessera.tile.cuda import fragments
from tessera.tile.cuda.emit.elementwise import apply, spread
from tessera.tile.cuda.emit.emitter import Emitter, kind_of
from tessera.tile.cuda.emit.table import emits
from tessera.tile.cuda.instruction import Form, Operand, Operation
from tessera.tile.ir import Op
from tessera.tile.layouts import Layout
from tessera.tile.types import Tile

Builder = Any
LLVM = Any
# (magnitudes whose reciprocal is a normal number lie between 2^-a and 2^a, power of the scale)
RANGES = {"f32": (126, 64), "f64": (1022, 512)}


@emits("div", "div_or_zero")
def _div(e: Emitter, op: Op) -> None:
    (x, y), (made,) = op.args, op.outs
    kind = kind_of(made.type.dtype)
    if not isinstance(made.type, Tile) or not isinstance(e.type(y), Tile) or \
            2 * e.layout(y).count > e.layout(made.value).count:
        apply(e, op, e.use(op.name, f"use(maths.operation({op.name!r}, {kind!r}))"))
        return
    assert made.type.layout is not None
    large = Layout.parse(made.type.layout, made.type.shape)
    scale, inverse = e.fresh("scale"), e.fresh("inverse")
    e.line(f"{scale}, {inverse} = {e.use('inverses', f'use(quotients.inverses({kind!r}))')}"
           f"({e.name(y)})")
    factors = [scale, inverse] + ([e.name(y)] if op.name == "div_or_zero" else [])
    wide = [spread(e, text, e.layout(y), large) for text in factors]
    quotient = e.use(op.name, f"use(quotients.{op.name})")
    dividend = spread(e, e.name(x), e.layout(x), large) if isinstance(e.type(x), Tile) \
        else e.name(x)
    e.define(made, f"{quotient}({dividend}, {', '.join(wide)})")


@functools.cache
def inverses(kind: str) -> Operation:
    """(divisors) -> (their scales, the reciprocals of the scaled divisors)"""
    most, power = RANGES[kind]

    def rule(y: Operand) -> Form:
        def one(b: Builder, v: LLVM) -> tuple[LLVM, LLVM]:
            size = b.select(b.compare("<", v, b.zero(v)), b.fneg(v), v)
            small = b.compare("<", size, b.like(v, 2.0 ** -most))
            large = b.compare(">", size, b.like(v, 2.0 ** most))
            scale = b.select(small, b.like(v, 2.0 ** power),
                             b.select(large, b.like(v, 2.0 ** -power), b.like(v, 1.0)))
            return scale, b.fdiv(b.like(v, 1.0), b.fmul(v, scale))

        def body(b: Builder, values: list[LLVM]) -> list[list[LLVM]]:
            found = [one(b, v) for v in values]
            return [[s for s, _ in found], [r for _, r in found]]

        out = Operand("d", y.kind, y.count)
        return Form((y,), (out, out), body)

    return Operation("inverses", 1, rule)


div = fragments.elementwise("quotient", 3, lambda b, x, s, r: b.fmul(b.fmul(x, s), r))


def _or_zero(b: Builder, x: LLVM, s: LLVM, r: LLVM, y: LLVM) -> LLVM:
    """0 for 0 / 0."""
    both = b.and_(b.compare("==", x, b.zero(x)), b.compare("==", y, b.zero(y)))
    return b.select(both, b.zero(x), b.fmul(b.fmul(x, s), r))


div_or_zero = fragments.elementwise("quotient_or_zero", 4, _or_zero)
