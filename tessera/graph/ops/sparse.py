"""Sparse matrices: coordinates (COO) and compressed rows (CSR), and their products.

A matrix is its stored values, a differentiable tensor, and integer indices; everything is made of
`take` and `segment_sum`, so it is traced, differentiated and batched as those are. A product
gathers one row of the dense operand per stored value: nnz K elements of memory for K columns. On a
GPU those of compressed rows are kernels of their own, which write nothing between.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...dims import show_shape
from ...errors import ArgumentError, AxisError, DTypeError, ShapeError, TraceError
from ...lazy_dataclass import dataclass
from ...numerics import as_type
from ...tensor import Tensor, as_tensor
from .. import functions as F
from ..op import Aval, GraphOp, sample
from ..operand import convert, dequantized, public, store, to_compute
from ..trace import Tracer, apply
from ..tree import register_tree
from .contract import matmul_operands, widened
from .gather import CHECK_INDEX, SEGMENT_SUM, TAKE, index_operand
from .sort import SEARCHSORTED

__all__ = ["COO", "CSR"]
INT32, INT64 = as_type("int32"), as_type("int64")


# --- row of each stored value of a CSR matrix ---------------------------------------------------
def _rows_shape(indptr: Aval, nnz: Any) -> Aval:
    return Aval((*indptr.shape[:-1], nnz), INT64)


def _rows_ref(indptr: np.ndarray, nnz: int) -> np.ndarray:
    count = np.diff(indptr, axis=-1)
    if (count < 0).any():
        *_, i = np.unravel_index(int(np.argmax(count < 0)), count.shape)
        raise AxisError(f"indptr falls from entry {i} to {i + 1}",
                        hint="row i holds the values from indptr[i] up to indptr[i + 1]")
    if (indptr[..., 0] != 0).any() or (indptr[..., -1] != nnz).any():
        raise AxisError(f"indptr must begin with 0 and end with the number of values, {nnz}, got "
                        f"{indptr[..., 0].min()} and {indptr[..., -1].max()}")
    out = np.empty((*indptr.shape[:-1], nnz), np.int64)
    for line in np.ndindex(indptr.shape[:-1]):
        out[line] = np.repeat(np.arange(count.shape[-1]), count[line])
    return out


def _rows_by_search(indptr: Tensor, nnz: int) -> Tensor:
    """How many rows begin at or before each value. What is checked is 0 where it is right."""
    lead = tuple(indptr.shape[:-1])
    steps = apply(CHECK_INDEX, indptr[..., 1:] - indptr[..., :-1], extent=nnz + 1, wrap=False)
    ends = [apply(CHECK_INDEX, x, extent=1, wrap=False)
            for x in (indptr[..., :1], indptr[..., -1:] - nnz)]
    falls = F.sum(F.minimum(steps, 0), axis=-1, keepdims=True)
    values = F.broadcast_to(F.arange(nnz), (*lead, nnz))
    begun = apply(SEARCHSORTED, indptr, values, side="right", lines=len(lead))
    return begun - 1 + falls + ends[0] + ends[1]


CSR_ROWS = GraphOp(
    "csr_rows",
    shape=_rows_shape,
    ref=_rows_ref,
    batch=lambda size, batched, indptr, nnz: (apply(CSR_ROWS, indptr, nnz=nnz), True),
    expand_gpu=_rows_by_search,
    axes=lambda indptr, nnz: f"{'abcdefgh'[:len(indptr.shape) - 1]}_->"
                                  f"{'abcdefgh'[:len(indptr.shape) - 1]}_",
    differentiable=False,
    samples=(sample(((4,), "offsets:5"), nnz=5), sample(((2, 3), "offsets:4"), nnz=4)),
    doc="the row of each stored value of a CSR matrix; AxisError at run time when indptr falls or "
    "does not end with their number",
)


# --- the matrices -----------------------------------------------------------------------------
class _Matrix(ABC):
    """What COO and CSR have in common."""

    values: Tensor
    shape: tuple[int, int]
    __array_ufunc__ = None  # np.float32(2) * a asks a

    @property
    def nnz(self) -> Any:
        """How many values are stored."""
        return self.values.shape[0]

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    @abstractmethod
    def triples(self) -> tuple[Tensor, Tensor, Tensor]:
        """(values, row of each, column of each)."""

    @abstractmethod
    def with_values(self, values: Any) -> Any:
        """Other values at the same places."""

    def to_dense(self) -> Tensor:
        """The dense matrix [M, N]; values stored for one place add."""
        values, rows, cols = self.triples()
        m, n = self.shape
        flat = apply(SEGMENT_SUM, to_compute(values), rows * n + cols, axis=0, extent=m * n)
        return F.reshape(store(flat, values.type), (m, n))

    def __matmul__(self, x: Any) -> Tensor:
        x = as_tensor(x)
        return spmv(self, x) if x.ndim == 1 else spmm(self, x)

    def __mul__(self, factor: Any) -> Any:
        return self.with_values(self.values * _number(factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        return self.with_values(self.values / _number(divisor))

    def __neg__(self) -> Any:
        return self.with_values(-self.values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise DTypeError("a sparse matrix where a tensor is needed",
                         hint="its product with one is a @ x; a.to_dense() is one, and a.values")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.values.type}[{self.nnz}], shape={self.shape})"


def _number(x: Any) -> Any:
    if isinstance(x, _Matrix) or as_tensor(x).ndim:
        raise ShapeError("a sparse matrix is multiplied and divided by numbers alone",
                         hint="a @ x; elementwise: a.with_values(...), or a.to_dense()")
    return x


@dataclass(frozen=True, eq=False, repr=False)
class COO(_Matrix):
    """A sparse matrix by coordinates: values[i] is added at (rows[i], cols[i]).

    values: [nnz] any type   rows, cols: [nnz] integers, not negative   shape: (M, N)
    Passes through jit, grad and vmap; its gradient is a COO of the values' gradients.
    Raises ShapeError, DTypeError, and AxisError for an index outside (of traced ones, when it
    runs).
    """

    values: Tensor
    rows: Tensor
    cols: Tensor
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        shape, values = _matrix_shape(self.shape), _values(self.values)
        fields = {"values": values, "shape": shape}
        for name, extent in zip(("rows", "cols"), shape, strict=True):
            ids = index_operand(getattr(self, name), name)
            if ids.shape != values.shape:
                raise ShapeError(f"{name} {show_shape(ids.shape)} for values "
                                 f"{show_shape(values.shape)}: one index per value is needed")
            fields[name] = apply(CHECK_INDEX, ids, extent=extent, wrap=False)
        _set(self, **fields)

    @staticmethod
    def from_dense(dense: Any) -> COO:
        """The elements of a matrix [M, N] that are not 0, row by row. Its values must be known."""
        return COO(*_nonzero(dense))

    def triples(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.values, self.rows, self.cols

    def with_values(self, values: Any) -> COO:
        """Other values at the same places."""
        return _unchecked(COO, values=_same_count(values, self.values), rows=self.rows,
                          cols=self.cols, shape=self.shape)

    @property
    def T(self) -> COO:
        """The transpose; nothing is copied."""
        return _unchecked(COO, values=self.values, rows=self.cols, cols=self.rows,
                          shape=self.shape[::-1])

    def to_csr(self) -> CSR:
        """Sorted by row, those of one row in the order in which they are stored."""
        order = F.argsort(self.rows)
        ones = F.ones((self.nnz,), INT64)
        counts = apply(SEGMENT_SUM, ones, self.rows, axis=0, extent=self.shape[0])
        indptr = F.pad(F.cumsum(counts), (1, 0))
        return _unchecked(CSR, values=apply(TAKE, self.values, order, axis=0),
                          indices=apply(TAKE, self.cols, order, axis=0), indptr=indptr,
                          shape=self.shape)


@dataclass(frozen=True, eq=False, repr=False)
class CSR(_Matrix):
    """A sparse matrix by rows: row i has values[j] at column indices[j], indptr[i] <= j <
    indptr[i + 1].

    values: [nnz] any type   indices: [nnz] integers   indptr: [M + 1] integers   shape: (M, N)
    Passes through jit, grad and vmap; its gradient is a CSR of the values' gradients.
    Raises ShapeError, DTypeError, and AxisError for indices outside or an indptr that is not a
    rising count of the values (of traced ones, when it runs).
    """

    values: Tensor
    indices: Tensor
    indptr: Tensor
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        shape, values = _matrix_shape(self.shape), _values(self.values)
        indices, indptr = _ids(self.indices, "indices"), _ids(self.indptr, "indptr")
        if indices.shape != values.shape or indptr.shape != (shape[0] + 1,):
            raise ShapeError(
                f"values {show_shape(values.shape)}, indices {show_shape(indices.shape)} and "
                f"indptr {show_shape(indptr.shape)} for shape {shape}",
                hint=f"one index per value, and M + 1 = {shape[0] + 1} entries of indptr")
        if not isinstance(indptr, Tracer):
            apply(CSR_ROWS, convert(indptr, INT64), nnz=values.shape[0])  # checks
        indices = apply(CHECK_INDEX, indices, extent=shape[1], wrap=False)
        _set(self, values=values, indices=indices, indptr=indptr, shape=shape)

    @staticmethod
    def from_dense(dense: Any) -> CSR:
        """The elements of a matrix [M, N] that are not 0. Its values must be known."""
        return COO(*_nonzero(dense)).to_csr()

    def triples(self) -> tuple[Tensor, Tensor, Tensor]:
        rows = apply(CSR_ROWS, convert(self.indptr, INT64), nnz=self.nnz)
        return self.values, rows, convert(self.indices, INT64)

    def with_values(self, values: Any) -> CSR:
        """Other values at the same places."""
        return _unchecked(CSR, values=_same_count(values, self.values), indices=self.indices,
                          indptr=self.indptr, shape=self.shape)

    def to_coo(self) -> COO:
        values, rows, cols = self.triples()
        return _unchecked(COO, values=values, rows=rows, cols=cols, shape=self.shape)

    @property
    def T(self) -> COO:
        """The transpose, by coordinates."""
        return self.to_coo().T


def _ids(ids: Any, what: str) -> Tensor:
    """Indices as int64, or as they are where they are int32: half the bytes."""
    kept = isinstance(ids, Tensor | np.ndarray) and as_tensor(ids).dtype is INT32.dtype
    return as_tensor(ids) if kept else index_operand(ids, what)


def _set(matrix: Any, **fields: Any) -> Any:
    for name, value in fields.items():
        object.__setattr__(matrix, name, value)
    return matrix


def _unchecked(cls: type, **fields: Any) -> Any:
    """A matrix of parts that were checked before, or stand for such: types, gradients, None."""
    return _set(object.__new__(cls), **fields)


register_tree(COO, lambda a: ((a.values, a.rows, a.cols), a.shape),
              lambda shape, parts: _unchecked(COO, shape=shape, **dict(
                  zip(("values", "rows", "cols"), parts, strict=True))))
register_tree(CSR, lambda a: ((a.values, a.indices, a.indptr), a.shape),
              lambda shape, parts: _unchecked(CSR, shape=shape, **dict(
                  zip(("values", "indices", "indptr"), parts, strict=True))))


# --- checks -----------------------------------------------------------------------------------
def _matrix_shape(shape: Any) -> tuple[int, int]:
    items = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    whole = all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in items)
    if len(items) != 2 or not whole or min(items) < 0:
        raise ArgumentError(f"shape={shape!r} of a sparse matrix", hint="two integers, (M, N)")
    return int(items[0]), int(items[1])


def _values(values: Any) -> Tensor:
    values = dequantized(values)
    if values.ndim != 1:
        raise ShapeError(f"values of a sparse matrix are one axis, got {show_shape(values.shape)}",
                         hint="from_dense takes a matrix")
    return values


def _same_count(values: Any, old: Tensor) -> Tensor:
    values = _values(values)
    if values.shape != old.shape:
        raise ShapeError(f"{values.shape[0]} values for {old.shape[0]} places")
    return values


def _nonzero(dense: Any) -> tuple[Tensor, Tensor, Tensor, tuple]:
    x = dequantized(dense)
    if isinstance(x, Tracer):
        raise TraceError("from_dense of a traced matrix: how many elements are not 0 is not known",
                         hint="make the sparse matrix outside; with_values(v) takes traced values")
    if x.ndim != 2:
        raise ShapeError(f"from_dense needs a matrix, got {show_shape(x.shape)}")
    rows, cols = np.nonzero(np.asarray(to_compute(x)))
    return x[rows, cols], as_tensor(rows), as_tensor(cols), tuple(x.shape)


# --- products ---------------------------------------------------------------------------------
def _product(a: Any, x: Any, transpose: bool, ndim: int) -> Tensor:
    """sum over stored values: y[row] += value x[col], in the accumulate type of the product."""
    if not isinstance(a, _Matrix):
        raise DTypeError(f"a sparse matrix is needed, got {type(a).__name__}",
                         hint="ts.sparse.COO.from_dense, or ts.matmul for dense ones")
    m, n = a.shape[::-1] if transpose else a.shape
    x = as_tensor(x)
    if x.ndim != ndim or x.shape[0] != n:
        want = f"[{n}]" if ndim == 1 else f"[{n}, K]"
        raise ShapeError(f"a sparse [{m}, {n}] times {show_shape(x.shape)}: {want} is needed")
    left, right, numeric, accum = matmul_operands(a.values, x)
    left, right = widened(left), widened(right)
    if accum.bits < left.dtype.bits:
        raise DTypeError(f"sums of sparse products run in {left.dtype} or wider, not {accum}")
    left, right = convert(left, as_type(accum)), convert(right, as_type(accum))
    if ndim == 1:
        right = F.expand_dims(right, 1)
    if isinstance(a, CSR) and not transpose:
        made = apply(CSR_PRODUCT, left, a.indices, a.indptr, right)
    else:
        _, rows, cols = a.triples()
        made = _summed(left, *((cols, rows) if transpose else (rows, cols)), right, m)
    return store(F.reshape(made, (m,)) if ndim == 1 else made, numeric)


def _summed(values: Tensor, rows: Tensor, cols: Tensor, x: Tensor, m: Any) -> Tensor:
    """y[row] += value x[col], [m, K]."""
    picked = apply(TAKE, x, cols, axis=0)
    return apply(SEGMENT_SUM, F.expand_dims(values, 1) * picked, rows, axis=0, extent=m)


def _csr_shape(values: Aval, indices: Aval, indptr: Aval, x: Aval) -> Aval:
    return Aval((indptr.shape[0] - 1, x.shape[1]), x.type)


def _csr_ref(values: np.ndarray, indices: np.ndarray, indptr: np.ndarray,
             x: np.ndarray) -> np.ndarray:
    rows = _rows_ref(indptr, len(values))
    y = np.zeros((len(indptr) - 1, x.shape[1]), x.dtype)
    np.add.at(y, rows, values[:, None] * x[indices])
    return y


def _element_indices(values: Tensor, indices: Tensor, indptr: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of each value."""
    rows = apply(CSR_ROWS, convert(indptr, INT64), nnz=values.shape[0])
    return rows, convert(indices, INT64)


