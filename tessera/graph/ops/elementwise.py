"""Elementwise ops: arithmetic, maths, comparison, selection, with NumPy broadcasting."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ...complex_pair import Complex
from ...errors import ArgumentError
from ...tensor import Tensor, as_tensor
from .. import functions as F
from ..op import OPS, GraphOp, sample
from ..operand import convert, floating, literal, promote, public, store, to_compute
from ..trace import apply
from .broadcasting import unbroadcast
from .elementwise_record import (
    MINUS,
    ONE,
    Choosing,
    batch_rule,
    elementwise,
    integers,
    offer,
    public_binary,
    public_predicate,
    public_unary,
    refuse_bools,
    shape_rule,
)

# --- arithmetic -------------------------------------------------------------------------------
ADD = elementwise("add", np.add, "{0} + {1}", lambda y, a, b: (ONE, ONE), arity=2,
                  linear="joint", doc="a + b")
SUB = elementwise("sub", np.subtract, "{0} - {1}", lambda y, a, b: (ONE, MINUS), arity=2,
                  linear="joint", doc="a - b",
                  hint="inf - inf: a row whose elements are all masked? ts.softmax_safe allows it")
MUL = elementwise("mul", np.multiply, "{0} * {1}", lambda y, a, b: (lambda: b, lambda: a), arity=2,
                  linear="each", doc="a * b",
                  hint="an overflow, or 0 * inf: in a gradient, a branch that ts.where did not "
                       "choose")
DIV = elementwise("div", np.true_divide, "{0} / {1}",
                  lambda y, a, b: ((lambda: 1.0 / b) if b.ndim else Choosing(lambda g: g / b),
                                   lambda: -(y / b)), arity=2, draw="positive",
                  linear="first", doc="a / b",
                  hint="the divisor holds 0: add an epsilon, or select the divisor with ts.where "
                       "first")
NEG = elementwise("neg", np.negative, "-{0}", lambda y, x: (MINUS,), linear="joint", doc="-x")


def _pow_ref(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind == "i" and (b < 0).any():
        raise ArgumentError("an integer to a negative power is no integer",
                            hint="cast the base to a floating type")
    return np.power(a, b)


def _pow_by_base(a: Tensor, b: Tensor) -> Tensor:
    """b a^(b - 1), and 0 for b = 0, also where a is 0."""
    still = equal(b, 0.0)
    return where(still, literal(0.0, a), b * power(a, where(still, literal(1.0, b), b - 1.0)))


POW = elementwise(
    "pow", _pow_ref, "pow({0}, {1})",
    lambda y, a, b: (
        lambda: _pow_by_base(a, b),
        lambda: y * log(where(equal(a, 0.0), literal(1.0, a), a)),  # 0 ** b stays 0 near b > 0
    ),
    arity=2, draw="positive", loop_kinds=("float", "uint"),
    doc="a ** b for a tensor exponent; of integers one below 0 is an error on the CPU, and cut off "
        "on GPUs: 0, or 1 and -1 of these",
    hint="a negative base with a fraction, 0 to a negative power, or an overflow",
)
MAXIMUM = elementwise(
    "maximum", np.maximum, "maximum({0}, {1})",
    lambda y, a, b: (_where_chosen(a, b, y), _where_chosen(b, a, y)), arity=2, draw="apart",
    smooth=False, drops_inf=(0, 1),
    doc="max(a, b); NaN propagates; equal operands share the gradient",
)
MINIMUM = elementwise(
    "minimum", np.minimum, "minimum({0}, {1})",
    lambda y, a, b: (_where_chosen(a, b, y), _where_chosen(b, a, y)), arity=2, draw="apart",
    smooth=False, drops_inf=(0, 1),
    doc="min(a, b); NaN propagates; equal operands share the gradient",
)
FLOOR_DIV = elementwise("floor_divide", np.floor_divide, "floordiv({0}, {1})", None, arity=2,
                        draw="positive", doc="floor(a / b)")
REMAINDER = elementwise("remainder", np.remainder, "mod({0}, {1})",
                        lambda y, a, b: (ONE, lambda: -floor(a / b)), arity=2, draw="positive",
                        smooth=False, doc="a - b * floor(a / b)")


def _where_chosen(a: Tensor, b: Tensor, y: Tensor) -> Choosing:
    """The cotangent where a alone gives y, half of it where both do, 0 elsewhere."""
    return Choosing(lambda g: where(equal(a, y), where(equal(b, y), g * 0.5, g), literal(0.0, g)))


# --- maths of one operand ---------------------------------------------------------------------
def _unary(name: str, ref: Callable, loop: str, partial: Callable | None, **kw: Any) -> GraphOp:
    rule = None if partial is None else lambda y, x: (lambda: partial(y, x),)
    return elementwise(name, ref, loop, rule, **kw)


_erf, _erfc = (np.frompyfunc(f, 1, 1) for f in (math.erf, math.erfc))


def _erf_ref(x: np.ndarray) -> np.ndarray:
    return np.asarray(_erf(x), dtype=x.dtype)


def _erfc_ref(x: np.ndarray) -> np.ndarray:
    return np.asarray(_erfc(x), dtype=x.dtype)


def _sigmoid_ref(x: np.ndarray) -> np.ndarray:
    z = np.exp(-np.abs(x))
    return np.divide(np.where(x >= 0, 1, z), 1 + z, dtype=x.dtype)


EXP = _unary("exp", np.exp, "exp({0})", lambda y, x: y, drops_inf=(0,),
             hint="exp overflows f32 above 88.7: subtract the maximum first (ts.softmax_safe does)")
EXPM1 = _unary("expm1", np.expm1, "expm1({0})", lambda y, x: y + 1.0, drops_inf=(0,))
LOG = _unary("log", np.log, "log({0})", lambda y, x: 1.0 / x, draw="positive",
             hint="log needs positive operands; ts.where(x > 0, x, 1) inside it, not around it")
LOG1P = _unary("log1p", np.log1p, "log1p({0})", lambda y, x: 1.0 / (1.0 + x), draw="positive",
               hint="log1p needs operands above -1")
SQRT = _unary("sqrt", np.sqrt, "sqrt({0})", lambda y, x: 0.5 / y, draw="positive",
              hint="sqrt needs operands that are not negative")
RSQRT = _unary("rsqrt", lambda x: 1 / np.sqrt(x), "rsqrt({0})", lambda y, x: -0.5 * (y * y * y),
               draw="positive", doc="1 / sqrt(x)",
               hint="rsqrt needs positive operands: add an epsilon")
ABS = _unary("abs", np.abs, "abs({0})", lambda y, x: sign(x), draw="apart", smooth=False)
SIGN = elementwise("sign", np.sign, "sign({0})", lambda y, x: (None,), draw="apart", smooth=False,
                   drops_inf=(0,))
SIN = _unary("sin", np.sin, "sin({0})", lambda y, x: cos(x))
COS = _unary("cos", np.cos, "cos({0})", lambda y, x: -sin(x))
TAN = _unary("tan", np.tan, "tan({0})", lambda y, x: 1.0 + y * y, draw="unit")
ASIN = _unary("asin", np.arcsin, "asin({0})", lambda y, x: rsqrt(1.0 - x * x), draw="unit",
              hint="asin needs operands from -1 to 1: ts.clip them first")
ACOS = _unary("acos", np.arccos, "acos({0})", lambda y, x: -rsqrt(1.0 - x * x), draw="unit",
              hint="acos needs operands from -1 to 1: ts.clip them first")
ATAN = _unary("atan", np.arctan, "atan({0})", lambda y, x: 1.0 / (1.0 + x * x), drops_inf=(0,))
SINH = _unary("sinh", np.sinh, "sinh({0})", lambda y, x: cosh(x))
COSH = _unary("cosh", np.cosh, "cosh({0})", lambda y, x: sinh(x))
TANH = _unary("tanh", np.tanh, "tanh({0})", lambda y, x: 1.0 - y * y, drops_inf=(0,))
SIGMOID = _unary("sigmoid", _sigmoid_ref, "sigmoid({0})", lambda y, x: y * (1.0 - y),
                 drops_inf=(0,), doc="1 / (1 + exp(-x))")
ERF = _unary("erf", _erf_ref, "erf({0})",
             lambda y, x: (2.0 / math.sqrt(math.pi)) * exp(-(x * x)), drops_inf=(0,))
ERFC = _unary("erfc", _erfc_ref, "erfc({0})",
              lambda y, x: (-2.0 / math.sqrt(math.pi)) * exp(-(x * x)), drops_inf=(0,),
              doc="1 - erf(x), with all digits where that is small")
RELU = elementwise("relu", lambda x: np.maximum(x, x.dtype.type(0)), "maximum({0}, 0)",
                   lambda y, x: (Choosing(lambda g: where(x > 0.0, g, literal(0.0, g))),),
                   draw="apart", smooth=False, drops_inf=(0,), doc="max(x, 0); gradient 0 at 0")
FLOOR = elementwise("floor", np.floor, "floor({0})", lambda y, x: (None,), smooth=False)
CEIL = elementwise("ceil", np.ceil, "ceil({0})", lambda y, x: (None,), smooth=False)
ROUND = elementwise("round", np.rint, "rint({0})", lambda y, x: (None,), smooth=False,
                    doc="to the nearest integer, halves to even")
TRUNC = elementwise("trunc", np.trunc, "trunc({0})", lambda y, x: (None,), smooth=False)
ATAN2 = elementwise(
    "atan2", np.arctan2, "atan2({0}, {1})",
    lambda y, a, b: (lambda: _over_square(b, a, b), lambda: _over_square(-a, a, b)), arity=2,
    draw="positive", drops_inf=(0, 1), doc="the angle of the point (b, a); gradient 0 at (0, 0)",
)


def _over_square(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x / (a^2 + b^2), and 0 at the origin, which has no angle."""
    origin = equal(maximum(abs_(a), abs_(b)), 0.0)
    return where(origin, literal(0.0, x), x / where(origin, literal(1.0, x), a * a + b * b))


