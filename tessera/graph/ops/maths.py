"""Elementwise functions beyond arithmetic: logarithms and powers of other bases, hypot, comparisons
with a tolerance, replacements of what is not finite."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...dims import show_shape
from ...errors import DTypeError, ShapeError
from ...tensor import Tensor, as_tensor
from .. import functions as F
from ..operand import (
    axis_index,
    floating,
    literal,
    need_float,
    promote,
    public,
    store,
    to_compute,
)
from .elementwise import abs_, equal, sqrt, where
from .elementwise_record import elementwise, public_binary, public_unary

LOG2 = elementwise("log2", np.log2, "log2({0})",
                   lambda y, x: (lambda: (1.0 / math.log(2)) / x,), draw="positive")
LOG10 = elementwise("log10", np.log10, "log10({0})",
                    lambda y, x: (lambda: (1.0 / math.log(10)) / x,), draw="positive")
EXP2 = elementwise("exp2", np.exp2, "exp2({0})", lambda y, x: (lambda: math.log(2) * y,))


def _hypot_expand(a: Tensor, b: Tensor) -> Tensor:
    """m sqrt(1 + (n / m)^2) for the larger m and the smaller n: no square overflows."""
    m, n = F.maximum(abs_(a), abs_(b)), F.minimum(abs_(a), abs_(b))
    zero = equal(m, 0.0)
    q = n / where(zero, literal(1.0, m), m)
    y = m * sqrt(1.0 + q * q)
    infinite = F.logical_or(F.isinf(a), F.isinf(b))
    return where(infinite, literal(math.inf, m), y)


def _direction(a: Tensor, y: Tensor) -> Tensor:
    """a / y, and 0 where both are 0: the slope of least length of a cone's tip."""
    zero = equal(y, 0.0)
    return where(zero, literal(0.0, y), a / where(zero, literal(1.0, y), y))


HYPOT = elementwise(
    "hypot", np.hypot, None,
    lambda y, a, b: (lambda: _direction(a, y), lambda: _direction(b, y)), arity=2,
    expand=_hypot_expand, doc="sqrt(a^2 + b^2)",
)

log2 = public_unary("log2", LOG2, "the logarithm of base 2")
log10 = public_unary("log10", LOG10, "the logarithm of base 10")
exp2 = public_unary("exp2", EXP2, "2**x")
hypot = public_binary("hypot", HYPOT, "sqrt(a^2 + b^2) without overflow; the gradient at 0 is 0",
                       to_float=True)


@public
def reciprocal(x: Any) -> Tensor:
    """1 / x, elementwise. Integers become f32."""
    c, numeric = floating(x)
    return store(1.0 / c, numeric)


@public
def lerp(a: Any, b: Any, weight: Any) -> Tensor:
    """a + weight (b - a), elementwise with broadcasting: exactly a for weight 0 and b for 1."""
    (x, y, w), numeric = promote(a, b, weight)
    need_float(x, "lerp")
    near = F.less(abs_(w), 0.5)
    return store(where(near, x + w * (y - x), y - (1.0 - w) * (y - x)), numeric)


@public
def nan_to_num(x: Any, nan: float = 0.0, posinf: float | None = None,
               neginf: float | None = None) -> Tensor:
    """x with NaN and infinities replaced: by 0 and the largest and smallest finite values of x's
    type, unless others are given. The gradient is 0 where something was replaced."""
    x = as_tensor(x)
    if x.dtype.kind != "float":
        return x
    c = to_compute(x)
    high = float(x.dtype.max) if posinf is None else posinf
    low = float(x.dtype.min) if neginf is None else neginf
    out = where(F.isnan(c), literal(nan, c), c)
    out = where(equal(c, math.inf), literal(high, c), out)
    return store(where(equal(c, -math.inf), literal(low, c), out), x.type)


@public
def isclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8,
            equal_nan: bool = False) -> Tensor:
    """|a - b| <= atol + rtol |b|, elementwise with broadcasting; infinities if they are equal.

    equal_nan: whether NaN is close to NaN   y: bool_   np.isclose
    """
    (x, y), _ = promote(a, b)
    if x.dtype.kind != "float":
        x, y = (floating(v)[0] if v.dtype.bits < 32 else F.cast(v, "f64") for v in (x, y))
    within = F.less_equal(abs_(x - y), atol + rtol * abs_(y))
    finite = F.isfinite(y)
    out = F.logical_or(F.logical_and(within, finite), equal(x, y))
    if not equal_nan:
        return out
    both = F.logical_and(F.isnan(x), F.isnan(y))
    return F.logical_or(out, both)


@public
def allclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8,
             equal_nan: bool = False) -> Tensor:
    """Whether all elements are close: see `ts.isclose`. A bool_ scalar."""
    return F.all(isclose(a, b, rtol, atol, equal_nan))


@public
def cross(a: Any, b: Any, axis: int = -1) -> Tensor:
    """The cross product of vectors of three elements along an axis, broadcast: np.cross."""
    (x, y), numeric = promote(a, b)
    if numeric.dtype.kind == "bool":
        raise DTypeError("a cross product of bools", hint="cast to an integer type first")
    left, right = _three(x, axis), _three(y, axis)
    parts = [left[i] * right[j] - left[j] * right[i] for i, j in ((1, 2), (2, 0), (0, 1))]
    ndim = parts[0].ndim + 1
    place = axis if axis >= 0 else axis + ndim
    return store(F.stack(parts, place), numeric)


def _three(x: Tensor, axis: int) -> list[Tensor]:
    a = axis_index(axis, x.ndim)
    if x.shape[a] != 3:
        raise ShapeError(f"a cross product needs 3 elements along axis {axis} of "
                         f"{show_shape(x.shape)}")
    return [F.squeeze(v, a) for v in F.split(x, 3, axis=a)]
