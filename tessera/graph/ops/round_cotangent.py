"""The identity whose cotangent is rounded, so that matmuls behind it in a backward pass take it in
the type of their other operand."""

from __future__ import annotations

from ...numerics import as_type
from ..op import FLAT_VIEW, GraphOp, sample
from ..operand import convert
from ..trace import apply

ROUND_COTANGENT = GraphOp(
    "round_cotangent",
    shape=lambda x, to: x,
    ref=lambda x, to: x,
    vjp=lambda g, y, x, to: (convert(convert(g, to), x.type),),
    jvp=lambda ts, y, x, to: ts[0],
    batch=lambda size, batched, x, to: (apply(ROUND_COTANGENT, x, to=to), True),
    expand=lambda x, to: x,
    axes="...->...",
    linear="joint",
    memory=FLAT_VIEW,
    samples=(sample((2, 3), to=as_type("f32")),),
    doc="x; in reverse mode its cotangent is rounded to a type",
)

__all__ = ["ROUND_COTANGENT"]
