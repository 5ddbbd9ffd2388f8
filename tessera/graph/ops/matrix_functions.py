"""Functions of whole matrices: the pseudoinverse and the exponential, batched over leading axes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...errors import ArgumentError
from ...tensor import Tensor
from .. import functions as F
from ..op import Aval, GraphOp, VendorLibrary, sample
from ..operand import public, store
from ..trace import apply
from .linalg import floats, mT, need_matrix, need_square, square_shape, unary_batch


# --- pseudoinverse ----------------------------------------------------------------------------
def _pinv_shape(a: Aval, rcond: float) -> Aval:
    need_matrix(a)
    return Aval((*a.shape[:-2], a.shape[-1], a.shape[-2]), a.type)


def _pinv_in(module: Any, a: Any, rcond: float) -> Any:
    """V diag(1 / s) Uᵀ, of the singular values that count. Arrays of any module with NumPy's names.
    """
    if a.size == 0:
        return module.zeros((*a.shape[:-2], a.shape[-1], a.shape[-2]), a.dtype)
    u, s, vh = module.linalg.svd(a.astype(np.float64), full_matrices=False)
    counts = s > rcond * s.max(-1, keepdims=True)
    scale = module.where(counts, 1 / module.where(counts, s, 1), 0)[..., None]
    y = vh.swapaxes(-1, -2) @ (scale * u.swapaxes(-1, -2))
    return module.ascontiguousarray(y, a.dtype)


def _left_over(a: Tensor, y: Tensor) -> Tensor:
    """1 - a y"""
    return F.eye(a.shape[-2], dtype=a.dtype) - a @ y


def _pinv_jvp(ts: tuple, y: Tensor, a: Tensor, rcond: float) -> Tensor:
    t = mT(ts[0])
    return y @ mT(y) @ t @ _left_over(a, y) + _left_over(y, a) @ t @ mT(y) @ y - y @ ts[0] @ y


def _pinv_vjp(g: Tensor, y: Tensor, a: Tensor, rcond: float) -> tuple:
    """The adjoint of the three terms of the jvp; 1 - a y and 1 - y a are symmetric."""
    h, z = mT(g), mT(y)
    return (_left_over(a, y) @ h @ y @ z + z @ y @ h @ _left_over(y, a) - z @ g @ z,)


PINV = GraphOp(
    "pinv",
    shape=_pinv_shape,
    ref=partial(_pinv_in, np),
    library=VendorLibrary("cuSOLVER", _pinv_in),
    vjp=_pinv_vjp,
    jvp=_pinv_jvp,
    batch=unary_batch("pinv"),
    axes="...__->...__",
    samples=(
        sample(((4, 3), "wellconditioned"), rcond=1e-6),
        sample(((2, 2, 3), "wellconditioned"), rcond=1e-6),
        sample(((3, 3), "wellconditioned"), rcond=1e-6),
    ),
    doc="the pseudoinverse: singular values below rcond times the largest count as 0",
)


@public
def pinv(a: Any, rcond: float | None = None) -> Tensor:
    """The pseudoinverse by singular values; those below rcond times the largest count as 0.

    a: [..., M, N]   y: [..., N, M]   rcond: max(M, N) eps of a's type when None
    The derivative is that at a fixed rank. f32 is computed in f64. np.linalg.pinv; Golub and
    Pereyra 1973, eq. 4.12. Raises ShapeError, ArgumentError.
    """
    (x,), numeric = floats(a)
    need_matrix(Aval(x.shape, x.type))
    if rcond is None:
        extents = [n for n in x.shape[-2:] if isinstance(n, int)]
        rcond = max(extents, default=1) * float(x.dtype.eps)
    if isinstance(rcond, bool) or not isinstance(rcond, int | float) or not rcond >= 0:
        raise ArgumentError(f"rcond={rcond!r} is not a number of at least 0")
    return store(apply(PINV, x, rcond=float(rcond)), numeric)


# --- exponential ------------------------------------------------------------------------------
# Higham 2005, "The scaling and squaring method for the matrix exponential revisited", table 2.3
PADE = (64764752532480000.0, 32382376266240000.0, 7771770303897600.0, 1187353796428800.0,
        129060195264000.0, 10559470521600.0, 670442572800.0, 33522128640.0, 1323241920.0,
        40840800.0, 960960.0, 16380.0, 182.0, 1.0)
THETA = 5.371920351148152  # the 1-norm up to which the approximant is exact in f64


def _exp_in(module: Any, a: Any) -> Any:
    """Padé's approximant of degree 13 of a / 2^s, squared s times; s of each matrix."""
    x = a.astype(np.float64)
    if x.size == 0:
        return x.astype(a.dtype)
    norm = module.abs(x).sum(-2).max(-1)
    bad = ~module.isfinite(norm)
    with np.errstate(all="ignore"):
        s = module.where(bad | (norm <= THETA), 0, module.ceil(module.log2(norm / THETA)))
        s = s.astype(int)
        x = module.where(bad[..., None, None], 0, x) / module.exp2(s)[..., None, None]
        one, x2 = module.eye(x.shape[-1]), x @ x
        x4 = x2 @ x2
        x6, b = x2 @ x4, [c / PADE[0] for c in PADE]  # exp(0) is 1 exactly
        odd = x @ (x6 @ (b[13] * x6 + b[11] * x4 + b[9] * x2)
                   + b[7] * x6 + b[5] * x4 + b[3] * x2 + b[1] * one)
        even = (x6 @ (b[12] * x6 + b[10] * x4 + b[8] * x2)
                + b[6] * x6 + b[4] * x4 + b[2] * x2 + b[0] * one)
        y = module.linalg.solve(even - odd, even + odd)
        for k in range(int(s.max())):
            y = module.where((k < s)[..., None, None], y @ y, y)
    return module.where(bad[..., None, None], module.nan, y).astype(a.dtype)


def _exp_slope(a: Tensor, t: Tensor) -> Tensor:
    """The upper right block of exp([[a, t], [0, a]]): the derivative along t."""
    join, n = F.concatenate, a.shape[-1]
    top = join([a, t], axis=-1)
    bottom = join([F.zeros_like(a), a], axis=-1)
    return apply(MATRIX_EXP, join([top, bottom], axis=-2))[..., :n, n:]


MATRIX_EXP = GraphOp(
    "matrix_exp",
    shape=square_shape,
    ref=partial(_exp_in, np),
    library=VendorLibrary("cuSOLVER and cuBLAS", _exp_in),
    vjp=lambda g, y, a: (_exp_slope(mT(a), g),),
    jvp=lambda ts, y, a: _exp_slope(a, ts[0]),
    batch=unary_batch("matrix_exp"),
    axes="...__->...__",
    samples=(sample((3, 3)), sample((2, 2, 2))),
    doc="1 + a + a a / 2 + ... of square matrices",
)


@public
def matrix_exp(a: Any) -> Tensor:
    """exp(a) = 1 + a + a a / 2 + ... of square matrices; a: [..., N, N]

    By scaling and squaring in f64, rounded once. The derivative is an exponential of twice the
    extent. scipy.linalg.expm, torch.linalg.matrix_exp. Higham 2005, doi:10.1137/04061101X.
    Raises ShapeError.
    """
    (x,), numeric = floats(a)
    need_square(Aval(x.shape, x.type))
    return store(apply(MATRIX_EXP, x), numeric)
