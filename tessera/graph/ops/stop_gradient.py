"""stop_gradient: a value that derivatives take as a constant."""

from __future__ import annotations

from typing import Any

from .. import tree
from ..op import VIEW, GraphOp, sample
from ..operand import dequantized, public
from ..trace import apply

STOP_GRADIENT = GraphOp(
    "stop_gradient",
    shape=lambda x: x,
    ref=lambda x: x,
    batch=lambda size, batched, x: (apply(STOP_GRADIENT, x), True),
    axes="...->...",
    memory=VIEW,
    differentiable=False,
    samples=(sample((2, 3)),),
    doc="x, as a constant for derivatives",
)


@public
def stop_gradient(x: Any) -> Any:
    """x, whose derivative is taken as zero. x: a tensor or a nested value of them."""
    return tree.map_tree(lambda t: apply(STOP_GRADIENT, dequantized(t)), x)
