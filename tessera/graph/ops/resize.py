"""Images and lines at another number of points: nearest and linear interpolation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...dims import show_shape
from ...errors import ArgumentError, ShapeError
from ...tensor import Tensor
from .. import functions as F
from ..operand import dequantized, floating, public, store

# name -> number of spatial axes, None for any
MODES: dict[str, int | None] = {"nearest": None, "linear": 1, "bilinear": 2, "trilinear": 3}


@public
def interpolate(x: Any, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
                align_corners: bool = False) -> Tensor:
    """x at another number of points along each of its spatial axes.

    x: [N, C, *spatial]   size: extents, or scale_factor: floor(extent * factor), a number or one
    per axis
    mode "nearest": element floor(i * in / out)   "linear", "bilinear", "trilinear" for one, two and
    three axes: between the two elements beside (i + 1/2) in / out - 1/2, held within x, or with
    align_corners beside i (in - 1) / (out - 1)
    torch.nn.functional.interpolate; positions follow from scale_factor itself where it is given,
    as there. Raises ShapeError, ArgumentError.
    """
    x = dequantized(x)
    rank = x.ndim - 2
    if rank < 1:
        raise ShapeError(f"interpolate takes [N, C, *spatial], got {show_shape(x.shape)}")
    if mode not in MODES or MODES[mode] not in (None, rank):
        fits = [m for m, axes in MODES.items() if axes in (None, rank)]
        raise ArgumentError(f"mode {mode!r} for {rank} spatial axes", hint=" or ".join(
            f'"{m}"' for m in fits))
    if align_corners and mode == "nearest":
        raise ArgumentError("align_corners says nothing for nearest elements")
    extents = tuple(x.shape[2:])
    if not all(isinstance(n, int) for n in extents):
        raise ShapeError(f"interpolate needs known extents, got {show_shape(extents)}")
    target, steps = _target(extents, size, scale_factor, rank)
    if mode == "nearest":
        for d, (n, m, step) in enumerate(zip(extents, target, steps, strict=True)):
            x = F.take(x, np.minimum(np.floor(np.arange(m) * step), n - 1).astype(np.int64),
                               2 + d) if n != m or step != 1 else x
        return x
    c, numeric = floating(x)
    for d, (n, m, step) in enumerate(zip(extents, target, steps, strict=True)):
        c = _between(c, 2 + d, n, m, step, align_corners)
    return store(c, numeric)


def _target(extents: tuple, size: Any, factor: Any, rank: int) -> tuple[tuple, tuple]:
    """(extents of the result, distance of its points in elements of x)"""
    if (size is None) == (factor is None):
        raise ArgumentError("interpolate takes size= or scale_factor=, one of them")
    given = size if factor is None else factor
    items = tuple(given) if isinstance(given, tuple | list) else (given,) * rank
    good = int | np.integer if factor is None else int | float | np.integer | np.floating
    if len(items) != rank or any(
            isinstance(v, bool) or not isinstance(v, good) or not v > 0 for v in items):
        word = "size" if factor is None else "scale_factor"
        raise ArgumentError(f"{word}={given!r}", hint=f"a positive number, or {rank} of them")
    if min(extents) == 0:
        raise ShapeError(f"interpolate of an axis without elements: {show_shape(extents)}")
    if factor is None:
        target = tuple(int(v) for v in items)
        return target, tuple(n / m for n, m in zip(extents, target, strict=True))
    target = tuple(math.floor(n * f) for n, f in zip(extents, items, strict=True))
    if min(target) < 1:
        raise ArgumentError(f"scale_factor={factor!r} leaves {show_shape(target)} of "
                            f"{show_shape(extents)}")
    return target, tuple(1.0 / float(f) for f in items)


def _between(x: Tensor, axis: int, n: int, m: int, step: float, align_corners: bool) -> Tensor:
    """Along one axis: (1 - w) of the element below and w of the one above; w from f64 positions."""
    if align_corners:
        at = np.arange(m) * ((n - 1) / (m - 1) if m > 1 else 0.0)
    else:
        at = np.maximum((np.arange(m) + 0.5) * step - 0.5, 0.0)
    below = np.minimum(at.astype(np.int64), n - 1)
    above = np.minimum(below + 1, n - 1)
    w = np.clip(at - below, 0.0, 1.0)
    shape = (m,) + (1,) * (x.ndim - axis - 1)
    weight = Tensor(w.astype(x.dtype.numpy).reshape(shape), x.type)
    low, high = F.take(x, below, axis), F.take(x, above, axis)
    return (1.0 - weight) * low + weight * high