def _csr_expand(values: Tensor, indices: Tensor, indptr: Tensor, x: Tensor) -> Tensor:
    return _summed(values, *_element_indices(values, indices, indptr), x, indptr.shape[0] - 1)


def _csr_vjp(g: Tensor, y: Tensor, values: Tensor, indices: Tensor, indptr: Tensor,
             x: Tensor) -> tuple:
    rows, cols = _element_indices(values, indices, indptr)
    picked = apply(TAKE, g, rows, axis=0) * apply(TAKE, x, cols, axis=0)
    return F.sum(picked, axis=1), None, None, _summed(values, cols, rows, g, x.shape[0])


def _csr_jvp(ts: tuple, y: Tensor, values: Tensor, indices: Tensor, indptr: Tensor,
             x: Tensor) -> Tensor:
    parts = [apply(CSR_PRODUCT, v, indices, indptr, u)
             for v, u in ((ts[0], x), (values, ts[3])) if v is not None and u is not None]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


CSR_PRODUCT = GraphOp(
    "csr_product",
    shape=_csr_shape,
    ref=_csr_ref,
    vjp=_csr_vjp,
    jvp=_csr_jvp,
    expand=_csr_expand,
    axes=lambda values, indices, indptr, x: "_,_,_,_k->_k",
    samples=(sample((5,), ((5,), "index:4"), ((4,), "offsets:5"), (4, 3)),
             sample((6,), ((6,), "index:2"), ((3,), "offsets:6"), (2, 1))),
    flops=lambda ins, outs, **attrs: 2.0 * ins[0][0] * outs[0][1],
    doc="y = A x of a matrix in compressed rows: values, the column of each, where rows begin",
)


@public
def spmv(a: Any, x: Any, *, transpose: bool = False) -> Tensor:
    """Sparse matrix times vector: y_i = sum_j a_ij x_j; with `transpose`, aᵀ x.

    a: ts.sparse.COO or CSR [M, N]   x: [N] ([M])   y: [M] ([N]), of the common type
    Differentiable in a's values and in x. Sums in storage order in the accumulate type and rounds
    once. Raises ShapeError, DTypeError.
    """
    return _product(a, x, transpose, 1)


@public
def spmm(a: Any, x: Any, *, transpose: bool = False) -> Tensor:
    """Sparse matrix times dense matrix: y_ik = sum_j a_ij x_jk; with `transpose`, aᵀ x.

    a: ts.sparse.COO or CSR [M, N]   x: [N, K] ([M, K])   y: [M, K] ([N, K]), of the common type
    Differentiable in a's values and in x. Needs nnz K elements of memory, but for a CSR on a GPU.
    Raises ShapeError, DTypeError.
    """
    return _product(a, x, transpose, 2)
