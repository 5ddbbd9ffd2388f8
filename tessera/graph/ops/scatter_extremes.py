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
        mine = F.cast(F.equal(y, x), x.type)
        theirs = F.cast(F.equal(u, apply(TAKE, y, ids, axis=axis)), u.type)
        return mine, theirs, mine + apply(SEGMENT_SUM, theirs, ids, axis=axis, extent=x.shape[axis])

    def vjp(g: Tensor, y: Tensor, x: Tensor, ids: Tensor, u: Tensor, axis: int) -> tuple:
        mine, theirs, count = ties(y, x, ids, u, axis)
        share = g / count
        return share * mine, None, apply(TAKE, share, ids, axis=axis) * theirs

    def jvp(ts: tuple, y: Tensor, x: Tensor, ids: Tensor, u: Tensor, axis: int) -> Tensor:
        mine, theirs, count = ties(y, x, ids, u, axis)
        moved = None if ts[2] is None else apply(SEGMENT_SUM, ts[2] * theirs, ids, axis=axis,
                                                 extent=x.shape[axis])
        parts = [t for t in (None if ts[0] is None else ts[0] * mine, moved) if t is not None]
        return (parts[0] + parts[1] if len(parts) == 2 else parts[0]) / count

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
