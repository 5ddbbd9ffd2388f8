"""Products of matrices in compressed rows: a warp sums a row times a vector, threads side by side
the columns of a row times a matrix. The rows that are picked are not written down between."""

from __future__ import annotations

from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.kernel.decorator import kernel

WARP, LANES = 32, 128


@kernel
def term(values, indices, x, j, column):
    """Stored value j times its number of x; NaN where its column is none of the matrix."""
    at = indices[j]
    if at < 0 or at >= x.shape[0]:
        return values[j] * float("nan")
    return values[j] * x[at, column]


@kernel
def span(indptr, row, stored):
    """Where the values of a row begin and end."""
    begin, end = indptr[row], indptr[row + 1]
    assert 0 <= begin and begin <= end and end <= stored, "indptr is no rising count of the values"
    return max(begin, 0), min(end, stored)


@kernel(grid=lambda M: -(-M * WARP // LANES), overwrites=("y",))
def csr_vector(values: Tensor["nnz"], indices: Tensor["nnz"], indptr: Tensor["M + 1"],
               x: Tensor["N", 1], y: Tensor["M", 1]):
    """y = A x, a warp for each row of A."""
    row, lane = tile.linear_id() // WARP, tile.lane_id()
    total = tile.cast(0.0, y.dtype)
    begin, end = span(indptr, min(row, M - 1), values.shape[0])
    for j in range(begin + lane, end, WARP):
        total += term(values, indices, x, j, 0)
    total = tile.warp_sum(total)
    if row < M and lane == 0:
        y[row, 0] = total


@kernel(grid=lambda M, K, columns: (-(-M // (LANES // columns)), -(-K // columns)),
        overwrites=("y",))
def csr_matrix(values: Tensor["nnz"], indices: Tensor["nnz"], indptr: Tensor["M + 1"],
               x: Tensor["N", "K"], y: Tensor["M", "K"], columns: int):
    """Y = A X, in blocks of so many columns of some rows."""
    lane = tile.local_id()
    row = tile.group_id(0) * (LANES // columns) + lane // columns
    column = tile.group_id(1) * columns + lane % columns
    if row < M and column < K:
        total = tile.cast(0.0, y.dtype)
        begin, end = span(indptr, row, values.shape[0])
        for j in range(begin, end):
            total += term(values, indices, x, j, column)
        y[row, column] = total


__all__ = ["LANES", "csr_matrix", "csr_vector"]
