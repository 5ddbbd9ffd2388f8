"""Indexing, gather and scatter against NumPy; gradients where indices repeat; bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tessera as ts
from tessera.errors import (
    ArgumentError,
    AxisError,
    DTypeError,
    ShapeError,
    TraceError,
)
from tolerance import assert_close


def same(got: Any, want: np.ndarray) -> None:
    got = np.asarray(got)
    assert got.shape == want.shape and got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


A, B = np.array([[0, 2], [1, -1]]), np.array([3, 0])
INDICES = [
    1, -1, np.int64(2), (1, 2), (0, -1, 3), slice(None), slice(1, None), slice(None, -1),
    slice(None, None, 2), slice(None, None, -1), slice(-1, 0, -2), slice(5, 1), slice(2, 99),
    (slice(None), 1), (..., 1), (0, ..., 2), ..., None, (None, 1, None), (slice(None), None, 2),
    A, [0, 2, 2], [], B[:0], (A, 1), (1, A), (slice(None), A), (A, slice(None), B),
    (A, None, B), (A, B), (0, slice(None), B), (slice(None), 1, B), (slice(None), A, B),
    (..., A), (A, ..., B), (None, A), (slice(1, 3), A), (slice(None, None, -1), B, slice(1)),
    (A, slice(None), 1), (0, A, B), (A, 0, B),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_getitem_is_numpys(index: Any, rng: np.random.Generator) -> None:
    a = rng.standard_normal((3, 4, 5)).astype(np.float32)
    plain = np.array([], np.int64) if isinstance(index, list) and not index else index
    same(ts.tensor(a)[index], a[plain])
    same(ts.jit(lambda x: x[index])(ts.tensor(a)), a[plain])


@given(hnp.basic_indices((3, 0, 4), allow_newaxis=True, allow_ellipsis=True))
def test_basic_indices_are_numpys(index: Any) -> None:
    a = np.zeros((3, 0, 4), np.int32)
    same(ts.tensor(a)[index], np.asarray(a[index]))


@given(st.data())
def test_integer_array_indices_are_numpys(data: st.DataObject) -> None:
    a = np.arange(120).reshape(2, 3, 4, 5)
    index = data.draw(hnp.integer_array_indices(a.shape))
    same(ts.tensor(a)[index], a[index])


@pytest.mark.parametrize("pattern", ["m", "m2", "m,:", ":,m", "m,1", "1,m", "m,i"])
def test_bool_masks_select_as_in_numpy(pattern: str, rng: np.random.Generator) -> None:
    a = rng.standard_normal((3, 4)).astype(np.float32)
    m = np.array([True, False, True])
    index: Any = {
        "m": m, "m2": a > 0, "m,:": (m, slice(None)),
        ":,m": (slice(None), np.array([1, 0, 0, 1]) > 0), "m,1": (m, 1),
        "1,m": (1, np.array([0, 1, 1, 0]) > 0), "m,i": (m, np.array([3, 0])),
    }[pattern]
    held = tuple(ts.tensor(i) if isinstance(i, np.ndarray) else i for i in index) \
        if isinstance(index, tuple) else ts.tensor(index)
    same(ts.tensor(a)[index], a[index])
    same(ts.tensor(a)[held], a[index])
    same(ts.jit(lambda x: x[index])(ts.tensor(a)), a[index])


def test_traced_mask_is_refused() -> None:
    with pytest.raises(TraceError, match="number of elements it selects") as err:
        ts.jit(lambda x: x[x > 0])(ts.ones((3,)))
    assert "ts.where" in str(err.value) and "x[x > 0]" in str(err.value)


@pytest.mark.parametrize(
    ("index", "error", "text"),
    [
        (3, AxisError, "index 3 is outside axis 0 of extent 3"),
        ((0, -5), AxisError, "index -5 is outside axis 1 of extent 4"),
        ((0, 0, 0), AxisError, "3 indices for the 2 axes"),
        ((..., ...), AxisError, "one ellipsis"),
        (slice(None, None, 0), AxisError, "step of 0"),
        ([0, 3], AxisError, r"index 3 \(ids\[1\]\) is outside axis 0 of extent 3"),
        (([0, 1], [0, 9]), AxisError, "index 9"),
        (1.0, DTypeError, "must be integers"),
        ([0.5], DTypeError, "must be integers"),
        (True, DTypeError, "True as an index"),
        (np.array([True, False]), ShapeError, "a mask of extent 2 for axis 0"),
        (np.zeros((3, 3), bool), ShapeError, "a mask of extent 3 for axis 1"),
        (([0, 1, 2], [0, 1]), ShapeError, "do not broadcast"),
    ],
    ids=str,
)
def test_getitem_errors(index: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        ts.zeros((3, 4))[index]


def test_getitem_by_data_inside_jit(rng: np.random.Generator) -> None:
    a, i = rng.standard_normal((5, 3)).astype(np.float32), rng.integers(-5, 5, (2, 4))
    pick = ts.jit(lambda x, i: x[i, 1:])
    same(pick(ts.tensor(a), ts.tensor(i)), a[i, 1:])
    same(pick(ts.tensor(a), ts.tensor(i[::-1])), a[i[::-1], 1:])
    assert pick.specializations == 1
    with pytest.raises(AxisError, match=r"index 5 \(ids\[0, 1\]\) is outside axis 0 of extent 5"):
        pick(ts.tensor(a), np.array([[0, 5, 1, 1]] * 2))


def test_getitem_with_symbolic_extents() -> None:
    from tessera import Tensor, f32, sym

    S = sym("S")
    infer = lambda fn: ts.jit(fn).infer(Tensor["S", 4, f32]).shape  # noqa: E731
    assert infer(lambda x: x[1:]) == (S - 1, 4)
    assert infer(lambda x: x[:-1, 0]) == (S - 1,)
    assert infer(lambda x: x[-2:]) == (2, 4)
    assert infer(lambda x: x[None, ..., 1]) == (1, S)
    assert infer(lambda x: x[ts.arange(3)]) == (3, 4)
    with pytest.raises(TraceError, match="negative step"):
        infer(lambda x: x[::-1])


# --- gradients --------------------------------------------------------------------------------
def test_getitem_gradient_adds_where_indices_repeat(rng: np.random.Generator) -> None:
    a, i = rng.standard_normal((4, 3)), np.array([2, 0, 2, 2, -1])
    w = rng.standard_normal((5, 3))
    got = ts.grad(lambda x: ts.sum(x[i] * w))(ts.tensor(a))
    want = np.zeros_like(a)
    np.add.at(want, i, w)
    assert_close(got, want, n=3)


def test_getitem_gradient_of_slices_is_zero_elsewhere(rng: np.random.Generator) -> None:
    a = rng.standard_normal((5, 4))
    got = ts.grad(lambda x: ts.sum(x[4:0:-2, 1:3] * 2.0) + ts.sum(x[0]))(ts.tensor(a))
    want = np.zeros_like(a)
    want[4:0:-2, 1:3] += 2.0
    want[0] += 1.0
    same(got, want)


def test_per_example_gradients_of_a_lookup(rng: np.random.Generator) -> None:
    """vmap of grad over ids: both the batching rule and the adjoint of take."""
    table, ids = rng.standard_normal((6, 3)), rng.integers(0, 6, (4, 2))
    fn = ts.vmap(ts.grad(lambda t, i: ts.sum(t[i] ** 2)), in_axes=(None, 0))
    want = np.zeros((4, 6, 3))
    for b in range(4):
        np.add.at(want[b], ids[b], 2 * table[ids[b]])
    assert_close(fn(ts.tensor(table), ts.tensor(ids)), want, n=2)


# --- take, scatter ----------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["f32", "bf16", "fp8_e4m3", "int4", "int64", "bool_"])
def test_take_moves_elements_of_any_type(dtype: str, rng: np.random.Generator) -> None:
    x = ts.cast(ts.tensor(rng.integers(0, 2, (4, 3))), dtype)
    i = rng.integers(-4, 4, (2, 5))
    out = ts.take(x, i)
    assert out.dtype is x.dtype
    same(out.array, x.array[i])
    same(ts.take(x, [1, -1], axis=-1).array, x.array[:, [1, -1]])


def test_index_types() -> None:
    x = ts.arange(4)
    for dtype in ("int8", "uint8", "int32", "uint64"):
        same(ts.take(x, ts.tensor([1, 3], dtype)), np.array([1, 3]))
    with pytest.raises(DTypeError, match="must be integers"):
        ts.take(x, ts.tensor([1.0]))


def test_out_of_bounds_is_an_error_eager_and_compiled(rng: np.random.Generator) -> None:
    x = ts.tensor(rng.standard_normal((3, 2)))
    ids = ts.tensor([0, 7])
    calls = {
        "take": lambda x, i: ts.take(x, i),
        "take_along": lambda x, i: ts.take_along_axis(x, i[:, None], 0),
        "scatter": lambda x, i: ts.scatter(x, i, 0.0),
        "scatter_add": lambda x, i: ts.scatter_add(x, i, 1.0),
        "one_hot": lambda x, i: ts.one_hot(i, 3),
        "embedding": lambda x, i: ts.embedding(x, i),
        "getitem": lambda x, i: x[:, i],
        "segment_sum": lambda x, i: ts.segment_sum(x[:2], i, 3),
    }
    for name, fn in calls.items():
        for run in (fn, ts.jit(fn)):
            with pytest.raises(AxisError, match=r"index 7 .*extent [23]") as err:
                run(x, ids)
            assert "valid" in str(err.value), name


def test_scatter_sets_the_last_and_adds_all(rng: np.random.Generator) -> None:
    x = rng.standard_normal((5, 3)).astype(np.float32)
    ids, u = np.array([1, 4, 1, -1]), rng.standard_normal((4, 3)).astype(np.float32)
    want = x.copy()
    for i, row in zip(ids, u, strict=True):
        want[i] = row
    same(ts.scatter(x, ids, u), want)
    added = x.astype(np.float64)
    np.add.at(added, ids, u)
    assert_close(ts.scatter_add(x, ids, u), added, dtype="f32", n=3)
    assert_close(ts.scatter(x, ids, u, mode="add"), added, dtype="f32", n=3)
    columns = x.copy()
    columns[:, [2, 0]] = 7
    same(ts.scatter(x, [2, 0], 7.0, axis=1), columns)


def test_scatter_gradients(rng: np.random.Generator) -> None:
    """Replaced elements of x get none; of repeated ids only the last update gets one."""
    x, ids = rng.standard_normal((4, 2)), np.array([1, 3, 1])
    u, w = rng.standard_normal((3, 2)), rng.standard_normal((4, 2))
    gx, gu = ts.grad(lambda x, u: ts.sum(ts.scatter(x, ids, u) * w), argnums=(0, 1))(x, u)
    same(gx, np.where(np.isin(np.arange(4), ids)[:, None], 0.0, w))
    same(gu, np.stack([np.zeros(2), w[3], w[1]]))
    gx, gu = ts.grad(lambda x, u: ts.sum(ts.scatter_add(x, ids, u) * w), argnums=(0, 1))(x, u)
    same(gx, w)
    same(gu, w[ids])


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("along", [False, True])
@pytest.mark.parametrize("mode", ["max", "min"])
def test_scatter_keeps_the_largest_or_smallest(mode: str, along: bool, jit: bool,
                                               rng: np.random.Generator) -> None:
    """Those that tie share the gradient, x's element among them."""
    x, u = rng.integers(0, 4, (5, 3)).astype(np.float32), rng.integers(0, 4, (9, 3)).astype("f4")
    ids = rng.integers(-5, 5, (9, 3) if along else 9)
    w = rng.standard_normal((5, 3)).astype(np.float32)
    places = (ids if along else ids[:, None], np.arange(3))
    want, extremum = x.copy(), np.maximum if mode == "max" else np.minimum
    extremum.at(want, places, u)
    mine, theirs = x == want, u == want[places]
    count = mine.astype(np.float64)
    np.add.at(count, places, theirs)

    def f(x: Any, u: Any) -> Any:
        return (ts.put_along_axis(x, ids, u, 0, mode) if along else
                ts.scatter(x, ids, u, mode=mode))

    run = ts.jit(f) if jit else f
    same(run(x, u), want)
    gx, gu = ts.grad(lambda x, u: ts.sum(run(x, u) * w), argnums=(0, 1))(x, u)
    assert_close(gx, w / count * mine, dtype="f32", n=4)
    assert_close(gu, (w / count)[places] * theirs, dtype="f32", n=4)
    _, t = ts.jvp(lambda x: run(x, u), (x,), (w,))
    assert_close(t, w / count * mine, dtype="f32", n=4)
    ints = run(x.astype(np.int32), u.astype(np.int32))
    same(ints, want.astype(np.int32))
    assert np.isnan(run(np.full((5, 3), np.nan, np.float32), u).numpy()).all()


