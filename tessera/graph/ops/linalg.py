"""Dense linear algebra: triangular and general solves, inverse, powers; batched over leading axes.

NumPy's LAPACK computes in f64 and rounds to f32 for f32 operands; so do the substitutions here.
A matrix without an inverse is a NumericsError, when the op runs, that names its batch index.
Rules: Giles 2008, "Collected matrix derivative results for forward and reverse mode AD".
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ...dims import show_shape
from ...errors import ArgumentError, DTypeError, NumericsError, ShapeError
from ...numerics import NumericType, as_type
from ...tensor import Tensor
from .. import flops
from .. import functions as F
from ..op import OPS, Aval, GraphOp, VendorLibrary, sample
from ..operand import convert, promote, public, store
from ..trace import apply
from .broadcasting import broadcast_shapes, pad_batch_axes, unbroadcast

LINE = 16  # rows that a substitution solves one by one; more are halved around a product


# --- operands, shapes, errors -----------------------------------------------------------------
def floats(*xs: Any) -> tuple[list[Tensor], NumericType]:
    """Operands in one floating compute type (integers become f32), and the result's type."""
    tensors, numeric = promote(*xs)
    if tensors[0].dtype.kind == "float":
        return tensors, numeric
    f32 = as_type("f32")
    return [convert(t, f32) for t in tensors], f32


def need_matrix(a: Aval) -> None:
    if a.ndim < 2:
        raise ShapeError(f"a matrix needs two axes, got {show_shape(a.shape)}")


def need_square(a: Aval) -> None:
    need_matrix(a)
    if a.shape[-1] != a.shape[-2]:
        raise ShapeError(f"a square matrix is needed, got {show_shape(a.shape)}",
                         hint="ts.lstsq solves, and ts.svd and ts.qr factor, any extents")


def square_shape(a: Aval) -> Aval:
    need_square(a)
    return a


def smaller(m: Any, n: Any) -> Any:
    """min(m, n) of extents that may be symbolic."""
    if m == n:
        return m
    if isinstance(m, int) and isinstance(n, int):
        return min(m, n)
    raise ShapeError(f"which of the symbolic extents {m} and {n} is smaller is not known")


def mT(x: Tensor) -> Tensor:
    return F.swapaxes(x, -1, -2)


def add_terms(*terms: Tensor | None) -> Tensor | None:
    """The sum of those that are there, None when none is."""
    held = [t for t in terms if t is not None]
    return sum(held[1:], start=held[0]) if held else None


def at_index(index: Iterable[Any]) -> str:
    place = tuple(map(int, index))
    return f" at batch index {place}" if place else ""


def first_failure(probe: Callable, a: np.ndarray) -> str:
    """Where the first matrix stands that LAPACK refuses: it tells only that there is one."""
    for index in np.ndindex(a.shape[:-2]):
        try:
            probe(a[index])
        except np.linalg.LinAlgError:
            return at_index(index)
    return ""


def singular(where: str = "", why: str = "a pivot is 0") -> NumericsError:
    return NumericsError(
        f"the matrix{where} is singular: {why}", code="E_SINGULAR",
        hint="ts.lstsq minimizes |a x - b|; adding a small multiple of the identity regularizes",
    )


def unary_batch(name: str) -> Callable[..., tuple]:
    """The batching rule of an op on the last two axes."""
    def rule(size: Any, batched: tuple, x: Tensor, **attrs: Any) -> tuple:
        return apply(OPS[name], x, **attrs), True

    return rule


def _pair_batch(name: str) -> Callable[..., tuple]:
    """The batching rule of op(a, b) whose leading axes broadcast."""
    def rule(size: Any, batched: tuple, a: Tensor, b: Tensor, **attrs: Any) -> tuple:
        ndim = max(a.ndim - batched[0], b.ndim - batched[1])
        left, right = (pad_batch_axes(x, ndim) if flag else x
                       for x, flag in zip((a, b), batched, strict=True))
        return apply(OPS[name], left, right, **attrs), True

    return rule


def _solve_shape(a: Aval, b: Aval, **attrs: Any) -> Aval:
    need_square(a)
    need_matrix(b)
    if a.dtype is not b.dtype:
        raise DTypeError(f"operands of one type needed, got {a.type} and {b.type}")
    if a.shape[-1] != b.shape[-2]:
        raise ShapeError(f"{a.shape[-1]} equations and a right side {show_shape(b.shape)} "
                         f"of {b.shape[-2]} rows")
    return Aval((*broadcast_shapes(a.shape[:-2], b.shape[:-2]), *b.shape[-2:]), b.type)


# --- triangular -------------------------------------------------------------------------------
def _triangle(x: Tensor, lower: bool, unit: bool) -> Tensor:
    """The part of a matrix that a triangular solve reads."""
    return (F.tril if lower else F.triu)(x, (-1 if lower else 1) if unit else 0)


