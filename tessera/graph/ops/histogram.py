"""How often values occur: bincount, histogram. Counts are sums of integers, exact in any order."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...dims import size_of
from ...errors import ArgumentError, DTypeError, ShapeError, TraceError
from ...tensor import Tensor, as_tensor
from .. import functions as F
from ..operand import dequantized, floating, public
from ..trace import Tracer, apply
from .gather import CHECK_INDEX, index_operand

EVEN = 1 << 20  # bins whose place an f32 tells but for one


@public
def bincount(x: Any, weights: Any = None, *, length: int | None = None) -> Tensor:
    """y[c] = how often c occurs, or the sum of the weights where x is c: np.bincount.

    x: integers >= 0, any shape; taken flat   weights: x's shape   y: [length], int64, or of the
    type of ts.sum of the weights. length: None: the largest of x and one more, which needs values.
    Raises AxisError for a number outside of 0..length-1, TraceError without length where x is
    traced, by jit, grad or vmap.
    """
    x = dequantized(x)
    if x.dtype.kind not in ("int", "uint"):
        raise DTypeError(f"bincount of {x.type}", hint="of integers; ts.histogram counts floats")
    if length is None:
        length = _extent(x)
    elif isinstance(length, bool) or not isinstance(length, int | np.integer) or length < 0:
        raise ArgumentError(f"length={length!r} is not a number of elements")
    ids = index_operand(F.flatten(x))
    if x.dtype.kind == "int":  # segment_sum takes -1 for the last
        ids = apply(CHECK_INDEX, ids, extent=int(length), wrap=False)
    return _counted(x, ids, weights, int(length))


def _counted(x: Tensor, ids: Tensor, weights: Any, length: int) -> Tensor:
    if weights is None:
        return F.segment_sum(F.ones((size_of(x.shape),), "int64"), ids, length)
    weights = as_tensor(weights)
    if weights.shape != x.shape:
        raise ShapeError(f"weights of shape {list(weights.shape)} for x of {list(x.shape)}")
    return F.segment_sum(F.flatten(weights), ids, length)


def _extent(x: Tensor) -> int:
    if isinstance(x, Tracer):
        raise TraceError("bincount of a traced tensor: how many numbers there are is not known",
                         hint="ts.bincount(x, length=n) counts those of 0..n-1")
    return int(x.numpy().max()) + 1 if size_of(x.shape) else 0


@public
def histogram(x: Any, bins: Any = 10, range: tuple[float, float] | None = None,
              weights: Any = None, *, density: bool = False) -> tuple[Tensor, Tensor]:
    """How many elements lie in each bin, edges[i] <= x < edges[i + 1], the last one with its upper
    edge: np.histogram.

    x: any shape; integers become f32   bins: how many of one width, or their edges [N + 1], rising
    range: (low, high) of the bins; None: the smallest and the largest of x. What lies outside, and
    NaN, is not counted.   weights: x's shape: their sums in place of counts
    density: divided so that the integral over the bins is 1
    y: (int64 [N], or of the type of ts.sum of the weights, f32 for density; edges [N + 1] of x's
    type)
    """
    line, numeric = floating(dequantized(x))
    line = F.flatten(line)
    low, high, edges = _edges(line, bins, range)
    count = edges.shape[0] - 1
    inside = F.logical_and(F.greater_equal(line, low), F.less_equal(line, high))
    line = F.where(inside, line, low)
    even = isinstance(bins, int | np.integer) and count < EVEN
    place = _even_place(line, low, high, edges) if even else _place(line, high, edges)
    place = F.where(inside, place, count)  # what is not counted gets a bin of its own
    weights = None if weights is None else F.flatten(as_tensor(weights))
    y = _counted(place, index_operand(place), weights, count + 1)[:-1]
    if density:
        y = y / F.sum(y) / (edges[1:] - edges[:-1])
    return y, F.cast(edges, numeric)


def _place(line: Tensor, high: Tensor, edges: Tensor) -> Tensor:
    count = edges.shape[0] - 1
    place = F.cast(F.searchsorted(edges, line, "right"), "int32") - 1
    return F.where(F.equal(line, high), count - 1, place)


def _even_place(line: Tensor, low: Tensor, high: Tensor, edges: Tensor) -> Tensor:
    """By where an element stands between the first and the last edge, which may be one off: the
    edges beside it decide, as in NumPy."""
    last = edges.shape[0] - 2
    low, high = 0.5 * low, 0.5 * high  # their difference is no infinity
    part = (0.5 * line - low) / (high - low)
    place = F.minimum(F.cast(F.floor(part * float(last + 1)), "int32"), last)
    place = place - F.cast(F.less(line, edges[place]), "int32")
    return F.minimum(place + F.cast(F.greater_equal(line, edges[place + 1]), "int32"), last)


def _edges(line: Tensor, bins: Any, limits: tuple[float, float] | None
           ) -> tuple[Tensor, Tensor, Tensor]:
    """The first and the last edge as numbers, which a loop has at hand, and all of them."""
    if isinstance(bins, bool) or not isinstance(bins, int | np.integer):
        edges = F.cast(dequantized(bins), line.type)
        if edges.ndim != 1 or edges.shape[0] < 2:
            raise ShapeError(f"edges of bins of shape {list(edges.shape)}: at least two in a line")
        return edges[0], edges[-1], edges
    if bins < 1:
        raise ArgumentError(f"bins={bins!r}: at least one")
    if limits is not None:
        low, high = (F.full((), float(v), line.type) for v in limits)
        if limits[0] > limits[1]:
            raise ArgumentError(f"range={limits!r}: its low end lies above the high one")
    elif size_of(line.shape) == 0:
        low, high = F.zeros((), line.type), F.ones((), line.type)
    else:
        low, high = F.min(line), F.max(line)
    half = F.where(F.equal(low, high), 0.5, 0.0)  # of one value a bin of width 1 around it
    low, high = low - half, high + half
    part = F.arange(bins + 1, dtype=line.type) / float(bins)
    return low, high, F.where(F.equal(part, 1.0), high, low + (high - low) * part)


__all__ = ["bincount", "histogram"]