@pytest.mark.parametrize("width", [1, 3, 200])
def test_segment_sum_of_narrow_and_wide_rows(width: int, rng: np.random.Generator) -> None:
    ids, v = rng.integers(0, 7, 300), rng.standard_normal((300, width)).astype(np.float32)
    want = np.zeros((7, width))
    np.add.at(want, ids, v)
    assert_close(ts.segment_sum(v, ids, 7), want, dtype="f32", n=300)
    assert ts.segment_sum(v[:0], ids[:0], 2).tolist() == [[0.0] * width] * 2


def test_scatter_errors() -> None:
    x = ts.zeros((3, 2))
    with pytest.raises(ArgumentError, match="scatter mode 'mul'"):
        ts.scatter(x, [0], 1.0, mode="mul")
    with pytest.raises(ShapeError, match="does not broadcast"):
        ts.scatter(x, [0], ts.zeros((2, 2)))
    with pytest.raises(DTypeError, match="update of type f32 into int64"):
        ts.scatter(ts.zeros((3,), "int64"), [0], 1.5)
    with pytest.raises(DTypeError, match="bools"):
        ts.scatter_add(ts.zeros((3,), "bool_"), [0], True)


def test_scatter_into_low_precision_rounds_once() -> None:
    x = ts.zeros((2,), "bf16")
    assert ts.scatter(x, [1], 1.00390625).array.astype(np.float32).tolist() == [0.0, 1.0]
    assert ts.scatter_add(x, [1, 1], 2.0**-9).dtype is x.dtype
    assert ts.scatter_add(ts.ones((1,), "bf16"), [0, 0], 2.0**-8).item() == 1.0078125


