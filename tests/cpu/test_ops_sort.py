"""sort, argsort, top_k, searchsorted, cumulative products and extrema, linear recurrences."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from tessera.errors import ArgumentError, DTypeError, ShapeError, TraceError
from tolerance import assert_close


def many_ties(rng: np.random.Generator, shape: tuple, dtype: str = "f32") -> np.ndarray:
    return rng.integers(-3, 4, shape).astype({"f32": np.float32, "int64": np.int64}[dtype])


def best_first(a: np.ndarray) -> np.ndarray:
    """Indices of a line from the largest on, ties by position, NaN first: by Python's sort."""
    key = lambda i: (0 if a[i] != a[i] else 1, -a[i] if a[i] == a[i] else 0, i)  # noqa: E731
    return np.array(sorted(range(a.size), key=key), np.int64)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("dtype", ["f32", "int64"])
def test_sort_and_argsort(axis: int, dtype: str, rng: np.random.Generator) -> None:
    a = many_ties(rng, (5, 7, 3), dtype)
    np.testing.assert_array_equal(ts.sort(a, axis), np.sort(a, axis))
    np.testing.assert_array_equal(ts.argsort(a, axis), np.argsort(a, axis, kind="stable"))
    down = ts.argsort(a, axis, descending=True)
    want = np.apply_along_axis(best_first, axis, a)
    np.testing.assert_array_equal(down, want)
    np.testing.assert_array_equal(ts.sort(a, axis, descending=True),
                                  np.take_along_axis(a, want, axis))


def test_sort_of_the_smallest_integer_and_of_unsigned() -> None:
    low = np.iinfo(np.int64).min
    assert ts.sort([0, low, 5], descending=True).tolist() == [5, 0, low]
    assert ts.argsort(np.array([0, 255, 1], np.uint8), descending=True).tolist() == [1, 2, 0]


def test_nan_is_the_largest() -> None:
    a = np.array([2.0, np.nan, -np.inf, np.inf, np.nan], np.float32)
    assert ts.argsort(a).tolist() == [2, 0, 3, 1, 4]
    assert ts.argsort(a, descending=True).tolist() == [1, 4, 3, 0, 2]
    assert ts.top_k(a, 3)[1].tolist() == [1, 4, 3]


def test_sort_in_low_precision_keeps_its_type(rng: np.random.Generator) -> None:
    x = ts.tensor(rng.standard_normal(9).astype(np.float32), "bf16")
    out = ts.sort(x)
    assert out.dtype is x.dtype
    wide = x.array.astype(np.float32)
    np.testing.assert_array_equal(out.array.astype(np.float32), np.sort(wide))


def test_sort_gradient_returns_to_the_source(rng: np.random.Generator) -> None:
    a, w = many_ties(rng, (4, 6)).astype(np.float64), rng.standard_normal((4, 6))
    got = ts.grad(lambda x: ts.sum(ts.sort(x) * w))(a)
    want = np.zeros_like(a)
    np.put_along_axis(want, np.argsort(a, -1, kind="stable"), w, -1)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("shape", [(5, 7), (3, 2000)], ids=["sorts", "selects"])
@pytest.mark.parametrize("dtype", ["f32", "int64"])
def test_top_k(shape: tuple, dtype: str, rng: np.random.Generator) -> None:
    a = many_ties(rng, shape, dtype)
    for k in (0, 1, 5):
        values, index = ts.top_k(a, k)
        want = np.apply_along_axis(best_first, 1, a)[:, :k]
        np.testing.assert_array_equal(index, want)
        np.testing.assert_array_equal(values, np.take_along_axis(a, want, 1))
    values, index = ts.top_k(a, 2, axis=0)
    np.testing.assert_array_equal(index, np.apply_along_axis(best_first, 0, a)[:2])


def test_top_k_with_nan_among_many(rng: np.random.Generator) -> None:
    a = rng.standard_normal(3000).astype(np.float32)
    a[[17, 2100]] = np.nan
    np.testing.assert_array_equal(ts.top_k(a, 5)[1], best_first(a)[:5])


