"""Scatters that keep the largest or the smallest of what meets at a place."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...dims import show_shape
from ...errors import DTypeError, ShapeError
from ...tensor import Tensor
from .. import flops
from .. import functions as F
from ..op import Aval, GraphOp, sample
from ..trace import apply
from .gather import SEGMENT_SUM, TAKE, split_names
from .segments import SEGMENT_MAX, SEGMENT_MIN


def scatter_axes(x: Aval, ids: Aval, u: Aval, axis: int) -> str:
    pre, post, _ = split_names(x, ids, axis, 1)
    whole = "_" * len(ids.shape)
    return f"{pre}_{post},{whole},{pre}{whole}{post}->{pre}_{post}"


def scatter_shape(x: Aval, ids: Aval, u: Aval, axis: int) -> Aval:
    want = x.shape[:axis] + ids.shape + x.shape[axis + 1:]
    if u.shape != want:
        raise ShapeError(
            f"updates {show_shape(u.shape)} for ids {show_shape(ids.shape)} along axis {axis} of "
            f"{show_shape(x.shape)} should be {show_shape(want)}"
        )
    if x.dtype is not u.dtype:
        raise DTypeError(f"operands of one type needed, got {x.type} and {u.type}")
    return x


def _extreme(name: str, extremum: np.ufunc, word: str, segment: GraphOp) -> GraphOp:
    def ties(y: Tensor, x: Tensor, ids: Tensor, u: Tensor, axis: int
             ) -> tuple[Tensor, Tensor, Tensor]:
        """Where x and updates are what stays, and how many there are at each place."""
        mine, theirs = F.equal(y, x), F.equal(u, apply(TAKE, y, ids, axis=axis))
        met = apply(SEGMENT_SUM, F.cast(theirs, u.type), ids, axis=axis, extent=x.shape[axis])
        return mine, theirs, F.cast(mine, x.type) + met

    def vjp(g: Tensor, y: Tensor, x: Tensor, ids: Tensor, u: Tensor, axis: int) -> tuple:
        mine, theirs, count = ties(y, x, ids, u, axis)
        share, none = g / count, 0.0 / count  # NaN where y is
        return F.where(mine, share, none), None, F.where(
            theirs, *(apply(TAKE, t, ids, axis=axis) for t in (share, none)))

    def jvp(ts: tuple, y: Tensor, x: Tensor, ids: Tensor, u: Tensor, axis: int) -> Tensor:
        mine, theirs, count = ties(y, x, ids, u, axis)
        moved = [] if ts[0] is None else [F.where(mine, ts[0], 0.0)]
        if ts[2] is not None:
            moved += [apply(SEGMENT_SUM, F.where(theirs, ts[2], 0.0), ids, axis=axis,
                            extent=x.shape[axis])]
        return (moved[0] if len(moved) == 1 else moved[0] + moved[1]) / count

    def steps(x: Tensor, ids: Tensor, u: Tensor, axis: int) -> Tensor:
        found = apply(segment, u, ids, axis=axis, extent=x.shape[axis])
        return F.maximum(x, found) if extremum is np.maximum else F.minimum(x, found)

    return GraphOp(
        name,
        shape=scatter_shape,
        ref=lambda x, ids, u, axis: extremum(
            x, segment.ref(u, ids, axis=axis, extent=x.shape[axis])),
        vjp=vjp,
        jvp=jvp,
        expand=steps,
        axes=scatter_axes,
        drops_inf=(0, 2),
        smooth=False,
        samples=(
            sample(((5, 3), "distinct"), ((4,), "index:5"), ((4, 3), "distinct"), axis=0),
            sample(((2, 4, 3), "distinct"), ((2, 2), "index:4"), ((2, 2, 2, 3), "distinct"),
                   axis=1),
        ),
        flops=flops.per_operand,
        doc=f"x, where updates go the {word} of it and of them; those that tie share the gradient",
    )


SCATTER_MAX = _extreme("scatter_max", np.maximum, "largest", SEGMENT_MAX)
SCATTER_MIN = _extreme("scatter_min", np.minimum, "smallest", SEGMENT_MIN)
EXTREMES: dict[Any, GraphOp] = {"max": SCATTER_MAX, "min": SCATTER_MIN}

__all__ = ["EXTREMES", "scatter_axes", "scatter_shape"]