def test_take_along_axis(rng: np.random.Generator) -> None:
    a = rng.standard_normal((3, 4, 2)).astype(np.float32)
    i = rng.integers(-4, 4, (3, 5, 2))
    same(ts.take_along_axis(a, i, 1), np.take_along_axis(a, i, 1))
    same(ts.take_along_axis(a, i[:1, :, :1], 1), np.take_along_axis(a, i[:1, :, :1], 1))
    with pytest.raises(ShapeError, match="along axis 1"):
        ts.take_along_axis(a, np.zeros((3, 5), np.int64), 1)


def test_gather_axes_places_its_axes(rng: np.random.Generator) -> None:
    a = rng.standard_normal((3, 4, 5)).astype(np.float32)
    same(ts.gather_axes(a, (1, 2), (A, 0)), a[:, A, 0])
    same(ts.gather_axes(a, (2, 0), (A, A[0])), a[A[0], :, A])
    same(ts.gather_axes(a, (1,), (A,), at=0), np.moveaxis(a[:, A], (1, 2), (0, 1)))
    with pytest.raises(ArgumentError, match="one index tensor for each"):
        ts.gather_axes(a, (0, 1), (A,))


# --- dynamic slices ---------------------------------------------------------------------------
def test_dynamic_slices_follow_data(rng: np.random.Generator) -> None:
    a = rng.standard_normal((6, 5)).astype(np.float32)
    cut = ts.jit(lambda x, i: ts.dynamic_slice(x, (i, 1), (2, 3)))
    put = ts.jit(lambda x, u, i: ts.dynamic_update_slice(x, u, (i, 1)))
    for i in range(5):
        same(cut(a, np.int64(i)), a[i:i + 2, 1:4])
        want = a.copy()
        want[i:i + 2, 1:4] = -1
        same(put(a, np.full((2, 3), -1, np.float32), np.int64(i)), want)
    assert cut.specializations == put.specializations == 1