def test_top_k_gradient(rng: np.random.Generator) -> None:
    a = np.array([1.0, 3.0, 2.0, 3.0])
    got = ts.grad(lambda x: ts.sum(ts.top_k(x, 2)[0] * np.array([10.0, 1.0])))(a)
    assert got.tolist() == [0.0, 10.0, 0.0, 1.0]


def test_top_k_errors() -> None:
    with pytest.raises(ShapeError, match="the 4 largest of 3"):
        ts.top_k(ts.zeros((3,)), 4)
    for k in (-1, 1.0, True):
        with pytest.raises(ArgumentError, match="number of elements"):
            ts.top_k(ts.zeros((3,)), k)
    with pytest.raises(TraceError, match="Python needs an integer") as info:
        ts.jit(lambda x, k: ts.top_k(x, k))(ts.zeros(3), 2)
    assert 'static=("k",)' in info.value.hint


@pytest.mark.parametrize("side", ["left", "right"])
def test_searchsorted(side: str, rng: np.random.Generator) -> None:
    lines = np.sort(many_ties(rng, (3, 9)))
    values = many_ties(rng, (3, 2, 4))
    np.testing.assert_array_equal(ts.searchsorted(lines[0], values, side),
                                  np.searchsorted(lines[0], values, side))
    rows = ts.vmap(lambda line, v: ts.searchsorted(line, v, side))(lines, values)
    for i in range(3):
        np.testing.assert_array_equal(rows.array[i], np.searchsorted(lines[i], values[i], side))
    with pytest.raises(ArgumentError, match="side"):
        ts.searchsorted(lines[0], values, "middle")
    with pytest.raises(ShapeError, match="one sorted line"):
        ts.searchsorted(lines, values)


# --- cumulative -------------------------------------------------------------------------------
@pytest.mark.parametrize("axis", [0, -1])
def test_cumulative(axis: int, rng: np.random.Generator) -> None:
    a = rng.standard_normal((6, 5))
    assert_close(ts.cumsum(a, axis), np.cumsum(a, axis), n=6)
    assert_close(ts.cumprod(a, axis), np.cumprod(a, axis), n=6)
    np.testing.assert_array_equal(ts.cummax(a, axis), np.maximum.accumulate(a, axis))


def test_cummax_keeps_nan_and_gives_ties_to_the_first() -> None:
    a = np.array([1.0, np.nan, 3.0])
    np.testing.assert_array_equal(ts.cummax(a), [1.0, np.nan, np.nan])
    got = ts.grad(lambda x: ts.sum(ts.cummax(x)))(np.array([1.0, 1.0, 3.0, 2.0]))
    assert got.tolist() == [2.0, 0.0, 2.0, 0.0]


@pytest.mark.parametrize("zeros", [(), (2,), (1, 3), (0, 1, 2, 3, 4)])
def test_cumprod_gradient_is_exact_at_zeros(zeros: tuple, rng: np.random.Generator) -> None:
    a, w = rng.integers(1, 5, 5).astype(np.float64), rng.integers(-3, 4, 5).astype(np.float64)
    a[list(zeros)] = 0
    want = np.zeros(5)
    for j in range(5):
        for i in range(j, 5):
            want[j] += w[i] * np.prod(np.delete(a[: i + 1], j))
    np.testing.assert_array_equal(ts.grad(lambda x: ts.sum(ts.cumprod(x) * w))(a), want)


def test_linear_recurrence(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((2, 7, 3)), rng.standard_normal((2, 7, 3))
    h, want = np.zeros((2, 3)), []
    for t in range(7):
        h = a[:, t] * h + b[:, t]
        want.append(h)
    assert_close(ts.linear_recurrence(a, b, axis=1), np.stack(want, 1), n=7)
    assert ts.linear_recurrence(a[:, :0], b[:, :0], axis=1).shape == (2, 0, 3)


def test_cumulative_errors() -> None:
    with pytest.raises(DTypeError, match="bools"):
        ts.cumprod([True, False])
    with pytest.raises(ShapeError, match="differ"):
        ts.linear_recurrence(ts.zeros((2,)), ts.zeros((3,)))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (0, 0)])
@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
def test_the_largest_0_of_nothing(run, shape):
    values, places = run(lambda x: ts.top_k(x, 0))(ts.zeros(shape))
    assert values.shape == places.shape == (*shape[:-1], 0)
