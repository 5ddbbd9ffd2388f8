"""Functions of every family with what they mean in f64, and numbers of every type to try them on.

A result is that meaning rounded once to its type, of operands as their types hold them. In narrow
types the f32 that it is computed in may decide ties: the numbers beside it, rounded, are right too.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy.special as sp

import tessera as ts
from tessera.errors import TesseraError
from tessera.numerics import as_type, decode, encode
from tessera.tensor import Tensor
from tolerance import EPS, TINY

FLOATS = ["f64", "f32", "tf32", "bf16", "f16", "fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3",
          "fp4_e2m1", "fp4_e3m0", "bf16 @saturate", 'f16 @rounding("toward_zero")',
          "fp8_e4m3 @saturate"]
INTEGERS = ["int64", "int32", "int16", "int8", "int4", "uint64", "uint32", "uint16", "uint8",
            "bool_"]
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 2.0, -3.0,
           1e-40, -1e-40, 1e-7, 1e-3, 88.0, -80.0, 89.0, -89.0, 1e20, -1e20, 3e38, -3e38, 2.0**31,
           240.0, 448.0, -464.0, 65504.0, 65520.0, -57344.0, 7.0, -7.5, 0.1]
Case = tuple[Callable, Callable]
IDS = np.array([0, 1, 0, 3, 1, 0])

UNARY: dict[str, Case] = {
    **{name: (getattr(ts, name), getattr(np, name)) for name in (
        "abs", "negative", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt",
        "square", "sin", "cos", "tan", "sinh", "cosh", "tanh", "sign", "floor", "ceil", "trunc",
        "round", "isnan", "isinf", "isfinite", "logical_not")},
    "asin": (ts.asin, np.arcsin), "acos": (ts.acos, np.arccos), "atan": (ts.atan, np.arctan),
    "rsqrt": (ts.rsqrt, lambda x: 1 / np.sqrt(x)), "reciprocal": (ts.reciprocal, lambda x: 1 / x),
    "erf": (ts.erf, sp.erf), "erfc": (ts.erfc, sp.erfc), "sigmoid": (ts.sigmoid, sp.expit),
    "relu": (ts.relu, lambda x: np.maximum(x, 0 * x.astype(x.dtype)) if x.dtype.kind != "f" else
             np.where(x < 0, 0, x)),
    "softplus": (ts.softplus, lambda x: np.logaddexp(0, x)),
    "elu": (ts.elu, lambda x: np.where(x > 0, x, np.expm1(x))),
    "leaky_relu": (ts.leaky_relu, lambda x: np.where(x > 0, x, 0.01 * x)),
    "x ** 2": (lambda x: x ** 2, lambda x: x * x),
    "x ** 3": (lambda x: x ** 3, lambda x: x * x * x),
    "x ** 0": (lambda x: x ** 0, lambda x: x ** 0),
    "x ** 0.5": (lambda x: x ** 0.5, np.sqrt),
}
BINARY: dict[str, Case] = {
    **{name: (getattr(ts, name), getattr(np, name)) for name in (
        "add", "subtract", "multiply", "divide", "floor_divide", "remainder", "maximum", "minimum",
        "hypot", "less", "equal", "greater_equal", "not_equal", "left_shift", "right_shift",
        "bitwise_and", "bitwise_xor", "logical_and", "logical_xor")},
    "atan2": (ts.atan2, np.arctan2),
    "where": (lambda a, b: ts.where(a > b, a, b), lambda a, b: np.where(a > b, a, b)),
}
ROWS: dict[str, Case] = {
    **{name: (lambda x, name=name: getattr(ts, name)(x, axis=-1),
              lambda x, name=name: getattr(np, name)(_counted(x), -1)) for name in (
        "sum", "prod", "max", "min", "mean", "var", "std", "argmax", "argmin",
        "all", "any", "median", "sort")},
    "cumsum": (lambda x: ts.cumsum(x, axis=0), lambda x: np.cumsum(_counted(x), 0)),
    "cummax": (lambda x: ts.cummax(x, axis=-1), lambda x: np.maximum.accumulate(x, -1)),
    "argsort": (lambda x: ts.argsort(x), lambda x: np.argsort(x, -1, kind="stable")),
    "top_k": (lambda x: ts.top_k(x, 2)[0], lambda x: np.sort(x, -1)[:, :1:-1]),
    "logsumexp": (lambda x: ts.logsumexp(x), lambda x: sp.logsumexp(x, -1)),
    "softmax": (lambda x: ts.softmax(x), lambda x: sp.softmax(x, -1)),
    "norm": (lambda x: ts.vector_norm(x, axis=-1), lambda x: np.linalg.norm(x, axis=-1)),
    "matmul": (lambda x: x @ x.T, lambda x: _counted(x, 8) @ _counted(x, 8).T),
    "einsum": (lambda x: ts.einsum("ij->j", x), lambda x: _any_or_sum(x, 0)),
    "segment_sum": (lambda x: ts.segment_sum(x, IDS, 5), lambda x: np.stack(
        [_counted(x[i == IDS]).sum(0) for i in range(5)])),
    "segment_max": (lambda x: ts.segment_max(x, IDS % 2, 2), lambda x: np.stack(
        [x[i == IDS % 2].max(0) for i in range(2)])),
    "take": (lambda x: ts.take(x, np.array([1, 0, -1]), axis=1), lambda x: x[:, [1, 0, -1]]),
    "slice": (lambda x: x[1:, ::2], lambda x: x[1:, ::2]),
    "flip": (ts.flip, lambda x: x[::-1, ::-1]),
    "concatenate": (lambda x: ts.concatenate([x, x], 1), lambda x: np.concatenate([x, x], 1)),
    "pad": (lambda x: ts.pad(x, ((1, 1), (0, 1))), lambda x: np.pad(x, ((1, 1), (0, 1)))),
    "to f16": (lambda x: ts.cast(x, "f16"), lambda x: x),
    "to e4m3": (lambda x: ts.cast(x, "fp8_e4m3"), lambda x: x),
    "to e3m0": (lambda x: ts.cast(x, "fp4_e3m0"), lambda x: x),
    "to int8": (lambda x: ts.cast(x, "int8"), lambda x: np.clip(np.trunc(x), -128, 127)),
}
FAMILIES = {"unary": UNARY, "binary": BINARY, "rows": ROWS}
ANY_ZERO = {"maximum", "minimum", "relu", "elu", "where", "max", "min"}  # of either sign
ANGLES = {"tan", "sin", "cos"}  # f32 holds large integers only roughly


def _counted(x: np.ndarray, bits: int = 16) -> np.ndarray:
    """As sums are kept: of bools in int64, of narrow integers in int32."""
    if x.dtype.kind == "b":
        return x.astype(np.int64) if bits == 16 else x
    return x.astype(np.int32) if x.dtype.kind in "iu" and x.itemsize * 8 <= bits else x


def _any_or_sum(x: np.ndarray, axis: int) -> np.ndarray:
    return x.any(axis) if x.dtype.kind == "b" else _counted(x).sum(axis)


# --- operands -------------------------------------------------------------------------------------
def operands(family: str, kind: str, rng: np.random.Generator) -> list[Tensor]:
    """Of one family: every number of a type of 8 bits, or special ones; pairs of such; a matrix."""
    if family == "rows":
        return [_matrix(kind, rng)]
    values = _special(kind, rng, few=family == "binary")
    if family == "unary":
        return [_tensor(values, kind)]
    n = len(values)
    return [_tensor(np.repeat(values, n), kind), _tensor(np.tile(values, n), kind)]


def _special(kind: str, rng: np.random.Generator, few: bool) -> np.ndarray:
    d = as_type(kind).dtype
    if d.kind == "bool":
        return np.array([False, True])
    if d.kind == "float":
        if d.bits <= 8 and not few:
            return np.asarray(decode(np.arange(1 << d.bits, dtype=np.uint8), d), np.float64)
        own = [*SPECIAL[:14], 3.0, 7.0, float(d.max), -float(d.max)]
        drawn = [] if few else [*SPECIAL, *rng.standard_normal(20) * 3]
        return np.array([*own, *drawn])
    low, high = int(d.min), int(d.max)
    some = [0, 1, 2, 3, -1, -2, -3, 5, 7, -7, 8, 31, 33, 100, -100, low, low + 1, high - 1, high]
    return np.array(sorted({x for x in some if low <= x <= high}), object)


def _matrix(kind: str, rng: np.random.Generator) -> Tensor:
    """[6, 4] with ties and zeros."""
    d = as_type(kind).dtype
    if d.kind == "float":
        x = rng.standard_normal((6, 4)) * 2
        x[0], x[1, 1] = [1, 1, 0, 2], x[1, 2]
        return _tensor(x, kind)
    if d.kind == "bool":
        return _tensor(rng.random((6, 4)) < 0.6, kind)
    low, high = max(int(d.min), -100), min(int(d.max), 100)
    x = rng.integers(low, high + 1, (6, 4)).astype(object)
    x[0] = [1, 1, 0, 2]
    return _tensor(x, kind)


def _tensor(values: np.ndarray, kind: str) -> Tensor:
    numeric = as_type(kind)
    if numeric.dtype.kind == "float":
        return Tensor(encode(values, numeric.dtype, rounding=numeric.policy.rounding,
                             saturate=numeric.policy.saturate), numeric)
    return Tensor(np.asarray(values).astype(np.int8).astype(numeric.dtype.numpy)
                  if numeric.dtype.packed else values.astype(numeric.dtype.numpy), numeric)


def defined(family: str, given: list[Tensor]) -> dict[str, Tensor]:
    """The functions that take such operands, with what they give op by op."""
    made = {}
    for name, (fn, _) in FAMILIES[family].items():
        try:
            made[name] = fn(*given)
        except TesseraError:
            continue
    return made


# --- judging --------------------------------------------------------------------------------------
def values_of(x: Tensor) -> np.ndarray:
    """In f64, integers as they are."""
    a = decode(x.array, x.dtype)
    return a.astype(np.float64) if a.dtype.kind == "f" else a


def check_meaning(name: str, oracle: Callable, given: list[Tensor], got: Tensor) -> None:
    exact, d = [values_of(x) for x in given], got.dtype
    if d.kind == "float":
        exact = [x.astype(np.float64) for x in exact]
    with np.errstate(all="ignore"):
        want = np.asarray(oracle(*exact))
    if d.kind != "float":
        want = np.clip(want, d.min, d.max) if d.packed else want
        np.testing.assert_array_equal(values_of(got), want.astype(d.numpy).astype(
            np.int8 if d.packed else d.numpy), name)
        return
    near = 4e-6 if d.compute.name == "f32" else 1e-13
    found = values_of(got)
    fits = np.full(want.shape, False) if name not in ANGLES or given[0].dtype.kind == "float" else (
        np.abs(exact[0]) > 1000)
    policy = got.policy
    with np.errstate(all="ignore"):
        for w in (want, want * (1 + near), want * (1 - near)):
            if d.compute.name == "f32":  # what overflows that is infinite before it is rounded
                w = np.where(np.isinf(w.astype(np.float32)), np.copysign(np.inf, w), w)
            r = encode(w, d, rounding=policy.rounding, saturate=policy.saturate)
            fits |= _same(np.asarray(decode(r, d), np.float64), found)
        if d.bits >= 32:
            fits |= np.abs(found - want) <= near * np.abs(want) + 16 * float(d.smallest)
    assert fits.all(), _told(name, exact, found, want, ~fits)


def _same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a == b) | (np.isnan(a) & np.isnan(b))


def check_same(name: str, given: list[Tensor], got: np.ndarray, want: Tensor,
               signs: bool = True) -> None:
    """What another way gives: equal, of floats to the last digits. signs: of zeros, too."""
    d = want.dtype
    assert got.shape == want.shape, name
    found, meant = (np.asarray(decode(a, d)) for a in (got, want.array))
    if d.kind != "float":
        np.testing.assert_array_equal(found, meant, name)
        return
    found, meant = found.astype(np.float64), meant.astype(np.float64)
    eps = {"f64": 64, "f32": 64}.get(d.name, 1) * EPS[d.name]
    with np.errstate(all="ignore"):
        size = np.maximum(np.abs(meant), TINY[d.name] if d.bits < 32 else 0)
        least = 4 * float(d.smallest) if d.bits >= 32 else 0.0
        least = TINY["f32"] if name == "sigmoid" else least  # by one exp, which overflows
        fits = _same(found, meant) | (np.abs(found - meant) <= 1.01 * eps * size + least)
    if signs and name not in ANY_ZERO and d.special != "none":  # else NaN is one of two zeros
        fits &= (found != 0) | (meant != 0) | (np.signbit(found) == np.signbit(meant))
    assert fits.all(), _told(name, [values_of(x) for x in given], found, meant, ~fits)


def _told(name: str, given: list, found: np.ndarray, want: np.ndarray, bad: np.ndarray) -> str:
    at = tuple(np.argwhere(bad)[0])
    of = [x[at] for x in given if x.shape == found.shape]
    return f"{name} of {of} at {at}: {found[at]}, not {want[at]}; {bad.sum()} such"
