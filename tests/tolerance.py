"""How far a result may be from its oracle: one function of the type and the reduction's length.

    from tolerance import assert_close
    assert_close(actual, expected, dtype="bf16", n=K)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

# 2^-mantissa bits, written down here and not taken from tessera.numerics, which it judges.
EPS: dict[str, float] = {
    "f64": 2.0**-52, "f32": 2.0**-23, "tf32": 2.0**-10, "bf16": 2.0**-7, "f16": 2.0**-10,
    "fp8_e4m3": 2.0**-3, "fp8_e5m2": 2.0**-2, "fp6_e3m2": 2.0**-2, "fp6_e2m3": 2.0**-3,
    "fp4_e2m1": 2.0**-1, "fp4_e3m0": 1.0,
}
# How NumPy and ml_dtypes spell them.
NAMES: dict[str, str] = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16",
    "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "float6_e3m2fn": "fp6_e3m2",
    "float6_e2m3fn": "fp6_e2m3", "float4_e2m1fn": "fp4_e2m1",
}
# The smallest normal number, below which an error is absolute.
TINY: dict[str, float] = {
    "f64": 2.0**-1022, "f32": 2.0**-126, "tf32": 2.0**-126, "bf16": 2.0**-126, "f16": 2.0**-14,
    "fp8_e4m3": 2.0**-6, "fp8_e5m2": 2.0**-14, "fp6_e3m2": 2.0**-2, "fp6_e2m3": 1.0,
    "fp4_e2m1": 1.0, "fp4_e3m0": 2.0**-2,
}
FEW = 2
FACTOR = 4.0  # half an ulp for the result, and room for a handful of roundings before it


def f64(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def type_name(dtype: Any) -> str:
    """f32, ... of a tessera type, a NumPy type or a name; integers and bool keep their name."""
    text = str(np.dtype(dtype)) if isinstance(dtype, type) else str(dtype)
    return NAMES.get(text, text)


def tolerance(dtype: Any, n: int = 1) -> float:
    """4 eps(dtype) sqrt(n): n rounding errors of random sign add up like a random walk.

    Zero for integers and bool. Higham and Mary 2019, doi:10.1137/18M1226312, section 2.
    """
    name = type_name(dtype)
    if name in EPS:
        return FACTOR * EPS[name] * math.sqrt(max(n, 1))
    if name.startswith(("int", "uint", "bool")):
        return 0.0
    raise KeyError(f"no tolerance for {dtype!r}; known: {', '.join(EPS)}, integers, bool")


def assert_close(
    actual: Any, expected: Any, dtype: Any = None, n: int = 1, *, scale: Any = None
) -> None:
    """|actual - expected| <= tolerance(dtype, n) * (|expected| + scale); NaN, Inf where expected.

    dtype: the coarsest type the computation rounds to; that of `actual` when None.
    n: terms of the longest sum. With n > 1 a result may cancel, so the error is also allowed
    relative to `scale`, by default the root mean square of the finite expected values. One or two
    elements may all cancel, and zeros did, so theirs is at least 1, the size of what tests draw.
    scale: the size of the terms that cancel, for all or, as an array, for each element: the largest
    term, or the root of the sum of their squares. The largest result is no such size.
    """
    dtype = actual.dtype if dtype is None else dtype
    limit = tolerance(dtype, n)
    if limit == 0.0:
        got, want = np.asarray(actual), np.asarray(expected)
    else:
        got, want = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    if limit == 0.0:
        bad = got != want
        error, allowed = np.where(bad, 1.0, 0.0), np.zeros(want.shape)
    else:
        error, allowed = _errors(got, want, limit, n, scale, TINY[type_name(dtype)])
        bad = ~(error <= allowed)
    if bad.any():
        raise AssertionError(_message(got, want, bad, error, allowed, type_name(dtype), n))


def _errors(
    got: np.ndarray, want: np.ndarray, limit: float, n: int, scale: Any, tiny: float
) -> tuple[np.ndarray, np.ndarray]:
    finite = np.isfinite(want)
    if scale is None:
        scale = math.sqrt(np.mean(np.square(want[finite]))) if n > 1 and finite.any() else 0.0
        if n > 1 and (want.size <= FEW or not want.any()):
            scale = max(scale, 1.0)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.where(finite, np.abs(got - want), np.inf))
        error = np.where(np.isnan(error), np.inf, error)  # NaN where a number was expected
    allowed = limit * (np.where(finite, np.abs(want), 0.0) + np.maximum(scale, tiny))
    return error, allowed


def _message(
    got: np.ndarray, want: np.ndarray, bad: np.ndarray, error: np.ndarray, allowed: np.ndarray,
    name: str, n: int,
) -> str:
    excess = np.where(bad, error / np.maximum(allowed, 1e-300), -1.0)
    worst = np.unravel_index(int(np.argmax(excess)), bad.shape)
    where = "[" + ", ".join(map(str, worst)) + "]" if worst else ""
    return (
        f"{bad.sum()} of {bad.size} elements are off ({name}, n={n}, shape {bad.shape})\n"
        f"worst{where}: got {got[worst]}, expected {want[worst]}\n"
        f"error {error[worst]:.3g}, allowed {allowed[worst]:.3g}"
    )