def substitute(a: np.ndarray, b: np.ndarray, lower: bool, unit: bool) -> np.ndarray:
    """X with a X = b; halves of the unknowns in turn, so that the work is in matrix products."""
    if not lower:  # the same rows and columns in reverse are a lower triangle
        return substitute(a[..., ::-1, ::-1], b[..., ::-1, :], True, unit)[..., ::-1, :]
    n = a.shape[-1]
    if n <= LINE:
        return _substitute_rows(a, b, unit)
    h = n // 2
    top = substitute(a[..., :h, :h], b[..., :h, :], True, unit)
    rest = b[..., h:, :] - a[..., h:, :h] @ top
    return np.concatenate((top, substitute(a[..., h:, h:], rest, True, unit)), -2)


def _substitute_rows(a: np.ndarray, b: np.ndarray, unit: bool) -> np.ndarray:
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    x = np.empty((*lead, *b.shape[-2:]), b.dtype)
    for i in range(a.shape[-1]):
        row = b[..., i, :] - (a[..., i:i + 1, :i] @ x[..., :i, :])[..., 0, :]
        x[..., i, :] = row if unit else row / a[..., i, i, None]
    return x


def _triangular_ref(a: np.ndarray, b: np.ndarray, lower: bool, unit: bool) -> np.ndarray:
    zero = np.diagonal(a, axis1=-2, axis2=-1) == 0
    if zero.any() and not unit:
        *index, i = np.unravel_index(int(np.argmax(zero)), zero.shape)
        raise singular(at_index(index), f"its diagonal is 0 in row {i}")
    x = substitute(a.astype(np.float64), b.astype(np.float64), lower, unit)
    return x.astype(b.dtype)


def _triangular_in(module: Any, a: Any, b: Any, lower: bool, unit: bool) -> Any:
    """By trsm, in f64. Arrays of CuPy; of NumPy by substitution."""
    if module is np:
        return _triangular_ref(a, b, lower, unit)
    if not unit and bool((a.diagonal(0, -2, -1) == 0).any()):
        raise np.linalg.LinAlgError("the matrix is singular: its diagonal holds a 0")
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    left, right = (module.ascontiguousarray(module.broadcast_to(x, (*lead, *x.shape[-2:])),
                                            np.float64) for x in (a, b))
    return cupy_linalg().solve_triangular(left, right, lower=lower, unit_diagonal=unit)


def cupy_linalg() -> Any:
    """What CuPy has beyond NumPy's names."""
    return importlib.import_module("cupyx.scipy.linalg")


def solve_triangle(a: Tensor, b: Tensor, lower: bool, unit: bool = False) -> Tensor:
    return apply(TRIANGULAR_SOLVE, a, b, lower=lower, unit=unit)


def _triangular_vjp(g: Tensor, y: Tensor, a: Tensor, b: Tensor, lower: bool, unit: bool) -> tuple:
    db = solve_triangle(mT(a), g, not lower, unit)
    da = -_triangle(db @ mT(y), lower, unit)
    return unbroadcast(da, tuple(a.shape)), unbroadcast(db, tuple(b.shape))


def _triangular_jvp(ts: tuple, y: Tensor, a: Tensor, b: Tensor, lower: bool,
                    unit: bool) -> Tensor:
    moved = None if ts[0] is None else -(_triangle(ts[0], lower, unit) @ y)
    right = add_terms(ts[1], moved)
    assert right is not None
    return F.broadcast_to(solve_triangle(a, right, lower, unit), y.shape)


TRIANGULAR_SOLVE = GraphOp(
    "triangular_solve",
    shape=_solve_shape,
    ref=_triangular_ref,
    library=VendorLibrary("cuBLAS", _triangular_in),
    vjp=_triangular_vjp,
    jvp=_triangular_jvp,
    batch=_pair_batch("triangular_solve"),
    axes="...__,..._n->..._n",
    samples=(
        sample(((3, 3), "dominant"), (3, 2), lower=True, unit=False),
        sample(((2, 3, 3), "dominant"), (3, 2), lower=False, unit=False),
        sample(((3, 3), "dominant"), (2, 1, 3, 1), lower=False, unit=True),
    ),
    flops=flops.triangular_solve,
    doc="X with a X = b, reading one triangle of a (`unit`: with ones on its diagonal)",
)


# --- general ----------------------------------------------------------------------------------
def _inv_ref(a: np.ndarray) -> np.ndarray:
    try:
        return np.linalg.inv(a)
    except np.linalg.LinAlgError as err:
        raise singular(first_failure(np.linalg.inv, a)) from err