# --- comparison, logic, selection -------------------------------------------------------------
_COMPARE = {
    "less": "{0} < {1}", "less_equal": "{0} <= {1}", "greater": "{0} > {1}",
    "greater_equal": "{0} >= {1}", "equal": "{0} == {1}", "not_equal": "{0} != {1}",
}
for _name, _loop in _COMPARE.items():
    elementwise(_name, getattr(np, _name), _loop, None, arity=2, result="bool",
                drops_inf=(0, 1))
for _name, _loop in {"isnan": "isnan({0})", "isinf": "isinf({0})", "isfinite": "isfinite({0})"}.items():  # noqa: E501
    elementwise(_name, getattr(np, _name), _loop, None, result="bool", drops=(0,))

_INT = (sample(((2, 3), "int"), ((3,), "int")), sample(((2,), "bool"), ((2,), "bool")))
AND = elementwise("bitwise_and", np.bitwise_and, "{0} & {1}", None, arity=2, samples=_INT,
                  doc="a & b, of integers or bools")
OR = elementwise("bitwise_or", np.bitwise_or, "{0} | {1}", None, arity=2, samples=_INT,
                  doc="a | b, of integers or bools")
XOR = elementwise("bitwise_xor", np.bitwise_xor, "{0} ^ {1}", None, arity=2, samples=_INT,
                  doc="a ^ b, of integers or bools")
