"""NumPy's broadcasting: the common shape, and the way back of cotangents and batches."""

from __future__ import annotations

from typing import Any

from ...dims import show_shape
from ...errors import ShapeError
from ...tensor import Tensor
from .. import functions as F


def broadcast_shapes(*shapes: tuple) -> tuple:
    """NumPy's rule: align at the end, extents equal or 1. Raises ShapeError."""
    ndim = max(map(len, shapes))
    out = []
    for axis in range(ndim):
        extent: Any = 1
        for shape in shapes:
            i = axis - ndim + len(shape)
            if i < 0 or shape[i] == 1 or shape[i] == extent:
                continue
            if extent != 1:
                raise ShapeError(
                    "the shapes do not broadcast: " + " and ".join(map(show_shape, shapes))
                    + f" disagree at axis {axis - ndim}: {extent} and {shape[i]}",
                    hint=_broadcast_hint(shapes),
                )
            extent = shape[i]
        out.append(extent)
    return tuple(out)


def _broadcast_hint(shapes: tuple[tuple, ...]) -> str:
    if len(shapes) == 2 and len(shapes[0]) == len(shapes[1]) == 2 and shapes[0] == shapes[1][::-1]:
        return "one operand is the transpose of the other's shape: use .T"
    long, short = sorted(shapes[:2], key=len, reverse=True)
    if len(short) == 1 and short[0] in long[:-1]:
        return "to align with an earlier axis add axes at the end: x[:, None]"
    return "axes align at the end; an extent of 1 stretches"


def unbroadcast(g: Tensor, shape: tuple) -> Tensor:
    """Sum a cotangent over the axes along which an operand of `shape` was stretched."""
    if g.shape == shape:
        return g
    extra = g.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(
        i + extra
        for i, (a, b) in enumerate(zip(g.shape[extra:], shape, strict=True))
        if a != b
    )
    return F.reshape(F.sum(g, axis=axes), shape)


def pad_batch_axes(x: Tensor, ndim: int) -> Tensor:
    """A batched [N, ...] operand with 1s after N, so that it has ndim axes after N."""
    missing = ndim + 1 - x.ndim
    if missing == 0:
        return x
    return F.reshape(x, (x.shape[0],) + (1,) * missing + tuple(x.shape[1:]))
