"""Elementwise ops against NumPy, math and scipy: values, types, broadcasting, gradient traps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.special

import tessera as ts
from tessera.errors import ArgumentError, DTypeError, ShapeError
from tolerance import assert_close

RUNS = [lambda f: f, ts.jit]


def ulps(got: Any, exact: np.ndarray) -> float:
    """The largest error in units of f32's last place of the exact value."""
    got = np.asarray(got)
    assert got.dtype == np.float32
    unit = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    return float(np.max(np.abs(got.astype(np.float64) - exact) / unit))


POSITIVE = {"log", "sqrt", "rsqrt"}
UNIT = {"asin", "acos"}
ORACLES: dict[str, Callable] = {
    "log": np.log, "log1p": np.log1p, "expm1": np.expm1, "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin, "cos": np.cos, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
    "sinh": np.sinh, "cosh": np.cosh, "sigmoid": scipy.special.expit, "erf": scipy.special.erf,
    "erfc": scipy.special.erfc,
    "exp": np.exp, "tanh": np.tanh, "sqrt": np.sqrt,
}


@pytest.mark.parametrize("run", RUNS, ids=["eager", "jit"])
@pytest.mark.parametrize("name", ORACLES)
def test_maths_in_f32(name: str, run: Callable, rng: np.random.Generator) -> None:
    """Within a few last places of the f64 value rounded to f32."""
    x = rng.uniform(-4, 4, 3001).astype(np.float32)
    x = np.abs(x) if name in POSITIVE else x / 4.01 if name in UNIT else x
    x = np.maximum(x, np.float32(-0.99)) if name == "log1p" else x.astype(np.float32)
    want = ORACLES[name](x.astype(np.float64))
    assert_close(run(getattr(ts, name))(x), want, dtype="f32", n=2,
                 scale=1e-3 if name in ("sin", "cos", "log", "log1p", "acos") else 0.0)


@pytest.mark.row("OPS-07")
def test_exp_within_two_ulp(rng: np.random.Generator) -> None:
    """Eager it is NumPy's f32 exp, itself up to 2.4 ulp off (NumPy 2.4, AVX-512); compiled it is
    held to the exact value."""
    x = rng.uniform(-87, 88, 20001).astype(np.float32)
    np.testing.assert_array_equal(ts.exp(x), np.exp(x))
    assert ulps(ts.jit(ts.exp)(x), np.exp(x.astype(np.float64))) <= 2
    edge = np.array([np.inf, -np.inf, np.nan, 0, 89, -110], np.float32)
    for run in RUNS:
        np.testing.assert_array_equal(run(ts.exp)(edge), [np.inf, 0, np.nan, 1, np.inf, 0])


@pytest.mark.row("OPS-15")
@pytest.mark.parametrize("run", RUNS, ids=["eager", "jit"])
def test_tanh(run: Callable, rng: np.random.Generator) -> None:
    x = rng.uniform(-12, 12, 5001).astype(np.float32)
    assert_close(run(ts.tanh)(x), np.tanh(x), dtype="f32")
    assert run(ts.tanh)(np.array([np.inf, -np.inf, 0], np.float32)).tolist() == [1.0, -1.0, 0.0]


@pytest.mark.row("OPS-16", "OPS-17")
def test_sqrt_also_of_python_scalars(rng: np.random.Generator) -> None:
    x = rng.uniform(0, 1e6, 999).astype(np.float32)
    for run in RUNS:
        np.testing.assert_array_equal(run(ts.sqrt)(x), np.sqrt(x))
    assert ts.sqrt(2.0).item() == np.sqrt(np.float32(2))
    assert ts.sqrt(16).item() == 4.0
    assert ts.pi == math.pi
    assert ts.sqrt(2.0 / ts.pi).item() == pytest.approx(0.79788456, rel=1e-7)


