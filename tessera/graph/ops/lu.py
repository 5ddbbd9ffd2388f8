"""LU with partial pivoting, batched over leading axes. NumPy has none, so it is written here.

Recursive on halves of the columns, so that the work is in matrix products: Toledo 1997,
doi:10.1137/S0895479896297744.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...numerics import as_type
from ...tensor import Tensor
from .. import flops
from .. import functions as F
from ..op import Aval, GraphOp, VendorLibrary, sample
from ..operand import public, store
from ..trace import apply
from .linalg import (
    cupy_linalg,
    floats,
    mT,
    need_matrix,
    smaller,
    solve_triangle,
    substitute,
    unary_batch,
)

INT64 = as_type("int64")


def _rows(a: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Rows of each matrix in another order. a: [B, m, n]   order: [B, m]"""
    return np.take_along_axis(a, order[:, :, None], 1)


def _factor(a: np.ndarray) -> np.ndarray:
    """Overwrite a [B, m, n] by L below the diagonal and U on and above it; returns the order of
    its rows, [B, m]: row i of L U is row order[i] of a."""
    count, m, n = a.shape
    if not m or not n:
        return np.tile(np.arange(m), (count, 1))
    if n == 1:
        return _pivot(a[:, :, 0])
    h = max(min(m, n) // 2, 1)
    order = _factor(a[:, :, :h])
    right = _rows(a[:, :, h:], order)
    right[:, :h] = substitute(a[:, :h, :h], right[:, :h], True, True)
    right[:, h:] -= a[:, h:, :h] @ right[:, :h]
    below = _factor(right[:, h:])
    a[:, :, h:] = right
    a[:, h:, :h] = _rows(a[:, h:, :h], below)
    order[:, h:] = np.take_along_axis(order[:, h:], below, 1)
    return order


def _pivot(column: np.ndarray) -> np.ndarray:
    """One column [B, m]: the largest element to the top, the others divided by it."""
    count, m = column.shape
    order = np.tile(np.arange(m), (count, 1))
    if not count:
        return order
    place = np.argmax(np.abs(column), 1)
    order[np.arange(count), place] = 0
    order[:, 0] = place
    column[...] = np.take_along_axis(column, order, 1)
    top = column[:, :1]  # 0 when the column is: it stays as it is
    np.divide(column[:, 1:], top, out=column[:, 1:], where=top != 0)
    return order


def _lu_ref(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    *lead, m, n = a.shape
    work = a.astype(np.float64).reshape(int(np.prod(lead, dtype=np.int64)), m, n)
    order = _factor(work)
    return work.reshape(a.shape).astype(a.dtype), order.reshape(*lead, m)


def _lu_in(module: Any, a: Any) -> tuple[Any, Any]:
    """By getrf, in f64, one matrix at a time. Arrays of CuPy; of NumPy as above."""
    if module is np:
        return _lu_ref(a)
    m, n = a.shape[-2:]
    packed, order = module.zeros(a.shape), module.zeros(a.shape[:-1], np.int64)
    for i in np.ndindex(a.shape[:-2]):
        rows, lower, upper = cupy_linalg().lu(a[i].astype(np.float64), check_finite=False)
        packed[i][:, :lower.shape[1]] = module.tril(lower, -1)
        packed[i][:lower.shape[1]] += upper
        order[i] = rows.argmax(0)  # a = rows L U: column j of a permutation has its 1 there
    return packed, order


def _lu_shape(a: Aval) -> tuple[Aval, Aval]:
    need_matrix(a)
    return a, Aval(a.shape[:-1], INT64)


# --- derivatives ------------------------------------------------------------------------------
def _strict(x: Tensor) -> Tensor:
    return F.tril(x, -1)


def _upper(x: Tensor) -> Tensor:
    return F.triu(x)


def _take_rows(x: Tensor, order: Tensor) -> Tensor:
    return F.take_along_axis(x, F.expand_dims(order, -1), axis=-2)


def _unit_lower(square: Tensor) -> Tensor:
    eye = F.equal(F.expand_dims(F.arange(square.shape[-1]), 1),
                          F.arange(square.shape[-1]))
    return F.where(eye, 1.0, _strict(square))


def _times_inverse(x: Tensor, square: Tensor) -> Tensor:
    """x U^-1"""
    return mT(solve_triangle(mT(square), mT(x), lower=True))


def _lu_jvp(ts: tuple, y: tuple, a: Tensor) -> tuple:
    """With M = L^-1 dA U^-1: dL = L tril(M, -1), dU = triu(M) U; what lies below or beside the
    square part follows from L2 = A2 U^-1 and U2 = L^-1 A2."""
    packed, order = y
    m, n = a.shape[-2:]
    k = smaller(m, n)
    square, moved = packed[..., :k, :k], _take_rows(ts[0], order)
    lower, upper = _unit_lower(square), _upper(square)
    left = solve_triangle(square, moved[..., :k, :k], lower=True, unit=True)
    middle = _times_inverse(left, square)
    dl, du = lower @ _strict(middle), _upper(middle) @ upper
    out = _strict(dl) + _upper(du)
    if m != k:
        below = _times_inverse(moved[..., k:, :] - packed[..., k:, :] @ du, square)
        out = F.concatenate([out, below], axis=-2)
    if n != k:
        rest = moved[..., k:] - dl @ packed[..., k:]
        beside = solve_triangle(square, rest, lower=True, unit=True)
        out = F.concatenate([out, beside], axis=-1)
    return out, None


def _lu_vjp(g: tuple, y: tuple, a: Tensor) -> tuple:
    """The adjoint of _lu_jvp, its steps in reverse."""
    packed, order = y
    m, n = a.shape[-2:]
    k = smaller(m, n)
    square, given = packed[..., :k, :k], g[0][..., :k, :k]
    gl, gu = _strict(given), _upper(given)
    if m != k:
        below = mT(solve_triangle(square, mT(g[0][..., k:, :]), lower=False))
        gu = gu - _upper(mT(packed[..., k:, :]) @ below)
    if n != k:
        beside = solve_triangle(mT(square), g[0][..., k:], lower=False, unit=True)
        gl = gl - _strict(beside @ mT(packed[..., k:]))
    middle = _strict(mT(_unit_lower(square)) @ gl) + _upper(gu @ mT(_upper(square)))
    left = solve_triangle(mT(square), middle, lower=False, unit=True)
    out = mT(solve_triangle(square, mT(left), lower=False))
    if m != k:
        out = F.concatenate([out, below], axis=-2)
    if n != k:
        out = F.concatenate([out, beside], axis=-1)
    return (_take_rows(out, F.argsort(order, axis=-1)),)


LU = GraphOp(
    "lu",
    shape=_lu_shape,
    ref=_lu_ref,
    library=VendorLibrary("cuSOLVER", _lu_in),
    vjp=_lu_vjp,
    jvp=_lu_jvp,
    batch=unary_batch("lu"),
    axes="...__->...__,..._",
    multi=True,
    samples=tuple(sample((shape, "wellconditioned")) for shape in ((3, 3), (4, 2), (2, 2, 3))),
    flops=flops.cubic(2 / 3),
    doc="L below the diagonal and U on and above it, in one matrix, and the order p of the rows: "
    "L U = a[p]",
)


@public
def lu(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(p, L, U) with L U = a[p]: the order of rows that partial pivoting chose, and triangles.

    a: [..., M, N]   p: [..., M] int64   L: [..., M, K], ones on its diagonal   U: [..., K, N]
    K = min(M, N). Differentiable where the leading K columns are independent (NumericsError else)
    and no two pivots compete; p is a constant.
    """
    (x,), numeric = floats(a)
    packed, order = apply(LU, x)
    m, n = x.shape[-2:]
    k = smaller(m, n)
    square = packed[..., :k, :k]
    lower, upper = _unit_lower(square), _upper(square)
    if m != k:
        lower = F.concatenate([lower, packed[..., k:, :]], axis=-2)
    if n != k:
        upper = F.concatenate([upper, packed[..., k:]], axis=-1)
    return order, store(lower, numeric), store(upper, numeric)
