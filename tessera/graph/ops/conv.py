"""Convolutions as users call them, and the arguments of windows: strides, padding, dilation.

Images are [N, C, H, W], filters [O, C / groups, KH, KW]. The ops are in conv_products.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...dims import show_shape
from ...errors import ArgumentError, ShapeError
from ...tensor import Tensor, as_tensor
from .. import functions as F
from ..operand import convert, public, store, to_compute
from ..trace import apply
from .contract import matmul_operands
from .conv_products import CONV, CONV_INPUT
from .windows import Pairs


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
        return tuple(map(_same_padding, spatial, window, stride, dilation))
    items = (value,) * rank if isinstance(value, int) else value
    if isinstance(items, str) or len(items) != rank:
        raise ArgumentError(f"padding={value!r}",
                            hint=f'"same", "valid", an int, {rank} ints or (before, after) pairs')
    pairs = tuple((p, p) if isinstance(p, int) else tuple(p) for p in items)
    if any(len(p) != 2 or min(p) < 0 for p in pairs):
        raise ArgumentError(f"padding={value!r}: widths are non-negative", hint="slice to crop")
    return pairs


def _same_padding(n: Any, window: int, stride: int, dilation: int) -> tuple[int, int]:
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
    y = apply(CONV, a, b, stride=steps, padding=pads, dilation=spread, groups=groups, accum=accum)
    return store(_with_bias(y, bias), result)


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
    As matmul it computes in the accumulate type and rounds once. On a CPU images of f32 and fewer
    bits are padded once, and read from there; those of f64, and convolutions of few products, copy
    their windows: KH KW times x. So they are on a GPU, but of bf16 and f16 of 16 channels or more:
    those are read from one copy of x with the channels of a pixel together. Raises ShapeError,
    ArgumentError, DTypeError.
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
    out = apply(CONV_INPUT, a, b, spatial=spatial, stride=steps, padding=pads, dilation=spread,
                groups=groups, accum=accum)
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
