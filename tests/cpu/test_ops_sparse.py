"""Sparse matrices against dense and scipy.sparse ones: products, conversions, gradients, checks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse

import tessera as ts
from derivatives import assert_derivatives
from tessera.errors import ArgumentError, AxisError, DTypeError, GradError, ShapeError, TraceError
from tolerance import assert_close

COO, CSR = ts.sparse.COO, ts.sparse.CSR

KINDS = pytest.mark.parametrize("kind", [COO, CSR])
SHAPES = pytest.mark.parametrize("shape", [(1, 1), (6, 4), (3, 9), (0, 3), (3, 0), (40, 50)])


def few(rng: np.random.Generator, *shape: int, share: float = 0.3) -> np.ndarray:
    """A matrix of which most elements, and one row, are 0."""
    a = rng.standard_normal(shape) * (rng.random(shape) < share)
    a[:1] = 0
    return a


def with_duplicates(rng: np.random.Generator, m: int, n: int, nnz: int) -> tuple[COO, np.ndarray]:
    rows, cols = rng.integers(0, m, nnz), rng.integers(0, n, nnz)
    rows[: nnz // 2], cols[: nnz // 2] = rows[0], cols[0]
    values = rng.standard_normal(nnz)
    dense = np.zeros((m, n))
    np.add.at(dense, (rows, cols), values)
    return COO(values, rows, cols, (m, n)), dense


# --- conversions ------------------------------------------------------------------------------
@KINDS
@SHAPES
def test_from_dense_to_dense(kind: Any, shape: tuple, rng: np.random.Generator) -> None:
    a = few(rng, *shape)
    made = kind.from_dense(a)
    assert made.shape == shape and made.nnz == np.count_nonzero(a) and made.dtype is ts.f64
    for run in (lambda x: x.to_dense(), ts.jit(lambda x: x.to_dense())):
        np.testing.assert_array_equal(run(made), a)
    np.testing.assert_array_equal(made.T.to_dense(), a.T)
    assert repr(made) == f"{kind.__name__}(f64[{made.nnz}], shape={shape})"


@SHAPES
def test_the_rows_are_those_of_scipy(shape: tuple, rng: np.random.Generator) -> None:
    a = few(rng, *shape)
    made, want = CSR.from_dense(a), scipy.sparse.csr_array(a)
    for got, expected in ((made.values, want.data), (made.indices, want.indices),
                          (made.indptr, want.indptr)):
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(made.to_coo().rows, want.tocoo().coords[0])
    np.testing.assert_array_equal(made.to_coo().to_csr().to_dense(), a)


def test_values_at_one_place_add(rng: np.random.Generator) -> None:
    a, dense = with_duplicates(rng, 5, 4, 12)
    x = rng.standard_normal(4)
    for made in (a, a.to_csr(), ts.jit(lambda m: m.to_csr())(a)):
        assert made.nnz == 12
        assert_close(made.to_dense(), dense, n=12)
        assert_close(made @ x, dense @ x, n=12, scale=1.0)


# --- products ---------------------------------------------------------------------------------
@KINDS
@SHAPES
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_spmv_and_spmm(kind: Any, shape: tuple, dtype: type, rng: np.random.Generator) -> None:
    a = few(rng, *shape).astype(dtype)
    made, wide = kind.from_dense(a), a.astype(np.float64)
    for transpose, dense, sparse in ((False, wide, made), (True, wide.T, made.T)):
        x = rng.standard_normal(dense.shape[1]).astype(dtype)
        many = rng.standard_normal((dense.shape[1], 3)).astype(dtype)
        for fn, right in ((ts.spmv, x), (ts.spmm, many)):
            want = dense @ right.astype(np.float64)
            jitted = ts.jit(lambda m, r, f=fn, t=transpose: f(m, r, transpose=t))
            for got in (fn(made, right, transpose=transpose), jitted(made, right), sparse @ right):
                assert got.dtype is made.dtype
                assert_close(got, want, dtype=dtype, n=50, scale=1.0)


def test_one_trace_serves_all_matrices_of_a_size(rng: np.random.Generator) -> None:
    traces = []

    @ts.jit
    def product(a: Any, x: Any) -> Any:
        traces.append(1)
        return a @ x

    x = rng.standard_normal(4)
    for _ in range(3):
        a, dense = with_duplicates(rng, 5, 4, 7)
        assert_close(product(a, x), dense @ x, n=12, scale=1.0)
    assert len(traces) == 1


def test_low_precision_and_integers(rng: np.random.Generator) -> None:
    a = few(rng, 6, 300, share=0.9)
    made = COO.from_dense(ts.cast(a, "bf16"))
    x = ts.cast(rng.standard_normal(300), "bf16")
    want = np.asarray(ts.cast(made.to_dense(), "f64")) @ np.asarray(ts.cast(x, "f64"))
    got = made @ x
    assert got.dtype is ts.bf16  # f32 sums of 270 terms, then one rounding
    np.testing.assert_allclose(np.asarray(ts.cast(got, "f64")), want, rtol=2**-8, atol=1e-4)
    whole = CSR.from_dense(np.full((2, 50), 100, np.int8))
    out = whole @ np.full(50, 100, np.int8)
    assert out.dtype is ts.int32 and out.tolist() == [500_000] * 2
    assert (made @ ts.cast(x, "f32")).dtype is ts.f32
    narrow = ts.cast(x, "bf16 @accum(bf16)")
    with pytest.raises(DTypeError, match="run in f32 or wider, not bf16"):
        _ = made.with_values(ts.cast(made.values, "bf16 @accum(bf16)")) @ narrow


# --- derivatives ------------------------------------------------------------------------------
@KINDS
@pytest.mark.parametrize("transpose", [False, True])
def test_gradients_of_values_and_operand(kind: Any, transpose: bool,
                                         rng: np.random.Generator) -> None:
    a = kind.from_dense(few(rng, 5, 4))
    rows = 5 if transpose else 4
    for fn, x in ((ts.spmv, rng.standard_normal(rows)), (ts.spmm, rng.standard_normal((rows, 2)))):
        assert_derivatives(lambda v, r, f=fn: f(a.with_values(v), r, transpose=transpose) ** 2, rng,
                           a.values.numpy(), x)
    assert_derivatives(lambda v: a.with_values(v).to_dense() ** 2, rng, a.values.numpy())


@KINDS
def test_the_gradient_of_a_matrix_is_a_matrix(kind: Any, rng: np.random.Generator) -> None:
    dense, x = few(rng, 5, 4), rng.standard_normal(4)
    a = kind.from_dense(dense)
    loss = lambda m, v: ts.sum((m @ v) ** 2)  # noqa: E731
    want = 2 * np.outer(dense @ x, x) * (dense != 0)
    for run in (ts.grad(loss), ts.jit(ts.grad(loss))):
        got = run(a, x)
        assert isinstance(got, kind) and got.shape == (5, 4)
        assert_close(got.to_dense(), want, n=9)
    of_both = ts.grad(loss, argnums=(0, 1))(a, ts.tensor(x))
    assert_close(of_both[0].values, got.values, n=9)
    assert_close(of_both[1], 2 * dense.T @ (dense @ x), n=9)
    _, pull = ts.vjp(lambda m: m @ x, a)
    assert_close(pull(ts.ones((5,), ts.f64)).values, np.broadcast_to(x, (5, 4))[dense != 0], n=2)


def test_the_gradient_of_indices_alone_does_not_exist(rng: np.random.Generator) -> None:
    a = COO.from_dense(np.eye(3, dtype=np.int64))
    with pytest.raises(GradError, match="has no derivative"):
        ts.grad(lambda m: ts.sum(ts.cast(m @ np.ones(3, np.int64), "f32")))(a)


def test_vmap_over_values_and_operands(rng: np.random.Generator) -> None:
    a, _ = with_duplicates(rng, 5, 4, 7)
    rows, cols = a.rows.numpy(), a.cols.numpy()
    values, x = rng.standard_normal((3, 7)), rng.standard_normal((3, 4))
    dense = np.zeros((3, 5, 4))
    np.add.at(dense, (slice(None), rows, cols), values)
    make = lambda v: COO(v, rows, cols, (5, 4))  # noqa: E731
    for fn in (lambda v, r: make(v) @ r, lambda v, r: make(v).to_csr() @ r):
        got = ts.vmap(fn)(values, x)
        assert_close(got, np.einsum("bij,bj->bi", dense, x), n=12, scale=1.0)


def test_vmap_over_indices(rng: np.random.Generator) -> None:
    many = [CSR.from_dense(rng.permutation(np.diag(rng.uniform(1, 2, 4)))) for _ in range(3)]
    parts = [np.stack([np.asarray(getattr(m, f)) for m in many])
             for f in ("values", "indices", "indptr")]
    x = rng.standard_normal(4)
    got = ts.vmap(lambda v, i, p: CSR(v, i, p, (4, 4)) @ x)(*parts)
    assert_close(got, np.stack([np.asarray(m.to_dense()) @ x for m in many]), n=4)


# --- checks -----------------------------------------------------------------------------------
def test_coordinates_are_checked() -> None:
    ones = np.ones(2)
    with pytest.raises(AxisError, match="index 3 .*outside extent 3"):
        COO(ones, [0, 3], [0, 0], (3, 3))
    with pytest.raises(AxisError, match="index -1"):
        COO(ones, [0, 1], [0, -1], (3, 3))
    with pytest.raises(ShapeError, match=r"rows \[1\] for values \[2\]"):
        COO(ones, [0], [0, 1], (3, 3))
    with pytest.raises(DTypeError, match="cols must be integers"):
        COO(ones, [0, 1], [0.0, 1.0], (3, 3))
    with pytest.raises(ShapeError, match="one axis"):
        COO(np.eye(2), [0, 1], [0, 1], (3, 3))
    for shape in (3, (3,), (3, -1), (3, 2.0)):
        with pytest.raises(ArgumentError, match="of a sparse matrix"):
            COO(ones, [0, 1], [0, 1], shape)
    made = ts.jit(lambda rows: COO(ones, rows, np.array([0, 1]), (3, 3)).to_dense())
    with pytest.raises(AxisError, match="index 5"):
        made(np.array([0, 5]))
    with pytest.raises(ShapeError, match="3 values for 2 places"):
        COO(ones, [0, 1], [0, 1], (3, 3)).with_values(np.ones(3))


def test_rows_are_checked() -> None:
    ones = np.ones(3)
    with pytest.raises(AxisError, match="falls from entry 1 to 2"):
        CSR(ones, [0, 1, 2], [0, 2, 1, 3], (3, 3))
    for indptr in ([0, 1, 2, 2], [1, 1, 2, 3], [0, 1, 2, 4]):
        with pytest.raises(AxisError, match="begin with 0 and end with the number of values, 3"):
            CSR(ones, [0, 1, 2], indptr, (3, 3))
    with pytest.raises(AxisError, match="index 3 .*outside extent 3"):
        CSR(ones, [0, 1, 3], [0, 1, 2, 3], (3, 3))
    with pytest.raises(ShapeError, match="indptr .3. for shape"):
        CSR(ones, [0, 1, 2], [0, 1, 3], (3, 3))
    made = ts.jit(lambda p: CSR(ones, np.array([0, 1, 2]), p, (3, 3)).to_dense())
    with pytest.raises(AxisError, match="falls from entry 1 to 2"):
        made(np.array([0, 2, 1, 3]))


def test_operands_are_checked() -> None:
    a = COO.from_dense(np.ones((2, 3)))
    with pytest.raises(ShapeError, match=r"a sparse \[2, 3\] times \[2\]: \[3\] is needed"):
        ts.spmv(a, np.ones(2))
    with pytest.raises(ShapeError, match=r"a sparse \[3, 2\] times \[3\]: \[2\] is needed"):
        ts.spmv(a, np.ones(3), transpose=True)
    with pytest.raises(ShapeError, match=r"\[3, K\] is needed"):
        ts.spmm(a, np.ones(3))
    with pytest.raises(DTypeError, match="a sparse matrix is needed, got ndarray"):
        ts.spmv(np.ones((2, 3)), np.ones(3))
    with pytest.raises(ShapeError, match="from_dense needs a matrix"):
        CSR.from_dense(np.ones(3))
    with pytest.raises(TraceError, match="from_dense of a traced matrix"):
        ts.jit(lambda x: COO.from_dense(x).to_dense())(np.eye(2))
    for wrong in (lambda: ts.sum(a), lambda: a @ a):
        with pytest.raises(DTypeError, match="a sparse matrix where a tensor is needed") as info:
            wrong()
        assert "a.to_dense()" in info.value.hint
    with pytest.raises(ShapeError, match="by numbers alone"):
        a * np.ones((2, 3))


@pytest.mark.parametrize("kind", [COO, CSR])
def test_a_matrix_times_a_number(kind: Any, rng: np.random.Generator) -> None:
    dense = rng.standard_normal((3, 4))
    a, x = kind.from_dense(dense), rng.standard_normal(4)
    for made, want in ((a * 2.0, 2 * dense), (np.float64(3) * a / 2, 1.5 * dense), (-a, -dense)):
        assert isinstance(made, kind)
        assert_close(made.to_dense(), want)
    slope = ts.grad(lambda s: ts.sum((a * s) @ x))(ts.tensor(2.0, "f64"))
    assert_close(slope, (dense @ x).sum(), n=12, scale=np.abs(dense * x).sum())


@pytest.mark.parametrize("ids", [np.int32, np.int64])
def test_indices_keep_their_type(ids: type, rng: np.random.Generator) -> None:
    a = scipy.sparse.csr_array(few(rng, 6, 5))
    made = CSR(a.data, a.indices.astype(ids), a.indptr.astype(ids), a.shape)
    assert made.indices.dtype.numpy == made.indptr.dtype.numpy == ids
    np.testing.assert_array_equal(made.to_coo().to_dense(), a.toarray())
    x = rng.standard_normal((5, 3))
    assert_close(ts.jit(lambda a, x: a @ x)(made, x), a @ x, "f64", n=5)
    assert_close(ts.sparse.spmm(made, a @ x, transpose=True), a.T @ (a @ x), "f64", n=30)
