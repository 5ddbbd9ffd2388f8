"""Values that lie as others do: what optimizers make of parameters, and give back for them.

    m = zeros_as(p, numeric)     zeros of p's shape, in p's layout
    w = lie_as(w, p)             w in p's layout, and gathered anew for each use if p is
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tessera.dims import Dim
from tessera.graph import functions as F
from tessera.graph.devices import to
from tessera.graph.op import VIEW, GraphOp, sample
from tessera.graph.ops.gather import stretch
from tessera.graph.trace import apply, current_builder
from tessera.numerics import NumericType
from tessera.tensor import Tensor, as_tensor

from ..layout import Layout
from ..sharding.constraints import LIKE
from ..sharding.partitioned_steps import CONSTRAINTS
from ..tensor import distribute


def split_over(layout: Layout, shape: Sequence[int | Dim], axis: str) -> Layout:
    """`layout` with the first dimension that is not split split over `axis` too. A tensor without
    a dimension of so many elements stays as it is, as does one that `axis` splits already."""
    if layout.dim_of(axis) is not None:
        return layout
    n = layout.mesh.size(axis)
    free = [d for d in range(layout.ndim) if not layout.axes_of(d) and shape[d] >= n]
    return layout.with_split(free[0], (axis,)) if free else layout


LIE_AS = GraphOp(
    "lie_as",
    shape=lambda x, like: x,
    ref=lambda x, like=None: x,
    vjp=lambda g, y, x, like: (g, None),
    jvp=lambda ts, y, x, like: ts[0],
    batch=lambda size, batched, x, like: (
        apply(LIE_AS, stretch(x, size, batched[0]), stretch(like, size, batched[1])), True),
    memory=VIEW,
    drops=(1,),
    samples=(sample((2, 3), (2, 3)),),
    doc="a value that takes the place of another: its layout, and how it is gathered",
)
CONSTRAINTS["lie_as"] = lambda node, at: at[1].settled()


def is_distributed(*xs: Tensor) -> bool:
    """Whether tensors have parts on a mesh, or stand for such while a function is traced."""
    builder = current_builder()
    return any(x.layout is not None for x in xs) or getattr(builder, "mesh", None) is not None


def lie_as(x: Tensor, like: Tensor) -> Tensor:
    """x in the layout of `like`, of the same shape; x itself when neither is distributed."""
    return apply(LIE_AS, x, like) if is_distributed(x, like) else x


def zeros_as(like: Tensor, numeric: NumericType) -> Tensor:
    """Zeros of `like`'s shape, that lie as it does: on its GPU, or in parts on its mesh."""
    if current_builder() is None and like.layout is not None:  # ranks have agreed on `like`
        zero = F.zeros((), numeric).array  # read everywhere: no rank makes the whole
        return distribute(Tensor(np.broadcast_to(zero, tuple(like.shape)), numeric),
                          like.layout.settled().unmarked())
    zeros = F.zeros(like.shape, numeric)
    if is_distributed(like):
        return apply(LIKE, zeros, like)
    return zeros if current_builder() is not None else to(zeros, like.device)


def counter(like: Sequence[Tensor]) -> Tensor:
    """An integer that starts at 0, for a state beside these tensors: on their mesh if they have
    one, so that the state of a step lies as that of the step before."""
    zero = as_tensor(0)
    layout = next((x.layout for x in like if x.layout is not None), None)
    if layout is None or current_builder() is not None:
        return zero
    return distribute(zero, None, mesh=layout.mesh)
