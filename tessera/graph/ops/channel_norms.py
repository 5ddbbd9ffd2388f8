"""Norms of channels: batch norm and group norm."""

from __future__ import annotations

from typing import Any

from ...dims import divide, show_shape
from ...errors import ArgumentError, ShapeError
from ...tensor import Tensor, as_tensor
from .. import functions as F
from ..operand import axis_index, convert, floating, public, store, to_compute
from ..trace import apply
from .center import CENTER
from .elementwise import rsqrt
from .norms import LAYERNORM
from .reduce import accumulate_dtype


def _of_channels(value: Any, x: Tensor, axis: int, name: str) -> Tensor:
    """A number for each channel, shaped to meet x."""
    v = convert(to_compute(as_tensor(value)), x.type)
    if tuple(v.shape) != (x.shape[axis],):
        raise ShapeError(f"{name} has shape {show_shape(v.shape)}, the channels of x need "
                         f"{show_shape((x.shape[axis],))}")
    return F.reshape(v, tuple(n if d == axis else 1 for d, n in enumerate(x.shape)))


def _affine(y: Tensor, gamma: Any, beta: Any, axis: int) -> Tensor:
    y = y if gamma is None else y * _of_channels(gamma, y, axis, "gamma")
    return y if beta is None else y + _of_channels(beta, y, axis, "beta")


@public
def batch_norm(x: Any, gamma: Any = None, beta: Any = None, *, mean: Any = None, var: Any = None,
               axis: int = 1, eps: float = 1e-5) -> Tensor:
    """y = (x - mean) / sqrt(var + eps) * gamma + beta for each channel.

    x: [N, C, ...], the channels along `axis`   gamma, beta, mean, var: [C]   y: as x
    Without mean and var they are those of x, the variance divided by their number: training. The
    function keeps nothing. Running statistics are values of yours: ts.mean(x, axes) and
    ts.var(x, axes, ddof=1), averaged, are given here as mean and var for inference.
    Ioffe and Szegedy 2015, arXiv:1502.03167. Raises ShapeError, ArgumentError.
    """
    c, numeric = floating(x)
    if c.ndim < 2:
        raise ShapeError(f"batch_norm takes [N, C, ...], got {show_shape(c.shape)}")
    if (mean is None) != (var is None):
        raise ArgumentError("batch_norm takes both mean and var, or neither of them")
    a = axis_index(axis, c.ndim)
    if mean is None:
        others = tuple(d for d in range(c.ndim) if d != a)
        centred, spread = apply(CENTER, c, axis=others, ddof=0, accum=accumulate_dtype(c.type))
    else:
        centred = c - _of_channels(mean, c, a, "mean")
        spread = _of_channels(var, c, a, "var")
    return store(_affine(centred * rsqrt(spread + eps), gamma, beta, a), numeric)


@public
def group_norm(x: Any, groups: int, gamma: Any = None, beta: Any = None, *,
               eps: float = 1e-5) -> Tensor:
    """Layer norm of each group of neighbouring channels, then gamma and beta of each channel.

    x: [N, C, ...]   groups: a divisor of C   gamma, beta: [C]   y: as x
    groups = C is instance norm. Wu and He 2018, arXiv:1803.08494. Raises ShapeError.
    """
    c, numeric = floating(x)
    whole = isinstance(groups, int) and not isinstance(groups, bool) and groups > 0
    if c.ndim < 2 or not whole or divide(c.shape[1], groups) is None:
        raise ShapeError(f"group_norm takes [N, C, ...] and a divisor of C, got "
                         f"{show_shape(c.shape)} and groups={groups!r}")
    rows = F.reshape(c, (c.shape[0], groups, -1))
    y = apply(LAYERNORM, rows, eps=float(eps), accum=accumulate_dtype(numeric))
    return store(_affine(F.reshape(y, c.shape), gamma, beta, 1), numeric)
