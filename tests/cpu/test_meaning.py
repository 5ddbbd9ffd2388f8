"""What ops mean where it is easily missed: roundings, points without a derivative, kinds, ends."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart
from tessera.runtime.host_memory import kept_count
from tolerance import assert_close


# --- one rounding -------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["bf16", "f16", "fp8_e4m3", "f32"])
@pytest.mark.parametrize("compiled", [False, True])
def test_gemm_rounds_once(dtype: str, compiled: bool, rng: np.random.Generator) -> None:
    a, b, c = (ts.tensor(rng.standard_normal(s), dtype) for s in ((9, 16), (16, 7), (9, 7)))
    f = lambda a, b, c: ts.gemm(a, b, c, alpha=0.5, beta=-2.0)  # noqa: E731
    y = (ts.jit(f) if compiled else f)(a, b, c)
    wide = [x.numpy().astype(np.float64) for x in (a, b, c)]
    exact = 0.5 * wide[0] @ wide[1] - 2.0 * wide[2]
    want = exact.astype(y.dtype.numpy).astype(np.float64)
    got = y.numpy().astype(np.float64)
    # the product is summed in f32: by that much another value may be the nearest one
    terms = 0.5 * np.abs(wide[0]) @ np.abs(wide[1]) + 2.0 * np.abs(wide[2])
    near = [(exact + off).astype(y.dtype.numpy).astype(np.float64)
            for off in (-18 * 2.0**-24 * terms, 18 * 2.0**-24 * terms)]
    assert str(y.type) == dtype
    assert ((near[0] <= got) & (got <= near[1])).all()
    if dtype != "f32":
        assert np.mean(got == want) > 0.9


FLOATS = ["f64", "f32", "bf16", "f16", "fp8_e5m2", "fp8_e4m3"]


@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("least", [0, 1])
def test_a_saturating_cast_clips_infinities(source: str, to: str, least: int) -> None:
    """Compiled or not, from the same format too; NaN stays, and what is computed in f32 or f64 is
    not looked at again."""
    top = ts.as_type(to).dtype.max
    with np.errstate(over="ignore"):
        x = ts.tensor(np.array([np.inf, -np.inf, np.nan, 2.0 * top, 1.5], np.float64), source)
    wide = x.numpy().astype(np.float64)
    want = wide if source == to in ("f32", "f64") else np.clip(wide, -top, top)
    with ts.config.scope(loop_min_elements=least):
        cast = lambda x: ts.cast(ts.cast(x, f"{to} @saturate"), "f64")  # noqa: E731
        for y in (cast(x), ts.jit(cast)(x)):
            np.testing.assert_array_equal(y.numpy(), want)


@pytest.mark.parametrize(("types", "result"), [
    (("int8", "int8", "int32"), "int32"), (("int8", "int8", "f32"), "f32"),
    (("bf16", "bf16", "f32"), "f32"), (("bf16", "f32", "bf16"), "f32")])
def test_types_of_gemm(types: tuple, result: str) -> None:
    a, b, c = (ts.ones((2, 2), t) for t in types)
    y = ts.gemm(a, b, c)
    assert str(y.type) == result and y.tolist() == [[3, 3], [3, 3]]
    assert y.type == (a @ b + c).type


def test_gemm_rounds_once_on_a_gpu(gpu: Any, apart: Any) -> None:
    a, b, c = (ts.tensor(x, "bf16") for x in ([[1.0, 2**-8]], [[1.0], [1.0]], [[-1.0]]))
    assert ts.jit(ts.gemm, target="cuda")(a, b, c).tolist() == [[2**-8]]


# --- derivatives at a point ---------------------------------------------------------------------
@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_the_gradient_of_elu_at_0(alpha: float) -> None:
    g = [ts.grad(lambda x: ts.elu(x, alpha))(ts.tensor(x)).item() for x in (0.0, -1e-30, 1.0)]
    np.testing.assert_allclose(g, [alpha, alpha, 1.0], rtol=1e-6)
    assert ts.jvp(lambda x: ts.elu(x, alpha), (0.0,), (1.0,))[1].item() == np.float32(alpha)


@pytest.mark.parametrize("p", [1.5, 2, 3, 4.0, 5])
def test_the_gradient_of_p_norms_at_0(p: float, rng: np.random.Generator) -> None:
    x = np.zeros((3, 4))
    x[1] = rng.standard_normal(4)
    f = lambda v: ts.sum(ts.norm(v, p, axis=1))  # noqa: E731
    got = ts.grad(f)(ts.tensor(x, "f64")).numpy()
    norm = (np.abs(x[1]) ** p).sum() ** (1 / p)
    want = np.zeros((3, 4))
    want[1] = np.sign(x[1]) * np.abs(x[1]) ** (p - 1) / norm ** (p - 1)
    np.testing.assert_allclose(got, want, rtol=1e-10)
    assert ts.norm(ts.tensor(x, "f64"), p, axis=1).tolist()[0] == 0.0


# --- kinds and ends -----------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["bf16", "f16", "fp8_e4m3", "int8", "f64", "bf16 @saturate"])
def test_extremes_of_a_scalar_keep_its_type(dtype: str) -> None:
    x = ts.tensor(1.0, dtype)
    for f in (ts.max, ts.min):
        assert f(x).type == x.type and f(x).item() == 1.0
        assert ts.jit(f)(x).type == x.type


@pytest.mark.parametrize(("value", "dtype", "want"), [
    (2**40, "int32", 2**31 - 1), (-(2**40), "int32", -(2**31)), (-1, "uint32", 0),
    (300, "int8", 127), (2**70, "int64", 2**63 - 1), (-(2**70), "int64", -(2**63)),
    (2**64 - 1, "uint64", 2**64 - 1), (1e30, "int64", 2**63 - 1), (math.nan, "int32", 0),
    (3.9, "int32", 3), (True, "int32", 1)])
def test_fills_saturate(value: float, dtype: str, want: int) -> None:
    assert ts.full(2, value, dtype).tolist() == [want] * 2
    assert ts.jit(lambda: ts.full((2,), value, dtype))().tolist() == [want] * 2


def test_logic_is_of_truth_and_operators_are_of_bits() -> None:
    a, b = [0.0, 2.0, math.nan, -0.0, 0.5], [1.0, 4.0, 1.0, 1.0, 0.0]
    for dtype in ("f32", "bf16", "f64"):
        x, y = ts.tensor(a, dtype), ts.tensor(b, dtype)
        for f, g in ((ts.logical_and, np.logical_and), (ts.logical_or, np.logical_or),
                     (ts.logical_xor, np.logical_xor)):
            assert f(x, y).tolist() == g(a, b).tolist() and str(f(x, y).type) == "bool_"
            assert ts.jit(f)(x, y).tolist() == g(a, b).tolist()
        assert ts.logical_not(x).tolist() == np.logical_not(a).tolist()
        with pytest.raises(ts.DTypeError, match="needs integers or bools"):
            x & y
    i, j = ts.tensor([1, 2, 0, 6], "int32"), ts.tensor([2, 2, 5, 3], "int32")
    assert ts.logical_and(i, j).tolist() == [True, True, False, True]
    assert (i & j).tolist() == [0, 2, 0, 2] and (i | j).tolist() == [3, 2, 5, 7]
    assert (i ^ 1).tolist() == [0, 3, 1, 7] and (~i).tolist() == [-2, -3, -1, -7]
    assert ts.bitwise_and(i, 2).tolist() == [0, 2, 0, 2] and str((i & j).type) == "int32"
    assert (ts.tensor([True, False]) & ~ts.tensor([False, False])).tolist() == [True, False]
    assert ts.logical_and(i, 1.5).tolist() == [True, True, False, True]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def test_searchsorted_in_a_batch(side: str, axes: tuple, rng: np.random.Generator) -> None:
    lines = np.sort(rng.integers(-3, 4, (4, 9)).astype(np.float32), -1)
    lines[:, -1] = np.nan
    wanted = rng.integers(-4, 5, (4, 2, 3)).astype(np.float32)
    wanted[:, 0, 0] = np.nan
    a, b = (x if axis == 0 else x[0] for x, axis in zip((lines, wanted), axes, strict=True))
    got = ts.vmap(lambda a, b: ts.searchsorted(a, b, side), in_axes=axes)(ts.tensor(a),
                                                                          ts.tensor(b))
    want = [np.searchsorted(lines[i] if axes[0] == 0 else a, wanted[i] if axes[1] == 0 else b, side)
            for i in range(4)]
    np.testing.assert_array_equal(got.numpy(), want)


def test_searchsorted_in_two_batches(rng: np.random.Generator) -> None:
    lines = np.sort(rng.standard_normal((2, 3, 5)), -1)
    wanted = rng.standard_normal((2, 3, 4))
    got = ts.vmap(ts.vmap(ts.searchsorted))(ts.tensor(lines), ts.tensor(wanted)).numpy()
    for at in np.ndindex(2, 3):
        np.testing.assert_array_equal(got[at], np.searchsorted(lines[at], wanted[at]))


# --- pullbacks ----------------------------------------------------------------------------------
def written(x: Any, v: Any) -> None:
    x[0] = 10.0
    v[...] = -1.0


def through_a_view(x: Any, v: Any) -> None:
    x.T.reshape(4, 4)[...] = 5.0
    x.T[...] = 7.0


def by_a_kernel(x: Any, v: Any) -> None:
    @ts.kernel
    def clear(y: ts.Tensor["N", "M", ts.f32]):  # noqa: F821
        y[0:4, 0:4] = 0.0

    clear(x)


@pytest.mark.parametrize("change", [written, through_a_view, by_a_kernel])
def test_a_pullback_reads_what_was_there(change: Any, rng: np.random.Generator) -> None:
    x = ts.tensor(rng.standard_normal((4, 4)).astype(np.float32))
    w = ts.tensor(rng.standard_normal((4, 4)).astype(np.float32), "bf16")
    before, wide = x.numpy().copy(), w.numpy().astype(np.float64)
    value, pull = ts.vjp(lambda x: x * x.T * w + ts.exp(x), x)
    change(x, value)
    w[...] = 0.0
    x64 = before.astype(np.float64)
    want = wide * x64.T + (wide * x64).T + np.exp(x64)
    for _ in range(2):
        assert_close(pull(ts.ones((4, 4))).numpy(), want, "f32", 4, scale=8.0)
    assert not np.array_equal(x.numpy(), before)


def test_what_a_pullback_holds_is_given_back() -> None:
    count = kept_count()
    x = ts.ones(4)
    value, pull = ts.vjp(lambda x: x * x, x)
    assert kept_count() > count
    del pull, value
    assert kept_count() == count
