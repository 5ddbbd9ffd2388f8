"""Sparse products on GPUs by the library's kernels, under the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse

import tessera as ts
from tessera.graph.cuda import CudaProgram
from tolerance import assert_close

CSR = ts.sparse.CSR


def drawn(rng: Any, m: int, n: int, ids: type, dtype: type) -> Any:
    """Of which rows are empty, and one is longer than a warp."""
    a = (rng.standard_normal((m, n)) * (rng.random((m, n)) < 0.1)).astype(dtype)
    a[:1], a[-1:] = 0, rng.standard_normal(n)
    a = scipy.sparse.csr_array(a)
    a.indices, a.indptr = a.indices.astype(ids), a.indptr.astype(ids)
    return a


def calls(program: CudaProgram) -> list[str]:
    return [str(g.attr("call")).split("[")[0] for g in program.plan.groups if g.kind == "launch"]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("ids", [np.int32, np.int64])
@pytest.mark.parametrize(("m", "n", "k"), [(37, 90, 0), (130, 33, 1), (9, 50, 5), (33, 40, 128),
                                           (5, 8, 200)])
def test_products(m: int, n: int, k: int, ids: type, dtype: type, rng: Any) -> None:
    a = drawn(rng, m, n, ids, dtype)
    x = rng.standard_normal((n, k) if k else n).astype(dtype)

    def fn(values: Any, indices: Any, indptr: Any, x: Any) -> tuple:
        return (CSR(values, indices, indptr, (m, n)) @ x,)

    given = [a.data, a.indices, a.indptr, x]
    program = CudaProgram(ts.jit(fn).graph(*map(ts.tensor, given)), "sm_90a")
    assert calls(program) == ["csr_matrix" if k > 1 else "csr_vector"]
    (y,) = program.run(given)
    assert_close(y, a.astype(np.float64) @ x.astype(np.float64), "f32" if dtype is np.float32
                 else "f64", n=n, scale=abs(a.astype(np.float64)) @ abs(x.astype(np.float64)))


def test_the_matrix_as_an_argument_needs_one_launch(rng: Any) -> None:
    a = drawn(rng, 20, 30, np.int32, np.float32)
    made = CSR(a.data, a.indices, a.indptr, a.shape)
    x = ts.tensor(rng.standard_normal((30, 8)).astype(np.float32))
    plan = ts.jit(lambda a, x: a @ x).schedule(made, x, target="sm_90a")
    assert len(plan.launches) == 1


def test_narrow_values_are_summed_wide(rng: Any) -> None:
    a = drawn(rng, 20, 30, np.int32, np.float32)
    values = ts.cast(a.data, "bf16")
    x = ts.cast(rng.standard_normal((30, 8)).astype(np.float32), "bf16")

    def fn(values: Any, indices: Any, indptr: Any, x: Any) -> tuple:
        return (CSR(values, indices, indptr, a.shape) @ x,)

    given = [values, ts.tensor(a.indices), ts.tensor(a.indptr), x]
    program = CudaProgram(ts.jit(fn).graph(*given), "sm_90a")
    assert calls(program) == ["csr_matrix"]
    a.data = np.asarray(values, np.float64)
    (y,) = program.run([g.array for g in given])
    assert_close(np.asarray(y, np.float64), a.astype(np.float64) @ np.asarray(x, np.float64),
                 "bf16", n=30)


def test_gradients_on_a_gpu(rng: Any) -> None:
    a = drawn(rng, 12, 10, np.int32, np.float32)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((10, 4), (12, 4)))

    def fn(values: Any, x: Any, w: Any) -> Any:
        return ts.grad(lambda v, x: ts.sum((CSR(v, a.indices, a.indptr, a.shape) @ x) * w),
                       (0, 1))(values, x)

    given = [a.data, x, w]
    dv, dx = CudaProgram(ts.jit(fn).graph(*map(ts.tensor, given)), "sm_90a").run(given)
    rows, cols = a.tocoo().coords
    assert_close(dv, (w[rows] * x[cols]).sum(1), "f32", n=4, scale=4.0)
    assert_close(dx, a.T @ w, "f32", n=12, scale=4.0)


@pytest.mark.parametrize("indptr", [[0, 3, 2, 5], [0, 2, 4, 6], [-1, 2, 4, 5]])
@pytest.mark.parametrize("k", [1, 4])
def test_rows_that_are_none_are_told(indptr: list, k: int, rng: Any) -> None:
    given = [np.ones(5, np.float32), np.arange(5, dtype=np.int32), np.int32([0, 2, 4, 5]),
             np.ones((5, k), np.float32)]

    def fn(values: Any, indices: Any, indptr: Any, x: Any) -> tuple:
        return (CSR(values, indices, indptr, (3, 5)) @ x,)

    program = CudaProgram(ts.jit(fn).graph(*map(ts.tensor, given)), "sm_90a")
    np.testing.assert_array_equal(program.run(given)[0][:, 0], [2, 2, 1])
    given[2] = np.int32(indptr)
    with pytest.raises(ts.TesseraError, match="indptr is no rising count of the values"):
        program.run(given)
