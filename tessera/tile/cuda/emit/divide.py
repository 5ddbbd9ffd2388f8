"""Division: by a statistic of rows or of the whole tile, or by a number of the group that is an
argument or computed from some, one reciprocal for each divisor and two products for each element;
by a constant as intrinsics/divide.py does.

x / y = (x s) (1 / (y s)) with s = 1 except for a y near the ends of the range, where a power of two
keeps the reciprocal a normal number. At most 1.5 ulp from x / y; zeros, infinities and NaN as in
x / y.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tessera.tile.cuda.emit.elementwise import apply, maths, spread
from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.intrinsics.divide import has_quick_constant
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.ir.ir import Const, Op, Operand, SSAValue
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.register_layout import RegisterLayout
from tessera.tile.ir.types import Scalar, TileType


@emits("div", "div_or_zero")
def _div(e: Emitter, op: Op) -> None:
    (x, y), (made,) = op.args, op.outs
    y, kind = _before_broadcast(e, y), kind_of(made.type.dtype)
    if isinstance(y, Const) and isinstance(made.type, TileType) and kind == "f32" and (
            has_quick_constant(y.value)):
        divisor = float(np.float32(y.value))
        apply(e, replace(op, args=(x,)), e.use(
            "quotient_by_constant", f"use(divide.by_constant({divisor!r}))"))
        return
    if not isinstance(made.type, TileType) or not _shared_by_many(e, y, e.layout(made.value)):
        apply(e, op, maths(e, op.name, kind))
        return
    assert made.type.layout is not None
    large = RegisterLayout.parse(made.type.layout, made.type.shape)
    scale, inverse = e.fresh("scale"), e.fresh("inverse")
    e.line(f"{scale}, {inverse} = {e.use('inverses', f'use(divide.inverses({kind!r}))')}"
           f"({e.name(y)})")
    factors = [scale, inverse] + ([e.name(y)] if op.name == "div_or_zero" else [])
    wide = [spread(e, text, e.layout(y), large) for text in factors] if isinstance(
        e.type(y), TileType) else factors
    quotient = e.use(op.name, f"use(divide.{op.name})")
    dividend = spread(e, e.name(x), e.layout(x), large) if isinstance(e.type(x), TileType) \
        else e.name(x)
    e.define(made, f"{quotient}({dividend}, {', '.join(wide)})")


def _shared_by_many(e: Emitter, y: Operand, large: RegisterLayout) -> bool:
    """Whether a thread divides several elements by each divisor."""
    t = e.type(y)
    if isinstance(t, TileType):
        return 2 * e.layout(y).count <= large.count
    return large.count > 1 and isinstance(y, SSAValue) and isinstance(t, Scalar) and (
        t.uniform and t.dtype.kind == "float") and (y not in e.made_by
                                                   or OPS[e.made_by[y].name].access == "")


def _before_broadcast(e: Emitter, y: Operand) -> Operand:
    """A divisor that was repeated along rows, which each thread has once."""
    node = e.made_by.get(y)
    repeated = node is not None and node.name == "broadcast_to" and isinstance(
        e.type(node.args[0]), TileType)
    return node.args[0] if node is not None and repeated else y
