"""The functions of `vocabulary.py`, compiled: f32 as polynomials that vectorise, f64 through libm.

Imports numba: only the compiler imports this module. `name_f32` is inlined into the loop that calls
it. f32 errors against f64 are <= 2 ulp for exp, log, sqrt, sin, cos, pow and <= 6 ulp for the rest
(tests/cpu/test_loops_maths.py sweeps them); tanh and erf gave up 4 ulp for 2.2 and 2.9 times the
speed (gelu of 4 Mi elements, one thread of an EPYC 9005: 1.0 and 0.9 ms). Subnormals, infinities
and NaN follow IEEE 754 and C99 annex F. The functions listed last have no polynomial: they run
libm on one element at a time in f64.

Arithmetic here may not be reordered: the argument reductions depend on the order written.
Polynomial coefficients are minimax fits (Lawson iteration on Chebyshev nodes) unless a source is
named.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from .instructions import INSTRUCTIONS, NUMBA, memory_access
from .pipeline import LoopCompiler
from .vocabulary import FUNCTIONS

MATHS: dict[str, object] = {}
f32, f64, i32 = np.float32, np.float64, np.int32

abs_f32 = INSTRUCTIONS["abs_f32"]
abs_f64 = INSTRUCTIONS["abs_f64"]
add_u32 = INSTRUCTIONS["add_u32"]
bits_f32 = INSTRUCTIONS["bits_f32"]
bits_f64 = INSTRUCTIONS["bits_f64"]
f32_from_f64 = INSTRUCTIONS["f32_from_f64"]
f32_from_i32 = INSTRUCTIONS["f32_from_i32"]
f64_from_f32 = INSTRUCTIONS["f64_from_f32"]
f64_from_i64 = INSTRUCTIONS["f64_from_i64"]
floor_f64 = INSTRUCTIONS["floor_f64"]
fma_f32 = INSTRUCTIONS["fma_f32"]
fma_f64 = INSTRUCTIONS["fma_f64"]
from_bits_f32 = INSTRUCTIONS["from_bits_f32"]
from_bits_f64 = INSTRUCTIONS["from_bits_f64"]
i32_from_i64 = INSTRUCTIONS["i32_from_i64"]
isnan_f32 = INSTRUCTIONS["isnan_f32"]
maximum_f32 = INSTRUCTIONS["maximum_f32"]
maximum_f64 = INSTRUCTIONS["maximum_f64"]
mul_u32 = INSTRUCTIONS["mul_u32"]
rint_f32 = INSTRUCTIONS["rint_f32"]
rint_f64 = INSTRUCTIONS["rint_f64"]
u32_from_i64 = INSTRUCTIONS["u32_from_i64"]
u64_high = INSTRUCTIONS["u64_high"]
where_f32 = INSTRUCTIONS["where_f32"]
where_f64 = INSTRUCTIONS["where_f64"]
xor_u32 = INSTRUCTIONS["xor_u32"]


def compiled(function: Callable) -> object:
    """Register a function to be inlined into loops; compiled at its first use."""
    MATHS[function.__name__] = njit(
        error_model="numpy", forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True,
        pipeline_class=LoopCompiler,
    )(function)
    return MATHS[function.__name__]


ZERO, HALF, ONE, TWO = f32(0), f32(0.5), f32(1), f32(2)
INF, NAN = f32(np.inf), f32(np.nan)
LOG2E = f32(math.log2(math.e))
LN2 = f32(math.log(2))
LN2_HIGH, LN2_LOW = f32(0.693359375), f32(-2.12194440e-4)  # Cephes; high * n is exact
# Adding 1.5 * 2**23 leaves the nearest integer in the low bits of the f32.
SNAP, SNAP_BITS = f32(12582912.0), i32(0x4B400000)
EXP = tuple(map(f32, (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2,
                      1.6666665459e-1, 5.0000001201e-1)))  # Cephes expf
E5, E4, E3, E2, E1, E0 = EXP


@compiled
def power_of_two_f32(k):
    """2**k for -126 <= k <= 127."""
    return from_bits_f32((k + 127) << 23)


@compiled
def expm1_reduced_f32(r):
    """e**r - 1 for |r| <= ln(2) / 2."""
    p = fma_f32(E5, r, E4)
    p = fma_f32(p, r, E3)
    p = fma_f32(p, r, E2)
    p = fma_f32(p, r, E1)
    p = fma_f32(p, r, E0)
    return fma_f32(p, r * r, r)


EXP_LEAST, EXP_MOST = f32(-104.0), f32(89.0)  # beyond: 0 and infinity


@compiled
def exp_f32(x):
    """x = k ln2 + r; e**x = 2**(k//2) 2**(k - k//2) e**r, in two steps for subnormal results."""
    y = where_f32(x < EXP_LEAST, EXP_LEAST, where_f32(x > EXP_MOST, EXP_MOST, x))
    snapped = fma_f32(y, LOG2E, SNAP)
    n = snapped - SNAP
    r = fma_f32(n, -LN2_LOW, fma_f32(n, -LN2_HIGH, y))
    k = bits_f32(snapped) - SNAP_BITS
    half = k >> 1
    p = expm1_reduced_f32(r) + ONE
    return p * power_of_two_f32(half) * power_of_two_f32(k - half)


@compiled
def exp2_f32(x):
    y = where_f32(x < f32(-151.0), f32(-151.0), where_f32(x > f32(129.0), f32(129.0), x))
    snapped = y + SNAP
    n = snapped - SNAP
    k = bits_f32(snapped) - SNAP_BITS
    half = k >> 1
    p = expm1_reduced_f32((y - n) * LN2) + ONE
    return p * power_of_two_f32(half) * power_of_two_f32(k - half)


@compiled
def expm1_f32(x):
    """2**k (e**r - 1) + (2**k - 1), scaled by one half so that 2**128 does not appear."""
    y = where_f32(x < f32(-18.0), f32(-18.0), where_f32(x > EXP_MOST, EXP_MOST, x))
    snapped = fma_f32(y, LOG2E, SNAP)
    n = snapped - SNAP
    r = fma_f32(n, -LN2_LOW, fma_f32(n, -LN2_HIGH, y))
    scale = power_of_two_f32(bits_f32(snapped) - SNAP_BITS - 1)
    return where_f32(x == ZERO, x, TWO * fma_f32(scale, expm1_reduced_f32(r), scale - HALF))


TINY, TWO_23 = f32(2.0**-126), f32(2.0**23)
SQRT_HALF_BITS = i32(0x3F2AAAAB)  # 2/3: mantissas lie in [2/3, 4/3)


@compiled
def log1p_reduced_f32(m):
    """log(1 + m) for -1/3 <= m <= 1/3, <= 0.9 ulp."""
    s = m * m
    r = fma_f32(f32(-0.130310059), s, f32(-0.121484190))
    t = fma_f32(f32(0.140869141), s, f32(0.139814854))
    r = fma_f32(r, s, f32(-0.166846052))
    t = fma_f32(t, s, f32(0.200120345))
    r = fma_f32(r, s, f32(-0.249996200))
    r = fma_f32(t, m, r)
    r = fma_f32(r, m, f32(0.333331972))
    r = fma_f32(r, m, -HALF)
    return fma_f32(r, s, m)


@compiled
def exponent_f32(x):
    """k of x = 2**k (1 + m), -1/3 <= m < 1/3, as f32; subnormals included."""
    small = x < TINY
    bits = bits_f32(where_f32(small, x * TWO_23, x))
    k = i32_from_i64((bits - SQRT_HALF_BITS) >> 23)
    return f32_from_i32(k) - where_f32(small, f32(23.0), ZERO)


@compiled
def mantissa_f32(x):
    """m of x = 2**k (1 + m), -1/3 <= m < 1/3."""
    bits = bits_f32(where_f32(x < TINY, x * TWO_23, x))
    k = (bits - SQRT_HALF_BITS) >> 23
    return from_bits_f32(bits - (k << 23)) - ONE


@compiled
def log_edges_f32(x, y):
    """y, but -inf at 0, NaN below, infinity and NaN as they are."""
    y = where_f32(x < INF, y, x)
    return where_f32(x > ZERO, y, where_f32(x == ZERO, -INF, where_f32(isnan_f32(x), x, NAN)))


@compiled
def log_f32(x):
    k = exponent_f32(x)
    return log_edges_f32(x, fma_f32(k, LN2, log1p_reduced_f32(mantissa_f32(x))))


@compiled
def log2_f32(x):
    return log_edges_f32(
        x, fma_f32(log1p_reduced_f32(mantissa_f32(x)), LOG2E, exponent_f32(x))
    )


@compiled
def log10_f32(x):
    r = log1p_reduced_f32(mantissa_f32(x)) * f32(math.log10(math.e))
    return log_edges_f32(x, fma_f32(exponent_f32(x), f32(math.log10(2)), r))


@compiled
def log1p_f32(x):
    """log(u) + (x - (u - 1)) / u with u = 1 + x rounded; the second term is what rounding lost."""
    u = ONE + x
    y = log_f32(u) + (x - (u - ONE)) / u
    y = where_f32(abs_f32(x) < f32(1e-4), x - HALF * x * x, y)
    return where_f32(x == INF, x, where_f32(u == ZERO, -INF, y))


@compiled
def clipped_f32(x, most):
    """x held within [-most, most]; NaN stays."""
    return where_f32(x < -most, -most, where_f32(x > most, most, x))


TANH_MOST = f32(9.02)  # tanh is 1 in f32 from here


@compiled
def tanh_f32(x):
    """x P(x**2) / Q(x**2), degrees 4 and 4, minimax: 0.35 ulp before rounding."""
    y = clipped_f32(x, TANH_MOST)
    s = y * y
    p = fma_f32(f32(1.6780989e-8), s, f32(2.593356839e-5))
    p = fma_f32(p, s, f32(4.402208142e-3))
    p = fma_f32(p, s, f32(1.685738862e-1))
    p = fma_f32(p, s, f32(1.259921074))
    q = fma_f32(f32(9.779535048e-7), s, f32(4.136438365e-4))
    q = fma_f32(q, s, f32(3.259551153e-2))
    q = fma_f32(q, s, f32(5.88547349e-1))
    q = fma_f32(q, s, f32(1.259921074))
    return clipped_f32(y * p / q, ONE)


@compiled
def sigmoid_f32(x):
    """1 / (1 + e**-x), through e**-|x| so that neither tail loses digits."""
    e = exp_f32(-abs_f32(x))
    return where_f32(x < ZERO, e, ONE) / (ONE + e)


@compiled
def softplus_f32(x):
    return maximum_f32(x, ZERO) + log1p_f32(exp_f32(-abs_f32(x)))


ERF_MOST = f32(3.93)  # erf is 1 in f32 from here


@compiled
def erf_f32(x):
    """x P(x**2) / Q(x**2), degrees 5 and 5, minimax: 0.32 ulp before rounding."""
    y = clipped_f32(x, ERF_MOST)
    s = y * y
    p = fma_f32(f32(2.7256953672e-6), s, f32(3.8017443148e-4))
    p = fma_f32(p, s, f32(5.045207683e-3))
    p = fma_f32(p, s, f32(7.0466689765e-2))
    p = fma_f32(p, s, f32(2.5466668606e-1))
    p = fma_f32(p, s, f32(1.5062054396))
    q = fma_f32(f32(5.0729293434e-5), s, f32(1.5553802950e-3))
    q = fma_f32(q, s, f32(2.0019248128e-2))
    q = fma_f32(q, s, f32(1.5251584351e-1))
    q = fma_f32(q, s, f32(6.7063826323e-1))
    q = fma_f32(q, s, f32(1.3348398209))
    return clipped_f32(y * p / q, ONE)


TWO_OVER_PI = 2 / math.pi
PI_2_HIGH, PI_2_LOW = math.pi / 2, 6.123233995736766e-17


SMALL_ANGLE = f32(2.0**45)  # where a quarter turn in two parts no longer reduces exactly enough
# The bits of 2/pi behind the binary point. Payne and Hanek 1983, "Radian reduction for
# trigonometric functions".
BITS_0, BITS_1, BITS_2, BITS_3 = map(np.uint64, (
    0xA2F9836E4E441529, 0xFC2757D1F534DDC0, 0xDB6295993C439041, 0xFE5163ABDEBBC561))
QUARTER = math.pi / 2 * 2.0**-62


@compiled
def large_quarters_f32(x):
    """|x| 2/pi modulo 4 in units of 2**-62, for 2**45 <= |x| < inf: |x| is an integer m 2**e of 24
    bits, so of 2/pi only the 96 bits count that stand from 2**(1 - e) down."""
    bits = bits_f32(x)
    first = np.uint64(((bits >> 23) & 255) - 152)  # e - 2: of the bits that count
    shift = first & np.uint64(63)
    rest = np.uint64(63) - shift
    late = first >= np.uint64(64)
    a, b, c = (BITS_1, BITS_2, BITS_3) if late else (BITS_0, BITS_1, BITS_2)
    high = (a << shift) | ((b >> np.uint64(1)) >> rest)
    low = (b << shift) | ((c >> np.uint64(1)) >> rest)
    m = np.uint64((bits & 0x7FFFFF) | 0x800000)
    return m * high + ((m * (low >> np.uint64(32))) >> np.uint64(32))


@compiled
def quarter_turns_f32(x):
    """The nearest multiple of pi/2, in f64; from 2**45 on modulo 4."""
    large = (abs_f32(x) >= SMALL_ANGLE) & (abs_f32(x) < INF)
    held = where_f32(large, x, SMALL_ANGLE)
    nearest = (large_quarters_f32(held) + np.uint64(1 << 61)) >> np.uint64(62)
    turns = f64_from_i64(np.int64(nearest))
    signed = where_f64(x < ZERO, -turns, turns)
    return where_f64(large, signed, rint_f64(f64_from_f32(x) * TWO_OVER_PI))


@compiled
def within_quarter_f32(x, turns):
    large = (abs_f32(x) >= SMALL_ANGLE) & (abs_f32(x) < INF)
    held = where_f32(large, x, SMALL_ANGLE)
    quarters = large_quarters_f32(held)
    nearest = (quarters + np.uint64(1 << 61)) >> np.uint64(62)
    rest = f64_from_i64(np.int64(quarters - (nearest << np.uint64(62)))) * QUARTER
    rest = where_f64(x < ZERO, -rest, rest)
    r = fma_f64(-turns, PI_2_HIGH, f64_from_f32(x))
    return f32_from_f64(where_f64(large, rest, fma_f64(-turns, PI_2_LOW, r)))


@compiled
def sin_reduced_f32(r):
    s = r * r
    p = fma_f32(f32(-1.9515295891e-4), s, f32(8.3321608736e-3))  # Cephes sinf
    return fma_f32(fma_f32(p, s, f32(-1.6666654611e-1)) * s, r, r)


@compiled
def cos_reduced_f32(r):
    s = r * r
    p = fma_f32(f32(2.443315711809948e-5), s, f32(-1.388731625493765e-3))  # Cephes cosf
    p = fma_f32(p, s, f32(4.166664568298827e-2))
    return fma_f32(p * s, s, fma_f32(-HALF, s, ONE))


@compiled
def turn_f32(r, turns):
    """sin(r + turns pi/2)."""
    phase = turns - 4.0 * floor_f64(turns * 0.25)
    odd = (phase == 1.0) | (phase == 3.0)
    y = where_f32(odd, cos_reduced_f32(r), sin_reduced_f32(r))
    return where_f32(phase >= 2.0, -y, y)


@compiled
def sin_f32(x):
    turns = quarter_turns_f32(x)
    return where_f32(x == ZERO, x, turn_f32(within_quarter_f32(x, turns), turns))


@compiled
def cos_f32(x):
    turns = quarter_turns_f32(x)
    return turn_f32(within_quarter_f32(x, turns), turns + 1.0)


@compiled
def tan_f32(x):
    turns = quarter_turns_f32(x)
    r = within_quarter_f32(x, turns)
    return where_f32(x == ZERO, x, turn_f32(r, turns) / turn_f32(r, turns + 1.0))


SNAP64, SNAP64_BITS = 6755399441055744.0, np.int64(0x4338000000000000)  # 1.5 * 2**52
SQRT_HALF_BITS64 = np.int64(0x3FE6A09E667F3BCD)


@compiled
def log2_narrow_f64(x):
    """log2 of a positive finite f32 given as f64; absolute error < 1e-10: enough for an f32 pow."""
    bits = bits_f64(x)
    k = (bits - SQRT_HALF_BITS64) >> 52
    m = from_bits_f64(bits - (k << 52))
    t = (m - 1.0) / (m + 1.0)
    s = t * t
    p = fma_f64(1 / 13, s, 1 / 11)
    p = fma_f64(p, s, 1 / 9)
    p = fma_f64(p, s, 1 / 7)
    p = fma_f64(p, s, 1 / 5)
    p = fma_f64(p, s, 1 / 3)
    p = fma_f64(p, s, 1.0)
    return fma_f64(t * p, 2.8853900817779268, f64_from_i64(k))  # 2 / ln 2


@compiled
def exp2_narrow_f64(x):
    """2**x for |x| <= 300 with relative error < 1e-10."""
    snapped = x + SNAP64
    r = (x - (snapped - SNAP64)) * 0.6931471805599453
    p = fma_f64(1 / 362880, r, 1 / 40320)
    p = fma_f64(p, r, 1 / 5040)
    p = fma_f64(p, r, 1 / 720)
    p = fma_f64(p, r, 1 / 120)
    p = fma_f64(p, r, 1 / 24)
    p = fma_f64(p, r, 1 / 6)
    p = fma_f64(p, r, 0.5)
    p = fma_f64(p, r, 1.0)
    p = fma_f64(p, r, 1.0)
    return p * from_bits_f64((bits_f64(snapped) - SNAP64_BITS + 1023) << 52)


@compiled
def pow_f32(x, y):
    """2**(y log2|x|) in f64, then the sign and C99's special cases."""
    a = abs_f32(x)
    log2 = log2_narrow_f64(f64_from_f32(a))
    log2 = where_f64(a == ZERO, -np.inf, where_f64(a < INF, log2, np.inf))
    z = f64_from_f32(y) * log2
    z = where_f64(z > 300.0, 300.0, where_f64(z < -300.0, -300.0, z))
    power = f32_from_f64(exp2_narrow_f64(z))
    whole = rint_f32(y) == y
    odd = whole & (rint_f32(y * HALF) != y * HALF)
    negative = bits_f32(x) < 0
    power = where_f32(negative & odd, -power, power)
    power = where_f32((x < ZERO) & (not whole) & (a < INF), NAN, power)
    power = where_f32(isnan_f32(x) | isnan_f32(y), NAN, power)
    one = (x == ONE) | (y == ZERO) | ((a == ONE) & (abs_f32(y) == INF))
    return where_f32(one, ONE, power)


def _declare_both(name: str, make: Callable[[str], str]) -> None:
    """A short function with the same text in f32 and f64."""
    for suffix in ("f32", "f64"):
        scope: dict[str, Any] = INSTRUCTIONS | globals()
        exec(f"def {name}_{suffix}{make(suffix)}", scope)  # our own text, below
        compiled(scope[f"{name}_{suffix}"])


_declare_both("rsqrt", lambda t: f"(x): return {t}(1) / sqrt_{t}(x)")
_declare_both("isinf", lambda t: f"(x): return abs_{t}(x) == {t}(np.inf)")
_declare_both("isfinite", lambda t: f"(x): return abs_{t}(x) < {t}(np.inf)")
_declare_both("sign", lambda t: (
    f"(x): return where_{t}(x > 0, {t}(1), where_{t}(x < 0, {t}(-1), where_{t}(x == 0, {t}(0), x)))"
))


# x - y floor(x / y) with the divisor's sign, exact: C's fmod, moved once.
_declare_both("mod", lambda t: f"""(x, y):
    r = remainder_{t}(x, y)
    moved = where_{t}((r != 0) & ((r < 0) != (y < 0)), r + y, r)
    return where_{t}(r == 0, copysign_{t}({t}(0), y), moved)"""
)
# floor of the exact quotient, step by step as NumPy's floor_divide, also for infinities.
_declare_both("floordiv", lambda t: f"""(x, y):
    r = remainder_{t}(x, y)
    exact = (x - r) / y
    quotient = where_{t}((r != 0) & ((r < 0) != (y < 0)), exact - {t}(1), exact)
    nearest = floor_{t}(quotient)
    nearest = where_{t}(quotient - nearest > {t}(0.5), nearest + {t}(1), nearest)
    nearest = where_{t}(quotient == 0, copysign_{t}({t}(0), x / y), nearest)
    return where_{t}(y == 0, x / y, nearest)"""
)


def _declare_integer(suffix: str) -> None:
    kind = NUMBA[suffix]
    unsigned = suffix == "u32"

    def absolute(x):
        return x if unsigned else kind(where(x < 0, kind(-x), x))

    def sign(x):
        return kind(kind(x > 0) - kind(x < 0))

    def floordiv(x, y):
        """By -1 the negative, which wraps where the quotient of the least integer would."""
        if not unsigned and y == -1:
            return kind(0 - x)
        return kind(x // y) if y != 0 else kind(0)

    def mod(x, y):
        if not unsigned and y == -1:
            return kind(0)
        return kind(x % y) if y != 0 else kind(0)

    def power(x, n):
        result = kind(1)
        while n > 0:
            if n & 1:
                result = kind(result * x)
            x = kind(x * x)
            n = kind(n >> 1)
        return result

    where = INSTRUCTIONS[f"where_{suffix}"]
    for name, function in (("abs", absolute), ("sign", sign), ("floordiv", floordiv),
                           ("mod", mod), ("pow", power)):
        function.__name__ = f"{name}_{suffix}"
        compiled(function)


for _suffix in ("i64", "i32", "u32"):
    _declare_integer(_suffix)


@compiled
def sigmoid_f64(x):
    e = math.exp(-abs_f64(x))
    return where_f64(x < 0.0, e, 1.0) / (1.0 + e)


@compiled
def softplus_f64(x):
    return maximum_f64(x, 0.0) + math.log1p(math.exp(-abs_f64(x)))


@compiled
def exp2_f64(x):
    return math.pow(2.0, x)


@compiled
def log_f64(x):
    return where_f64(x < 0.0, np.nan, where_f64(x == 0.0, -np.inf, math.log(x)))


def _declare_libm(name: str, scalar: Callable | None) -> None:
    """name_f64 is libm's function; name_f32, where there is no polynomial, goes through it."""
    arguments = "x, y" if FUNCTIONS[name].arity == 2 else "x"
    wide = ", ".join(f"f64_from_f32({a})" for a in arguments.split(", "))
    scope: dict[str, Any] = INSTRUCTIONS | globals() | {"scalar": scalar}
    if f"{name}_f64" not in MATHS:
        exec(f"def {name}_f64({arguments}): return scalar({arguments})", scope)
        compiled(scope[f"{name}_f64"])
    if f"{name}_f32" not in MATHS:
        scope |= MATHS
        exec(f"def {name}_f32({arguments}): return f32_from_f64({name}_f64({wide}))", scope)
        compiled(scope[f"{name}_f32"])


for _name in FUNCTIONS:
    if not {f"{_name}_f32", f"{_name}_f64"} <= {*MATHS, *INSTRUCTIONS}:
        _declare_libm(_name, getattr(math, _name, None))


# ---- random bits ------------------------------------------------------------------------------

M0, M1 = np.uint32(0xD2511F53), np.uint32(0xCD9E8D57)
W0, W1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
store_uint32_keep15 = memory_access("store_uint32_keep15")


@compiled
def philox_row(keep, first, count, k0, k1):
    """Words first .. first + count - 1 of the stream, at keep[first % 4 ...] (u32).

    Four words come from one counter; writing whole quads lets LLVM vectorise over counters.
    """
    quad = first >> 2
    quads = ((first + count + 3) >> 2) - quad
    for q in range(quads):
        counter = quad + q
        x0, x1 = u32_from_i64(counter), u32_from_i64(counter >> 32)
        x2, x3 = np.uint32(0), np.uint32(0)
        c0, c1 = k0, k1
        for _ in range(10):
            high0, low0 = u64_high(x0, M0), mul_u32(x0, M0)
            high1, low1 = u64_high(x2, M1), mul_u32(x2, M1)
            x0, x2 = xor_u32(xor_u32(high1, x1), c0), xor_u32(xor_u32(high0, x3), c1)
            x1, x3 = low1, low0
            c0, c1 = add_u32(c0, W0), add_u32(c1, W1)
        store_uint32_keep15(keep, 4 * q, x0)
        store_uint32_keep15(keep, 4 * q + 1, x1)
        store_uint32_keep15(keep, 4 * q + 2, x2)
        store_uint32_keep15(keep, 4 * q + 3, x3)