@pytest.mark.row("OPS-10", "OPS-11")
def test_round_and_abs(rng: np.random.Generator) -> None:
    x = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 2.4999, np.nan, -np.inf], np.float32)
    for run in RUNS:
        np.testing.assert_array_equal(run(ts.round)(x), np.round(x))
        np.testing.assert_array_equal(run(ts.abs)(x), np.abs(x))
        assert np.signbit(np.asarray(run(ts.round)(x))[2])
    ints = rng.integers(-9, 9, 20)
    np.testing.assert_array_equal(abs(ts.tensor(ints)), np.abs(ints))


@pytest.mark.parametrize("decimals", [0, 1, 3, 7, -1, -2])
def test_round_to_decimals(decimals: int, rng: np.random.Generator) -> None:
    for dtype in ("f4", "f8"):
        x = (rng.standard_normal(500) * 10.0 ** rng.integers(-3, 6, 500)).astype(dtype)
        np.testing.assert_array_equal(ts.round(x, decimals), np.round(x, decimals))
        np.testing.assert_array_equal(ts.jit(lambda x: ts.round(x, decimals))(x),
                                      np.round(x, decimals))
    ints = rng.integers(-500, 500, 300)
    np.testing.assert_array_equal(ts.round(ints, decimals), np.round(ints, decimals))
    edge = np.array([np.inf, -np.inf, np.nan, 3e38], np.float32)
    np.testing.assert_array_equal(ts.round(edge, decimals), edge)
    slope = ts.grad(lambda x: ts.sum(ts.round(x, decimals)))(np.array([0.12, 3e38], np.float32))
    assert slope.tolist() == [0.0, 0.0]


def test_narrow_integers_round_exactly() -> None:
    x = np.array([127, -128, 55, 45, 5, -55], np.int8)
    assert ts.round(x, -1).tolist() == [127, -128, 60, 40, 0, -60]  # 130 saturates
    assert ts.round(x, -2).tolist() == [100, -100, 100, 0, 0, -100]
    assert ts.round(x, -3).tolist() == [0] * 6 and ts.round(x, 2).tolist() == x.tolist()
    with pytest.raises(ArgumentError, match="decimals=0.5"):
        ts.round(x, 0.5)


@pytest.mark.row("OPS-13")
def test_relu_and_its_gradient_at_zero() -> None:
    x = np.array([-2.0, -0.0, 0.0, 3.0, np.inf], np.float32)
    for run in RUNS:
        np.testing.assert_array_equal(run(ts.relu)(x), np.maximum(x, 0))
    assert np.isnan(ts.relu(np.float32(np.nan)).item())
    assert ts.grad(lambda x: ts.sum(ts.relu(x)))(x[:4]).tolist() == [0.0, 0.0, 0.0, 1.0]
    assert ts.relu(ts.tensor([-1, 2])).tolist() == [0, 2]


@pytest.mark.row("OPS-14")
def test_mse(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((2, 5, 7))
    assert_close(ts.mse(a, b), ((a - b) ** 2).mean(), n=35)
    assert ts.mse(a, b).shape == ()
    assert_close(ts.grad(lambda a: ts.mse(a, b))(a), 2 * (a - b) / 35, n=2)


@pytest.mark.row("OPS-18")
@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 4, 5, 0.5, -1, -2, 2.5])
def test_powers(exponent: float, rng: np.random.Generator) -> None:
    x = rng.uniform(0.2, 2, 50)
    signed = x if exponent in (0.5, 2.5) else x * rng.choice([-1, 1], 50)
    for run in RUNS:
        assert_close(run(lambda x: x**exponent)(signed), signed**exponent, dtype="f64")
    slope = ts.grad(lambda x: ts.sum(x**exponent))(signed)
    want = exponent * signed ** (exponent - 1) if exponent else np.zeros(50)
    assert_close(slope, want, dtype="f64", n=2)


