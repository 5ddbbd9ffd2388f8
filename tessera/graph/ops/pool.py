"""Pooling: the largest element or the mean of each window of an image."""

from __future__ import annotations

from math import prod
from typing import Any

from ...dims import show_shape
from ...errors import ArgumentError, DTypeError, ShapeError
from ...tensor import Tensor, as_tensor
from .. import functions as F
from ..operand import literal, need_float, promote, public, store, to_compute
from ..trace import apply
from .conv import padding_pairs, per_axis
from .reduce import accumulate_dtype
from .shape import PAD
from .window_reductions import WINDOW_MAX, WINDOW_SUM
from .windows import Pairs


def _overhang(n: Any, window: int, stride: int, dilation: int, pad: tuple[int, int]) -> int:
    """Elements behind the padding that the last window reaches when windows are counted upwards.
    A window that would begin in the padding behind is not counted (PyTorch's rule)."""
    if not isinstance(n, int):
        raise ShapeError(f"ceil_mode needs a known extent, got {n}")
    span = dilation * (window - 1) + 1
    count = -(-(n + sum(pad) - span) // stride) + 1
    count -= (count - 1) * stride >= n + pad[0]
    return max(0, (count - 1) * stride + span - n - sum(pad))


class _Windows:
    """The arguments of a pooling, checked."""

    def __init__(self, x: Tensor, window: Any, stride: Any, padding: Any, dilation: Any,
                 ceil_mode: bool):
        if x.ndim != 4:
            raise ShapeError(f"pooling takes images [N, C, H, W], got {show_shape(x.shape)}")
        self.size = per_axis(window, 2, "window")
        self.steps = self.size if stride is None else per_axis(stride, 2, "stride")
        self.spread = per_axis(dilation, 2, "dilation")
        spatial = tuple(x.shape[2:])
        self.pads = padding_pairs(padding, spatial, self.size, self.steps, self.spread)
        if any(max(p) >= k for p, k in zip(self.pads, self.size, strict=True)):
            raise ArgumentError(f"padding {self.pads} leaves windows {self.size} without an "
                                "element")
        self.extra: Pairs = ((0, 0), (0, 0))
        if ceil_mode:
            self.extra = tuple(
                (0, _overhang(*each)) for each in
                zip(spatial, self.size, self.steps, self.spread, self.pads, strict=True))

    @property
    def whole(self) -> dict[str, Any]:
        """Of the windows of images with all that surrounds them."""
        pads = tuple((a, b + extra) for (a, b), (_, extra) in
                     zip(self.pads, self.extra, strict=True))
        return {"window": self.size, "stride": self.steps, "dilation": self.spread,
                "padding": pads}


@public
def max_pool2d(x: Any, window: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
               ceil_mode: bool = False) -> Tensor:
    """The largest element of each window; stride is the window when None. NaN propagates.

    x: [N, C, H, W] floats or integers   y: [N, C, OH, OW], x's type
    dilation: distance of a window's elements   ceil_mode: a last window may reach beyond the edge,
    if it begins within   Elements that tie share the gradient. torch.nn.functional.max_pool2d.
    """
    x = as_tensor(x)
    if x.dtype.kind == "bool":
        raise DTypeError("max_pool2d of bools", hint="ts.cast(x, ts.int8)")
    (c,), numeric = promote(x)
    w = _Windows(c, window, stride, padding, dilation, ceil_mode)
    return store(apply(WINDOW_MAX, c, **w.whole), numeric)


@public
def avg_pool2d(x: Any, window: Any, stride: Any = None, padding: Any = 0,
               ceil_mode: bool = False, count_include_pad: bool = True) -> Tensor:
    """The mean of each window, padding counted as zeros; stride is the window when None.

    x: [N, C, H, W] floats   y: [N, C, OH, OW]
    count_include_pad=False: the mean of the elements that are in x   ceil_mode: a last window may
    reach beyond the edge, if it begins within; what lies behind the padding is never counted
    torch.nn.functional.avg_pool2d.
    """
    x = as_tensor(x)
    need_float(x, "avg_pool2d")
    c = to_compute(x)
    w = _Windows(c, window, stride, padding, 1, ceil_mode)
    accum = accumulate_dtype(c.type)
    total = apply(WINDOW_SUM, c, accum=accum, **w.whole)
    if count_include_pad and not any(map(any, w.extra)):
        return store(total / prod(w.size), x.type)
    ones = F.ones((1, 1, *c.shape[2:]), c.type)
    if count_include_pad:
        before, after = zip((0, 0), (0, 0), *w.pads, strict=True)
        ones = apply(PAD, ones, literal(1.0, ones), before=before, after=after, holes=(0,) * 4)
        w.pads = ((0, 0), (0, 0))
    return store(total / apply(WINDOW_SUM, ones, accum=accum, **w.whole), x.type)
