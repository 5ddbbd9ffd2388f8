"""Safe primitives: finite results for every finite input, whatever its scale.

softmax_safe and logsumexp_safe also give a meaning to rows of -inf (a fully masked row). The norms
divide a row by its largest magnitude before squaring: f32 holds 1e30 but not its square.
"""

from __future__ import annotations

import math
from typing import Any

from ...tensor import Tensor
from .. import functions as F
from ..operand import axis_index, floating, literal, public, scalar_line, store
from .elementwise import abs_, maximum, rsqrt, where
from .norms import norm_operand, row_mean, row_weight
from .reduce import accumulate_dtype
from .softmax import logsumexp, row_max, softmax_compute


@public
@scalar_line
def softmax_safe(x: Any, axis: int = -1) -> Tensor:
    """y_i = exp(x_i - max) / sum_j exp(x_j - max) along an axis, rounded once to x's type.

    Finite for any finite x; elements of -inf get 0, a row of -inf alone gives zeros (and a gradient
    of zero). Raises AxisError.
    """
    c, numeric = floating(x)
    a = axis_index(axis, c.ndim)
    return store(softmax_compute(c, a, True, accumulate_dtype(numeric)), numeric)


@public
def logsumexp_safe(x: Any, axis: Any = -1, keepdims: bool = False) -> Tensor:
    """`ts.logsumexp`, which is safe as it is, by the name that goes with `ts.softmax_safe`."""
    return logsumexp(x, axis, keepdims)


def _row_scale(x: Tensor, eps: float) -> Tensor:
    """A divisor per row under which squares neither overflow nor vanish: max |x|, at least
    sqrt(eps), below which x does not count; 1 for a row of zeros. [..., 1]

    The results do not depend on it, so it has no gradient.
    """
    a = maximum(row_max(abs_(x)), math.sqrt(eps))
    return F.stop_gradient(where(F.equal(a, 0.0), literal(1.0, a), a))


def _unit_rows(z: Tensor, scale: Tensor, eps: float, numeric: Any) -> Tensor:
    """x / sqrt(mean x^2 + eps) for z = x / a: z / sqrt(mean z^2 + eps / a^2)."""
    root = math.sqrt(eps) / scale  # <= 1
    mean = row_mean(z * z, accumulate_dtype(numeric)) + root * root
    return z * rsqrt(where(F.equal(mean, 0.0), literal(1.0, mean), mean))


@public
def rmsnorm_safe(x: Any, weight: Any = None, *, eps: float = 1e-6) -> Tensor:
    """y_i = x_i / sqrt(mean_j x_j^2 + eps) * weight_i along the last axis, for x of any scale.

    x: [..., N]   weight: [N]   y: shape and type of x
    Squares are taken of x / max|x|, so 1e30 and 1e-30 come out right in f32; zeros give zeros.
    Accumulates in x's accumulate type, rounds once. Raises ShapeError when weight's extent is
    not N.
    """
    c, numeric = norm_operand(x)
    if c.shape[-1] == 0:
        return store(c, numeric)
    scale = _row_scale(c, float(eps))
    y = _unit_rows(c / scale, scale, float(eps), numeric)
    return store(y if weight is None else y * row_weight(weight, c, "weight"), numeric)


@public
def layernorm_safe(x: Any, gamma: Any = None, beta: Any = None, *, eps: float = 1e-5) -> Tensor:
    """y_i = (x_i - mean) / sqrt(var + eps) * gamma_i + beta_i along the last axis, for x of any
    scale.

    x: [..., N]   gamma, beta: [N]   y: shape and type of x
    Distances from the row's largest element are exact zeros on a constant row, which gives zeros
    and no NaN; they are scaled before the mean and, in a second pass, the variance are taken.
    Accumulates in x's accumulate type, rounds once. Raises ShapeError.
    """
    c, numeric = norm_operand(x)
    if c.shape[-1] == 0:
        return store(c, numeric)
    quarter = c * 0.25  # the largest distance is twice the largest number
    y = quarter - F.stop_gradient(row_max(quarter))
    scale = _row_scale(y, float(eps) / 16.0)
    z = y / scale
    y = _unit_rows(z - row_mean(z, accumulate_dtype(numeric)), scale, float(eps) / 16.0, numeric)
    y = y if gamma is None else y * row_weight(gamma, c, "gamma")
    return store(y if beta is None else y + row_weight(beta, c, "beta"), numeric)
