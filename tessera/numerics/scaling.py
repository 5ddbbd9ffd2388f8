"""Scaled storage: x is kept as codes of x / scale, with the scale beside them (NUM-07, NUM-15).

    scale = max|x| / dtype.max      over the tensor, or for each index of one axis
    x ~ decode(codes) * scale
The scale is f32; 0 becomes 1, so a tensor of zeros decodes to zeros and not to 0/0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.errors import AxisError, DTypeError, ShapeError
from tessera.numerics.codec import decode, encode
from tessera.numerics.counts import CastCounts
from tessera.numerics.dtypes import DType, f32
from tessera.numerics.policy import as_dtype


def quantize_amax(
    x: Any,
    dtype: DType | str,
    axis: int | None = None,
    *,
    rounding: str = "nearest_even",
    key: Any = None,
    counts: CastCounts | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scale) with the largest finite |x| on the format's largest value.

    x: [...] floats   codes: dtype.numpy, shape of x   scale: f32, () or [x.shape[axis]]
    Integer targets are symmetric (int8 uses -127 .. 127) and round to nearest even, so the error is
    at most half a step per channel. inf saturates; NaN stays NaN where the format has it, else 0.
    Raises DTypeError for bool, unsigned integers and formats with f32's range (bf16, tf32, f32,
    f64), whose scale would be a subnormal; AxisError for an axis that x does not have.
    """
    dtype = as_dtype(dtype)
    if dtype.kind not in ("float", "int") or dtype.exp >= f32.exp:
        raise DTypeError(
            f"cannot scale to {dtype}", hint="use fp4, fp6, fp8, f16 or a signed integer"
        )
    x = np.asarray(x)
    x = x if x.dtype == np.float64 else x.astype(np.float32)
    scale = nonzero_scale(_amax(x, axis) / dtype.max)
    with np.errstate(over="ignore"):  # x over a subnormal scale; inf saturates
        scaled = x / _along(scale, axis, x.ndim)
    if dtype.kind == "int":
        scaled = np.clip(scaled, -dtype.max, dtype.max)
        scaled = np.rint(scaled) if rounding == "nearest_even" else scaled
    codes = encode(scaled, dtype, rounding=rounding, saturate=True, key=key, counts=counts)
    return codes, scale


def dequantize(codes: Any, scale: Any, dtype: DType | str, axis: int | None = None) -> np.ndarray:
    """decode(codes) * scale in f32 (f64 for f64). scale: () or [codes.shape[axis]]"""
    values = decode(codes, dtype)
    scale = nonzero_scale(scale)
    if axis is None and scale.ndim:
        raise ShapeError(f"a scale of shape {scale.shape} needs axis=", hint="axis=0 for rows")
    if axis is not None and scale.shape != (values.shape[_axis(axis, values.ndim)],):
        raise ShapeError(
            f"scale has shape {scale.shape}; axis {axis} of {values.shape} needs "
            f"({values.shape[axis]},)"
        )
    wide = values if values.dtype.kind == "f" else values.astype(np.float32)
    return wide * _along(scale, axis, values.ndim).astype(wide.dtype)


def nonzero_scale(scale: Any) -> np.ndarray:
    """f32 scale(s) with 0 replaced by 1."""
    scale = np.asarray(scale, np.float32)
    return np.where(scale == 0, np.float32(1), scale)


def _amax(x: np.ndarray, axis: int | None) -> np.ndarray:
    """Largest finite magnitude, 0 where there is none: () or [x.shape[axis]]."""
    magnitude = np.where(np.isfinite(x), np.abs(x), 0)
    if axis is None:
        return magnitude.max(initial=0)
    others = tuple(i for i in range(x.ndim) if i != _axis(axis, x.ndim))
    return magnitude.max(axis=others, initial=0)


def _axis(axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise AxisError(f"axis {axis} of an array of {ndim} dimensions")
    return axis % ndim


def _along(scale: np.ndarray, axis: int | None, ndim: int) -> np.ndarray:
    """The scale shaped to multiply an array of `ndim` axes."""
    if axis is None:
        return scale
    shape = [1] * ndim
    shape[_axis(axis, ndim)] = -1
    return scale.reshape(shape)