def _solve_ref(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    try:
        return np.linalg.solve(a, b)
    except np.linalg.LinAlgError as err:
        raise singular(first_failure(np.linalg.inv, a)) from err


def _solve_in_library(module: Any, a: Any, b: Any) -> Any:
    """CuPy's takes as many matrices as right sides: batch axes are broadcast before."""
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (module.ascontiguousarray(module.broadcast_to(x, (*lead, *x.shape[-2:])))
            for x in (a, b))
    return module.linalg.solve(a, b)


def _solve_vjp(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple:
    db = apply(SOLVE, mT(a), g)
    return unbroadcast(-(db @ mT(y)), tuple(a.shape)), unbroadcast(db, tuple(b.shape))


def _solve_jvp(ts: tuple, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    right = add_terms(ts[1], None if ts[0] is None else -(ts[0] @ y))
    assert right is not None
    return F.broadcast_to(apply(SOLVE, a, right), y.shape)


SOLVE = GraphOp(
    "solve",
    shape=_solve_shape,
    ref=_solve_ref,
    library=VendorLibrary("cuSOLVER", _solve_in_library, singular),
    vjp=_solve_vjp,
    jvp=_solve_jvp,
    batch=_pair_batch("solve"),
    axes="...__,..._n->..._n",
    samples=(
        sample(((3, 3), "wellconditioned"), (3, 2)),
        sample(((2, 1, 3, 3), "wellconditioned"), (2, 3, 1)),
    ),
    flops=flops.solve,
    doc="X with a X = b, by LU with partial pivoting",
)

INV = GraphOp(
    "inv",
    shape=square_shape,
    ref=_inv_ref,
    library=VendorLibrary("cuSOLVER", lambda module, a: module.linalg.inv(a), singular),
    vjp=lambda g, y, a: (-(mT(y) @ g @ mT(y)),),
    jvp=lambda ts, y, a: -(y @ ts[0] @ y),
    batch=unary_batch("inv"),
    axes="...__->...__",
    samples=(sample(((3, 3), "wellconditioned")), sample(((2, 2, 2), "wellconditioned"))),
    flops=flops.cubic(2),
    doc="the inverse of square matrices",
)


# --- public functions -------------------------------------------------------------------------
def _with_columns(b: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """run(b) with a vector b as one column."""
    if b.ndim != 1:
        return run(b)
    return F.squeeze(run(F.expand_dims(b, 1)), -1)


@public
def triangular_solve(a: Any, b: Any, *, lower: bool = True, transpose: bool = False,
                     unit_diagonal: bool = False) -> Tensor:
    """X with a X = b (`transpose`: aᵀ X = b), reading only the lower or upper triangle of a.

    a: [..., N, N]   b: [N] or [..., N, K]   X: like b, leading axes broadcast
    Raises ShapeError, and NumericsError, when it runs, for a 0 on the diagonal.
    """
    (x, y), numeric = floats(a, b)
    need_matrix(Aval(x.shape, x.type))
    if transpose:
        x, lower = mT(x), not lower
    return store(_with_columns(y, lambda c: solve_triangle(x, c, lower, unit_diagonal)), numeric)


@public
def solve(a: Any, b: Any) -> Tensor:
    """X with a X = b, by LU with partial pivoting in f64.

    a: [..., N, N]   b: [N] or [..., N, K]   X: like b, leading axes broadcast
    Raises ShapeError, and NumericsError, when it runs, for a singular matrix.
    """
    (x, y), numeric = floats(a, b)
    return store(_with_columns(y, lambda c: apply(SOLVE, x, c)), numeric)


@public
def inv(a: Any) -> Tensor:
    """The inverse of square matrices. a: [..., N, N]

    ts.solve(a, b) is more accurate than inv(a) @ b. Raises ShapeError, and NumericsError, when it
    runs, for a singular matrix.
    """
    (x,), numeric = floats(a)
    return store(apply(INV, x), numeric)


@public
def lstsq(a: Any, b: Any) -> Tensor:
    """The x that minimizes |a x - b|; with fewer rows than columns, the shortest that solves it.

    a: [..., M, N] of full rank   b: [M] or [..., M, K]   x: [N] or [..., N, K]
    By QR. Raises ShapeError, and NumericsError, when it runs, for a 0 on R's diagonal; a matrix
    that lacks rank only up to rounding gives large numbers.
    """
    (x, y), numeric = floats(a, b)
    need_matrix(Aval(x.shape, x.type))
    columns = F.expand_dims(y, 1) if y.ndim == 1 else y
    m, n = x.shape[-2:]
    if smaller(m, n) == n:
        q, r = F.qr(x)
        out = solve_triangle(r, mT(q) @ columns, lower=False)
    else:
        q, r = F.qr(mT(x))
        out = q @ solve_triangle(mT(r), columns, lower=True)
    return store(F.squeeze(out, -1) if y.ndim == 1 else out, numeric)


@public
def matrix_power(a: Any, n: int) -> Tensor:
    """a a ... a, n times, by repeated squaring; powers of the inverse when n < 0; a: [..., N, N]"""
    if isinstance(n, bool) or not isinstance(n, int | np.integer):
        raise ArgumentError(f"matrix_power needs an integer, got n={n!r}")
    (x,), numeric = floats(a)
    need_square(Aval(x.shape, x.type))
    if n < 0:
        x = apply(INV, x)
    out, bits = None, abs(int(n))
    while bits:
        if bits & 1:
            out = x if out is None else out @ x
        bits >>= 1
        x = x @ x if bits else x
    if out is None:
        out = F.broadcast_to(F.eye(x.shape[-1], dtype=x.dtype), x.shape)
    return store(out, numeric)
