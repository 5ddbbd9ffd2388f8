"""Reductions of the windows of images, and their adjoints: what pooling is made of.

    window_max   y[p] = max_i x[s p + d i - b]        b: the padding in front, which counts nothing
    window_sum   y[p] = sum_i x[s p + d i - b]

Each is an op for the sake of its gradient, which a GPU computes where images lie, with no window in
memory. Else it runs in the smaller ops of `expand`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...dims import size_of
from ...errors import ShapeError
from ...numerics import DType, as_type
from ...tensor import Tensor
from .. import functions as F
from ..cpu import windows as compiled_windows
from ..op import OPS, Aval, GraphOp, sample
from ..operand import literal
from ..trace import apply
from .reduce import SUM, chosen, restore_axes, sum_ref
from .shape import PAD
from .windows import FOLD, Pairs, fold_ref, out_extent, patches_of, unfold_ref, windows_side_by_side


def _shape(x: Aval, window: tuple, stride: tuple, dilation: tuple, padding: Pairs,
           **attrs: Any) -> Aval:
    lead = len(x.shape) - len(window)
    places = (out_extent(n, *each) for n, *each in
              zip(x.shape[lead:], window, stride, dilation, padding, strict=True))
    return Aval((*x.shape[:lead], *places), x.type)


def _max_vjp_shape(g: Aval, x: Aval, **attrs: Any) -> Aval:
    _need_places(g, _shape(x, **attrs))
    return x


def _spread_shape(g: Aval, spatial: tuple, **attrs: Any) -> Aval:
    out = Aval((*g.shape[:g.ndim - len(spatial)], *spatial), g.type)
    _need_places(g, _shape(out, **attrs))
    return out


def _need_places(g: Aval, want: Aval) -> None:
    if g.shape != want.shape:
        raise ShapeError(f"a cotangent {g} of {want}")


# --- meanings -----------------------------------------------------------------------------------
def _windows(x: np.ndarray, fill: Any, window: tuple, stride: tuple, dilation: tuple,
             padding: Pairs) -> np.ndarray:
    """[lead, window as one axis, places]"""
    lead, rank = x.shape[:x.ndim - len(window)], len(window)
    if fill and any(map(any, padding)):
        inner = [slice(before, before + n) for (before, _), n in
                 zip(padding, x.shape[len(lead):], strict=True)]
        sides = (n + before + after for n, (before, after) in
                 zip(x.shape[len(lead):], padding, strict=True))
        full = np.full((*lead, *sides), fill, x.dtype)
        place: Any = (..., *inner)
        full[place] = x
        x, padding = full, ((0, 0),) * rank
    y = unfold_ref(x, window, stride, dilation, padding)
    return y.reshape(*lead, size_of(window), *y.shape[len(lead) + rank:])


def _least(dtype: np.dtype) -> Any:
    return -np.inf if dtype.kind == "f" else np.iinfo(dtype).min


def _max_ref(x: np.ndarray, window: tuple, **attrs: Any) -> np.ndarray:
    return np.max(_windows(x, _least(x.dtype), window, **attrs), axis=x.ndim - len(window))


def _max_vjp_ref(g: np.ndarray, x: np.ndarray, window: tuple, stride: tuple, dilation: tuple,
                 padding: Pairs, out: np.ndarray | None = None) -> np.ndarray:
    attrs = {"stride": stride, "dilation": dilation, "padding": padding}
    dx = np.empty(x.shape, x.dtype) if out is None else out
    if compiled_windows.takes(x, window) and dx.flags.c_contiguous:
        compiled_windows.max_gradient(g, x, dx, window, stride, dilation,
                                      tuple(before for before, _ in padding))
        return dx
    axis = x.ndim - len(window)
    windows = _windows(x, _least(x.dtype), window, **attrs)
    mask = windows == np.max(windows, axis=axis, keepdims=True)
    count = np.sum(mask, axis=axis, keepdims=True).astype(x.dtype)
    parts = np.where(mask, np.expand_dims(g, axis) / count, x.dtype.type(0) / count)
    dx[...] = _sum_windows(parts, x.shape[axis:], window, **attrs)
    return dx


def _sum_windows(parts: np.ndarray, spatial: tuple, window: tuple, **attrs: Any) -> np.ndarray:
    lead = parts.ndim - len(window) - 1
    return fold_ref(parts.reshape(*parts.shape[:lead], *window, *parts.shape[lead + 1:]),
                    spatial=spatial, **attrs)


def _sum_ref(x: np.ndarray, window: tuple, accum: DType, **attrs: Any) -> np.ndarray:
    return sum_ref(_windows(x, 0, window, **attrs), (x.ndim - len(window),), False, accum)


def _spread_ref(g: np.ndarray, spatial: tuple, window: tuple, **attrs: Any) -> np.ndarray:
    axis = g.ndim - len(window)
    full = (*g.shape[:axis], size_of(window), *g.shape[axis:])
    return _sum_windows(np.broadcast_to(np.expand_dims(g, axis), full), spatial, window, **attrs)


# --- in smaller ops -----------------------------------------------------------------------------
def _unfolded(x: Tensor, fill: Any, window: tuple, stride: tuple, dilation: tuple,
              padding: Pairs) -> Tensor:
    """[lead, window as one axis, places]"""
    lead, rank = x.ndim - len(window), len(window)
    if any(map(any, padding)):
        before, after = zip(*((0, 0),) * lead, *padding, strict=True)
        x = apply(PAD, x, literal(fill, x), before=before, after=after, holes=(0,) * x.ndim)
    y = patches_of(x, window, stride, dilation, ((0, 0),) * rank)
    return F.reshape(y, (*x.shape[:lead], size_of(window), *y.shape[lead + rank:]))


def _added(parts: Tensor, spatial: tuple, window: tuple, stride: tuple, dilation: tuple,
           padding: Pairs) -> Tensor:
    """The adjoint of _unfolded."""
    lead, rank = parts.ndim - len(window) - 1, len(window)
    places = parts.shape[lead + 1:]
    cut = F.reshape(parts, (*parts.shape[:lead], *window, *places))
    if not windows_side_by_side(spatial, window, stride, dilation, padding):
        return apply(FOLD, cut, spatial=spatial, stride=stride, dilation=dilation, padding=padding)
    turns = [a for i in range(lead, lead + rank) for a in (i + rank, i)]
    return F.reshape(F.transpose(cut, (*range(lead), *turns)), (*parts.shape[:lead], *spatial))


def _max_steps(x: Tensor, window: tuple, **attrs: Any) -> Tensor:
    return F.max(_unfolded(x, _fill(x), window, **attrs), axis=x.ndim - len(window))


def _fill(x: Tensor) -> Any:
    return float("-inf") if x.dtype.kind == "float" else int(x.dtype.min)


def _max_vjp_steps(g: Tensor, x: Tensor, window: tuple, **attrs: Any) -> Tensor:
    axis = x.ndim - len(window)
    parts = _unfolded(x, _fill(x), window, **attrs)
    y = F.max(parts, axis=axis)  # which the function itself has
    shares = chosen(restore_axes(g, parts, (axis,), False), y, parts, (axis,), False)
    return _added(shares, tuple(x.shape[axis:]), window, **attrs)


def _sum_steps(x: Tensor, window: tuple, accum: DType, **attrs: Any) -> Tensor:
    return apply(SUM, _unfolded(x, 0.0, window, **attrs), axis=(x.ndim - len(window),),
                 keepdims=False, accum=accum)


def _spread_steps(g: Tensor, spatial: tuple, window: tuple, **attrs: Any) -> Tensor:
    lead, places = g.shape[:g.ndim - len(window)], g.shape[g.ndim - len(window):]
    parts = F.broadcast_to(F.reshape(g, (*lead, 1, *places)), (*lead, size_of(window), *places))
    return _added(parts, spatial, window, **attrs)


# --- records ------------------------------------------------------------------------------------
def _batch(name: str) -> Any:
    def rule(size: Any, batched: tuple, *xs: Tensor, **attrs: Any) -> tuple:
        full = (x if b else F.broadcast_to(x, (size, *x.shape))
                for x, b in zip(xs, batched, strict=True))
        return apply(OPS[name], *full, **attrs), True

    return rule


def _axes(operands: int) -> Any:
    def rule(x: Aval, *rest: Any, **attrs: Any) -> str:
        names = "abcdefgh"[:len(x.shape) - len(attrs["stride"])] + "_" * len(attrs["stride"])
        return ",".join([names] * operands) + f"->{names}"

    return rule


ONE: dict[str, Any] = {"window": (3,), "stride": (1,), "dilation": (1,), "padding": ((1, 1),)}
APART: dict[str, Any] = {"window": (2, 3), "stride": (2, 2), "dilation": (1, 2),
                         "padding": ((0, 1), (1, 0))}
BESIDE: dict[str, Any] = {"window": (2, 2), "stride": (2, 2), "dilation": (1, 1),
                          "padding": ((0, 0), (0, 0))}
ACCUM = as_type("f32").dtype

WINDOW_MAX = GraphOp(
    "window_max",
    shape=_shape,
    ref=_max_ref,
    vjp=lambda g, y, x, **a: (apply(WINDOW_MAX_VJP, g, x, **a),),
    expand=_max_steps,
    batch=_batch("window_max"),
    axes=_axes(1),
    drops=(0,),
    smooth=False,
    samples=(sample(((2, 5), "distinct"), **ONE), sample(((2, 4, 6), "distinct"), **APART),
             sample(((1, 2, 4, 6), "distinct"), **BESIDE)),
    doc="the largest element of each window of the last axes; ties share the gradient",
)

WINDOW_MAX_VJP = GraphOp(
    "window_max_vjp",
    shape=_max_vjp_shape,
    ref=_max_vjp_ref,
    out=True,
    derives=_max_vjp_steps,
    expand_gpu=_max_vjp_steps,
    batch=_batch("window_max_vjp"),
    axes=_axes(2),
    drops=(0, 1),
    smooth=False,
    samples=(sample((2, 5), ((2, 5), "distinct"), **ONE),
             sample((1, 2, 2, 3), ((1, 2, 4, 6), "distinct"), **BESIDE)),
    doc="the cotangent of x from that of y, window_max of x: elements that tie share it",
)

WINDOW_SUM = GraphOp(
    "window_sum",
    shape=_shape,
    ref=_sum_ref,
    vjp=lambda g, y, x, window, accum, **a: (
        apply(WINDOW_SPREAD, g, spatial=tuple(x.shape[-len(window):]), window=window, **a),),
    expand=_sum_steps,
    batch=_batch("window_sum"),
    axes=_axes(1),
    drops=(0,),
    samples=(sample((2, 5), accum=ACCUM, **ONE), sample((2, 4, 6), accum=ACCUM, **APART),
             sample((1, 2, 4, 6), accum=ACCUM, **BESIDE)),
    doc="the sum of each window of the last axes, in the accumulate type",
)

WINDOW_SPREAD = GraphOp(
    "window_spread",
    shape=_spread_shape,
    ref=_spread_ref,
    expand=_spread_steps,
    batch=_batch("window_spread"),
    axes=_axes(1),
    drops=(0,),
    samples=(sample((2, 5), spatial=(5,), **ONE), sample((2, 2, 2), spatial=(4, 6), **APART),
             sample((1, 2, 2, 3), spatial=(4, 6), **BESIDE)),
    doc="each element added to all of its window: the adjoint of window_sum",
)
