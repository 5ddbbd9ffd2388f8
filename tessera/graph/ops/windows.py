"""Windows of images: `unfold` gathers them, `fold` adds them up where they overlap.

Both are linear, and each other's adjoint.
Dumoulin and Visin 2016, arXiv:1603.07285, for the arithmetic of extents.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ...dims import show_shape
from ...errors import ShapeError
from ...tensor import Tensor
from .. import flops
from .. import functions as F
from ..element import Element, index_names
from ..op import Aval, GraphOp, sample
from ..trace import apply

Pairs = tuple[tuple[int, int], ...]


def out_extent(n: Any, window: int, stride: int, dilation: int, pad: tuple[int, int]) -> Any:
    """Windows that fit along an axis: (n + pad - (dilation (window - 1) + 1)) // stride + 1."""
    span = dilation * (window - 1) + 1
    room = n + pad[0] + pad[1] - span
    if isinstance(room, int) and room < 0:
        raise ShapeError(f"a window that spans {span} does not fit the extent {n}, padded by {pad}")
    return (room if stride == 1 else room // stride) + 1


def _unfold_shape(x: Aval, window: tuple, stride: tuple, dilation: tuple, padding: Pairs) -> Aval:
    lead = len(x.shape) - len(window)
    spatial = tuple(
        out_extent(n, *each)
        for n, *each in zip(x.shape[lead:], window, stride, dilation, padding, strict=True)
    )
    return Aval((*x.shape[:lead], *window, *spatial), x.type)


def unfold_ref(x: np.ndarray, window: tuple, stride: tuple, dilation: tuple,
                padding: Pairs, out: np.ndarray | None = None) -> np.ndarray:
    """One strided copy for each place of the window, zeros where it lies in the padding."""
    lead, spatial = x.shape[:x.ndim - len(window)], x.shape[x.ndim - len(window):]
    axes = list(zip(spatial, window, stride, dilation, padding, strict=True))
    if out is None:
        out = np.empty((*lead, *window, *(out_extent(*axis) for axis in axes)), x.dtype)
    for place in itertools.product(*map(range, window)):
        part = _at_place(out, len(lead), place)
        inside, there = _covered(place, axes)
        for a, (s, n) in enumerate(zip(inside, part.shape[len(lead):], strict=True)):
            behind = (slice(None),) * (len(window) - a - 1)
            for rest in (slice(0, s.start), slice(s.stop, n)):
                part[_last(*inside[:a], rest, *behind)] = 0
        part[_last(*inside)] = x[_last(*there)]
    return out


def _at_place(x: np.ndarray, lead: int, place: tuple[int, ...]) -> np.ndarray:
    """The windows' elements at one place of them. x: [lead, window, places]"""
    return x[(slice(None),) * lead + place]


def _last(*parts: slice) -> Any:
    """A subscript of the last axes."""
    return (..., *parts)


def _covered(place: tuple[int, ...], axes: list[tuple]) -> tuple[list[slice], list[slice]]:
    """Of one place of the window: which windows have it inside, and where it lies in these."""
    inside, there = [], []
    for i, (n, window, s, d, pad) in zip(place, axes, strict=True):
        at = i * d - pad[0]  # in the first window
        first = max(0, -(at // s))
        last = max(first, min(out_extent(n, window, s, d, pad), (n - 1 - at) // s + 1))
        inside.append(slice(first, last))
        begin = at + first * s
        there.append(slice(begin, begin + max(0, (last - first - 1) * s + 1), s))
    return inside, there


def _fold_shape(x: Aval, spatial: tuple, stride: tuple, dilation: tuple, padding: Pairs) -> Aval:
    rank = len(spatial)
    lead = len(x.shape) - 2 * rank
    window, out = x.shape[lead:lead + rank], x.shape[lead + rank:]
    for n, k, s, d, p, have in zip(spatial, window, stride, dilation, padding, out, strict=True):
        if out_extent(n, k, s, d, p) != have:
            raise ShapeError(f"windows {show_shape(x.shape)} are not those of "
                             f"{show_shape(spatial)}")
    return Aval((*x.shape[:lead], *spatial), x.type)


def fold_ref(x: np.ndarray, spatial: tuple, stride: tuple, dilation: tuple,
              padding: Pairs, out: np.ndarray | None = None) -> np.ndarray:
    """One strided addition for each place of the window."""
    rank = len(spatial)
    lead = x.ndim - 2 * rank
    window = x.shape[lead:lead + rank]
    axes = list(zip(spatial, window, stride, dilation, padding, strict=True))
    total = np.empty((*x.shape[:lead], *spatial), x.dtype) if out is None else out
    total[...] = 0
    for place in itertools.product(*map(range, window)):
        inside, there = _covered(place, axes)
        total[_last(*there)] += _at_place(x, lead, place)[_last(*inside)]
    return total


def _lead_axes(lead: int, rank: int, before: int) -> str:
    names = "abcdefghijklmnopqrstuvwxyz"[:lead]
    return f"{names}{'_' * (before * rank)}->{names}{'_' * ((3 - before) * rank)}"


def _unfold_element(x: Aval, window: tuple, stride: tuple, dilation: tuple,
                    padding: Pairs) -> Element:
    rank = len(window)
    lead = x.ndim - rank
    at = [f"o{lead + rank + i} * {s} + o{lead + i} * {d} - {before}" for i, (s, d, (before, _)) in
          enumerate(zip(stride, dilation, padding, strict=True))]
    return Element(f"x0[{index_names([*range(lead), *at])}]")


def _fold_element(x: Aval, spatial: tuple, stride: tuple, dilation: tuple,
                  padding: Pairs) -> Element:
    """Over the places of the window: of each the window that has this element there."""
    rank = len(spatial)
    lead = x.ndim - 2 * rank
    at = []
    for i, (s, d, (before, _)) in enumerate(zip(stride, dilation, padding, strict=True)):
        first = f"(o{lead + i} + {before} - r{i} * {d})"
        at.append(f"where(({first} >= 0) & ({first} % {s} == 0), {first} // {s}, -1)"
                  if s > 1 else first)
    window = [f"r{i}" for i in range(rank)]
    return Element(f"x0[{index_names([*range(lead), *window, *at])}]",
                   over=x.shape[lead:lead + rank])


UNFOLD = GraphOp(
    "unfold",
    shape=_unfold_shape,
    ref=unfold_ref,
    vjp=lambda g, y, x, window, **a: (apply(FOLD, g, spatial=tuple(x.shape[-len(window):]), **a),),
    jvp=lambda ts, y, x, **a: apply(UNFOLD, ts[0], **a),
    batch=lambda size, batched, x, **a: (apply(UNFOLD, x, **a), True),
    axes=lambda x, window, **a: _lead_axes(len(x.shape) - len(window), len(window), 1),
    drops=(0,),
    samples=(
        sample((2, 5), window=(3,), stride=(1,), dilation=(1,), padding=((1, 1),)),
        sample((2, 1, 5, 6), window=(2, 3), stride=(2, 1), dilation=(1, 2),
               padding=((0, 0), (1, 0))),
    ),
    flops=flops.none,
    element=_unfold_element,
    out=True,
    doc="windows of the last axes: [lead, spatial] -> [lead, window, places]",
)

FOLD = GraphOp(
    "fold",
    shape=_fold_shape,
    ref=fold_ref,
    vjp=lambda g, y, x, spatial, **a: (
        apply(UNFOLD, g, window=tuple(x.shape[-2 * len(spatial):-len(spatial)]), **a),
    ),
    jvp=lambda ts, y, x, **a: apply(FOLD, ts[0], **a),
    batch=lambda size, batched, x, **a: (apply(FOLD, x, **a), True),
    axes=lambda x, spatial, **a: _lead_axes(len(x.shape) - 2 * len(spatial), len(spatial), 2),
    drops=(0,),
    samples=(
        sample((2, 3, 5), spatial=(5,), stride=(1,), dilation=(1,), padding=((1, 1),)),
        sample((2, 2, 3, 2, 3), spatial=(5, 6), stride=(2, 1), dilation=(1, 2),
               padding=((0, 0), (1, 0))),
    ),
    element=_fold_element,
    out=True,
    doc="windows added up where they overlap: the adjoint of unfold",
)


def windows_side_by_side(spatial: tuple, window: tuple, stride: tuple, dilation: tuple,
                         padding: Pairs) -> bool:
    """Whether each element is in one window."""
    return stride == window and set(dilation) == {1} and not any(map(any, padding)) and all(
        isinstance(n, int) and n % k == 0 for n, k in zip(spatial, window, strict=True))


def _cut(x: Tensor, window: tuple) -> Tensor:
    """[lead, window, places] of windows side by side: no element moves."""
    lead, rank = x.ndim - len(window), len(window)
    parts = [(n // k, k) for n, k in zip(x.shape[lead:], window, strict=True)]
    cut = F.reshape(x, (*x.shape[:lead], *(m for pair in parts for m in pair)))
    axes = [lead + 2 * i for i in range(rank)]
    return F.transpose(cut, (*range(lead), *(a + 1 for a in axes), *axes))


def patches_of(x: Tensor, window: tuple, stride: tuple, dilation: tuple, padding: Pairs) -> Tensor:
    if set(window) == {1} and set(stride) == {1} and not any(map(any, padding)):
        lead = x.ndim - len(window)  # each element is its own window
        return F.reshape(x, (*x.shape[:lead], *window, *x.shape[lead:]))
    if windows_side_by_side(x.shape[x.ndim - len(window):], window, stride, dilation, padding):
        return _cut(x, window)
    return apply(UNFOLD, x, window=window, stride=stride, dilation=dilation, padding=padding)
