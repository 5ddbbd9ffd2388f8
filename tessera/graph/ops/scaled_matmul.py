"""Matmuls of scaled tensors: codes are multiplied as they are stored, and the sums by both scales.

Derivatives are such matmuls too: the cotangent is quantised with a scale of its own and multiplies
the codes of the other operand, so no operand is ever widened. Cotangents need range more than
digits: e5m2, where values have e4m3 (Micikevicius et al. 2022, arXiv:2209.05433).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...dims import size_of
from ...numerics import DType, NumericType, as_type
from ...tensor import Tensor
from .. import flops
from .. import functions as F
from ..op import Arg, Aval, GraphOp, Sample
from ..trace import apply
from .broadcasting import broadcast_shapes, pad_batch_axes, unbroadcast
from .contract import (
    MATMUL,
    as_one_matrix,
    matmul_ref,
    multiply_together,
)
from .scaled import codes_of, finite_amax, scale_of, stored_codes, values_of

F32 = as_type("f32")
COTANGENT = as_type('fp8_e5m2 @scaled("amax")')


def _shape(a: Aval, a_scale: Aval, b: Aval, b_scale: Aval, *cotangent_scale: Aval, accum: DType,
           cotangent: NumericType) -> Aval:
    out = MATMUL.shape(a, b, accum)
    return Aval(broadcast_shapes(out.shape, a_scale.shape, b_scale.shape), F32)


def _ref(a: np.ndarray, a_scale: np.ndarray, b: np.ndarray, b_scale: np.ndarray,
         *cotangent_scale: np.ndarray, accum: DType, cotangent: NumericType) -> np.ndarray:
    return matmul_ref(a, b, accum) * (a_scale * b_scale)


def _scales_behind_reshape(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor,
                           *cotangent_scale: Tensor,
                           accum: DType, cotangent: NumericType) -> Tensor:
    """The scales behind the reshape of rows that are one matrix: with what follows they are one
    loop, which the matmul takes in."""
    scale = a_scale * b_scale
    if scale.ndim:
        return apply(MATMUL, a, b, accum=accum) * scale
    return as_one_matrix(a, b, lambda x, y: apply(MATMUL, x, y, accum=accum)) * scale


def _mT(x: Tensor) -> Tensor:
    return F.swapaxes(x, -1, -2)


def _vjp(g: Tensor, y: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor,
         *cotangent_scale: Tensor, accum: DType, cotangent: NumericType) -> tuple:
    scale = cotangent_scale[0] if cotangent_scale else scale_of(finite_amax(g), cotangent)
    codes = codes_of(g, scale, cotangent, shows=True)  # where g is made: before any reshape
    attrs = {"accum": accum, "cotangent": cotangent}
    da = apply(SCALED_MATMUL, codes, scale, _mT(b), b_scale, **attrs)
    if a.ndim > 2 and b.ndim == 2 and not a_scale.ndim:  # the sum over rows is one over matrices
        a, codes = (F.reshape(x, (size_of(x.shape[:-1]), x.shape[-1])) for x in (a, codes))
        return da, None, apply(SCALED_MATMUL, _mT(a), a_scale, codes, scale, **attrs), None, *(
            None for _ in cotangent_scale)
    db = apply(SCALED_MATMUL, _mT(a), a_scale, codes, scale, **attrs)
    return (unbroadcast(da, tuple(a.shape)), None, unbroadcast(db, tuple(b.shape)), None,
            *(None for _ in cotangent_scale))


def _jvp(ts: tuple, y: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor,
         *cotangent_scale: Tensor, accum: DType, cotangent: NumericType) -> Tensor | None:
    left = right = None
    if ts[0] is not None:
        left = apply(MATMUL, ts[0], values_of(b, b_scale), accum=accum)
    if ts[2] is not None:
        right = apply(MATMUL, values_of(a, a_scale), ts[2], accum=accum)
    return right if left is None else left if right is None else left + right


def _batch(size: Any, batched: tuple, *xs: Tensor, accum: DType, cotangent: NumericType) -> tuple:
    """A row of the batch has scales of its own where these are batched."""
    ndim = max(xs[0].ndim - batched[0], xs[2].ndim - batched[2])
    if not any(batched[:4]):
        xs, batched = (F.broadcast_to(xs[0], (size, *xs[0].shape)), *xs[1:]), (True, *batched[1:])
    padded = (pad_batch_axes(x, ndim) if on else x for x, on in zip(xs, batched, strict=True))
    return apply(SCALED_MATMUL, *padded, accum=accum, cotangent=cotangent), True


_SCALES = (Arg((), "positive", False),) * 3
_ATTRS = {"accum": F32.dtype, "cotangent": COTANGENT}
SCALED_MATMUL = GraphOp(
    "scaled_matmul",
    shape=_shape,
    ref=_ref,
    vjp=_vjp,
    jvp=_jvp,
    batch=_batch,
    expand=_scales_behind_reshape,
    axes=lambda *xs, **attrs: "...mk,...,...kn" + ",..." * (len(xs) - 3) + "->...mn",
    reduces="sum",
    samples=tuple(
        Sample((Arg(a, "type:fp8_e4m3", False), _SCALES[0], Arg(b, f"type:{other}", False),
                *_SCALES[1:count]), _ATTRS)
        for a, b, other, count in (((3, 4), (4, 5), "fp8_e4m3", 2),
                                   ((2, 3, 4), (2, 4, 2), "fp8_e5m2", 3))),
    flops=lambda ins, outs, **attrs: flops.matmul((ins[0], ins[2]), outs, **attrs),
    matmul=True,
    shows=(0, 2),
    hint="an infinity or a NaN in front of a scaled cast",
    doc="[..., M, K] x [..., K, N] -> [..., M, N] of codes as they are stored, times both scales; "
    "the cotangent is quantised in the derivative",
)


# --- which operands -----------------------------------------------------------------------------
def multiplies_scaled(a: Tensor, b: Tensor) -> bool:
    """Whether a matmul takes the codes of these operands: floats of 8 bits, with one scale each or
    none, and one of them with a scale."""
    scaled = a.scale is not None or b.scale is not None
    return scaled and _plain_codes(a) and _plain_codes(b) and multiply_together(a.dtype, b.dtype)


def _plain_codes(x: Tensor) -> bool:
    """Of types of 8 bits a custom policy alone has codes that only its class can read."""
    narrow = x.dtype.kind == "float" and x.dtype.bits == 8 and x.policy.custom is None
    return narrow and (x.scale is None or not x.scale.ndim)


def scaled_product(a: Tensor, b: Tensor, cotangent_scale: Tensor | None = None,
                   cotangent: NumericType = COTANGENT) -> Tensor:
    """a b of operands that multiply as scaled codes, in f32. a: [..., M, K]   b: [..., K, N]"""
    rest = () if cotangent_scale is None else (cotangent_scale,)
    return apply(SCALED_MATMUL, *_codes_and_scale(a), *_codes_and_scale(b), *rest,
                 accum=F32.dtype, cotangent=cotangent)


def _codes_and_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.scale is None:
        return x, F.ones((), "f32")
    return stored_codes(x), x.scale


__all__ = ["COTANGENT", "SCALED_MATMUL", "multiplies_scaled", "scaled_product"]
