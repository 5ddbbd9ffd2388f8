"""Cosine transforms along an axis, types II and III: linear ops, each other's adjoint."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...errors import ArgumentError
from ...tensor import Tensor
from .. import flops
from ..op import Aval, GraphOp, VendorLibrary, sample
from ..operand import axis_index, public, store
from ..trace import apply
from .linalg import floats
from .spectral import line_batch, line_letters, need_points


def _dct_shape(x: Aval, axis: int, inverse: bool) -> Aval:
    need_points(x, axis)
    return x


def _dct_in(module: Any, x: Any, axis: int, inverse: bool) -> Any:
    """By one FFT of n points: even elements forwards, then odd ones backwards. Arrays of NumPy or
    of a module with its names."""
    lines = module.moveaxis(x, axis, -1)
    y = _from_cosines(module, lines) if inverse else _to_cosines(module, lines)
    return module.ascontiguousarray(module.moveaxis(y, -1, axis), x.dtype)


def _twiddles(module: Any, n: int) -> tuple[Any, Any]:
    """exp(-pi i k / 2n), and the factors that make the transform orthonormal."""
    scale = module.full(n, np.sqrt(2 / n))
    scale[0] = np.sqrt(1 / n)
    return module.exp(-0.5j * np.pi * module.arange(n) / n), scale


def _to_cosines(module: Any, x: Any) -> Any:
    twiddles, scale = _twiddles(module, x.shape[-1])
    folded = module.concatenate((x[..., ::2], x[..., 1::2][..., ::-1]), -1)
    return (module.fft.fft(folded) * twiddles).real * scale


def _from_cosines(module: Any, y: Any) -> Any:
    n = y.shape[-1]
    twiddles, scale = _twiddles(module, n)
    full = y / scale
    mirrored = module.concatenate((module.zeros_like(full[..., :1]), full[..., :0:-1]), -1)
    folded = module.fft.ifft((full - 1j * mirrored) / twiddles).real
    x = module.empty_like(folded)
    middle = n - n // 2
    x[..., ::2], x[..., 1::2] = folded[..., :middle], folded[..., middle:][..., ::-1]
    return x


DCT = GraphOp(
    "dct",
    shape=_dct_shape,
    ref=partial(_dct_in, np),
    library=VendorLibrary("cuFFT", _dct_in),
    vjp=lambda g, y, x, axis, inverse: (apply(DCT, g, axis=axis, inverse=not inverse),),
    jvp=lambda ts, y, x, **a: apply(DCT, ts[0], **a),
    batch=line_batch("dct"),
    axes=lambda x, axis, inverse: line_letters(x, axis, 1, 1),
    samples=(sample((5,), axis=0, inverse=False), sample((2, 4), axis=1, inverse=True),
             sample((1, 2), axis=0, inverse=True)),
    flops=flops.fft(0.5),
    doc="orthonormal cosine transform along an axis, type II; its inverse and transpose, type III; "
    "Makhoul 1980, doi:10.1109/TASSP.1980.1163351",
)


def _cosine_weights(n: int, type: int, axis: int, like: Tensor) -> Tensor:
    """What the transforms without norm have over the orthonormal ones, along the axis."""
    w = np.full(n, np.sqrt(2.0 * n))
    w[:1] = np.sqrt(n) * (2 if type == 2 else 1)
    shape = [1] * like.ndim
    shape[axis] = n
    return Tensor(w.reshape(shape).astype(like.dtype.numpy), like.type)


def _cosine(x: Any, type: int, axis: int, norm: str | None, inverse: bool) -> Tensor:
    (c,), numeric = floats(x)
    a = axis_index(axis, c.ndim)
    if type not in (2, 3) or norm not in (None, "ortho"):
        raise ArgumentError(f"a cosine transform of type={type!r} with norm={norm!r}",
                            hint='type 2 or 3, norm None or "ortho"')
    transposed = (type == 3) is not inverse
    w = None if norm else _cosine_weights(int(c.shape[a]), type, a, c)
    if w is not None and transposed:
        c = c / w if inverse else c * w
    y = apply(DCT, c, axis=a, inverse=transposed)
    if w is not None and not transposed:
        y = y / w if inverse else y * w
    return store(y, numeric)


@public
def dct(x: Any, type: int = 2, axis: int = -1, norm: str | None = None) -> Tensor:
    """Cosine transform along an axis, as scipy.fft.dct.

    type 2: y_k = 2 sum_j x_j cos(pi k (2j + 1) / 2n)
    type 3: y_j = x_0 + 2 sum_(k > 0) x_k cos(pi k (2j + 1) / 2n)
    norm "ortho": orthonormal; type 3 is then the transpose and inverse of type 2
    Raises ShapeError, ArgumentError, AxisError.
    """
    return _cosine(x, type, axis, norm, inverse=False)


@public
def idct(x: Any, type: int = 2, axis: int = -1, norm: str | None = None) -> Tensor:
    """The inverse of ts.dct of the same type and norm."""
    return _cosine(x, type, axis, norm, inverse=True)
