"""Accuracy and special values of the functions compiled loops call, against f64 NumPy and SciPy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special

from tessera.graph.cpu import LoopInput, LoopOp, LoopOutput, LoopProgram, compile_loops

INF, NAN = np.inf, np.nan
# name -> (f64 reference, low, high, greatest error in ulp of the f32 result)
SWEEPS = {
    "exp": (np.exp, -104, 89, 2), "exp2": (np.exp2, -150, 128, 2),
    "expm1": (np.expm1, -20, 89, 3), "log": (np.log, 1e-45, 3e38, 2),
    "log2": (np.log2, 1e-45, 3e38, 3), "log10": (np.log10, 1e-45, 3e38, 3),
    "log1p": (np.log1p, -1, 100, 3), "tanh": (np.tanh, -10, 10, 6),
    "sigmoid": (special.expit, -104, 104, 3),
    "softplus": (lambda x: np.logaddexp(0, x), -80, 90, 3),
    "erf": (special.erf, -5, 5, 6), "erfc": (special.erfc, -3, 9, 1),
    "sin": (np.sin, -1e4, 1e4, 2), "cos": (np.cos, -1e4, 1e4, 2), "tan": (np.tan, -1e4, 1e4, 4),
    "sqrt": (np.sqrt, 0, 3e38, 0.5), "rsqrt": (lambda x: 1 / np.sqrt(x), 1e-38, 3e38, 2),
    "asin": (np.arcsin, -1, 1, 1), "acos": (np.arccos, -1, 1, 1), "atan": (np.arctan, -50, 50, 1),
    "sinh": (np.sinh, -88, 88, 1), "cosh": (np.cosh, -88, 88, 1),
    "asinh": (np.arcsinh, -1e5, 1e5, 1), "acosh": (np.arccosh, 1, 1e5, 1),
    "atanh": (np.arctanh, -1, 1, 1),
}


def apply(expr: str, *arrays: np.ndarray, dtype: str = "f32", out: str | None = None) -> np.ndarray:
    n = len(arrays)
    program = LoopProgram(
        (LoopInput(dtype),) * n, (LoopOp("map", tuple(range(n)), out or dtype, expr),),
        (LoopOutput(n, out or dtype),),
    )
    return compile_loops(program)(*arrays)[0]


def samples(
    low: float, high: float, rng: np.random.Generator, count: int = 1 << 17
) -> np.ndarray:
    """f32 values in [low, high]: evenly, around zero over all magnitudes, and the ends."""
    even = rng.uniform(low, high, count)
    tiny = rng.choice([-1.0, 1.0], count) * 2.0 ** rng.uniform(-149, 127, count)
    x = np.concatenate([even, tiny[(tiny >= low) & (tiny <= high)], [low, high]])
    return x.astype(np.float32)


def ulp_error(got: np.ndarray, exact: np.ndarray) -> float:
    """Greatest error in units of the exact result's f32 spacing; infinities must match."""
    with np.errstate(over="ignore"):
        rounded = exact.astype(np.float32)
    finite = np.isfinite(rounded)
    np.testing.assert_array_equal(got[~finite], rounded[~finite])
    unit = np.spacing(np.abs(rounded[finite])).astype(np.float64)
    return float(np.max(np.abs(got[finite].astype(np.float64) - exact[finite]) / unit))


@pytest.mark.parametrize("name", SWEEPS)
def test_f32_accuracy(name: str, rng: np.random.Generator) -> None:
    reference, low, high, most = SWEEPS[name]
    x = samples(low, high, rng)
    with np.errstate(all="ignore"):
        exact = reference(x.astype(np.float64))
    got = apply(f"{name}({{0}})", x)
    error = ulp_error(got, exact)
    print(f"{name}: {error:.2f} ulp")
    assert error <= most


SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, 2.0, -2.5, 1e-45, -1e-45, 3e38, -3e38, INF, -INF, NAN,
                    1e-30, 88.7, -103.5, 89.0, 0.5], np.float32)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("name", [*SWEEPS, "sign", "abs", "floor", "ceil", "trunc", "rint"])
