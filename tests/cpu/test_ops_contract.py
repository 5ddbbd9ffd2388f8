"""Matrix products against f64: types, accumulation, broadcasting, vectors, gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera.errors import DTypeError, ShapeError
from tolerance import EPS, TINY, assert_close

TYPES = ["f64", "f32", "tf32", "bf16", "f16", "fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3",
         "fp4_e2m1", "int8", "int4"]


def random_of(dtype: str, shape: tuple, rng: np.random.Generator) -> tuple[ts.Tensor, np.ndarray]:
    """A tensor of this type and its values in f64."""
    integers = rng.integers(-7, 8, shape).astype(np.float32)
    x = ts.cast(integers if dtype.startswith("int") else
                rng.standard_normal(shape).astype(np.float32), dtype)
    return x, np.asarray(ts.cast(x, "f64"))


@pytest.mark.row("OPS-01")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("lead", [(), (3,)], ids=["matrix", "batch"])
def test_gemm_against_f64(dtype: str, lead: tuple, rng: np.random.Generator) -> None:
    (a, wa), (b, wb) = random_of(dtype, (*lead, 17, 33), rng), random_of(dtype, (33, 9), rng)
    want = wa @ wb
    for run in (ts.gemm, ts.jit(ts.gemm)):
        out = run(a, b)
        if dtype.startswith("int"):
            assert out.dtype.name == "int32"
            np.testing.assert_array_equal(out, want)
            continue
        assert out.dtype.name == dtype
        if dtype.startswith(("fp4", "fp6")):  # narrow: results beyond the format are its largest
            want = np.clip(want, -out.dtype.max, out.dtype.max)
        got = np.asarray(ts.cast(out, "f64"))
        if out.dtype.bits >= 32:
            assert_close(got, want, dtype=dtype, n=33)
            continue
        half_ulp = EPS[dtype] / 2 * np.maximum(np.abs(want), TINY[dtype])  # rounded once
        assert (np.abs(got - want) <= half_ulp + 1e-5 * (1 + np.abs(want))).all()


@pytest.mark.row("OPS-01")
def test_gemm_accumulates_as_the_policy_says() -> None:
    """1 + 2048 * 2^-9 in bf16: f32 sums reach 5, bf16 sums stay at 1."""
    a, b = np.full((1, 2049), 2.0**-9, np.float32), np.ones((2049, 1), np.float32)
    a[0, 0] = 1
    for accum, want in (("f32", 5.0), ("bf16", 1.0)):
        kind = f"bf16 @accum({accum})"
        assert ts.gemm(ts.tensor(a, kind), ts.tensor(b, kind)).item() == want


def test_gemm_with_alpha_beta_and_c(rng: np.random.Generator) -> None:
    a, b, c = (rng.standard_normal(s) for s in ((4, 3), (3, 5), (5,)))
    assert_close(ts.gemm(a, b, c, alpha=0.5, beta=-2.0), 0.5 * (a @ b) - 2.0 * c, n=4)


SHAPES = [((3, 4), (4, 5)), ((4,), (4,)), ((4,), (4, 5)), ((3, 4), (4,)), ((2, 3, 4), (4, 5)),
          ((2, 3, 4), (2, 4, 5)), ((2, 1, 3, 4), (6, 4, 5)), ((3, 4), (2, 4, 5)), ((2, 3, 4), (4,)),
          ((4,), (2, 4, 5)), ((0, 4), (4, 5)), ((3, 0), (0, 5)), ((1, 1), (1, 1))]


@pytest.mark.row("OPS-02", "OPS-03", "OPS-20")
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_matmul_is_numpys(shapes: tuple, rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal(s) for s in shapes)
    want = a @ b
    for run in (lambda f: f, ts.jit):
        assert_close(run(ts.matmul)(a, b), want, dtype="f64", n=4)
        assert_close(run(lambda x, y: x @ y)(ts.tensor(a), ts.tensor(b)), want, dtype="f64", n=4)
    if b.ndim == 2 and want.ndim == 2:
        bias = rng.standard_normal(want.shape[-1])
        assert_close(ts.matmul(a, b) + bias, want + bias, dtype="f64", n=5)
    assert_close(a @ ts.tensor(b), want, dtype="f64", n=4)


@pytest.mark.parametrize("shapes", SHAPES[:10], ids=str)
def test_matmul_gradients(shapes: tuple, rng: np.random.Generator) -> None:
    """Linear in each operand: the gradient times a direction is the product with the direction."""
    a, b = (rng.standard_normal(s) for s in shapes)
    w = rng.standard_normal((a @ b).shape)
    da, db = ts.grad(lambda a, b: ts.sum(ts.matmul(a, b) * w), argnums=(0, 1))(a, b)
    ta, tb = rng.standard_normal(a.shape), rng.standard_normal(b.shape)
    assert_close(np.sum(da.array * ta), np.sum((ta @ b) * w), dtype="f64", n=300, scale=10.0)
    assert_close(np.sum(db.array * tb), np.sum((a @ tb) * w), dtype="f64", n=300, scale=10.0)


def test_large_integers_are_exact() -> None:
    a = np.array([[2**31, 1]]), np.array([[2**31], [1]])
    assert ts.matmul(*a).item() == 2**62 + 1


@pytest.mark.parametrize(
    ("shapes", "error", "text"),
    [
        (((2, 3), (2, 3)), ShapeError, "a @ b.T"),
        (((3, 2), (3, 4)), ShapeError, "a.T @ b"),
        (((2, 3), (4, 2)), ShapeError, "b @ a"),
        (((2, 3), ()), ShapeError, "matmul of a scalar"),
        (((2, 3, 4), (5, 4, 6)), ShapeError, "do not broadcast"),
    ],
)
def test_errors(shapes: tuple, error: type, text: str) -> None:
    with pytest.raises(error) as err:
        ts.matmul(*(ts.zeros(s) for s in shapes))
    assert text in str(err.value)


def test_formats_without_a_common_type() -> None:
    with pytest.raises(DTypeError, match="formats"):
        ts.matmul(ts.zeros((2, 2), "fp8_e4m3"), ts.zeros((2, 2), "fp8_e5m2"))


def test_gemv_and_batched_gemm(rng: np.random.Generator) -> None:
    a, x, b = (rng.standard_normal(s) for s in ((2, 3, 4), (4,), (2, 4, 5)))
    assert_close(ts.gemv(a, x), a @ x, n=4)
    assert_close(ts.batched_gemm(a, b), a @ b, n=4)
    wrong: list[Any] = [lambda: ts.gemv(a, b), lambda: ts.batched_gemm(a, b[0])]
    for call in wrong:
        with pytest.raises(ShapeError, match="needs"):
            call()
