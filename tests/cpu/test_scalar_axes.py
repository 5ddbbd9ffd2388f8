"""Axes of scalars, truth of numbers, and options of ops: against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera.errors import ArgumentError, AxisError, DTypeError, ShapeError
from tolerance import assert_close

# what each gives for the scalar 2.0: a number, or a pair of them
ALONG: dict[str, Any] = {
    "sum": 2.0, "mean": 2.0, "var": 0.0, "std": 0.0, "prod": 2.0, "max": 2.0, "min": 2.0,
    "argmax": 0, "argmin": 0, "cumsum": 2.0, "cumprod": 2.0, "cummax": 2.0, "sort": 2.0,
    "argsort": 0, "softmax": 1.0, "log_softmax": 0.0, "logsumexp": 2.0, "any": True, "all": True,
    "flip": 2.0, "norm": 2.0, "vector_norm": 2.0, "squeeze": 2.0, "softmax_safe": 1.0,
}


@pytest.mark.parametrize("name", ALONG)
def test_a_scalar_is_a_line_of_one(name: str) -> None:
    fn = getattr(ts, name)
    for axis in (0, -1, None, ()):
        for run in (lambda f: f, ts.jit):
            got = run(lambda x, axis=axis: fn(x, axis=axis))(ts.tensor(2.0))
            assert got.shape == () and got.item() == ALONG[name]
    for axis in (1, -2, (0, 0)):
        with pytest.raises((AxisError, ArgumentError)):
            fn(ts.tensor(2.0), axis=axis)
    if name in ("sum", "max", "mean", "any", "norm"):
        assert fn(ts.tensor(2.0), axis=0, keepdims=True).shape == ()


def test_pairs_and_shifts_of_scalars() -> None:
    assert [t.item() for t in ts.top_k(ts.tensor(2.0), 1, 0)] == [2.0, 0]
    assert ts.roll(ts.tensor(2.0), 3, 0).item() == 2.0
    with pytest.raises(ShapeError):
        ts.top_k(ts.tensor(2.0), 2)
    with pytest.raises(AxisError, match="the axes of a reduction are then 0, -1"):
        ts.cumsum(ts.tensor(2.0), 1)
    grad = ts.grad(lambda x: ts.cumsum(x) * ts.softmax(x, axis=0) + ts.sort(x))
    assert grad(ts.tensor(2.0)).item() == 2.0
    np.testing.assert_array_equal(ts.vmap(lambda x: ts.sum(x, axis=0))(np.arange(3.0)), range(3))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int64", "uint8", "bool_", "fp8_e4m3"])
def test_any_and_all_of_numbers(dtype: str) -> None:
    a = np.array([[0, 1, 2], [0, 0, 0], [3, 1, 1]])
    x = ts.tensor(a, "int64").astype(dtype)
    for axis in (None, 0, 1, (0, 1), ()):
        for run in (lambda f: f, ts.jit):
            for ours, theirs in ((ts.any, np.any), (ts.all, np.all)):
                got = run(lambda x, f=ours, axis=axis: f(x, axis))(x)
                assert got.type == "bool_"
                np.testing.assert_array_equal(got, theirs(a != 0, axis))
    assert ts.any(ts.tensor([np.nan])).item() and ts.all(ts.tensor([np.nan, -1e-40])).item()
    assert not ts.any(ts.tensor([0.0, -0.0])).item()


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "fp8_e4m3"])
def test_logic_of_floats(dtype: str) -> None:
    a, b = np.array([0, 0, 1, 2, np.nan]), np.array([0, 3, -0.0, 1, 0])
    x, y = ts.tensor(a, dtype), ts.tensor(b, dtype)
    for run in (lambda f: f, ts.jit):
        for name in ("logical_and", "logical_or", "logical_xor"):
            got = run(getattr(ts, name))(x, y)
            assert got.type == "bool_"
            np.testing.assert_array_equal(got, getattr(np, name)(a, b))
        np.testing.assert_array_equal(run(ts.logical_not)(x), np.logical_not(a))
    for call in (lambda: x & y, lambda: x | 1.0, lambda: ~x, lambda: np.float32(1) ^ x,
                 lambda: np.bitwise_and(x, y)):
        with pytest.raises(DTypeError, match="needs integers or bools"):
            call()
    assert (ts.tensor([True, False]) & True).tolist() == [True, False]
    assert (ts.tensor([6, 1]) & 3).tolist() == [2, 1] and (~ts.tensor([0])).tolist() == [-1]


def test_the_smallest(rng: np.random.Generator) -> None:
    for a in (rng.integers(-9, 9, (3, 40)), rng.integers(-300, 300, (2, 3000)),
              rng.standard_normal((2, 3000)).astype(np.float32)):
        for k in (0, 1, 7, a.shape[1]):
            want = np.argsort(a, axis=1, kind="stable")[:, :k]
            for run in (lambda f: f, ts.jit):
                values, index = run(lambda x, k=k: ts.top_k(x, k, largest=False))(a)
                np.testing.assert_array_equal(index, want)
                np.testing.assert_array_equal(values, np.take_along_axis(a, want, 1))
    x = np.float32([3, np.nan, -np.inf, np.nan, 1])
    assert ts.top_k(x, 5, largest=False)[1].tolist() == [2, 4, 0, 1, 3]
    ts.gradcheck(lambda x: ts.top_k(x, 2, 0, False)[0], (rng.standard_normal((5, 2)),))
    with pytest.raises(ShapeError, match="the 6 smallest of 5"):
        ts.top_k(x, 6, largest=False)


@pytest.mark.parametrize("order", [2, 1, 3, 0.5, np.inf, -np.inf, 0])
def test_norms_along_several_axes(order: float, rng: np.random.Generator) -> None:
    a = rng.standard_normal((2, 3, 4, 5))
    want = lambda **k: np.linalg.vector_norm(a, ord=order, **k)  # noqa: E731
    assert_close(ts.norm(a, order, axis=(0, 3, 1)), want(axis=(0, 1, 3)), n=30)
    assert_close(ts.vector_norm(a, order, (1, 2), True), want(axis=(1, 2), keepdims=True), n=12)
    assert_close(ts.vector_norm(a, order), want(), n=120)
    assert_close(ts.jit(lambda a: ts.vector_norm(a, order, -1))(a), want(axis=-1), n=5)
    if order:
        apart = np.sign(a[:, :, :, 0]) * (0.5 + np.abs(a[:, :, :, 0]))  # of 0, where slopes end
        ts.gradcheck(lambda x: ts.vector_norm(x, order, (0, 2)), (apart,))
    with pytest.raises(ArgumentError, match="along no axis"):
        ts.norm(a, order, axis=())


def test_sizes_of_fft2(rng: np.random.Generator) -> None:
    a = rng.standard_normal((3, 4, 5))
    for s, axes in (((3, 8), (-2, -1)), ((7, 2), (2, 0)), (None, (0, 1)), ((4, 9), (-2, -1))):
        for ours, theirs in ((ts.fft2, np.fft.fft2), (ts.ifft2, np.fft.ifft2)):
            for run in (lambda f: f, ts.jit):
                re, im = run(lambda x, f=ours, s=s, axes=axes: f(x, s, axes, "ortho"))(a)
                want = theirs(a, s, axes, "ortho")
                assert_close(re, want.real, n=45)
                assert_close(im, want.imag, n=45)
    for s in (3, (3,), (0, 4)):
        with pytest.raises(ArgumentError):
            ts.fft2(a, s=s)


def test_a_padding_row_gets_no_gradient(rng: np.random.Generator) -> None:
    table, ids = rng.standard_normal((5, 3)).astype(np.float32), np.array([[0, 4], [2, -1]])
    for padding in (4, -1):
        fn = lambda t, p=padding: ts.embedding(t, ids, padding_idx=p)  # noqa: E731
        np.testing.assert_array_equal(fn(table), table[ids])
        g = ts.jit(ts.grad(lambda t, f=fn: ts.sum(f(t))))(table).numpy()
        np.testing.assert_array_equal(g[:, 0], [1, 0, 1, 0, 0])
    with pytest.raises(AxisError, match="padding_idx=5 is outside the 5 rows"):
        ts.embedding(table, ids, padding_idx=5)


def padded(value: Any, dtype: str) -> Callable:
    return lambda x: ts.pad(x, ((1, 2), (0, 1)), value)


@pytest.mark.parametrize(("value", "dtype"), [
    (-np.inf, "f32"), (7, "int8"), (-1, "int64"), (True, "bool_"), (1.5, "bf16"), (0.25, "f64"),
    (np.nan, "f32"), (3.0, "int32"),
])
def test_pads_of_other_values(value: Any, dtype: str, rng: np.random.Generator) -> None:
    a = rng.integers(0, 2, (2, 3))
    want = np.pad(a.astype(np.float64), ((1, 2), (0, 1)), constant_values=value)
    for run in (lambda f: f, ts.jit):
        got = run(padded(value, dtype))(ts.tensor(a, "int64").astype(dtype))
        assert got.type == dtype
        np.testing.assert_array_equal(np.asarray(got.tolist(), np.float64), want)


def test_a_padding_that_is_a_tensor(rng: np.random.Generator) -> None:
    ts.gradcheck(lambda x, v: ts.pad(x, 1, v), (rng.standard_normal((2, 2)), np.array(0.5)))
    assert ts.pad(ts.ones(1, "bf16"), 1, ts.tensor(2.0)).type == "bf16"
    for call, kind, words in (
        (lambda: ts.pad(ts.ones(2), 1, "edge"), ArgumentError, "pad by the value 'edge'"),
        (lambda: ts.pad(ts.tensor([1]), 1, -np.inf), DTypeError, "-inf is not an element of int64"),
        (lambda: ts.pad(ts.tensor([1]), 1, ts.tensor(0.5)), ArgumentError, "a padding of type f32"),
        (lambda: ts.pad(ts.ones(2), 1, ts.ones(2)), ArgumentError, "one element"),
    ):
        with pytest.raises(kind, match=words):
            call()