def test_special_values_agree_with_numpy(name: str, dtype: str) -> None:
    from tessera.graph.cpu.vocabulary import FUNCTIONS

    x = SPECIAL.astype({"f32": np.float32, "f64": np.float64}[dtype])
    if name in ("sin", "cos", "tan"):
        x = x[~(np.abs(x) == np.float32(3e38))]  # documented: f32 arguments below 2**45
    with np.errstate(all="ignore"):
        want = FUNCTIONS[name].meaning(x)
    got = apply(f"{name}({{0}})", x, dtype=dtype)
    np.testing.assert_allclose(got, want, rtol=4e-7, atol=3e-45, err_msg=name)


def test_tanh_and_erf_stay_within_one(rng: np.random.Generator) -> None:
    x = np.concatenate([rng.uniform(-12, 12, 1 << 18), [INF, -INF, 50, -50]]).astype(np.float32)
    for name, one in (("tanh", 9.1), ("erf", 3.93)):
        got = apply(f"{name}({{0}})", x)
        assert np.max(np.abs(got)) == 1 and (np.abs(got[np.abs(x) >= one]) == 1).all()


def test_exp_limits() -> None:
    x = np.array([-INF, INF, NAN, 88.72283, 88.73, -103.97, -104.5], np.float32)
    got = apply("exp({0})", x)
    assert got[0] == 0 and got[1] == INF and np.isnan(got[2])
    assert np.isfinite(got[3]) and got[4] == INF and got[5] > 0 and got[6] == 0


def test_log_limits() -> None:
    got = apply("log({0})", np.array([0, -0.0, -1, INF, NAN, -INF, 1], np.float32))
    assert got[0] == got[1] == -INF and np.isnan(got[[2, 4, 5]]).all()
    assert got[3] == INF and got[6] == 0


def test_pow_accuracy_and_special_cases(rng: np.random.Generator) -> None:
    x = (2.0 ** rng.uniform(-60, 60, 1 << 16)).astype(np.float32)
    y = rng.uniform(-3, 3, 1 << 16).astype(np.float32)
    with np.errstate(all="ignore"):
        assert ulp_error(apply("pow({0}, {1})", x, y), x.astype(float) ** y.astype(float)) <= 1
        values = np.array([0.0, -0.0, 1, -1, 2, -2, 3, -3, 0.5, -0.5, INF, -INF, NAN], np.float32)
        a, b = (g.ravel().copy() for g in np.meshgrid(values, values))
        want = np.power(a.astype(float), b.astype(float)).astype(np.float32)
    np.testing.assert_allclose(apply("{0} ** {1}", a, b), want, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["f32", "f64", "i32", "i64"])
def test_floordiv_and_mod_agree_with_numpy(dtype: str, rng: np.random.Generator) -> None:
    kind = {"f32": np.float32, "f64": np.float64, "i32": np.int32, "i64": np.int64}[dtype]
    a = rng.integers(-40, 40, 4000).astype(kind)
    b = rng.integers(-7, 7, 4000).astype(kind)
    if dtype[0] == "f":
        a, b = a / kind(4), b / kind(3)
    memory = {"i32": "int32", "i64": "int64"}.get(dtype, dtype)
    for text, reference in (("{0} // {1}", np.floor_divide), ("{0} % {1}", np.mod)):
        with np.errstate(all="ignore"):
            want = reference(a, b)
        program = LoopProgram(
            (LoopInput(memory),) * 2, (LoopOp("map", (0, 1), dtype, text),),
            (LoopOutput(2, memory),),
        )
        np.testing.assert_array_equal(compile_loops(program)(a, b)[0], want)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_maximum_minimum_propagate_nan(dtype: str) -> None:
    a = np.array([1, NAN, 2, NAN, -INF, INF], {"f32": np.float32, "f64": np.float64}[dtype])
    b = np.array([2, 1, NAN, NAN, INF, NAN], a.dtype)
    np.testing.assert_array_equal(apply("maximum({0}, {1})", a, b, dtype=dtype), np.maximum(a, b))
    np.testing.assert_array_equal(apply("minimum({0}, {1})", a, b, dtype=dtype), np.minimum(a, b))
