"""Order: sort, argsort, top_k, searchsorted. Equal elements keep their order, NaN is the largest.

The permutation is an integer tensor; values are gathered by it, which is also how gradients flow.
"""

from __future__ import annotations

import math
import operator
from typing import Any, Literal

import numpy as np

from ...dims import show_shape
from ...errors import ArgumentError, ShapeError
from ...numerics import as_type
from ...tensor import OPERATORS, Tensor
from .. import functions as F
from ..op import Aval, GraphOp, sample
from ..operand import axis_index, dequantized, promote, public, scalar_line
from ..trace import apply
from .cumulative import line_axes
from .gather import TAKE_ALONG

INT64 = as_type("int64")


def _argsort_ref(x: np.ndarray, axis: int, descending: bool) -> np.ndarray:
    if not descending:
        return np.argsort(x, axis=axis, kind="stable")
    # Sorting the reversed line and reading it backwards puts the largest first and keeps the
    # order of equal elements; negating would not do for unsigned integers and the smallest int.
    back = np.argsort(np.flip(x, axis), axis=axis, kind="stable")
    return x.shape[axis] - 1 - np.flip(back, axis)


ARGSORT = GraphOp(
    "argsort",
    shape=lambda x, axis, descending: Aval(x.shape, INT64),
    ref=_argsort_ref,
    batch=lambda size, batched, x, axis, descending: (
        apply(ARGSORT, x, axis=axis + 1, descending=descending), True
    ),
    axes=lambda x, axis, descending: line_axes(x, axis),
    lines="order",
    differentiable=False,
    drops_inf=(0,),
    samples=(
        sample(((5,), "distinct"), axis=0, descending=False),
        sample(((2, 4), "distinct"), axis=1, descending=True),
        sample(((4, 2), "int"), axis=0, descending=True),
    ),
    doc="the stable permutation that sorts along an axis; NaN counts as the largest",
)


def _top_shape(x: Aval, k: int, largest: bool) -> Aval:
    n = x.shape[-1]
    if isinstance(n, int) and k > n:
        raise ShapeError(f"the {k} {'largest' if largest else 'smallest'} of {n} elements",
                         hint=f"k is at most the extent of the axis, {n}")
    return Aval((*x.shape[:-1], k), INT64)


def _top_ref(x: np.ndarray, k: int, largest: bool) -> np.ndarray:
    n = x.shape[-1]
    lines = x.reshape(math.prod(x.shape[:-1]), n)
    small = n < 512 or 4 * k > n or (x.dtype.kind == "f" and np.isnan(x).any())
    if small or not k:
        picked = _argsort_ref(lines, 1, largest)[:, :k]
    else:
        picked = np.stack([_top_of_line(line, k, largest) for line in lines]) if len(lines) else \
            np.zeros((0, k), np.int64)
    return np.ascontiguousarray(picked).reshape(*x.shape[:-1], k)


def _top_of_line(line: np.ndarray, k: int, largest: bool) -> np.ndarray:
    """By selection instead of sorting: of the elements equal to the k-th, the first ones."""
    place = line.size - k if largest else k - 1
    threshold = np.partition(line, place)[place]
    beyond = np.flatnonzero(line > threshold if largest else line < threshold)
    equal = np.flatnonzero(line == threshold)[: k - beyond.size]
    chosen = np.sort(np.concatenate([beyond, equal]))
    return chosen[_argsort_ref(line[chosen], 0, largest)]


TOP_K_INDEX = GraphOp(
    "top_k_index",
    shape=_top_shape,
    ref=_top_ref,
    batch=lambda size, batched, x, **attrs: (apply(TOP_K_INDEX, x, **attrs), True),
    axes="..._->..._",
    lines="top",
    differentiable=False,
    drops_inf=(0,),
    samples=(sample(((5,), "distinct"), k=2, largest=True),
             sample(((2, 4), "int"), k=3, largest=True),
             sample(((2, 4), "int"), k=2, largest=False)),
    doc="indices of the k largest (or smallest) along the last axis, in order; ties: lowest index "
    "first",
)


