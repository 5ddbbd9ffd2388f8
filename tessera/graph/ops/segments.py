"""Largest, smallest and mean values of segments: of the elements that have the same id."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...errors import DTypeError
from ...tensor import Tensor
from .. import functions as F
from ..cpu import rows as compiled_rows
from ..op import OPS, GraphOp, sample
from ..operand import floating, literal, promote, public, shape_tuple, store
from ..trace import apply
from .gather import (
    SEGMENT_SUM,
    TAKE,
    check_bounds,
    ids_first,
    index_operand,
    offset_rows,
    split_batch,
    stretch,
)


def _ref(extremum: np.ufunc, u: np.ndarray, ids: np.ndarray, axis: int,
         extent: int) -> np.ndarray:
    check_bounds(ids, extent, wrap=True, what="the ")
    pre, post = u.shape[:axis], u.shape[axis + ids.ndim:]
    rows = u.reshape(prod(pre), ids.size, prod(post))
    out = np.full((*pre, extent, *post), _identity(u.dtype, extremum is np.maximum), u.dtype)
    flat = out.reshape(prod(pre), extent, prod(post))
    at = np.where(ids < 0, ids + extent, ids).reshape(-1)
    if compiled_rows.takes(flat, rows):
        compiled_rows.combine("max" if extremum is np.maximum else "min", flat, at, rows,
                              np.full(extent, -1, np.int64), np.zeros((len(flat), 0, 1)))
    else:
        every: Any = (slice(None), at)
        extremum.at(flat, every, rows)
    return out


def _identity(dtype: np.dtype, largest: bool) -> Any:
    """What an empty segment has."""
    if dtype.kind == "f":
        return -np.inf if largest else np.inf
    return np.iinfo(dtype).min if largest else np.iinfo(dtype).max


def _shared(t: Tensor, y: Tensor, u: Tensor, ids: Tensor, axis: int) -> Tensor:
    """What each element has of t: those that tie share it, the others have none."""
    hit = F.equal(u, apply(TAKE, y, ids, axis=axis))
    count = apply(SEGMENT_SUM, F.cast(hit, u.type), ids, axis=axis, extent=y.shape[axis])
    count = apply(TAKE, count, ids, axis=axis)
    return F.where(hit, t / count, 0.0 / count)  # NaN where y is


def _segment(name: str, extremum: np.ufunc, word: str) -> GraphOp:
    def vjp(g: Tensor, y: Tensor, u: Tensor, ids: Tensor, axis: int, extent: Any) -> tuple:
        return _shared(apply(TAKE, g, ids, axis=axis), y, u, ids, axis), None

    def jvp(ts: tuple, y: Tensor, u: Tensor, ids: Tensor, axis: int, extent: Any) -> Tensor:
        return apply(SEGMENT_SUM, _shared(ts[0], y, u, ids, axis), ids, axis=axis, extent=extent)

    def batch(size: Any, batched: tuple, u: Tensor, ids: Tensor, axis: int, extent: Any) -> tuple:
        if not batched[1]:
            return apply(OPS[name], u, ids, axis=axis + 1, extent=extent), True
        rows = ids_first(stretch(u, size, batched[0]), axis, ids.ndim - 1)
        out = apply(OPS[name], rows, offset_rows(ids, size, extent), axis=0, extent=size * extent)
        return split_batch(out, size, axis), True

    return GraphOp(
        name,
        shape=SEGMENT_SUM.shape,
        ref=lambda u, ids, axis, extent: _ref(extremum, u, ids, axis, extent),
        vjp=vjp,
        jvp=jvp,
        batch=batch,
        axes=SEGMENT_SUM.axes,
        reduces=name.removeprefix("segment_"),
        smooth=False,
        meets=name.removeprefix("segment_"),
        samples=(
            sample(((4, 3), "distinct"), ((4,), "onto:3"), axis=0, extent=3),
            sample(((2, 3, 2, 4), "distinct"), ((3, 2), "onto:5"), axis=1, extent=5),
        ),
        doc=f"y[ids[i]] = the {word} of the values u[i] with that id; infinite where there is none",
    )


SEGMENT_MAX = _segment("segment_max", np.maximum, "largest")
SEGMENT_MIN = _segment("segment_min", np.minimum, "smallest")


def _extremum(op: GraphOp, values: Any, ids: Any, num_segments: int) -> Tensor:
    (u,), numeric = promote(values)
    if u.dtype.kind == "bool":
        raise DTypeError(f"{op.name} of bools", hint="cast to an integer type first")
    (extent,) = shape_tuple((num_segments,))
    return store(apply(op, u, index_operand(ids), axis=0, extent=extent), numeric)


@public
def segment_max(values: Any, ids: Any, num_segments: int) -> Tensor:
    """y[s] = the largest values[i] over the i with ids[i] = s; NaN propagates.

    values: [T, ...]   ids: [T]   y: [num_segments, ...], -inf (of integers the least) for a segment
    without elements   Elements that tie share the gradient. Raises ShapeError, AxisError.
    """
    return _extremum(SEGMENT_MAX, values, ids, num_segments)


@public
def segment_min(values: Any, ids: Any, num_segments: int) -> Tensor:
    """y[s] = the smallest values[i] over the i with ids[i] = s; inf (of integers the largest) for a
    segment without elements. See `ts.segment_max`."""
    return _extremum(SEGMENT_MIN, values, ids, num_segments)


@public
def segment_mean(values: Any, ids: Any, num_segments: int) -> Tensor:
    """y[s] = the mean of values[i] over the i with ids[i] = s; 0 for a segment without elements.

    values: [T, ...], integers become f32   ids: [T]   y: [num_segments, ...]
    """
    u, numeric = floating(values)
    rows, (extent,) = index_operand(ids), shape_tuple((num_segments,))
    total = apply(SEGMENT_SUM, u, rows, axis=0, extent=extent)
    one = F.broadcast_to(literal(1.0, u), rows.shape)
    count = apply(SEGMENT_SUM, one, rows, axis=0, extent=extent)
    count = F.reshape(count, (extent, *(1,) * (total.ndim - 1)))
    return store(total / F.maximum(count, 1.0), numeric)