def test_powers_at_zero() -> None:
    """0 ** c and its derivatives have no 0 * inf in them."""
    zero = np.zeros(1)
    for exponent, value, slope in ((0, 1.0, 0.0), (1, 0.0, 1.0), (2, 0.0, 0.0), (3, 0.0, 0.0),
                                   (5, 0.0, 0.0), (1.5, 0.0, 0.0)):
        assert ts.power(zero, exponent).item() == value
        assert ts.grad(lambda x, e=exponent: ts.sum(x**e), argnums=0)(zero).item() == slope
    cube = lambda x: ts.sum(x**3)  # noqa: E731
    assert ts.hvp(cube, (zero,), (np.ones(1),)).item() == 0.0
    a, b = np.array([0.0, 0.0, 2.0]), np.array([0.0, 2.0, 3.0])
    da, db = ts.grad(lambda a, b: ts.sum(a**b), argnums=(0, 1))(a, b)
    np.testing.assert_allclose(da, [0.0, 0.0, 12.0])
    np.testing.assert_allclose(db, [0.0, 0.0, 8 * math.log(2)])


def test_integer_powers() -> None:
    x = ts.tensor([2, -3])
    assert (x**3).tolist() == [8, -27] and (2 ** ts.tensor([3, 0])).tolist() == [8, 1]
    assert (x**2).dtype.name == "int64" and (x**0.5).dtype.name == "f32"
    with pytest.raises(ArgumentError, match="negative power"):
        x**-1


# --- broadcasting and types -------------------------------------------------------------------
SHAPES = [((), ()), ((3,), ()), ((3,), (1,)), ((2, 3), (3,)), ((2, 1), (1, 3)), ((2, 3), (2, 1)),
          ((4, 1, 3), (2, 1)), ((0, 3), (1, 3)), ((1,), (0,)), ((2, 3), (2, 3))]
ARITHMETIC = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.true_divide}


@pytest.mark.row("OPS-19")
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("sign", ARITHMETIC)
def test_arithmetic_broadcasts(sign: str, shapes: tuple, rng: np.random.Generator) -> None:
    a, b = (rng.uniform(0.5, 2, s).astype(np.float32) for s in shapes)
    apply = eval(f"lambda x, y: x {sign} y")  # noqa: S307
    for x, y in ((a, b), (b, a)):
        want = ARITHMETIC[sign](x, y)
        for run in RUNS:
            out = run(apply)(ts.tensor(x), ts.tensor(y))
            assert out.shape == want.shape and out.dtype is ts.f32
            assert_close(out, want)
        assert_close(apply(ts.tensor(x), 1.5), ARITHMETIC[sign](x, np.float32(1.5)))
        assert_close(apply(1.5, ts.tensor(x)), ARITHMETIC[sign](np.float32(1.5), x))


@pytest.mark.row("OPS-19")
def test_results_keep_type_and_policy() -> None:
    x = ts.ones((2,), "bf16 @accum(f32) @stochastic_round")
    for out in (x + 1, 2 - x, x * x, x / 3.0, np.float32(2) * x, x + np.float64(1)):
        assert out.type == x.type
    assert (ts.ones((2,), "bf16") + ts.ones((2,), "f32")).dtype is ts.f32
    assert (ts.tensor([1]) + 1.5).dtype is ts.f32
    assert (ts.tensor([1]) / ts.tensor([2])).dtype is ts.f32
    assert (ts.tensor([1], "int8") + 1).dtype.name == "int8"


def test_low_precision_computes_wide_and_rounds_once(rng: np.random.Generator) -> None:
    """bf16: the f32 result of the stored values, rounded by ml_dtypes."""
    a, b = (rng.standard_normal(500).astype(ml_dtypes.bfloat16) for _ in "ab")
    wa, wb = a.astype(np.float32), b.astype(np.float32)
    for fn, want in ((lambda a, b: a * b, wa * wb), (lambda a, b: a / b, wa / wb),
                     (lambda a, b: ts.maximum(a, b), np.maximum(wa, wb))):
        for run in RUNS:
            np.testing.assert_array_equal(run(fn)(ts.tensor(a), ts.tensor(b)),
                                          want.astype(ml_dtypes.bfloat16))


