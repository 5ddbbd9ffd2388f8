"""Arithmetic, comparison and maths: on scalars of each lane and on tiles alike."""

from __future__ import annotations

from math import erf, erfc
from typing import Any

import numpy as np

from tessera.numerics import DType, bool_, decode, encode, f32, i32, uint8, uint32
from tessera.tile.builder import edge_rules, rules
from tessera.tile.builder.ir_builder import IRBuilder
from tessera.tile.ir import numpy_values
from tessera.tile.ir.errors import RuleError
from tessera.tile.ir.handles import Handle, is_number
from tessera.tile.ir.op_record import declare
from tessera.tile.ir.types import Scalar, TileType


def _pair(rng: Any) -> tuple:
    return rng.standard_normal((13, 7)), rng.standard_normal((13, 7))


def _ints(rng: Any) -> tuple:
    return rng.integers(-9, 9, (13, 7)), rng.integers(1, 9, (13, 7))


def _positive_sample(rng: Any) -> tuple:
    return (rng.uniform(0.1, 3.0, (13, 7)),)


def _binary(name: str, doc: str, f: Any, rule: Any = rules.elementwise, public: bool = False,
            samples: tuple = (_pair,), carry: Any = edge_rules.elementwise, **facts: Any) -> Any:
    def meaning(x: Any, y: Any) -> Any:
        return f(x, y)

    meaning.__doc__ = doc
    return declare(rule=rule, name=name, public=public, samples=samples, edges=carry,
                   **facts)(meaning)


def _unary(name: str, doc: str, f: Any, rule: Any = rules.floats, public: bool = True,
           **facts: Any) -> Any:
    def meaning(x: Any) -> Any:
        return f(x)

    meaning.__doc__ = doc
    return declare(rule=rule, name=name, public=public, samples=(_positive_sample,),
                   edges=edge_rules.elementwise, **facts)(meaning)


def _not_negative(least: list[int | None]) -> int | None:
    """Of an op that leaves the numbers from 0 on among themselves."""
    return 0 if all(x is not None and x >= 0 for x in least) else None


def _sum(least: list[int | None]) -> int | None:
    known = [x for x in least if x is not None]
    return sum(known) if len(known) == len(least) else None


def _remainder(least: list[int | None]) -> int | None:
    """It has the divisor's sign."""
    return _not_negative(least[1:])


def _larger(least: list[int | None]) -> int | None:
    return max((x for x in least if x is not None), default=None)


def _smaller(least: list[int | None]) -> int | None:
    known = [x for x in least if x is not None]
    return min(known) if len(known) == len(least) else None


