"""Convolution and pooling over windows: `unfold` gathers windows, and a matmul does the rest.

`unfold` and `fold` are linear and each other's adjoint, so that convolution, its transpose and
the derivatives of both are these two and matmul. Images are [N, C, H, W], filters
[O, C / groups, KH, KW].
Dumoulin and Visin 2016, arXiv:1603.07285, for the arithmetic of extents.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ...dims import show_shape, size_of
from ...errors import ArgumentError, ShapeError
from ...tensor import Tensor, as_tensor
from .. import flops
from .. import functions as F
from ..element import Element, places
from ..op import Aval, GraphOp, sample
from ..operand import convert, public, store, to_compute
from ..trace import apply
from .contract import matmul_compute, matmul_operands

Pairs = tuple[tuple[int, int], ...]


# --- windows ----------------------------------------------------------------------------------
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


def _unfold_ref(x: np.ndarray, window: tuple, stride: tuple, dilation: tuple,
                padding: Pairs) -> np.ndarray:
    rank = len(window)
    lead = x.ndim - rank
    padded = np.pad(x, [(0, 0)] * lead + list(padding)) if any(map(any, padding)) else x
    out = tuple(
        out_extent(n, *each)
        for n, *each in zip(x.shape[lead:], window, stride, dilation, padding, strict=True)
    )
    steps = padded.strides[lead:]
    strides = (
        *padded.strides[:lead],
        *(s * d for s, d in zip(steps, dilation, strict=True)),
        *(s * t for s, t in zip(steps, stride, strict=True)),
    )
    shape = (*x.shape[:lead], *window, *out)
    return np.lib.stride_tricks.as_strided(padded, shape, strides, writeable=False).copy()


def _fold_shape(x: Aval, spatial: tuple, stride: tuple, dilation: tuple, padding: Pairs) -> Aval:
    rank = len(spatial)
    lead = len(x.shape) - 2 * rank
    window, out = x.shape[lead:lead + rank], x.shape[lead + rank:]
    for n, k, s, d, p, have in zip(spatial, window, stride, dilation, padding, out, strict=True):
        if out_extent(n, k, s, d, p) != have:
            raise ShapeError(f"windows {show_shape(x.shape)} are not those of "
                             f"{show_shape(spatial)}")
    return Aval((*x.shape[:lead], *spatial), x.type)


def _fold_ref(x: np.ndarray, spatial: tuple, stride: tuple, dilation: tuple,
              padding: Pairs) -> np.ndarray:
    """One strided addition for each place of the window."""
    rank = len(spatial)
    lead = x.ndim - 2 * rank
    window, out = x.shape[lead:lead + rank], x.shape[lead + rank:]
    full = [n + a + b for n, (a, b) in zip(spatial, padding, strict=True)]
    total = np.zeros((*x.shape[:lead], *full), x.dtype)
    for place in itertools.product(*map(range, window)):
        where: Any = (..., *(
            slice(i * d, i * d + s * (m - 1) + 1, s)
            for i, d, s, m in zip(place, dilation, stride, out, strict=True)
        ))
        total[where] += x[(slice(None),) * lead + place]
    inner: Any = (..., *(slice(a, a + n) for n, (a, _) in zip(spatial, padding, strict=True)))
    return np.ascontiguousarray(total[inner])


def _lead_axes(lead: int, rank: int, before: int) -> str:
    names = "abcdefghijklmnopqrstuvwxyz"[:lead]
    return f"{names}{'_' * (before * rank)}->{names}{'_' * ((3 - before) * rank)}"


def _unfold_element(x: Aval, window: tuple, stride: tuple, dilation: tuple,
                    padding: Pairs) -> Element:
    rank = len(window)
    lead = x.ndim - rank
    at = [f"o{lead + rank + i} * {s} + o{lead + i} * {d} - {before}" for i, (s, d, (before, _)) in
          enumerate(zip(stride, dilation, padding, strict=True))]
    return Element(f"x0[{places([*range(lead), *at])}]")


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
    return Element(f"x0[{places([*range(lead), *window, *at])}]", over=x.shape[lead:lead + rank])


UNFOLD = GraphOp(
    "unfold",
    shape=_unfold_shape,
    ref=_unfold_ref,
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
    doc="windows of the last axes: [lead, spatial] -> [lead, window, places]",
)

FOLD = GraphOp(
    "fold",
    shape=_fold_shape,
    ref=_fold_ref,
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
    doc="windows added up where they overlap: the adjoint of unfold",
)


# --- arguments --------------------------------------------------------------------------------
def per_axis(value: Any, rank: int, what: str) -> tuple[int, ...]:
    items = tuple(value) if isinstance(value, tuple | list) else (value,) * rank
    whole = all(isinstance(v, int | np.integer) and not isinstance(v, bool) for v in items)
    if len(items) != rank or not whole or any(v < 1 for v in items):
        raise ArgumentError(f"{what}={value!r}",
                            hint=f"a positive integer, or {rank} of them, one per spatial axis")
    return tuple(int(v) for v in items)


def padding_pairs(value: Any, spatial: tuple, window: tuple, stride: tuple,
                  dilation: tuple) -> Pairs:
    """"valid", "same" (out = ceil(n / stride), the odd element behind), an int, or per axis an int
    or a (before, after) pair."""
    rank = len(window)
    if value == "valid":
        return ((0, 0),) * rank
    if value == "same":
        return tuple(map(_same, spatial, window, stride, dilation))
    items = (value,) * rank if isinstance(value, int) else value
    if isinstance(items, str) or len(items) != rank:
        raise ArgumentError(f"padding={value!r}",
                            hint=f'"same", "valid", an int, {rank} ints or (before, after) pairs')
    pairs = tuple((p, p) if isinstance(p, int) else tuple(p) for p in items)
    if any(len(p) != 2 or min(p) < 0 for p in pairs):
        raise ArgumentError(f"padding={value!r}: widths are non-negative", hint="slice to crop")
    return pairs


def _same(n: Any, window: int, stride: int, dilation: int) -> tuple[int, int]:
    span = dilation * (window - 1) + 1
    total = span - 1 if stride == 1 else max((-(-n // stride) - 1) * stride + span - n, 0)
    return total // 2, total - total // 2


def _check_conv(x: Tensor, w: Tensor, rank: int, groups: int, transposed: bool = False) -> None:
    axes = ("N", "C", "D", "H", "W")
    layout = "[N, C, " + ", ".join(axes[-rank:]) + "]"
    if x.ndim != rank + 2 or w.ndim != rank + 2:
        raise ShapeError(
            f"a {rank}-D convolution takes images {layout} and filters of {rank + 2} axes, got "
            f"{show_shape(x.shape)} and {show_shape(w.shape)}",
            hint="one image or channel needs its axis of extent 1: x[None]",
        )
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise ArgumentError(f"groups={groups!r} is not a positive number")
    given, wanted = (w.shape[0], x.shape[1]) if transposed else (w.shape[1] * groups, x.shape[1])
    if given != wanted:
        raise ShapeError(
            f"the image has {wanted} channels, the filters {show_shape(w.shape)} take {given}"
            + (f" in {groups} groups" if groups > 1 else ""),
            hint="filters are [C, O / groups, *window]" if transposed else
            "filters are [O, C / groups, *window]",
        )
    split = (w.shape[0],)
    if any(isinstance(n, int) and n % groups for n in split):
        raise ShapeError(f"{split[0]} {'channels' if transposed else 'filters'} do not split into "
                         f"{groups} groups")


def _check_bias(bias: Any, channels: Any) -> None:
    shape = tuple(as_tensor(bias).shape)
    if shape != (channels,):
        raise ShapeError(f"the bias has shape {show_shape(shape)}, one number for each of the "
                         f"{channels} filters is needed")


# --- convolution ------------------------------------------------------------------------------
def _conv(x: Any, w: Any, bias: Any, rank: int, stride: Any, padding: Any, dilation: Any,
          groups: int) -> Tensor:
    a, b, result, accum = matmul_operands(x, w)
    _check_conv(a, b, rank, groups)
    window, spatial = tuple(b.shape[2:]), tuple(a.shape[2:])
    steps = per_axis(stride, rank, "stride")
    spread = per_axis(dilation, rank, "dilation")
    pads = padding_pairs(padding, spatial, window, steps, spread)
    patches = patches_of(a, window, steps, spread, pads)  # [N, C, *window, *places]
    places = tuple(patches.shape[2 + rank:])
    depth = b.shape[1] * size_of(window)
    n, filters, each = a.shape[0], b.shape[0], b.shape[0] // groups
    count = size_of(places)
    if groups == 1:
        columns = F.reshape(patches, (n, depth, count))
        y = matmul_compute(F.reshape(b, (filters, depth)), columns, accum)
    else:
        columns = F.reshape(patches, (n, groups, depth, count))
        y = matmul_compute(F.reshape(b, (groups, each, depth)), columns, accum)
    y = F.reshape(y, (n, filters, *places))
    return store(_with_bias(y, bias), result)


def patches_of(x: Tensor, window: tuple, stride: tuple, dilation: tuple, padding: Pairs) -> Tensor:
    if set(window) == {1} and set(stride) == {1} and not any(map(any, padding)):
        lead = x.ndim - len(window)  # each element is its own window
        return F.reshape(x, (*x.shape[:lead], *window, *x.shape[lead:]))
    return apply(UNFOLD, x, window=window, stride=stride, dilation=dilation, padding=padding)


def _with_bias(y: Tensor, bias: Any) -> Tensor:
    if bias is None:
        return y
    _check_bias(bias, y.shape[1])
    b = convert(to_compute(as_tensor(bias)), y.type)
    return y + F.reshape(b, (b.shape[0],) + (1,) * (y.ndim - 2))


@public
def conv2d(x: Any, w: Any, bias: Any = None, *, stride: Any = 1, padding: Any = 0,
           dilation: Any = 1, groups: int = 1) -> Tensor:
    """y[n, o, i] = sum_ck x[n, c, stride i + dilation k - pad] w[o, c, k] + bias[o], in 2-D.

    x: [N, C, H, W]   w: [O, C / groups, KH, KW]   bias: [O]   y: [N, O, OH, OW]
    stride, dilation: an int or one per axis   padding: those, (before, after) pairs, "same" (with
    OH = ceil(H / stride)) or "valid"
    As matmul it computes in the accumulate type and rounds once. The windows are copied: the memory
    is KH KW times x. Raises ShapeError, ArgumentError, DTypeError.
    """
    return _conv(x, w, bias, 2, stride, padding, dilation, groups)


@public
def conv1d(x: Any, w: Any, bias: Any = None, *, stride: Any = 1, padding: Any = 0,
           dilation: Any = 1, groups: int = 1) -> Tensor:
    """conv2d along one axis. x: [N, C, L]   w: [O, C / groups, K]   y: [N, O, OL]"""
    return _conv(x, w, bias, 1, stride, padding, dilation, groups)


@public
def conv_transpose2d(x: Any, w: Any, bias: Any = None, *, stride: Any = 1, padding: Any = 0,
                     output_padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Tensor:
    """The adjoint of conv2d with respect to its image, plus a bias.

    x: [N, C, H, W]   w: [C, O / groups, KH, KW]   bias: [O]
    y: [N, O, OH, OW] with OH = (H - 1) stride - 2 padding + dilation (KH - 1) + 1 + output_padding
    Raises ShapeError, ArgumentError, DTypeError.
    """
    a, b, result, accum = matmul_operands(x, w)
    _check_conv(a, b, 2, groups, transposed=True)
    window, places = tuple(b.shape[2:]), tuple(a.shape[2:])
    steps, spread = per_axis(stride, 2, "stride"), per_axis(dilation, 2, "dilation")
    pads = padding_pairs(padding, places, window, steps, spread)
    spatial = _transposed_extents(places, window, steps, spread, pads, output_padding)
    n, each = a.shape[0], b.shape[1]
    depth = a.shape[1] // groups
    filters = F.reshape(b, (groups, depth, each * size_of(window)))
    columns = F.reshape(a, (n, groups, depth, size_of(places)))
    y = matmul_compute(F.swapaxes(filters, 1, 2), columns, accum)
    y = F.reshape(y, (n, groups * each, *window, *places))
    out = apply(FOLD, y, spatial=spatial, stride=steps, dilation=spread, padding=pads)
    return store(_with_bias(out, bias), result)


def _transposed_extents(places: tuple, window: tuple, stride: tuple, dilation: tuple,
                        pads: Pairs, extra: Any) -> tuple:
    more = (extra, extra) if isinstance(extra, int) else tuple(extra)
    if len(more) != 2 or any(not 0 <= e < s for e, s in zip(more, stride, strict=True)):
        raise ArgumentError(f"output_padding={extra!r} must be below the stride {stride}")
    return tuple(
        (m - 1) * s + d * (k - 1) + 1 - p[0] - p[1] + e
        for m, k, s, d, p, e in zip(places, window, stride, dilation, pads, more, strict=True)
    )