NOT = elementwise("bitwise_not", np.invert, "~{0}", None,
                  samples=(sample(((2, 3), "int")), sample(((2,), "bool"))),
                  doc="~x of integers, not x of bools")
_SHIFT = (sample(((2, 3), "int"), ((3,), "int")),)
SHIFT_LEFT = elementwise("left_shift", np.left_shift, "{0} << {1}", None, arity=2,
                         samples=_SHIFT,
                         doc="a << b, of integers; 0 where b is outside of 0..bits - 1")
SHIFT_RIGHT = elementwise("right_shift", np.right_shift, "{0} >> {1}", None, arity=2,
                          samples=_SHIFT,
                          doc="a >> b, of integers, floor(a / 2^b); 0 or -1, the sign, where b is "
                              "outside of 0..bits - 1")


def _where_ref(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(c, a, b)


WHERE = GraphOp(
    "where",
    shape=shape_rule("select"),
    ref=_where_ref,
    vjp=lambda g, y, c, a, b: (
        None,
        unbroadcast(where(c, g, literal(0.0, g)), a.shape),
        unbroadcast(where(c, literal(0.0, g), g), b.shape),
    ),
    jvp=lambda ts, y, c, a, b: F.broadcast_to(
        where(c, _or_zero(ts[1], a), _or_zero(ts[2], b)), y.shape
    ),
    batch=batch_rule("where"),
    axes="...,...,...->...",
    loop="({1} if {0} else {2})",
    drops=(1, 2),
    samples=(
        sample(((2, 3), "bool"), (2, 3), (3,)),
        sample(((3,), "bool"), (2, 3), (1, 3)),
    ),
    doc="a where c else b",
)


def _or_zero(t: Tensor | None, like: Tensor) -> Tensor:
    return literal(0.0, like) if t is None else t


# --- public functions -------------------------------------------------------------------------
def _magnitude(x: Any) -> Tensor:
    if isinstance(x, Complex):
        return x.__abs__()
    (c,), numeric = promote(x)
    return store(apply(ABS, c), numeric)


add = public_binary("add", ADD, "a + b")
sub = public_binary("subtract", SUB, "a - b")
mul = public_binary("multiply", MUL, "a * b")
div = public_binary("divide", DIV, "a / b (integers become f32)", to_float=True)
maximum = public_binary("maximum", MAXIMUM, "max(a, b); NaN propagates")
minimum = public_binary("minimum", MINIMUM, "min(a, b); NaN propagates")
floor_divide = public_binary("floor_divide", FLOOR_DIV, "floor(a / b), of integers 0 where b is 0")
remainder = public_binary("remainder", REMAINDER,
                          "a - b * floor(a / b), of integers 0 where b is 0")
atan2 = public_binary("atan2", ATAN2, "the angle of the point (b, a)", to_float=True)
neg = public_unary("negative", NEG, "-x", to_float=False)
abs_ = offer(ABS, _magnitude, "abs", """|x|, elementwise; of ts.Complex the distance from 0.

    x: any shape. Integers stay integers.
    """)
sign = public_unary("sign", SIGN, "-1, 0 or 1", to_float=False)
exp = public_unary("exp", EXP, "e**x")
expm1 = public_unary("expm1", EXPM1, "e**x - 1")
log = public_unary("log", LOG, "the natural logarithm")
log1p = public_unary("log1p", LOG1P, "log(1 + x)")
sqrt = public_unary("sqrt", SQRT, "the square root")
rsqrt = public_unary("rsqrt", RSQRT, "1 / sqrt(x)")
sin = public_unary("sin", SIN, "sin x")
cos = public_unary("cos", COS, "cos x")
tan = public_unary("tan", TAN, "tan x")
asin = public_unary("asin", ASIN, "arcsin x")
acos = public_unary("acos", ACOS, "arccos x")
atan = public_unary("atan", ATAN, "arctan x")
sinh = public_unary("sinh", SINH, "sinh x")
cosh = public_unary("cosh", COSH, "cosh x")
tanh = public_unary("tanh", TANH, "tanh x")
sigmoid = public_unary("sigmoid", SIGMOID, "1 / (1 + exp(-x))")
erf = public_unary("erf", ERF, "the error function")
erfc = public_unary("erfc", ERFC, "1 - erf(x), with all digits where that is small")
relu = public_unary("relu", RELU, "max(x, 0); the gradient at 0 is 0", to_float=False)
floor = public_unary("floor", FLOOR, "the largest integer <= x", to_whole=True)
ceil = public_unary("ceil", CEIL, "the smallest integer >= x", to_whole=True)
trunc = public_unary("trunc", TRUNC, "x without its fraction", to_whole=True)
less = public_predicate("less", OPS["less"], "a < b", 2)
less_equal = public_predicate("less_equal", OPS["less_equal"], "a <= b", 2)
greater = public_predicate("greater", OPS["greater"], "a > b", 2)
greater_equal = public_predicate("greater_equal", OPS["greater_equal"], "a >= b", 2)
equal = public_predicate("equal", OPS["equal"], "a == b", 2)
not_equal = public_predicate("not_equal", OPS["not_equal"], "a != b", 2)
isnan = public_predicate("isnan", OPS["isnan"], "nan elements", 1)
isinf = public_predicate("isinf", OPS["isinf"], "inf elements", 1)
isfinite = public_predicate("isfinite", OPS["isfinite"], "finite elements", 1)


@public
def where(condition: Any, a: Any, b: Any) -> Tensor:
    """a where the condition holds, else b, with broadcasting.

    condition: bool_ (other types: where nonzero)   a, b: one common type
    The gradient of the value not chosen is exactly 0, also where it is not finite.
    """
    c = as_tensor(condition)
    if c.dtype.kind != "bool":
        c = to_compute(c) != 0
    (x, y), numeric = promote(a, b)
    return store(apply(WHERE, c, x, y), numeric)


@public
def power(x: Any, exponent: Any) -> Tensor:
    """x ** exponent, elementwise. Integer exponents from -1 to 4 are products, so that negative x
    and x = 0 are exact and differentiable."""
    (a, b), numeric = promote(x, exponent)
    if isinstance(exponent, int | float) and not isinstance(exponent, bool):
        x = as_tensor(x)
        small = _small_power(x if x.type == numeric else convert(a, numeric), exponent)
        if small is not None:
            return small
    if numeric.dtype.kind == "float" and isinstance(exponent, int | float):
        return store(_constant_power(a, float(exponent)), numeric)
    refuse_bools("power", numeric)
    return store(apply(POW, a, b), numeric)


def _small_power(x: Tensor, exponent: float) -> Tensor | None:
    if exponent == 1:
        return x
    if exponent == 0.5:
        return sqrt(x)
    if exponent not in (2, 3, 4):
        return None
    (a,), numeric = promote(x)
    square = apply(MUL, a, a)
    factor = {2: None, 3: a, 4: square}[int(exponent)]
    return store(square if factor is None else apply(MUL, square, factor), numeric)


def _constant_power(a: Tensor, exponent: float) -> Tensor:
    return apply(POW_CONSTANT, a, exponent=exponent)


def _power_slope(x: Tensor, exponent: float) -> Tensor | float:
    """c x^(c - 1): 0 for c = 0, where 0 * (1 / 0) would not be."""
    return exponent * power(x, exponent - 1.0) if exponent else 0.0


POW_CONSTANT = GraphOp(
    "pow_constant",
    shape=lambda x, exponent: x,
    ref=lambda x, exponent: np.power(x, np.asarray(exponent, x.dtype)),
    vjp=lambda g, y, x, exponent: (g * _power_slope(x, exponent),),
    jvp=lambda ts, y, x, exponent: ts[0] * _power_slope(x, exponent),
    batch=lambda size, batched, x, exponent: (apply(POW_CONSTANT, x, exponent=exponent), True),
    axes="...->...",
    loop="pow({0}, {exponent})",
    samples=(
        sample(((2, 3), "positive"), exponent=2.5), sample(((3,), "positive"), exponent=-1.0),
        sample((3,), exponent=0.0), sample((3,), exponent=5.0),
    ),
    doc="x ** c for a constant c",
)


@public
def clip(x: Any, low: Any = None, high: Any = None) -> Tensor:
    """min(max(x, low), high); a bound of None is absent. x has the gradient also at a bound."""
    out = as_tensor(x)
    moves = out.dtype.kind == "float"  # else no derivative asks which of two equals was chosen
    if low is not None:
        most = maximum(out, low)
        out = where(greater_equal(out, low), out, most) if moves else most
    if high is not None:
        least = minimum(out, high)
        out = where(less_equal(out, high), out, least) if moves else least
    return out


@public
def round(x: Any, decimals: int = 0) -> Tensor:
    """The nearest multiple of 10^-decimals, halves to even, elementwise. The derivative is 0.

    x: any shape; floats by rint(10^d x) / 10^d, as np.round, integers exactly
    """
    if isinstance(decimals, bool) or not isinstance(decimals, int | np.integer):
        raise ArgumentError(f"decimals={decimals!r} is not an integer")
    if (whole := integers(x)) is not None:
        return whole if decimals >= 0 else _roundintegers(whole, 10 ** -int(decimals))
    c, numeric = floating(x)
    if not decimals:
        return store(apply(ROUND, c), numeric)
    factor = 10.0 ** abs(int(decimals))
    scaled = c * factor if decimals > 0 else c / factor
    whole = apply(ROUND, scaled)
    out = whole / factor if decimals > 0 else whole * factor
    same = isfinite(out)  # numbers so large that scaling overflows have no fraction
    return store(where(same, out, apply(ROUND, c)), numeric)


def _roundintegers(x: Tensor, unit: int) -> Tensor:
    """In int64, and held within the type: 127 of int8 to tens is 127."""
    (c,), numeric = promote(x)
    if 2 * unit > 2**63 - 1 or numeric.dtype.name == "uint64":
        raise ArgumentError(f"rounding {numeric.dtype} to multiples of {unit}")
    wide = F.cast(c, "int64")
    below = floor_divide(wide, unit)
    twice = (wide - below * unit) * 2
    up = greater(twice, unit) | (equal(twice, unit) & equal(remainder(below, 2), 1))
    whole = (below + F.cast(up, "int64")) * unit
    return F.cast(clip(whole, int(numeric.dtype.min), int(numeric.dtype.max)), numeric)


@public
def square(x: Any) -> Tensor:
    """x * x, elementwise."""
    return power(x, 2)
