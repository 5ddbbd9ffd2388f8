"""Reductions against NumPy in f64: axes, accumulate types, order, NaN, empty axes, ties."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera import Tensor, f32, sym
from tessera.errors import ArgumentError, AxisError, ShapeError
from tessera.graph.simplify import simplify
from tolerance import assert_close

AXES = [None, 0, 1, -1, (0, 2), (-1, 0), (0, 1, 2), ()]
RUNS = [lambda f: f, ts.jit]


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", AXES, ids=str)
def test_reductions_are_numpys(axis: Any, keepdims: bool, rng: np.random.Generator) -> None:
    a = rng.standard_normal((3, 4, 5))
    for name in ("sum", "mean", "var", "std", "prod", "max", "min"):
        want = getattr(np, name)(a, axis=axis, keepdims=keepdims)
        for run in RUNS:
            got = run(lambda x, n=name: getattr(ts, n)(x, axis, keepdims))(a)
            scale = {"sum": 8.0, "mean": 1.0}.get(name, 0.0)  # these may cancel
            assert_close(got, want, dtype="f64", n=60, scale=scale)
    for name in ("any", "all"):
        got = getattr(ts, name)(a > 0, axis, keepdims)
        np.testing.assert_array_equal(got, getattr(np, name)(a > 0, axis=axis, keepdims=keepdims))


@pytest.mark.row("OPS-05", "OPS-06")
def test_max_with_axis_and_without_propagates_nan(rng: np.random.Generator) -> None:
    a = rng.standard_normal((4, 7)).astype(np.float32)
    a[2, 3] = np.nan
    for run in RUNS:
        got = run(lambda x: ts.max(x, axis=-1, keepdims=True))(a)
        np.testing.assert_array_equal(got, np.max(a, axis=-1, keepdims=True))
        assert np.isnan(run(lambda x: ts.max(ts.abs(x)))(a).item())
        whole = run(lambda x: ts.max(ts.abs(x)))(a[:2])
        assert whole.shape == () and whole.item() == np.abs(a[:2]).max()
        np.testing.assert_array_equal(run(lambda x: ts.min(x, 0))(a), np.min(a, 0))


@pytest.mark.row("OPS-08", "OPS-09")
def test_sum_is_accurate_and_bit_stable(rng: np.random.Generator) -> None:
    a = rng.standard_normal((3, 40001)).astype(np.float32)
    exact = a.astype(np.float64).sum(-1, keepdims=True)
    for run in RUNS:
        total = run(lambda x: ts.sum(x, axis=-1, keepdims=True))
        first = np.asarray(total(a))
        assert first.shape == (3, 1)
        assert_close(first, exact, dtype="f32", n=40001, scale=1.0)
        for _ in range(3):
            np.testing.assert_array_equal(np.asarray(total(a.copy())), first)
        y = a[:, :500]
        loss = run(lambda y: ts.sum(y**2))(y)
        assert loss.shape == ()
        assert_close(loss, np.sum(y.astype(np.float64) ** 2), dtype="f32", n=1500)


def test_sums_run_in_the_accumulate_type() -> None:
    """4096 additions of 2^-9 to 1 in bf16: lost one by one, kept in f32."""
    a = np.full(4097, 2.0**-9, ml_dtypes.bfloat16)
    a[0] = 1
    for run in RUNS:
        assert run(ts.sum)(ts.tensor(a)).item() == 9.0
        assert run(ts.sum)(ts.tensor(a, "bf16 @accum(bf16)")).item() == 1.0
    ints = ts.full((300,), 100, "int8")
    assert ts.sum(ints).item() == 30000
    assert ts.sum(ts.ones((5,), "bool_")).item() == 5


def test_low_precision_results_are_rounded_once(rng: np.random.Generator) -> None:
    a = rng.standard_normal((5, 333)).astype(ml_dtypes.bfloat16)
    wide = a.astype(np.float64)
    mean = ts.mean(ts.tensor(a), 1)
    assert mean.dtype.name == "bf16"
    assert_close(mean, wide.mean(1), dtype="bf16", scale=2.0**-7)
    np.testing.assert_array_equal(ts.max(ts.tensor(a), 1), np.max(a.astype(np.float32), 1))


@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_arg_extrema(name: str, rng: np.random.Generator) -> None:
    a = rng.integers(-2, 3, (4, 6, 5)).astype(np.float32)
    for axis in (None, 0, 1, -1):
        for run in RUNS:
            got = run(lambda x, i=axis: getattr(ts, name)(x, i))(a)
            np.testing.assert_array_equal(got, getattr(np, name)(a, axis))
            kept = run(lambda x, i=axis: getattr(ts, name)(x, i, keepdims=True))(a)
            np.testing.assert_array_equal(kept, getattr(np, name)(a, axis, keepdims=True),
                                          strict=True)
    a[1, 2, 3] = np.nan
    assert getattr(ts, name)(a).item() == 30 + 10 + 3


def test_variance(rng: np.random.Generator) -> None:
    """Two passes: a large mean does not cancel."""
    a = rng.standard_normal(1000) + 1e8
    assert_close(ts.var(a), np.var(a), dtype="f64", n=1000)
    assert_close(ts.var(a, ddof=1), np.var(a, ddof=1), dtype="f64", n=1000)
    assert_close(ts.std(a, ddof=1), np.std(a, ddof=1), dtype="f64", n=1000)


def test_empty_axes() -> None:
    x = ts.zeros((2, 0))
    assert ts.sum(x, 1).tolist() == [0.0, 0.0]
    assert ts.prod(x, 1).tolist() == [1.0, 1.0]
    assert ts.max(x, 0).shape == (0,)
    assert ts.all(ts.zeros((0,), "bool_")).item() is True
    assert np.isnan(ts.mean(x, 1).array).all()
    for name in ("max", "min", "argmax", "argmin"):
        with pytest.raises(ShapeError, match="no elements to reduce"):
            getattr(ts, name)(x, 1)


# --- gradients --------------------------------------------------------------------------------
def test_ties_of_max_share_the_gradient() -> None:
    a = np.array([[3.0, 1.0, 3.0], [0.0, 2.0, 1.0]])
    want = [[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]]
    assert ts.grad(lambda x: ts.sum(ts.max(x, 1)))(a).tolist() == want
    t = np.array([[1.0, 5.0, 3.0], [7.0, 2.0, 1.0]])
    assert ts.jvp(lambda x: ts.max(x, 1), (a,), (t,))[1].tolist() == [2.0, 2.0]
    every = ts.grad(lambda x: ts.min(x))(np.zeros((2, 2)))
    assert every.tolist() == [[0.25, 0.25], [0.25, 0.25]]


@pytest.mark.parametrize("zeros", [(), (1,), (0, 3), (0, 1, 2, 3)], ids=str)
def test_prod_gradient_with_zeros(zeros: tuple, rng: np.random.Generator) -> None:
    a = rng.integers(1, 6, 4).astype(np.float64)
    a[list(zeros)] = 0
    want = [np.prod(np.delete(a, i)) for i in range(4)]
    assert ts.grad(lambda x: ts.prod(x))(a).tolist() == want
    square = ts.grad(lambda x: ts.prod(x, (0, 1)))(a.reshape(2, 2))
    np.testing.assert_array_equal(square.array.reshape(-1), want)


def test_second_derivative_of_prod_with_zeros() -> None:
    a = np.array([0.0, 2.0, 0.0, 3.0])
    want = [[0.0 if i == j else np.prod(np.delete(a, [i, j])) for j in range(4)] for i in range(4)]
    np.testing.assert_array_equal(ts.hessian(lambda x: ts.prod(x))(a), want)


def test_prod_gradient_of_a_long_line_is_a_short_graph() -> None:
    graph = ts.grad(lambda x: ts.prod(x)).graph(np.ones(1000))
    assert len(graph.nodes) < 40


def test_gradient_of_nan_maximum_is_nan() -> None:
    got = ts.grad(lambda x: ts.max(x))(np.array([1.0, np.nan]))
    assert np.isnan(got.array).any()


def test_symbolic_extents() -> None:
    B, S = sym("B S")
    infer = lambda fn: ts.jit(fn).infer(Tensor["B", "S", 8, f32]).shape  # noqa: E731
    assert infer(lambda x: ts.sum(x, 1)) == (B, 8)
    assert infer(lambda x: ts.mean(x, (0, 1), keepdims=True)) == (1, 1, 8)
    assert infer(lambda x: ts.max(x, -1)) == (B, S)
    assert infer(lambda x: ts.var(x, 1)) == (B, 8)
    assert infer(lambda x: ts.prod(x, 1)) == (B, 8)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: ts.sum(ts.zeros((2, 3)), 2), AxisError, "axis 2 is outside a tensor of 2 axes"),
        (lambda: ts.sum(ts.zeros((2, 3)), (0, -2)), AxisError, "names an axis twice"),
        (lambda: ts.sum(ts.zeros((2, 3)), "rows"), ArgumentError, "axis must be an integer"),
        (lambda: ts.max(ts.zeros((0,))), ShapeError, "has extent 0"),
        (lambda: ts.cumsum(ts.ones((2,), "bool_")), ArgumentError, "cumsum of bools"),
    ],
)
def test_errors(call: Any, error: type, text: str) -> None:
    with pytest.raises(error) as err:
        call()
    assert text in str(err.value)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_a_standard_deviation_is_rounded_once(dtype: str, run: Any, rng: np.random.Generator):
    x = ts.tensor(1000.0 * rng.standard_normal((64, 30)), dtype)  # variances f16 does not hold
    want = ts.tensor(np.std(x.numpy().astype(np.float64), axis=1), dtype)
    got = run(lambda x: ts.std(x, axis=1))(x)
    assert got.dtype == dtype
    if dtype == "f32":
        assert_close(got, want, n=30)
    else:
        np.testing.assert_array_equal(got.numpy(), want.numpy())


@pytest.mark.parametrize("run", RUNS)
def test_the_gradient_of_a_standard_deviation_of_equal_elements_is_0(run: Any) -> None:
    slope = run(ts.grad(lambda x: ts.sum(ts.std(x, axis=1))))(ts.tensor([[2.0, 2.0], [1.0, 5.0]]))
    assert slope.tolist() == [[0.0, 0.0], [-0.5, 0.5]]


@pytest.mark.parametrize("run", RUNS)
def test_a_mean_is_its_sum_divided_once(run: Any) -> None:
    """In place of times 1 / n, which is rounded itself: the mean of 41 ones was less than one."""
    def found(x: Tensor) -> tuple[Tensor, ...]:
        rows = ts.mean(x, axis=1)
        return (rows, ts.mean(x), ts.mse(x, ts.zeros_like(x)), ts.var(x * rows[:, None], ddof=1),
                ts.layernorm(x)[0])

    for n in (28, 41, 47, 55, 61, 82, 107):
        rows, *scalars, spread, normed = run(found)(ts.ones((2, n)))
        assert rows.tolist() == [1.0, 1.0] and {float(s) for s in scalars} == {1.0}
        assert float(spread) == 0.0 and not normed.numpy().any()
    for n in (3, 28, 50, 97):
        numbers = np.arange(n, dtype=np.float32)
        assert float(run(lambda x: ts.mean(x))(numbers)) == (n - 1) / 2
        assert float(run(lambda x: ts.var(x, ddof=1))(numbers)) == np.float32(n * (n + 1) / 12)


def test_the_gradient_of_a_mean_is_a_factor() -> None:
    """One over the count is a number, and no op of the compiled graph."""
    graph = simplify(ts.jit(ts.grad(lambda x: ts.mean(x * x))).graph(ts.ones((4, 7))))
    assert "div" not in {n.op.name for n in graph.nodes}
    assert [n.attrs["value"] for n in graph.nodes if n.op.name == "constant"] == [
        float(np.float32(1) / np.float32(28))]


def test_a_mean_of_uneven_parts_is_that_of_the_whole() -> None:
    mesh = ts.dist.mesh(axes=("dp",), shape=(3,))
    x = ts.dist.distribute(np.arange(28.0, dtype=np.float32), ts.ShardSpec(("row",), ("dp",)),
                           mesh=mesh)
    assert float(ts.mean(x)) == float(ts.jit(ts.mean)(x)) == 13.5