def _search_shape(ordered: Aval, values: Aval, side: str, lines: int) -> Aval:
    if ordered.ndim != lines + 1:
        raise ShapeError(f"searchsorted needs one sorted line, got {show_shape(ordered.shape)}",
                         hint="ts.vmap(ts.searchsorted)(lines, values) searches one per row")
    if ordered.shape[:lines] != values.shape[:lines]:
        raise ShapeError(f"lines {show_shape(ordered.shape)} for values "
                         f"{show_shape(values.shape)}")
    return Aval(values.shape, INT64)


def _search_ref(ordered: np.ndarray, values: np.ndarray, side: Literal["left", "right"],
                lines: int) -> np.ndarray:
    """ordered: [*L, N]   values: [*L, ...]: each line of L has values of its own."""
    if not lines:
        return np.asarray(np.searchsorted(ordered, values, side))
    out = np.empty(values.shape, np.int64)
    for at in np.ndindex(*ordered.shape[:-1]):
        out[at] = np.searchsorted(ordered[at], values[at], side)
    return out


def _search_batch(size: Any, batched: tuple, ordered: Tensor, values: Tensor, side: str,
                  lines: int) -> tuple:
    if not batched[0] and not lines:
        return apply(SEARCHSORTED, ordered, values, side=side, lines=0), True
    if not batched[0]:
        ordered = F.broadcast_to(ordered, (size, *ordered.shape))
    if not batched[1]:
        values = F.broadcast_to(values, (size, *values.shape))
    return apply(SEARCHSORTED, ordered, values, side=side, lines=lines + 1), True


def _search_letters(ordered: Aval, values: Aval, side: str, lines: int) -> str:
    names = "abcdefghijklmnopqrstuvwxyz"[:values.ndim]
    return f"{names[:lines]}_,{names}->{names}"


SEARCHSORTED = GraphOp(
    "searchsorted",
    shape=_search_shape,
    ref=_search_ref,
    batch=_search_batch,
    axes=_search_letters,
    lines="search",
    differentiable=False,
    drops_inf=(0, 1),
    samples=(sample(((5,), "sorted"), (2, 3), side="left", lines=0),
             sample(((4,), "sorted"), (3,), side="right", lines=0),
             sample(((2, 4), "sorted"), (2, 3, 2), side="right", lines=1)),
    doc="how many elements of a sorted line are below each value (side right: or equal to it)",
)


@public
@scalar_line
def argsort(x: Any, axis: int = -1, descending: bool = False) -> Tensor:
    """The permutation that sorts x along an axis; int64.

    Stable, also when descending: equal elements stay in order. NaN counts as the largest.
    """
    (c,), _ = promote(x)
    return apply(ARGSORT, c, axis=axis_index(axis, c.ndim), descending=bool(descending))


@public
@scalar_line
def sort(x: Any, axis: int = -1, descending: bool = False) -> Tensor:
    """x sorted along an axis; NaN counts as the largest. The gradient returns to where each
    element came from."""
    x = dequantized(x)
    a = axis_index(axis, x.ndim)
    return apply(TAKE_ALONG, x, argsort(x, a, descending), axis=a)


@public
@scalar_line
def top_k(x: Any, k: int, axis: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
    """(values, indices) of the k largest along an axis, largest first, or of the k smallest,
    smallest first.

    values: x's type   indices: int64; equal elements: the lowest index first. NaN is the largest.
    Raises ShapeError when k exceeds the extent.
    """
    if isinstance(k, Tensor):
        k = operator.index(k)
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 0:
        raise ArgumentError(f"top_k needs a number of elements, got k={k!r}")
    x = dequantized(x)
    a = axis_index(axis, x.ndim)
    lines = F.moveaxis(x, a, -1)
    (c,), _ = promote(lines)
    index = apply(TOP_K_INDEX, c, k=int(k), largest=bool(largest))
    values = apply(TAKE_ALONG, lines, index, axis=x.ndim - 1)
    return F.moveaxis(values, -1, a), F.moveaxis(index, -1, a)


@public
def searchsorted(ordered: Any, values: Any, side: str = "left") -> Tensor:
    """Where values would be inserted into an ascending line to keep it sorted; int64.

    ordered: [N]   values: any shape   side: "left" before equal elements, "right" after them
    """
    if side not in ("left", "right"):
        raise ArgumentError(f"side {side!r}", hint='"left" or "right"')
    (line, wanted), _ = promote(ordered, values)
    return apply(SEARCHSORTED, line, wanted, side=side, lines=0)


OPERATORS.update(sort=sort, argsort=argsort)