@pytest.mark.row("OPS-04")
@pytest.mark.parametrize(("name", "kind"), [
    ("bf16", ml_dtypes.bfloat16), ("f16", np.float16), ("fp8_e4m3", ml_dtypes.float8_e4m3fn),
    ("fp8_e5m2", ml_dtypes.float8_e5m2), ("fp6_e3m2", ml_dtypes.float6_e3m2fn),
    ("fp6_e2m3", ml_dtypes.float6_e2m3fn), ("fp4_e2m1", ml_dtypes.float4_e2m1fn),
    ("f64", np.float64),
])
def test_cast_is_bit_exact(name: str, kind: Any, rng: np.random.Generator) -> None:
    finite = rng.integers(0, 2**32, 4000, np.uint32).view(np.float32)
    x = np.concatenate([finite[np.isfinite(finite)], rng.standard_normal(4000).astype(np.float32),
                        np.array([0.0, -0.0], np.float32)])
    with np.errstate(over="ignore"):
        want = x.astype(kind)
    for run in RUNS:
        got = run(lambda x: ts.cast(x, name))(x)
        assert got.dtype.name == name
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), want.view(np.uint8))
        back = np.asarray(run(lambda y: ts.cast(y, ts.f32))(got))
        np.testing.assert_array_equal(back, want.astype(np.float32))


def test_cast_to_f32_of_a_bf16_is_exact() -> None:
    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(ts.cast(ts.tensor(every), ts.f32), every.astype(np.float32))


# --- comparison, logic, selection -------------------------------------------------------------
def test_comparisons_and_logic(rng: np.random.Generator) -> None:
    a, b = (rng.integers(-2, 3, 40).astype(np.float32) for _ in "ab")
    a[3] = np.nan
    x, y = ts.tensor(a), ts.tensor(b)
    for sign in ("<", "<=", ">", ">=", "==", "!="):
        got = eval(f"x {sign} y", {"x": x, "y": y})  # noqa: S307
        want = eval(f"x {sign} y", {"x": a, "y": b})  # noqa: S307
        assert got.dtype.name == "bool_"
        np.testing.assert_array_equal(got, want)
    p, q = a > 0, b > 0
    for sign in ("&", "|", "^"):
        for u, v in ((p, q), (rng.integers(0, 9, 40), rng.integers(0, 9, 40))):
            got = eval(f"x {sign} y", {"x": ts.tensor(u), "y": ts.tensor(v)})  # noqa: S307
            want = eval(f"x {sign} y", {"x": u, "y": v})  # noqa: S307
            np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(~ts.tensor(p), ~p)
    np.testing.assert_array_equal(ts.isnan(x), np.isnan(a))


def test_where_stops_the_gradient_of_what_is_not_chosen() -> None:
    """Exactly 0 for a value that is not chosen, also when it is inf or NaN: not 0 * inf."""
    c, a = np.array([True, False, False]), np.array([1.0, np.inf, np.nan])
    da, db = ts.grad(lambda a, b: ts.sum(ts.where(c, a, b) * 3.0), argnums=(0, 1))(a, a)
    assert da.tolist() == [3.0, 0.0, 0.0] and db.tolist() == [0.0, 3.0, 3.0]
    tangent = ts.jvp(lambda a: ts.where(c, a, 0.0), (a,), (np.full(3, np.nan),))[1]
    np.testing.assert_array_equal(tangent, [np.nan, 0.0, 0.0])


def test_where_inside_guards_a_singular_branch() -> None:
    """The guard belongs before the singular function; after it 0 * inf is NaN, as in JAX."""
    x = np.array([-1.0, 0.0, 2.0])
    safe = lambda x: ts.sum(ts.where(x > 0, ts.log(ts.where(x > 0, x, 1.0)), 0.0))  # noqa: E731
    assert ts.grad(safe)(x).tolist() == [0.0, 0.0, 0.5]


@pytest.mark.parametrize("chosen", [
    ts.relu, lambda x: ts.maximum(x, 0.0), lambda x: ts.clip(x, 0.0, 9.0),
    lambda x: ts.max(ts.stack([x, ts.zeros_like(x)]), axis=0), lambda x: -ts.minimum(-x, 0.0)])
