"""Determinants of square matrices, batched over leading axes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...tensor import Tensor
from .. import flops
from .. import functions as F
from ..op import Aval, GraphOp, VendorLibrary, sample
from ..operand import public, store
from ..trace import apply
from .linalg import INV, floats, mT, need_square, square_shape, unary_batch


def _scalar_shape(a: Aval) -> Aval:
    need_square(a)
    return Aval(a.shape[:-2], a.type)


def _over_matrix(x: Tensor) -> Tensor:
    return F.expand_dims(x, (x.ndim, x.ndim + 1))


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return F.sum(a * b, axis=(-2, -1))


def _cofactor_in(module: Any, a: Any) -> Any:
    """det(U V) U diag(products of the other singular values) V: division by none of them. Arrays of
    any module with NumPy's names."""
    u, s, v = module.linalg.svd(a.astype(np.float64))
    before, after = module.ones_like(s), module.ones_like(s)
    before[..., 1:] = module.cumprod(s[..., :-1], -1)
    after[..., :-1] = module.cumprod(s[..., :0:-1], -1)[..., ::-1]
    sign = module.sign(module.linalg.det(u @ v))
    return (((before * after * sign[..., None])[..., None, :] * u) @ v).astype(a.dtype)


def _cofactor_vjp(g: Tensor, y: Tensor, a: Tensor) -> tuple:
    z = mT(apply(INV, a))
    return (_over_matrix(_inner(g, y)) * z - z @ mT(g) @ y,)


def _cofactor_jvp(ts: tuple, y: Tensor, a: Tensor) -> Tensor:
    z = mT(apply(INV, a))
    return _over_matrix(_inner(z, ts[0])) * y - y @ mT(ts[0]) @ z


COFACTOR = GraphOp(
    "cofactor",
    shape=square_shape,
    ref=partial(_cofactor_in, np),
    library=VendorLibrary("cuSOLVER", _cofactor_in),
    vjp=_cofactor_vjp,
    jvp=_cofactor_jvp,
    batch=unary_batch("cofactor"),
    axes="...__->...__",
    samples=(sample(((3, 3), "wellconditioned")), sample(((2, 2, 2), "wellconditioned"))),
    flops=flops.cubic(2),
    doc="d det(a) / d a, also of singular matrices (its own derivative needs an inverse)",
)

DET = GraphOp(
    "det",
    shape=_scalar_shape,
    ref=np.linalg.det,
    library=VendorLibrary("cuSOLVER", lambda module, a: module.linalg.det(a)),
    vjp=lambda g, y, a: (_over_matrix(g) * apply(COFACTOR, a),),
    jvp=lambda ts, y, a: _inner(apply(COFACTOR, a), ts[0]),
    batch=unary_batch("det"),
    axes="...__->...",
    samples=(sample(((3, 3), "wellconditioned")), sample(((2, 2, 2), "wellconditioned"))),
    flops=flops.cubic(2 / 3),
    doc="determinants of square matrices",
)

SLOGDET = GraphOp(
    "slogdet",
    shape=lambda a: (_scalar_shape(a),) * 2,
    ref=lambda a: tuple(np.linalg.slogdet(a)),
    library=VendorLibrary("cuSOLVER", lambda module, a: tuple(module.linalg.slogdet(a))),
    vjp=lambda g, y, a: (None if g[1] is None else _over_matrix(g[1]) * mT(apply(INV, a)),),
    jvp=lambda ts, y, a: (None, _inner(mT(apply(INV, a)), ts[0])),
    batch=unary_batch("slogdet"),
    axes="...__->...,...",
    multi=True,
    samples=(sample(((3, 3), "wellconditioned")), sample(((2, 2, 2), "wellconditioned"))),
    flops=flops.cubic(2 / 3),
    doc="sign and log|det| of square matrices; 0 and -inf of singular ones",
)


@public
def det(a: Any) -> Tensor:
    """Determinants. a: [..., N, N]   y: [...]

    The gradient is exact for singular matrices too; second derivatives need an inverse.
    """
    (x,), numeric = floats(a)
    return store(apply(DET, x), numeric)


@public
def slogdet(a: Any) -> tuple[Tensor, Tensor]:
    """(sign, log|det|) of square matrices: no overflow where det has one. a: [..., N, N]

    (0, -inf) of a singular matrix, whose gradient raises NumericsError.
    """
    (x,), numeric = floats(a)
    sign, log = apply(SLOGDET, x)
    return store(sign, numeric), store(log, numeric)