@pytest.mark.parametrize("start", [-1, 5])
def test_dynamic_slices_never_clamp(start: int) -> None:
    x = ts.zeros((6, 5))
    for run in (lambda f: f, ts.jit):
        with pytest.raises(AxisError, match=f"start {start} with size 2 leaves axis 0 of extent 6"):
            run(lambda x, i: ts.dynamic_slice(x, (i, 0), (2, 5)))(x, np.int64(start))
        with pytest.raises(AxisError, match=f"start {start} with size 2 leaves axis 0"):
            run(lambda x, i: ts.dynamic_update_slice(x, ts.ones((2, 5)), (i, 0)))(
                x, np.int64(start))
    batched = ts.vmap(lambda i: ts.dynamic_slice(x, (i, 0), (2, 5)))
    with pytest.raises(AxisError, match="outside extent 6"):
        batched(np.array([0, start]))


def test_dynamic_slice_errors() -> None:
    x = ts.zeros((6, 5))
    with pytest.raises(ShapeError, match="2 axes need 2 starts"):
        ts.dynamic_slice(x, (0,), (2, 2))
    with pytest.raises(ShapeError, match="one start and one size"):
        ts.dynamic_slice(x, (0, 0), (2,))
    with pytest.raises(DTypeError, match="starts must be integers"):
        ts.dynamic_slice(x, (0.5, 0), (2, 2))
    with pytest.raises(ShapeError, match="as many axes"):
        ts.dynamic_update_slice(x, ts.zeros((2,)), (0, 0))


# --- embedding, one_hot -----------------------------------------------------------------------
@pytest.mark.row("NUM-14")
@pytest.mark.parametrize("dtype", ["int8", "int4", "fp8_e4m3"])
@pytest.mark.parametrize("scaled", ['@scaled("amax")', '@scaled("amax") @per_channel(0)',
                                    '@scaled("amax") @per_channel(1)'])