def test_an_infinite_cotangent_stays_with_what_was_chosen(chosen: Any) -> None:
    """The root of what is cut off at 0: torch.relu(x).sqrt() has these gradients too."""
    for run in (ts.grad, lambda f: ts.jit(ts.grad(f))):
        g = run(lambda x: ts.sum(ts.sqrt(chosen(x))))(ts.tensor([-1.0, 0.25, -2.0]))
        assert g.tolist() == [0.0, 1.0, 0.0]
    _, t = ts.jvp(chosen, (ts.tensor([-1.0, 2.0]),), (ts.full((2,), ts.inf),))
    assert t.tolist() == [0.0, ts.inf]


def test_ties_of_maximum_share_the_gradient() -> None:
    a, b = np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])
    da, db = ts.grad(lambda a, b: ts.sum(ts.maximum(a, b)), argnums=(0, 1))(a, b)
    assert da.tolist() == [0.0, 0.5, 1.0] and db.tolist() == [1.0, 0.5, 0.0]
    assert ts.grad(lambda x: ts.sum(ts.clip(x, 1.5, 2.5)))(a).tolist() == [0.0, 1.0, 0.0]
    bounds = ts.grad(lambda x, b: ts.sum(ts.clip(x, b, 2.0)), argnums=(0, 1))(a, np.ones(3))
    assert [g.tolist() for g in bounds] == [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    assert np.isnan(ts.clip(np.array([np.nan, 1.0]), 0.0, np.nan).numpy()).all()
    assert ts.grad(lambda x: ts.sum(ts.abs(x)))(np.array([-2.0, 0.0])).tolist() == [-1.0, 0.0]


def test_the_origin_has_no_angle_to_change() -> None:
    a, b = np.array([0.0, 0.0, 3.0]), np.array([0.0, -2.0, 4.0])
    da, db = ts.grad(lambda a, b: ts.sum(ts.atan2(a, b)), argnums=(0, 1))(a, b)
    assert_close(da, np.array([0.0, -0.5, 0.16]), dtype=np.float64)
    assert_close(db, np.array([0.0, 0.0, -0.12]), dtype=np.float64)


# --- errors -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: ts.ones((2, 3)) + ts.ones((3, 2)), ShapeError, "use .T"),
        (lambda: ts.ones((2, 3)) * ts.ones((2,)), ShapeError, r"x\[:, None\]"),
        (lambda: ts.ones((2,), "fp8_e4m3") + ts.ones((2,), "fp8_e5m2"), DTypeError, "formats"),
        (lambda: ts.ones((2,)) & ts.ones((2,)), DTypeError, "integers or bools"),
        (lambda: ~ts.ones((2,)), DTypeError, "integers or bools"),
        (lambda: ts.tensor([True]) - ts.tensor([True]), DTypeError, "subtract of bools"),
        (lambda: -ts.tensor([True]), DTypeError, "negative of bools"),
        (lambda: ts.tensor([1], "int8") + 300, ArgumentError, "outside int8"),
        (lambda: ts.ones((2,)) + "a", DTypeError, "expected a tensor"),
        (lambda: ts.ones((2,)) + None, DTypeError, "holds numbers"),
        (lambda: ts.exp(), ArgumentError, r"missing.*hint: ts.exp\(x"),
    ],
)
def test_errors(call: Any, error: type, text: str) -> None:
    import re

    with pytest.raises(error) as err:
        call()
    assert re.search(text, str(err.value), re.S), str(err.value)


@pytest.mark.parametrize("name", ["abs", "relu"])
def test_functions_that_leave_bools_as_they_are(name, rng):
    """In a loop of their own, too."""
    x, function = rng.standard_normal((3, 40)).astype(np.float32), getattr(ts, name)
    with ts.config.scope(loop_min_elements=1):
        for fn in (lambda x: function(x > 0), lambda x: function(ts.all(x < 0.5, -1))):
            got = [np.asarray(run(fn)(x)) for run in (ts.jit, lambda f: f)]
            assert got[0].dtype == bool and (got[0] == got[1]).all()