def _power(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if x.dtype.kind != "i":
        return np.power(x, y)
    one = x.dtype.type(1)
    below = np.where(np.abs(x) == one, np.where(y & one == one, x, one), 0 * one)
    return np.where(y < 0, below, np.power(x, np.maximum(y, 0)))


_binary("add", "x + y", lambda x, y: x + y, total=True, zero="keeps", least=_sum)
_binary("sub", "x - y", lambda x, y: x - y, total=True, zero="keeps")
_binary("mul", "x * y", lambda x, y: x * y, total=True, zero="wins", least=_not_negative)
_binary("div", "x / y of floats", lambda x, y: x / y, rules.floats, special=True)
_binary("floordiv", "floor(x / y) of the exact quotient, as in Python: 1.0 // 0.1 is 9.0",
        np.floor_divide, samples=(_ints,),
        least=_not_negative)
_binary("mod", "x - floor(x / y) * y, as in Python", np.mod, samples=(_ints,),
        least=_remainder)
_binary("pow", "x ** y; of integers a power below 0 is cut off: 0, or 1 and -1 of these", _power,
        special=True)
_binary("maximum", "The larger of x and y; NaN when one is NaN.", np.maximum, public=True,
        total=True, exact=True, least=_larger)
_binary("minimum", "The smaller of x and y; NaN when one is NaN.", np.minimum, public=True,
        total=True, exact=True, least=_smaller)
_binary("atan2", "The angle of the point (y, x).", np.arctan2, rules.floats, public=True)
_binary("bitand", "x & y", np.bitwise_and, rules.integers, samples=(_ints,), total=True,
        least=_not_negative)
_binary("bitor", "x | y", np.bitwise_or, rules.integers, samples=(_ints,), total=True)
_binary("bitxor", "x ^ y", np.bitwise_xor, rules.integers, samples=(_ints,), total=True)
_binary("shl", "x << y; 0 where y is outside of 0..bits - 1", np.left_shift,
        rules.shifted, samples=(_ints,))
_binary("shr", "x >> y, keeping the sign; all sign where y is outside of 0..bits - 1",
        np.right_shift, rules.shifted, samples=(_ints,),
        least=_not_negative)
_binary("lt", "x < y", np.less, rules.comparison, total=True, exact=True)
_binary("le", "x <= y", np.less_equal, rules.comparison, total=True, exact=True)
_binary("gt", "x > y", np.greater, rules.comparison, total=True, exact=True)
_binary("ge", "x >= y", np.greater_equal, rules.comparison, total=True, exact=True)
_binary("eq", "x == y", np.equal, rules.comparison, total=True, exact=True)
_binary("ne", "x != y", np.not_equal, rules.comparison, total=True, exact=True)
_binary("and", "x and y of bools", np.logical_and, rules.logical, total=True,
        carry=edge_rules.intersect_edges)
_binary("or", "x or y of bools", np.logical_or, rules.logical, total=True)

_unary("neg", "-x", np.negative, rules.elementwise, public=False, total=True,
       exact=True)
_unary("not", "not x", np.logical_not, rules.logical, public=False, total=True)
_unary("bitnot", "~x", np.invert, rules.integers, public=False, total=True)
_unary("abs", "|x|", np.abs, rules.elementwise, total=True, exact=True)
_unary("exp", "e^x; exp(a - b) is 0 where a is -inf, also when b is.", np.exp, special=True)
_unary("exp2", "2^x", np.exp2, special=True)
_unary("exp_approx", "e^x in few instructions, for results of 16 bits: in f32 within "
       "(1.4 |x| + 4) 2^-24 of it, relative, and 0 below 2^-126.", np.exp, special=True)
_unary("expm1", "e^x - 1, exact near 0", np.expm1, special=True)
_unary("log", "The natural logarithm.", np.log, special=True)
_unary("log2", "The logarithm to base 2.", np.log2, special=True)
_unary("log1p", "log(1 + x), exact near 0", np.log1p, special=True)
_unary("sqrt", "The square root.", np.sqrt, special=True)
_unary("rsqrt", "1 / sqrt(x)", lambda x: (1 / np.sqrt(x)).astype(x.dtype), special=True)
_unary("sin", "The sine of an angle in radians.", np.sin, special=True)
_unary("cos", "The cosine of an angle in radians.", np.cos, special=True)
_unary("tan", "The tangent of an angle in radians.", np.tan)
_unary("atan", "The angle whose tangent is x.", np.arctan)
_unary("tanh", "The hyperbolic tangent.", np.tanh, special=True)
_unary("floor", "The largest whole number not above x.", np.floor)
_unary("ceil", "The smallest whole number not below x.", np.ceil)
_unary("round", "The nearest whole number, ties to even.", np.round)
_unary("trunc", "x without its fraction.", np.trunc)


def _erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(erf, otypes=[np.float64])(x).astype(x.dtype)


def _erfc(x: np.ndarray) -> np.ndarray:
    return np.vectorize(erfc, otypes=[np.float64])(x).astype(x.dtype)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return (1 / (1 + np.exp(-x))).astype(x.dtype)


_unary("erf", "The error function.", _erf, special=True)
_unary("erfc", "1 - erf(x), with all digits where that is small.", _erfc, special=True)
_unary("sigmoid", "1 / (1 + e^-x)", _sigmoid, special=True)
_unary("sigmoid_approx", "1 / (1 + e^-x) in few instructions, for results of 16 bits: in f32 "
       "within (1.4 |x| + 6) 2^-24 of it, relative, and 0 below 2^-126.", _sigmoid, special=True)


def _predicate(types: Any, attrs: Any) -> Any:
    rules.floats(types, attrs)
    return rules.comparison((types[0], types[0]), attrs)


_unary("isnan", "Whether x is NaN.", np.isnan, _predicate)
_unary("isinf", "Whether x is infinite.", np.isinf, _predicate)


def _counted(types: Any, attrs: Any) -> Any:
    return rules.broadcast_type((rules.integers(types, attrs),), i32, "popcount")


@declare(rule=_counted, samples=(lambda rng: (rng.integers(-9, 9, (13, 7)),),), total=True,
         edges=edge_rules.elementwise, least=lambda least: 0)
def popcount(x: Any) -> Any:
    """The number of bits that are set; a negative number's are those of its two's complement."""
    words = x.view(f"u{x.dtype.itemsize}")  # NumPy counts those of the magnitude
    return np.bitwise_count(words).astype(np.int32)


@declare(rule=rules.floats, public=False, samples=(_pair,), edges=edge_rules.elementwise,
         special=True)
def exp_sub(x: Any, y: Any) -> Any:
    """e^(x - y), and 0 where x is -inf, also when y is -inf: a fully masked row has weight 0."""
    return np.where(np.isneginf(x), x.dtype.type(0), np.exp(x - y))


@declare(rule=rules.floats, public=False, samples=(_pair,), edges=edge_rules.elementwise,
         special=True)
def div_or_zero(x: Any, y: Any) -> Any:
    """x / y, and 0 for 0 / 0: a row without weight stays 0. Used for tile / row statistic."""
    return np.where((x == 0) & (y == 0), x.dtype.type(0), x / y)


@declare(rule=rules.floats, samples=(lambda rng: tuple(rng.standard_normal((3, 5, 4))),),
         edges=edge_rules.elementwise)
def fma(x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""
    wide = x.astype(np.float64) * y.astype(np.float64) + z
    return wide.astype(x.dtype)


@declare(rule=lambda types, attrs: _where_rule(types), total=True, edges=edge_rules.chosen,
         exact=True, least=lambda least: _smaller(least[1:]),
         samples=(lambda rng: (rng.random((6, 5)) < 0.5, *rng.standard_normal((2, 6, 5))),))
def where(condition: Any, x: Any, y: Any) -> Any:
    """x where the condition holds, else y; both are evaluated."""
    return np.where(condition, x, y)


def _where_rule(types: Any) -> Any:
    rules.require_numbers(types[:1], "where")
    if rules.dtype_of(types[0]) is not bool_:
        raise RuleError(f"the condition of where is {types[0]}: it takes bools",
                        "compare it: x != 0")
    out = rules.elementwise(types[1:], {})
    return rules.broadcast_type(types, out.dtype, "where")


def _cast_rule(types: Any, attrs: dict[str, Any]) -> Any:
    rules.require_numbers(types, "a cast")
    dtype = attrs["dtype"]
    if not isinstance(dtype, DType):
        raise RuleError(f"a cast needs a dtype, got {dtype!r}", "for example ts.bf16")
    t = types[0]
    return Scalar(dtype, t.uniform) if isinstance(t, Scalar) else TileType(dtype, t.shape)


@declare(rule=_cast_rule, attrs=("dtype", "rounding", "saturate"), public=False, total=True,
         edges=edge_rules.elementwise)
def convert(x: Any, dtype: Any, rounding: Any = "nearest_even", saturate: Any = False) -> Any:
    """x in another type: rounded once, integers truncate toward zero and saturate, NaN gives 0."""
    return numpy_values.convert(x, dtype, rounding, saturate)


def _codes_rule(types: Any, attrs: dict[str, Any]) -> Any:
    dtype = types[0].dtype
    if dtype.kind != "float" or dtype.bits != 8:
        raise RuleError(f"codes of {types[0]}: those of floats of 8 bits are bytes",
                        "cast to such a type first, for example 'fp8_e4m3 @saturate'")
    return _cast_rule(types, {"dtype": uint8})


@declare(rule=_codes_rule, attrs=("dtype",), public=False, total=True,
         edges=edge_rules.elementwise)
def encode_bytes(x: Any, dtype: Any) -> Any:
    """The codes of numbers of a type of 8 bits, as bytes."""
    return encode(x, dtype).view(np.uint8)


def _bits_rule(types: Any, attrs: dict[str, Any]) -> Any:
    rules.require_numbers(types, "a bitcast")
    if {types[0].dtype.bits, attrs["dtype"].bits} not in ({32}, {64}):
        raise RuleError(f"a bitcast of {types[0]} to {attrs['dtype']}: it is between types of 32 "
                        "bits, or of 64", "cast to ts.f32 or ts.i32 first")
    return _cast_rule(types, attrs)


@declare(rule=_bits_rule, attrs=("dtype",), public=False, total=True,
         edges=edge_rules.elementwise)
def with_bits(x: Any, dtype: Any) -> Any:
    """The numbers of a type of 32 or 64 bits that have the bits of those of another."""
    return np.ascontiguousarray(x).view(dtype.numpy)


def _random_rule(types: Any, attrs: dict[str, Any]) -> Any:
    rules.require_numbers(types, "a cast")
    x, words = types
    if x.dtype.kind != "float" or x.dtype.bits > 32 or attrs["dtype"].kind != "float" or \
            attrs["dtype"].bits > 16:
        raise RuleError(f"a cast of {x} to {attrs['dtype']} by random words: it is from floats of "
                        "at most 32 bits to floats of at most 16, or to integers",
                        "cast to ts.f32 first")
    if words.dtype is not uint32:
        raise RuleError(f"the random words of a cast are uint32, got {words}",
                        "ts.tile.random_bits(index)")
    return rules.broadcast_type(types, attrs["dtype"], "a cast")


@declare(rule=_random_rule, attrs=("dtype", "saturate"), public=False, total=True,
         edges=edge_rules.elementwise)
def convert_random(x: Any, words: Any, dtype: Any, saturate: Any = False) -> Any:
    """x in a narrower float type, up where a random word is below the fraction that is cut off."""
    x, words = np.broadcast_arrays(x, words)
    return decode(encode(x, dtype, rounding="stochastic", saturate=saturate, words=words), dtype)


# --- forms that a call or an operator takes -----------------------------------------------------
def as_float(b: IRBuilder, x: Any) -> Any:
    """A number or tile of integers as f32. b, here and below: the builder of a trace."""
    if isinstance(x, Handle) and isinstance(x.type, Scalar | TileType):
        return x if x.type.dtype.kind == "float" else b.cast(x, f32)
    return float(x) if is_number(x) else x


def exponential(b: IRBuilder, x: Any) -> Any:
    """exp of a difference of tiles gives 0 for -inf - -inf (a fully masked row)."""
    if isinstance(x, Handle) and isinstance(x.type, TileType):
        made = b.values.defined_by.get(x.value)
        if made is not None and made.name == "sub":
            types = b.values.type_of_args(made)
            handles = [Handle(a, kind) if not hasattr(a, "dtype") else a
                       for a, kind in zip(made.args, types, strict=True)]
            return b.emit("exp_sub", handles)
    return b.arithmetic("exp", [as_float(b, x)])


def power(b: IRBuilder, x: Any, n: Any) -> Any:
    """Small whole powers are products, one half is a square root."""
    if not isinstance(x, Handle) or not is_number(n):
        return b.arithmetic("pow", (x, n))
    if n == 0.5:
        return b.arithmetic("sqrt", [as_float(b, x)])
    if isinstance(n, int) and 1 <= n <= 4:
        out: Any = x
        for _ in range(n - 1):
            out = b.arithmetic("mul", (out, x))
        return out
    if x.type.dtype.kind != "float" and isinstance(n, int) and n < 0:
        b.fail("a negative power of an integer", "write 1.0 / x")
    return b.arithmetic("pow", (x, n))
