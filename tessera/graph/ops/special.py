"""Special functions: the logarithm of gamma and its derivatives, the inverse of erf.

Each is one formula for NumPy and for graphs, in f64; f32 goes through f64 and is rounded once. The
polynomials interpolate at Chebyshev nodes, computed with 60 digits; without rounding their relative
errors are below 2^-53. tests/cpu/test_special.py holds the bounds that the docstrings state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from types import SimpleNamespace
from typing import Any

import numpy as np

from ...errors import ArgumentError
from ...numerics import as_type
from ...tensor import Tensor
from .. import functions as F
from ..op import GraphOp, sample
from ..operand import convert, floating, public, store
from ..trace import apply
from .elementwise import exp

F64 = as_type("f64")
NAMES = "where log log1p sqrt sin cos abs floor minimum maximum".split()
NUMPY = SimpleNamespace(**{n: getattr(np, n) for n in NAMES}, rint=np.rint)
GRAPH = SimpleNamespace(
    **{n: (lambda *xs, n=n: getattr(F, n)(*xs)) for n in NAMES}, rint=lambda x: F.round(x))

LGAMMA = (  # lgamma(2 + z) / z for |z| <= 1/2, from z^0 on
    0.42278433509846713, 0.3224670334241132, -0.06735230105319809, 0.02058080842778463,
    -0.007385551028674025, 0.0028905103307344045, -0.0011927539116998527, 0.0005096695250241955,
    -0.00022315475858818615, 9.94575066878814e-05, -4.4926233820610826e-05,
    2.0507291996563825e-05, -9.439526202058818e-06, 4.374223481082048e-06,
    -2.0389077825677104e-06, 9.584207048594987e-07, -4.508168225446838e-07,
    2.0193835401136915e-07, -9.558178101635195e-08, 6.472569840064724e-08, -3.085985478390577e-08,
)
DIGAMMA = (  # digamma(u) / (u - ROOT) for 1 <= u <= 2, in u - 3/2
    0.9510558760318328, -0.42362742128146047, 0.24054248424078692, -0.1484049230539187,
    0.09498872445291558, -0.061922133271544284, 0.04076083393821673, -0.026975796849706184,
    0.01790724844392596, -0.011908215027359153, 0.007927018411136843, -0.005280020192518892,
    0.0035181618550874957, -0.0023446252179885993, 0.001562789950608375, -0.0010424323828753985,
    0.000694908174082211, -0.0004591975036646912, 0.0003061242075543146, -0.00022001895005109955,
    0.0001466781049062341, -5.7709404612698156e-05, 3.847275205849602e-05, -8.394009422598467e-05,
    5.596002350342592e-05,
)
ROOT, ROOT_LOW = 1.4616321449683622, 9.549995429965697e-17  # where digamma is 0
ERFINV_CENTRE = (  # erfinv(x) / x for w = -log(1 - x^2) <= 6.25, in w - 3.125
    1.6536545626831027, 0.2401581824255883, -0.00603367087142785, -0.000740702534154477,
    0.00018673420802464837, -1.3882523394405316e-05, -1.3654691850603575e-06,
    4.234788173782339e-07, -2.9070382262927266e-08, -4.11266082002324e-09, 1.0512181539804126e-09,
    -5.414287198084716e-11, -1.2976885526532075e-11, 2.6304834740560442e-12,
    -8.118399443074353e-14, -4.001237735091896e-14, 6.596407712420834e-15,
    -4.0282154327661744e-17, -1.3016928016796445e-16, 1.557432024623325e-17,
    1.150022252066253e-18, -3.4996044354754177e-19, -1.113483769832702e-21, 3.240704459379902e-21,
)
ERFINV_TAIL = (  # for 2.5 <= sqrt(w) <= 4, in sqrt(w) - 3.25
    3.0838856104922208, 1.0052589676941652, 0.00537091455357168, -0.003751208508215561,
    0.0024914420969817607, -0.0016882755357337071, 0.0009532893637435638, -0.00035503780975963814,
    2.4031257015092525e-05, 6.828708654753377e-05, -4.731898412011245e-05, 1.2465167157087251e-05,
    2.9257291901789823e-06, -3.986084395214756e-06, 1.4987130784186127e-06,
    -2.7004219280868947e-08, -2.713451105439456e-07, 1.3104351499972014e-07,
    6.969241977629694e-10, -1.5102695423335065e-08,
)
ERFINV_FAR = (  # for 4 <= sqrt(w) <= 6.1, in sqrt(w) - 5.05
    4.90042105144364, 1.010285017597772, -0.00016985809149340308, -0.0002003120066802735,
    7.124031542245362e-05, -1.837453613912565e-05, 4.193853753803148e-06, -9.070860240222449e-07,
    2.0161905521548853e-07, -5.493197748316719e-08, 2.182184091047106e-08,
    -1.1207461299741068e-08, 5.805888104528111e-09, -2.6311132048940673e-09,
    1.0483309310240927e-09, -3.868291027600667e-10, 7.745384761724364e-11, 2.8907082659821915e-11,
    -1.543927819720834e-11,
)
# Asymptotic series in 1 / x^2: DLMF 5.11.1 and 5.11.2
STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156,
            -3617 / 122400, 43867 / 244188)
DIGAMMA_FAR = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12, -3617 / 8160)
BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510,
             43867 / 798, -174611 / 330, 854513 / 138, -236364091 / 2730)  # B_2, B_4, ...


def _polynomial(coefficients: Sequence[float], x: Any) -> Any:
    return reduce(lambda y, c: y * x + c, reversed(coefficients[:-1]), coefficients[-1])


def _special(name: str, formula: Callable, slope: Callable, doc: str, draws: Sequence[str],
             **attrs: Any) -> GraphOp:
    """formula(x, m, **attrs) in f64 with the functions of m; slope(y, x, **attrs)."""
    def ref(x: np.ndarray, **held: Any) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.asarray(formula(x.astype(np.float64), NUMPY, **held)).astype(x.dtype)

    def expand(x: Tensor, **held: Any) -> Tensor:
        return convert(formula(convert(x, F64), GRAPH, **held), x.type)

    made = GraphOp(
        name,
        shape=lambda x, **held: x,
        ref=ref,
        expand=expand,
        vjp=lambda g, y, x, **held: (g * slope(y, x, **held),),
        jvp=lambda ts, y, x, **held: ts[0] * slope(y, x, **held),
        batch=lambda size, batched, x, **held: (apply(made, x, **held), True),
        axes="...->...",
        samples=tuple(sample(((2, 3), d), **attrs) for d in draws),
        doc=doc,
    )
    return made


# --- gamma ------------------------------------------------------------------------------------
def _lgamma(x: Any, m: Any) -> Any:
    """z P(z) about 2, to which x is moved by the recurrence; Stirling from 8 on; below -1/2 the
    reflection lgamma(x) + lgamma(-x) = log(pi / |x sin(pi x)|)."""
    a = m.abs(x)
    near = a < 0.5
    n = m.minimum(m.maximum(m.floor(a - 1.5), -1.0), 6.0)
    z = m.where(near, x, a - (n + 2.0))  # exact: the difference is at most 1/2
    product = 1.0
    for k in range(1, 7):
        product = product * m.where(n >= k, a - k, 1.0)
    shifted = m.where(n < 0.0, -m.log1p(z), m.log(product))
    middle = z * _polynomial(LGAMMA, z) + m.where(near, -m.log1p(x) - m.log(a), shifted)
    r = 1.0 / a
    far = (a - 0.5) * (m.log(a) - 1.0) + (_polynomial(STIRLING, r * r) * r + HALF_LOG_2PI_E)
    positive = m.where(a < 8.0, middle, far)
    sine = m.abs(m.sin(math.pi * (x - m.rint(x))))
    mirrored = m.log(math.pi / (a * sine)) - positive
    out = m.where(x <= -0.5, mirrored, positive)
    return m.where(a == math.inf, math.inf, out)


HALF_LOG_2PI_E = 0.5 * math.log(2 * math.pi) - 0.5


def _digamma(x: Any, m: Any) -> Any:
    """(u - root) P(u) on [1, 2], to which x is moved; a series from 10 on; reflected below 0."""
    y = m.where(x < 0.0, 1.0 - x, x)
    n = m.minimum(m.floor(y) - 1.0, 8.0)
    below = y < 1.0
    u = m.where(below, y + 1.0, y - n)
    total = m.where(below, -1.0 / y, 0.0)
    for k in range(1, 9):
        total = total + m.where(n >= k, 1.0 / (y - k), 0.0)
    near = ((u - ROOT) - ROOT_LOW) * _polynomial(DIGAMMA, u - 1.5) + total
    r = 1.0 / y
    far = (m.log(y) - 0.5 * r) - _polynomial(DIGAMMA_FAR, r * r) * (r * r)
    out = m.where(y < 10.0, near, far)
    part = math.pi * (x - m.rint(x))
    mirrored = out - math.pi * (m.cos(part) / m.sin(part))
    mirrored = m.where(part == 0.0, math.nan, mirrored)
    return m.where(x < 0.0, mirrored, out)


def _integer_power(x: Any, n: int) -> Any:
    if n == 1:
        return x
    half = _integer_power(x, n // 2)
    return half * half * x if n % 2 else half * half


def _zeta(s: int, y: Any) -> Any:
    """sum_k (y + k)^-s for s >= 2, y > 0, by Euler and Maclaurin from the N-th term on."""
    N = 10 + s
    total = reduce(lambda t, k: t + _integer_power(1.0 / (y + k), s), range(1, N),
                   _integer_power(1.0 / y, s))
    r = 1.0 / (y + N)
    tail, power = 1.0 / (s - 1) + 0.5 * r, 1.0
    for j, bernoulli in enumerate(BERNOULLI, 1):
        factor = math.prod(range(s, s + 2 * j - 1)) / math.factorial(2 * j) * bernoulli
        power = power * (r * r)
        tail = tail + factor * power
    return total + _integer_power(r, s - 1) * tail


def _cotangent_slope(n: int) -> list[float]:
    """p_n, in powers of c = cot(pi x), where d^n/dx^n (pi cot pi x) = pi^(n + 1) p_n(c)."""
    p = [0.0, 1.0]
    for _ in range(n):
        d = [k * v for k, v in enumerate(p)][1:]
        p = [-a - b for a, b in zip(d + [0.0, 0.0], [0.0, 0.0] + d, strict=True)]
    return p


def _polygamma(x: Any, m: Any, n: int) -> Any:
    sign = -1.0 if n % 2 == 0 else 1.0
    y = m.where(x < 0.0, 1.0 - x, x)
    right = sign * math.factorial(n) * _zeta(n + 1, y)
    part = math.pi * (x - m.rint(x))
    slope = math.pi ** (n + 1) * _polynomial(_cotangent_slope(n), m.cos(part) / m.sin(part))
    mirrored = (-right if n % 2 else right) - slope
    if n % 2 == 0:  # from one side of a pole -inf, from the other inf
        mirrored = m.where(part == 0.0, math.nan, mirrored)
    return m.where(x < 0.0, mirrored, right)


# --- erf --------------------------------------------------------------------------------------
def _erfinv(x: Any, m: Any) -> Any:
    """x P(w) with w = -log(1 - x^2), and x P(sqrt(w)) in the tails."""
    w = -m.log((1.0 - x) * (1.0 + x))
    t = m.sqrt(m.maximum(w, 0.0))
    centre = _polynomial(ERFINV_CENTRE, w - 3.125)
    tail = m.where(t < 4.0, _polynomial(ERFINV_TAIL, t - 3.25), _polynomial(ERFINV_FAR, t - 5.05))
    y = x * m.where(w < 6.25, centre, tail)
    return m.where(m.abs(x) == 1.0, x * math.inf, y)


LGAMMA_OP = _special("lgamma", _lgamma, lambda y, x: digamma(x), "log |gamma(x)|",
                     ("positive", "off_integers"))
DIGAMMA_OP = _special("digamma", _digamma, lambda y, x: polygamma(1, x),
                      "the derivative of lgamma", ("positive", "off_integers"))
POLYGAMMA_OP = _special("polygamma", _polygamma, lambda y, x, n: polygamma(n + 1, x),
                        "the n-th derivative of digamma", ("positive", "off_integers"), n=1)
ERFINV_OP = _special("erfinv", _erfinv,
                     lambda y, x: (0.5 * math.sqrt(math.pi)) * exp(y * y),
                     "x with erf(x) = y", ("unit",))


# --- public functions -------------------------------------------------------------------------
@public
def lgamma(x: Any) -> Tensor:
    """log |gamma(x)|, elementwise; inf at 0, -1, -2, ...

    f32 within 1 ulp for x > 0 and f64 within 8, also near 1 and 2; below 0 within 4 ulp of
    |y| + |log |x|| + 1. Integers become f32. scipy.special.gammaln.
    """
    c, numeric = floating(x)
    return store(apply(LGAMMA_OP, c), numeric)


@public
def digamma(x: Any) -> Tensor:
    """The derivative of lgamma, elementwise; -inf at 0, inf at -0.0, NaN at -1, -2, ...

    f32 within 1 ulp for x > 0 and f64 within 4, also near the root 1.46; below 0 within 4 ulp of
    |y| + pi |cot pi x| + 1. Integers become f32. scipy.special.digamma.
    """
    c, numeric = floating(x)
    return store(apply(DIGAMMA_OP, c), numeric)


@public
def polygamma(n: int, x: Any) -> Tensor:
    """The n-th derivative of digamma, elementwise: (-1)^(n + 1) n! sum_k (x + k)^-(n + 1).

    n: 0 .. 30   f32 within 1 ulp for x > 0 and f64 within 4 + 2 n; below 0 by reflection, at the
    poles inf for odd n and NaN for even n. Raises ArgumentError. scipy.special.polygamma.
    """
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or not 0 <= n <= 30:
        raise ArgumentError(f"polygamma of order n={n!r}", hint="an integer from 0 to 30")
    c, numeric = floating(x)
    made = apply(POLYGAMMA_OP, c, n=int(n)) if n else apply(DIGAMMA_OP, c)
    return store(made, numeric)


@public
def erfinv(x: Any) -> Tensor:
    """y with erf(y) = x, elementwise; infinite at -1 and 1, NaN beyond.

    f32 within 1 ulp, f64 within 4. Integers become f32. scipy.special.erfinv.
    """
    c, numeric = floating(x)
    return store(apply(ERFINV_OP, c), numeric)
