"""Factorizations of matrices: Cholesky, QR, SVD, symmetric and general eigenvalues, LU.

Batched over leading axes; computed in f64, rounded to f32 for f32 operands. A matrix without the
factor is a NumericsError, when the op runs, that names its batch index.

Rules of QR and SVD: Liao et al. 2019, arXiv:1903.09650; of Cholesky: Murray 2016, arXiv:1602.07527;
of the others: the product rule of the defining equation, split into triangles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...complex_pair import Complex
from ...dims import show_shape
from ...errors import NumericsError, ShapeError
from ...tensor import Tensor
from .. import flops
from .. import functions as F
from ..op import Arg, Aval, GraphOp, NoRule, Sample, VendorLibrary, sample
from ..operand import public, store
from ..trace import apply
from .index import DIAGONAL, DIAGONAL_EMBED
from .linalg import (
    add_terms,
    at_index,
    first_failure,
    floats,
    mT,
    need_matrix,
    need_square,
    smaller,
    solve_triangle,
    square_shape,
    unary_batch,
)

# what a gradient that is infinite tells
EQUAL = ("two {} are equal or nearly so, and their {} have no derivative there: use the values "
         "alone, or perturb the matrix")
SQUARE = (sample(((3, 3), "spd")), sample(((2, 2, 2), "spd")))
ANY = tuple(sample((shape, "wellconditioned")) for shape in ((3, 3), (4, 2), (2, 2, 3)))


# --- pieces of rules --------------------------------------------------------------------------
def _tril(x: Tensor, k: int = 0) -> Tensor:
    return F.tril(x, k)


def _triu(x: Tensor) -> Tensor:
    return F.triu(x)


def _diagonal(x: Tensor) -> Tensor:
    return apply(DIAGONAL, x, offset=0, axis1=x.ndim - 2, axis2=x.ndim - 1)


def _embed(x: Tensor) -> Tensor:
    """[..., n] on the diagonal of [..., n, n]."""
    n = x.shape[-1]
    return apply(DIAGONAL_EMBED, x, offset=0, axis1=x.ndim - 1, axis2=x.ndim, extents=(n, n))


def _row(x: Tensor) -> Tensor:
    return F.expand_dims(x, -2)


def _column(x: Tensor) -> Tensor:
    return F.expand_dims(x, -1)


def _symmetric(x: Tensor) -> Tensor:
    return 0.5 * x + 0.5 * mT(x)


def _reciprocal_gaps(gaps: Tensor) -> Tensor:
    """1 / gaps off the diagonal, 0 on it. [..., n, n]"""
    lane = F.arange(gaps.shape[-1])
    own = F.equal(_column(lane), _row(lane))
    return F.where(own, 0.0, 1.0 / F.where(own, 1.0, gaps))


def _iterate(routine: Callable, a: np.ndarray) -> Any:
    """A LAPACK routine that iterates: of NaN, some builds return NaN and others do not end well."""
    bad = ~np.isfinite(a).all((-2, -1))
    if bad.any():
        where = at_index(np.unravel_index(int(np.argmax(bad)), bad.shape))
        raise NumericsError(f"the matrix{where} holds a NaN or an infinity")
    try:
        return routine(a)
    except np.linalg.LinAlgError as err:
        raise NumericsError(f"the iteration on the matrix{first_failure(routine, a)} does not "
                            "converge") from err


def _symmetric_part(a: np.ndarray) -> np.ndarray:
    half = a.dtype.type(0.5)
    return half * a + half * np.swapaxes(a, -1, -2)


def _half_sum(a: Any) -> Any:
    """The symmetric part, of arrays of any library."""
    return 0.5 * (a + a.swapaxes(-1, -2))


# --- Cholesky ---------------------------------------------------------------------------------
def _cholesky_ref(a: np.ndarray) -> np.ndarray:
    full = _symmetric_part(a)
    try:
        return np.linalg.cholesky(full)
    except np.linalg.LinAlgError as err:
        raise not_positive(first_failure(np.linalg.cholesky, full)) from err


def not_positive(where: str = "") -> NumericsError:
    return NumericsError(
        f"the matrix{where} is not positive definite", code="E_NOT_POSITIVE",
        hint="is there a NaN? one that is only just singular becomes positive definite when a "
        "small multiple of the identity is added")


def _half_lower(x: Tensor) -> Tensor:
    """The lower triangle with half the diagonal: phi, for which phi(S) + phi(S)ᵀ = S."""
    return 0.5 * (_tril(x) + _tril(x, -1))


def _cholesky_vjp(g: Tensor, y: Tensor, a: Tensor) -> tuple:
    middle = _half_lower(mT(y) @ g)
    left = solve_triangle(mT(y), middle, lower=False)
    return (_symmetric(mT(solve_triangle(mT(y), mT(left), lower=False))),)


def _cholesky_jvp(ts: tuple, y: Tensor, a: Tensor) -> Tensor:
    left = solve_triangle(y, _symmetric(ts[0]), lower=True)
    return y @ _half_lower(mT(solve_triangle(y, mT(left), lower=True)))


CHOLESKY = GraphOp(
    "cholesky",
    shape=square_shape,
    ref=_cholesky_ref,
    library=VendorLibrary("cuSOLVER", lambda module, a: module.linalg.cholesky(_half_sum(a)),
                          not_positive),
    vjp=_cholesky_vjp,
    jvp=_cholesky_jvp,
    batch=unary_batch("cholesky"),
    axes="...__->...__",
    samples=SQUARE,
    flops=flops.cubic(1 / 3),
    doc="lower triangular L with L Lᵀ = (a + aᵀ) / 2",
)


# --- QR ---------------------------------------------------------------------------------------
def _qr_shape(a: Aval) -> tuple[Aval, Aval]:
    need_matrix(a)
    m, n = a.shape[-2:]
    if smaller(m, n) != n:
        raise ShapeError(f"the qr op needs at least as many rows as columns: {show_shape(a.shape)}",
                         hint="ts.qr takes any extents")
    return a, Aval((*a.shape[:-2], n, n), a.type)


def _right_of_inverse(x: Tensor, r: Tensor) -> Tensor:
    """x R^-1"""
    return mT(solve_triangle(mT(r), mT(x), lower=True))


def _qr_vjp(g: tuple, y: tuple, a: Tensor) -> tuple:
    q, r = y
    m = add_terms(None if g[1] is None else r @ mT(g[1]),
                  None if g[0] is None else -(mT(g[0]) @ q))
    assert m is not None
    right = add_terms(g[0], q @ (_tril(m) + mT(_tril(m, -1))))
    assert right is not None
    return (mT(solve_triangle(r, mT(right), lower=False)),)


def _qr_jvp(ts: tuple, y: tuple, a: Tensor) -> tuple:
    q, r = y
    moved = _right_of_inverse(ts[0], r)
    m = mT(q) @ moved
    upper = _triu(m) + mT(_tril(m, -1))  # m less its skew part
    return moved - q @ upper, upper @ r


QR = GraphOp(
    "qr",
    shape=_qr_shape,
    ref=lambda a: tuple(np.linalg.qr(a)),
    library=VendorLibrary("cuSOLVER", lambda module, a: tuple(module.linalg.qr(a))),
    vjp=_qr_vjp,
    jvp=_qr_jvp,
    batch=unary_batch("qr"),
    axes=lambda a: "...__->...__,...__",
    multi=True,
    samples=ANY[:2] + (sample(((2, 3, 2), "wellconditioned")),),
    flops=flops.qr,
    doc="orthonormal columns Q and upper triangular R with Q R = a; [M, N], M >= N",
)


# --- SVD --------------------------------------------------------------------------------------
def _svd_shape(a: Aval) -> tuple[Aval, Aval, Aval]:
    need_matrix(a)
    *lead, m, n = a.shape
    k = smaller(m, n)
    u, s, vh = ((*lead, m, k), (*lead, k), (*lead, k, n))
    return Aval(u, a.type), Aval(s, a.type), Aval(vh, a.type)


def _square_gaps(s: Tensor) -> Tensor:
    """F_ij = 1 / (s_j^2 - s_i^2) for i != j."""
    return _reciprocal_gaps((_row(s) - _column(s)) * (_row(s) + _column(s)))


def _svd_vjp(g: tuple, y: tuple, a: Tensor) -> tuple:
    (gu, gs, gv), (u, s, vh) = g, y
    middle = None if gs is None else _embed(gs)
    outside = None
    if gu is not None:
        p = mT(u) @ gu
        middle = add_terms(middle, _square_gaps(s) * (p - mT(p)) * _row(s))
        if u.shape[-2] != u.shape[-1]:
            outside = ((gu - u @ p) / _row(s)) @ vh
    if gv is not None:
        p = vh @ mT(gv)
        middle = add_terms(middle, _column(s) * _square_gaps(s) * (p - mT(p)))
        if vh.shape[-2] != vh.shape[-1]:
            outside = add_terms(outside, u @ ((gv - mT(p) @ vh) / _column(s)))
    assert middle is not None
    return (add_terms(u @ middle @ vh, outside),)


def _svd_jvp(ts: tuple, y: tuple, a: Tensor) -> tuple:
    u, s, vh = y
    left, right = mT(u) @ ts[0], ts[0] @ mT(vh)  # [k, n], [m, k]
    p = left @ mT(vh)
    gaps = _square_gaps(s)
    du = u @ (gaps * (p * _row(s) + _column(s) * mT(p)))
    dv = mT(vh) @ (gaps * (_column(s) * p + mT(p) * _row(s)))
    if u.shape[-2] != u.shape[-1]:
        du = du + (right - u @ p) / _row(s)
    if vh.shape[-2] != vh.shape[-1]:
        dv = dv + mT((left - p @ vh) / _column(s))
    return du, _diagonal(p), mT(dv)


SVD = GraphOp(
    "svd",
    shape=_svd_shape,
    ref=lambda a: tuple(_iterate(lambda x: np.linalg.svd(x, full_matrices=False), a)),
    library=VendorLibrary("cuSOLVER", lambda module, a: tuple(module.linalg.svd(
        a, full_matrices=False))),
    vjp=_svd_vjp,
    jvp=_svd_jvp,
    batch=unary_batch("svd"),
    axes=lambda a: "...__->...__,..._,...__",
    multi=True,
    samples=ANY,
    flops=flops.cubic(21),
    gradient_hint=EQUAL.format("singular values", "vectors"),
    doc="U diag(s) Vh = a with k = min(M, N) singular values, falling",
)


# --- eigenvalues ------------------------------------------------------------------------------
def _eigh_shape(a: Aval) -> tuple[Aval, Aval]:
    need_square(a)
    return Aval(a.shape[:-1], a.type), a


def _value_gaps(w: Tensor) -> Tensor:
    """F_ij = 1 / (w_j - w_i) for i != j."""
    return _reciprocal_gaps(_row(w) - _column(w))


def _eigh_vjp(g: tuple, y: tuple, a: Tensor) -> tuple:
    (gw, gv), (w, v) = g, y
    middle = add_terms(None if gw is None else _embed(gw),
                       None if gv is None else _value_gaps(w) * (mT(v) @ gv))
    assert middle is not None
    return (_symmetric(v @ middle @ mT(v)),)


def _eigh_jvp(ts: tuple, y: tuple, a: Tensor) -> tuple:
    w, v = y
    p = mT(v) @ _symmetric(ts[0]) @ v
    return _diagonal(p), v @ (_value_gaps(w) * p)


EIGH = GraphOp(
    "eigh",
    shape=_eigh_shape,
    ref=lambda a: tuple(_iterate(np.linalg.eigh, _symmetric_part(a))),
    library=VendorLibrary("cuSOLVER", lambda module, a: tuple(module.linalg.eigh(_half_sum(a)))),
    vjp=_eigh_vjp,
    jvp=_eigh_jvp,
    batch=unary_batch("eigh"),
    axes="...__->..._,...__",
    multi=True,
    samples=SQUARE,
    flops=flops.cubic(9),
    gradient_hint=EQUAL.format("eigenvalues", "eigenvectors"),
    doc="eigenvalues, rising, and orthonormal eigenvectors (columns) of (a + aᵀ) / 2",
)


def _eig_ref(a: np.ndarray) -> tuple[np.ndarray, ...]:
    w, v = _iterate(np.linalg.eig, a)
    return tuple(np.array(part, a.dtype, order="C") for part in (w.real, w.imag, v.real, v.imag))


def _eig_in(module: Any, a: Any) -> tuple[Any, ...]:
    """Of any module with NumPy's names. The order of the eigenvalues is the library's."""
    if not bool(module.isfinite(a).all()):
        raise np.linalg.LinAlgError("the matrix holds a NaN or an infinity")
    return tuple(part for z in module.linalg.eig(a) for part in (z.real, z.imag))


_WHY_NOT = NoRule("eigenvectors of a general matrix have no fixed length and phase",
                  "ts.eigh for symmetric matrices, ts.svd, or ts.stop_gradient")

EIG = GraphOp(
    "eig",
    shape=lambda a: (_eigh_shape(a)[0],) * 2 + (a, a),
    ref=_eig_ref,
    library=VendorLibrary("cuSOLVER", _eig_in),
    no_vjp=_WHY_NOT,
    no_jvp=_WHY_NOT,
    batch=unary_batch("eig"),
    axes="...__->..._,..._,...__,...__",
    multi=True,
    samples=tuple(Sample((Arg(shape, "normal", diff=False),)) for shape in ((3, 3), (2, 2, 2))),
    flops=flops.cubic(25),
    doc="eigenvalues and eigenvectors (columns) of a general matrix, real and imaginary parts "
    "apart",
)


# --- public functions -------------------------------------------------------------------------
def _stored(parts: tuple, numeric: Any) -> tuple:
    return tuple(store(x, numeric) for x in parts)


@public
def cholesky(a: Any) -> Tensor:
    """Lower triangular L with L Lᵀ = a, of symmetric positive definite matrices.

    a: [..., N, N], of which the symmetric part (a + aᵀ) / 2 is used; so the gradient is symmetric
    Raises ShapeError, and NumericsError, when it runs, for a matrix that is not positive definite.
    """
    (x,), numeric = floats(a)
    return store(apply(CHOLESKY, x), numeric)


@public
def qr(a: Any) -> tuple[Tensor, Tensor]:
    """(Q, R): orthonormal columns and an upper triangle with Q R = a; reduced, as np.linalg.qr.

    a: [..., M, N]   Q: [..., M, K]   R: [..., K, N]   K = min(M, N)
    Differentiable where the first K columns are independent (NumericsError else). Signs are
    LAPACK's: R's diagonal may be negative.
    """
    (x,), numeric = floats(a)
    need_matrix(Aval(x.shape, x.type))
    m, n = x.shape[-2:]
    if smaller(m, n) == n:
        return _stored(apply(QR, x), numeric)
    q, r = apply(QR, x[..., :m])
    return _stored((q, F.concatenate([r, mT(q) @ x[..., m:]], axis=-1)), numeric)


@public
def svd(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(U, s, Vh) with U diag(s) Vh = a, s falling; reduced.

    a: [..., M, N]   U: [..., M, K]   s: [..., K]   Vh: [..., K, N]   K = min(M, N)
    Gradients of s exist always; those of U and Vh where no two of s are equal (else NaN) and, if
    M != N, none is 0. Raises NumericsError, when it runs, for NaN and infinities.
    """
    (x,), numeric = floats(a)
    return _stored(apply(SVD, x), numeric)


@public
def eigh(a: Any) -> tuple[Tensor, Tensor]:
    """(w, V): eigenvalues, rising, and orthonormal eigenvectors as columns: a V = V diag(w).

    a: [..., N, N], of which the symmetric part (a + aᵀ) / 2 is used; so the gradient is symmetric
    Gradients of w exist always; those of V where no two of w are equal (else NaN).
    Raises ShapeError, and NumericsError, when it runs, for NaN and infinities.
    """
    (x,), numeric = floats(a)
    return _stored(apply(EIGH, x), numeric)


@public
def eig(a: Any) -> tuple[Complex, Complex]:
    """((w real, w imaginary), (V real, V imaginary)): a V = V diag(w) of general matrices.

    a: [..., N, N]   w: [..., N] in the order of LAPACK, on a GPU in that of cuSOLVER
    V: [..., N, N], columns of length 1
    Not differentiable: a gradient through it is a GradError.
    """
    (x,), numeric = floats(a)
    w_re, w_im, v_re, v_im = _stored(apply(EIG, x), numeric)
    return Complex(w_re, w_im), Complex(v_re, v_im)