def test_embedding_of_a_quantised_table(dtype: str, scaled: str, rng: np.random.Generator) -> None:
    """Rows gathered then dequantised are rows of the dequantised table, and near the f32 table."""
    wide = rng.standard_normal((11, 6)).astype(np.float32)
    table = ts.quantize(wide, f"{dtype} {scaled}")
    codes, scale = table.array.astype(np.float32), np.asarray(table.scale)
    ids = rng.integers(0, 11, (2, 4))
    for run in (ts.embedding, ts.jit(ts.embedding)):
        got = run(table, ts.tensor(ids))
        assert got.dtype.name == "f32"
        same(got, (codes * scale)[ids])
    error = np.abs(np.asarray(got) - wide[ids]).max()
    assert error < {"int8": 0.02, "int4": 0.4, "fp8_e4m3": 0.25}[dtype]


def test_embedding_gradient_is_sparse_in_meaning(rng: np.random.Generator) -> None:
    table = ts.param(rng.standard_normal((9, 4)), "bf16")
    ids, w = rng.integers(0, 9, (3, 5)), rng.standard_normal((3, 5, 4)).astype(np.float32)
    got = ts.grad(lambda t: ts.sum(ts.embedding(t, ids) * w))(table)
    want = np.zeros((9, 4))
    np.add.at(want, ids, w)
    assert got.dtype.name == "f32"
    assert_close(got, want, dtype="f32", n=15)


def test_one_hot() -> None:
    same(ts.one_hot([2, 0], 3), np.array([[0, 0, 1], [1, 0, 0]], np.float32))
    assert ts.one_hot([[1]], 2, "bool_").tolist() == [[[False, True]]]
    with pytest.raises(AxisError, match="index -1"):
        ts.one_hot([-1], 3)


# --- diagonals and triangles ------------------------------------------------------------------
@pytest.mark.parametrize("offset", [-4, -1, 0, 2, 5])
def test_diagonals(offset: int, rng: np.random.Generator) -> None:
    a = rng.standard_normal((3, 4, 5)).astype(np.float32)
    same(ts.diagonal(a, offset), np.diagonal(a, offset))
    same(ts.diagonal(a, offset, 2, 0), np.diagonal(a, offset, 2, 0))
    same(ts.diag(a[0], offset), np.diag(a[0], offset))
    same(ts.diag(a[0, 0], offset), np.diag(a[0, 0], offset))
    assert_close(ts.trace(a, offset), np.trace(a.astype(np.float64), offset), dtype="f32", n=5)
    same(ts.tril(a, offset), np.tril(a, offset))
    same(ts.triu(a, offset), np.triu(a, offset))


def test_triangle_keeps_what_is_not_finite_out() -> None:
    """The zeroed part is zero also where x is not a number, and so is its gradient."""
    x = ts.tensor([[1.0, np.nan], [2.0, 3.0]])
    assert ts.tril(x).tolist() == [[1.0, 0.0], [2.0, 3.0]]
    assert ts.grad(lambda x: ts.sum(ts.tril(x)))(x).tolist() == [[1.0, 0.0], [1.0, 1.0]]


def test_diagonal_errors() -> None:
    with pytest.raises(AxisError, match="two different axes"):
        ts.diagonal(ts.zeros((2, 2)), 0, 1, -1)
    with pytest.raises(ShapeError, match="a vector or a matrix"):
        ts.diag(ts.zeros((2, 2, 2)))
    with pytest.raises(ShapeError, match="two axes"):
        ts.tril(ts.zeros((2,)))


@pytest.mark.parametrize("cut", [lambda x, i: x[i:], lambda x, i: x[:i], lambda x, i: x[::i],
                                 lambda x, i: x[i:i + 2]])
def test_a_slice_with_traced_bounds_is_told_of_dynamic_slice(cut):
    x, i = ts.ones((4, 3)), ts.tensor(1)
    with pytest.raises(ts.TraceError, match="where Python needs an integer") as err:
        ts.jit(cut)(x, i)
    assert "ts.dynamic_slice" in err.value.hint
    assert cut(x, i).shape == cut(np.ones((4, 3)), 1).shape


def test_none_in_place_of_a_tensor_is_told_of_functions_without_a_return():
    for call in (lambda: ts.sum(None), lambda: ts.ones(3) + None, lambda: ts.tensor(None)):
        with pytest.raises(ts.DTypeError, match="a tensor holds numbers, got None") as err:
            call()
        assert "without a return" in err.value.hint
