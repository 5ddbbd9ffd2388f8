"""Convolution and its two adjoints, three ops whose derivatives are one another.

    conv          y[n, o, p] = sum_ck x[n, c, s p + d k - pad] w[o, c, k]
    conv_input    the adjoint for x: of a cotangent g like y, and w
    conv_filter   the adjoint for w: of x, and a cotangent g like y

On a CPU those of f32 in one and two dimensions are computed without windows in memory
(graph/cpu/conv.py), the others are matmuls of unfolded windows. A GPU has kernels that unfold none
(graph/cuda/passes/conv_kernels.py).
Chetlur et al. 2014, arXiv:1410.0759, for the three products.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...dims import show_shape, size_of
from ...errors import DTypeError, ShapeError
from ...numerics import DType, as_type
from ...tensor import Tensor
from .. import functions as F
from ..cpu import conv as direct
from ..flops import Shapes
from ..op import OPS, Arg, Aval, GraphOp, Sample, sample
from ..operand import as_stored, to_compute
from ..trace import apply
from .contract import (
    is_multiplied_as_stored,
    matmul_compute,
    matmul_ref,
    wide_type,
    widened_array,
)
from .windows import FOLD, UNFOLD, Pairs, out_extent, patches_of

Ints = tuple[int, ...]


# --- shapes -----------------------------------------------------------------------------------
def _wide(a: Aval, b: Aval) -> Any:
    if a.dtype is not b.dtype:
        raise DTypeError(f"operands of one type needed, got {a.type} and {b.type}")
    return wide_type(a.dtype) if is_multiplied_as_stored(a.dtype) else a.type


def _output_extents(spatial: tuple, window: tuple, stride: Ints, dilation: Ints,
                    padding: Pairs) -> tuple:
    return tuple(map(out_extent, spatial, window, stride, dilation, padding))


def _conv_shape(x: Aval, w: Aval, stride: Ints, padding: Pairs, dilation: Ints, groups: int,
                accum: DType) -> Aval:
    places = _output_extents(x.shape[2:], w.shape[2:], stride, dilation, padding)
    if x.shape[1] != w.shape[1] * groups:
        raise ShapeError(f"{x.shape[1]} channels and filters {show_shape(w.shape)} in {groups} "
                         "groups")
    return Aval((x.shape[0], w.shape[0], *places), _wide(x, w))


def _input_shape(g: Aval, w: Aval, spatial: Ints, stride: Ints, padding: Pairs, dilation: Ints,
                 groups: int, accum: DType) -> Aval:
    _check_places(g, spatial, w.shape[2:], stride, dilation, padding)
    return Aval((g.shape[0], w.shape[1] * groups, *spatial), _wide(g, w))


def _filter_shape(x: Aval, g: Aval, window: Ints, stride: Ints, padding: Pairs, dilation: Ints,
                  groups: int, accum: DType) -> Aval:
    _check_places(g, x.shape[2:], window, stride, dilation, padding)
    return Aval((g.shape[1], x.shape[1] // groups, *window), _wide(x, g))


def _check_places(g: Aval, spatial: tuple, window: tuple, stride: Ints, dilation: Ints,
                  padding: Pairs) -> None:
    want = _output_extents(spatial, window, stride, dilation, padding)
    if tuple(g.shape[2:]) != want:
        raise ShapeError(f"windows {show_shape(g.shape)} are not those of {show_shape(spatial)}")


# --- meaning ----------------------------------------------------------------------------------
def _conv_ref(x: np.ndarray, w: np.ndarray, stride: Ints, padding: Pairs, dilation: Ints,
              groups: int, accum: DType, out: np.ndarray | None = None) -> np.ndarray:
    x, w = widened_array(x), widened_array(w)
    places = _output_extents(x.shape[2:], w.shape[2:], stride, dilation, padding)
    shape = (x.shape[0], w.shape[0], *places)
    if _in_registers(x, w, w.shape, places, accum):
        out = np.empty(shape, x.dtype) if out is None else out
        direct.images(_flat(x), _by_group(w, groups), _of_groups(out, groups), *_flat_axes(
            stride, padding, dilation))
        return out
    windows = _unfolded(x, w.shape[2:], stride, padding, dilation, groups)
    matrices = w.reshape(groups, w.shape[0] // groups, windows.shape[2])
    return matmul_ref(matrices, windows, accum).reshape(shape)


def _unfolded(x: np.ndarray, window: Ints, stride: Ints, padding: Pairs, dilation: Ints,
              groups: int) -> np.ndarray:
    """[N, groups, C / groups * window, places]"""
    n, c = x.shape[:2]
    made = _patches(x, window, stride, dilation, padding)
    return made.reshape(n, groups, c // groups * prod(window), prod(made.shape[2 + len(window):]))


def _patches(x: np.ndarray, window: Ints, stride: Ints, dilation: Ints, padding: Pairs
                     ) -> np.ndarray:
    """[N, C, window, places]"""
    if _pointwise(window, stride, padding):
        return x.reshape(*x.shape[:2], *window, *x.shape[2:])
    return UNFOLD.ref(x, window=window, stride=stride, dilation=dilation, padding=padding)


def _input_ref(g: np.ndarray, w: np.ndarray, spatial: Ints, stride: Ints, padding: Pairs,
               dilation: Ints, groups: int, accum: DType, out: np.ndarray | None = None
               ) -> np.ndarray:
    g, w = widened_array(g), widened_array(w)
    n, depth, window = g.shape[0], w.shape[0] // groups, w.shape[2:]
    shape = (n, w.shape[1] * groups, *spatial)
    if _in_registers(g, w, w.shape, g.shape[2:], accum):
        out = np.empty(shape, g.dtype) if out is None else out
        direct.adjoint_images(_flat(g), _by_group(w, groups), _of_groups(out, groups), *_flat_axes(
            stride, padding, dilation))
        return out
    matrices = w.reshape(groups, depth, w.shape[1] * prod(window)).swapaxes(1, 2)
    columns = g.reshape(n, groups, depth, prod(g.shape[2:]))
    made = matmul_ref(matrices, columns, accum)
    if _pointwise(window, stride, padding):
        return made.reshape(shape)
    made = made.reshape(*shape[:2], *window, *g.shape[2:])
    return FOLD.ref(made, spatial=spatial, stride=stride, dilation=dilation, padding=padding,
                    out=out)


def _filter_ref(x: np.ndarray, g: np.ndarray, window: Ints, stride: Ints, padding: Pairs,
                dilation: Ints, groups: int, accum: DType, out: np.ndarray | None = None
                ) -> np.ndarray:
    x, g = widened_array(x), widened_array(g)
    shape = (g.shape[1], x.shape[1] // groups, *window)
    if _in_registers(x, g, shape, g.shape[2:], accum):
        made = np.empty(shape, x.dtype) if out is None else out
        if direct.filters(_flat(x), _flat(g), _by_group(made, groups), *_flat_axes(
                stride, padding, dilation)):
            return made
    windows = _unfolded(x, window, stride, padding, dilation, groups)
    columns = g.reshape(g.shape[0], groups, g.shape[1] // groups, prod(g.shape[2:]))
    each = matmul_ref(columns, windows.swapaxes(-1, -2), accum)
    return each.sum(0, dtype=each.dtype).reshape(shape)


def _pointwise(window: Ints, stride: Ints, padding: Pairs) -> bool:
    """Whether a window is one element, each once."""
    return prod(window) == prod(stride) == 1 and not any(map(any, padding))


def _in_registers(a: np.ndarray, b: np.ndarray, filters: Ints, places: Ints, accum: DType) -> bool:
    """Whether the compiled loops of graph/cpu/conv.py do it. filters: their shape"""
    work = a.shape[0] * prod(filters) * prod(places)
    return accum.name == "f32" and prod(filters[2:]) > 1 and direct.takes(a, b, work)


def _flat(x: np.ndarray) -> np.ndarray:
    """Images of one axis as those of one row."""
    return x if x.ndim == 4 else x[:, :, None]


def _of_groups(x: np.ndarray, groups: int) -> np.ndarray:
    """[N, groups, C, H, W]"""
    x = _flat(x)
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def _by_group(w: np.ndarray, groups: int) -> np.ndarray:
    """[groups, O, C, KH, KW]"""
    w = _flat(w)
    return w.reshape(groups, w.shape[0] // groups, *w.shape[1:])


def _flat_axes(stride: Ints, padding: Pairs, dilation: Ints) -> tuple[Ints, Pairs, Ints]:
    """Of images of two axes, where they have one."""
    more = 2 - len(stride)
    return (1,) * more + stride, ((0, 0),) * more + tuple(padding), (1,) * more + dilation


# --- the same in smaller ops ------------------------------------------------------------------
def _conv_expand(x: Tensor, w: Tensor, stride: Ints, padding: Pairs, dilation: Ints, groups: int,
                 accum: DType) -> Tensor:
    window = tuple(w.shape[2:])
    patches = patches_of(x, window, stride, dilation, padding)  # [N, C, *window, *places]
    places = tuple(patches.shape[2 + len(window):])
    depth, n, count = w.shape[1] * size_of(window), x.shape[0], size_of(places)
    if groups == 1:
        y = matmul_compute(F.reshape(w, (w.shape[0], depth)), F.reshape(patches, (n, depth, count)),
                           accum)
    else:
        y = matmul_compute(F.reshape(w, (groups, w.shape[0] // groups, depth)),
                           F.reshape(patches, (n, groups, depth, count)), accum)
    return F.reshape(y, (n, w.shape[0], *places))


def _input_expand(g: Tensor, w: Tensor, spatial: Ints, stride: Ints, padding: Pairs,
                  dilation: Ints, groups: int, accum: DType) -> Tensor:
    n, window, places = g.shape[0], tuple(w.shape[2:]), tuple(g.shape[2:])
    depth = w.shape[0] // groups
    filters = F.swapaxes(F.reshape(w, (groups, depth, w.shape[1] * size_of(window))), 1, 2)
    columns = F.reshape(g, (n, groups, depth, size_of(places)))
    if groups == 1:
        filters, columns = filters[0], F.reshape(g, (n, depth, size_of(places)))
    y = F.reshape(matmul_compute(filters, columns, accum),
                  (n, groups * w.shape[1], *window, *places))
    if set(window) == {1} and set(stride) == {1} and not any(map(any, padding)):
        return F.reshape(y, (n, groups * w.shape[1], *spatial))
    return apply(FOLD, y, spatial=spatial, stride=stride, dilation=dilation, padding=padding)


def _filter_expand(x: Tensor, g: Tensor, window: Ints, stride: Ints, padding: Pairs,
                   dilation: Ints, groups: int, accum: DType) -> Tensor:
    patches = patches_of(x, window, stride, dilation, padding)
    n, each, count = x.shape[0], x.shape[1] // groups, size_of(tuple(g.shape[2:]))
    lead = (n,) if groups == 1 else (n, groups)
    windows = F.reshape(patches, (*lead, each * size_of(window), count))
    columns = F.reshape(g, (*lead, g.shape[1] // groups, count))
    y = F.sum(matmul_compute(columns, F.swapaxes(windows, -1, -2), accum), axis=0)
    return F.reshape(y, (g.shape[1], each, *window))


# --- rules ------------------------------------------------------------------------------------
def _bilinear(op: str, a: Tensor, b: Tensor, **attrs: Any) -> Tensor:
    """An op on elements of a narrow type where both are such, as a cotangent is that was rounded
    behind the convolution; else in the wide type."""
    (x, i), (y, j) = as_stored(a), as_stored(b)
    if x.dtype is not y.dtype or not is_multiplied_as_stored(x.dtype):
        return apply(OPS[op], to_compute(a), to_compute(b), **attrs)
    out = apply(OPS[op], x, y, **attrs)
    return out if i * j == 1.0 else out * (i * j)


def _spatial(x: Tensor) -> Ints:
    return tuple(x.shape[2:])


def _conv_vjp(g: Tensor, y: Tensor, x: Tensor, w: Tensor, **attrs: Any) -> tuple:
    return (_bilinear("conv_input", g, w, spatial=_spatial(x), **attrs),
            _bilinear("conv_filter", x, g, window=_spatial(w), **attrs))


def _input_vjp(t: Tensor, y: Tensor, g: Tensor, w: Tensor, spatial: Ints, **attrs: Any) -> tuple:
    return (_bilinear("conv", t, w, **attrs),
            _bilinear("conv_filter", t, g, window=_spatial(w), **attrs))


def _filter_vjp(t: Tensor, y: Tensor, x: Tensor, g: Tensor, window: Ints, **attrs: Any) -> tuple:
    return (_bilinear("conv_input", g, t, spatial=_spatial(x), **attrs),
            _bilinear("conv", x, t, **attrs))


def _jvp(op: str) -> Any:
    def rule(ts: tuple, y: Tensor, a: Tensor, b: Tensor, **attrs: Any) -> Tensor | None:
        left = None if ts[0] is None else _bilinear(op, ts[0], b, **attrs)
        right = None if ts[1] is None else _bilinear(op, a, ts[1], **attrs)
        return right if left is None else left if right is None else left + right

    return rule


def _batch(op: str, filters: int) -> Any:
    """Rows of a batch are images where all have the same filters, else groups of channels.
    filters: the operand that has them, or 2 for the result."""
    def rule(size: Any, batched: tuple, *xs: Tensor, groups: int, **attrs: Any) -> tuple:
        full = [x if flag else F.broadcast_to(x, (size, *x.shape)) if i != filters else x
                for i, (x, flag) in enumerate(zip(xs, batched, strict=True))]
        if filters < 2 and not batched[filters]:
            images = [x if i == filters else F.reshape(x, (size * x.shape[1], *x.shape[2:]))
                      for i, x in enumerate(full)]
            y = apply(OPS[op], *images, groups=groups, **attrs)
            return F.reshape(y, (size, y.shape[0] // size, *y.shape[1:])), True
        joined = [F.reshape(x, (size * x.shape[1], *x.shape[2:])) if i == filters else
                  _channels(x) for i, x in enumerate(full)]
        y = apply(OPS[op], *joined, groups=groups * size, **attrs)
        if filters == 2:
            return F.reshape(y, (size, y.shape[0] // size, *y.shape[1:])), True
        return F.moveaxis(F.reshape(y, (y.shape[0], size, y.shape[1] // size, *y.shape[2:])),
                          1, 0), True

    return rule


def _channels(x: Tensor) -> Tensor:
    """[B, N, C, ...] as [N, B C, ...]"""
    x = F.moveaxis(x, 0, 1)
    return F.reshape(x, (x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:]))


def _letters(first: str, second: str, result: str) -> Any:
    """Of groups alone the channels of a shard are those of a shard of filters."""
    def axes(a: Aval, b: Aval, groups: int, **attrs: Any) -> str:
        rest = "_" * (a.ndim - 2)
        names = [first, second, result]
        if groups > 1:
            names = [t if t[0] == "n" else "__" for t in names]
            names = ["n_" if t[0] == "n" else t for t in names]
        return f"{names[0]}{rest},{names[1]}{rest}->{names[2]}{rest}"

    return axes


def _flops(images: int, filters: int) -> Any:
    """For each place of the images that convolution makes, 2 for each element of a filter. images,
    filters: which of the operands and results these are."""
    def rule(ins: Shapes, outs: Shapes, **attrs: Any) -> float:
        shapes = (*ins, *outs)
        return 2.0 * prod(shapes[images]) * prod(shapes[filters][1:])

    return rule


# --- ops --------------------------------------------------------------------------------------
def _samples(order: tuple[int, int], **extra: Any) -> tuple[Sample, ...]:
    """Of images, filters and results, the operands in this order. extra: an attribute that is the
    extents of the third behind its channels."""
    cases = (((2, 3, 5), (4, 3, 3), (2, 4, 5), (1,), ((1, 1),), (1,), 1),
             ((1, 4, 5, 6), (2, 2, 2, 3), (1, 2, 2, 3), (2, 1), ((0, 0), (1, 0)), (2, 2), 2))
    made = []
    for *shapes, stride, padding, dilation, groups in cases:
        attrs: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation,
                                 "groups": groups, "accum": F32}
        (third,) = {0, 1, 2} - set(order)
        attrs |= {name: tuple(shapes[third][2:]) for name in extra}
        made.append(sample(*(shapes[i] for i in order), **attrs))
        if groups == 1:
            args = tuple(Arg(shapes[i], "type:bf16", False) for i in order)
            made.append(Sample(args, attrs))
    return tuple(made)


F32 = as_type("f32").dtype
CONV = GraphOp(
    "conv",
    shape=_conv_shape,
    ref=_conv_ref,
    vjp=_conv_vjp,
    jvp=_jvp("conv"),
    batch=_batch("conv", 1),
    expand_gpu=_conv_expand,
    out=True,
    axes=_letters("nc", "oc", "no"),
    reduces="sum",
    drops=(0,),
    samples=_samples((0, 1)),
    flops=_flops(2, 1),
    matmul=True,
    hint="a product or sum beyond the range of the type; of an operand with inf, 0 * inf",
    doc="y[n, o, p] = sum_ck x[n, c, s p + d k - pad] w[o, c, k], in groups of channels; operands "
    "of 16 bits or fewer, and of tf32, keep their type, and the result is wide",
)

CONV_INPUT = GraphOp(
    "conv_input",
    shape=_input_shape,
    ref=_input_ref,
    vjp=_input_vjp,
    jvp=_jvp("conv_input"),
    batch=_batch("conv_input", 1),
    expand_gpu=_input_expand,
    out=True,
    axes=_letters("no", "oc", "nc"),
    reduces="sum",
    drops=(0, 1),
    samples=_samples((2, 1), spatial=True),
    flops=_flops(0, 1),
    matmul=True,
    hint="a product or sum beyond the range of the type; of an operand with inf, 0 * inf",
    doc="the adjoint of conv for its images, of a cotangent g[n, o, p] and filters w[o, c, k]",
)

CONV_FILTER = GraphOp(
    "conv_filter",
    shape=_filter_shape,
    ref=_filter_ref,
    vjp=_filter_vjp,
    jvp=_jvp("conv_filter"),
    batch=_batch("conv_filter", 2),
    expand_gpu=_filter_expand,
    out=True,
    axes=_letters("nc", "no", "oc"),
    reduces="sum",
    drops=(0,),
    samples=_samples((0, 2), window=True),
    flops=_flops(1, 2),
    matmul=True,
    hint="a product or sum beyond the range of the type; of an operand with inf, 0 * inf",
    doc="the adjoint of conv for its filters, of images x[n, c, i] and a cotangent g[n, o, p]",
)

CONVOLUTIONS = (CONV, CONV_INPUT, CONV_FILTER)

__all__ = ["CONV", "CONV_FILTER", "CONV_INPUT"]
