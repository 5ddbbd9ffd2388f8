"""Scaled types: codes, and the scale that is stored beside them.

x ~ decode(codes) * scale. To derivatives the pair is the value that it stands for: quantize is the
identity, which passes a cotangent on as it is, and the cotangent of codes is that of the values.
Scales are constants. So no factor is multiplied into a cotangent to be divided out again, and none
is rounded here: products round theirs, with a scale of its own (scaled_matmul.py).
Bengio et al. 2013, arXiv:1308.3432 (straight-through).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import ArgumentError, DTypeError, ShapeError
from ...numerics import CastCounts, NumericType, Policy, as_type, decode
from ...tensor import OPERATORS, Tensor, as_tensor
from .. import functions as F
from ..op import Arg, Aval, GraphOp, Sample
from ..operand import axis_index, compute_type, convert, public, to_compute
from ..trace import apply
from ..weak_numbers import is_number
from .broadcasting import broadcast_shapes, pad_batch_axes
from .convert import CAST, CAST_STOCHASTIC, RETYPE, cast_ref, with_scale
from .gather import stretch
from .stop_gradient import STOP_GRADIENT

F32 = as_type("f32")
SMALLEST = 2.0**-126  # of the normal numbers of f32
FIRST = Arg((), "positive", False)


# --- codes and values ---------------------------------------------------------------------------
def _scaled_shape(x: Aval, scale: Aval, numeric: NumericType) -> Aval:
    if broadcast_shapes(x.shape, scale.shape) != tuple(x.shape):
        raise ShapeError(f"a scale of {scale} does not broadcast to {x}")
    return Aval(x.shape, numeric)


def _quantize_ref(x: np.ndarray, scale: np.ndarray, key: np.ndarray | None = None, *,
                  to: NumericType, shows: bool = False, counts: CastCounts | None = None
                  ) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = x / scale if to.dtype.kind == "int" else x * (np.float32(1) / scale)
        scaled = np.rint(scaled) if to.dtype.kind == "int" else scaled
        scaled = scaled + x * np.float32(0) if shows else scaled
    return cast_ref(scaled, key, source=F32, to=to, counts=counts)


def _quantize_steps(x: Tensor, scale: Tensor, *key: Tensor, to: NumericType, shows: bool = False
                    ) -> Tensor:
    """Integers are to be at most half a step off, so they are divided; of floats, which have few
    digits, a product with one reciprocal is as good. x 0 is NaN for infinities and 0 else."""
    scaled = x / scale if to.dtype.kind == "int" else x * (1.0 / scale)
    scaled = F.round(scaled) if to.dtype.kind == "int" else scaled
    scaled = scaled + x * 0.0 if shows else scaled
    return apply(CAST_STOCHASTIC if key else CAST, scaled, *key, source=F32, to=to)


def _rows(x: Tensor, scale: Tensor, batched: tuple) -> tuple[Tensor, Tensor]:
    """Operands with a batch axis each where the scale has one, which broadcasts behind it."""
    if not batched[1]:
        return x, scale
    x = x if batched[0] else F.expand_dims(x, 0)
    return x, pad_batch_axes(scale, x.ndim - 1)


def _quantize_batch(size: Any, batched: tuple, x: Tensor, scale: Tensor, *key: Tensor,
                    **attrs: Any) -> tuple:
    x, scale = _rows(x, scale, batched)
    if not batched[0] and batched[1]:
        x = F.broadcast_to(x, (size, *x.shape[1:]))
    if not (key and batched[2]):
        return apply(QUANTIZE, x, scale, *key, **attrs), True
    keys = [F.reshape(k, (2,)) for k in F.split(key[0], [1] * size, axis=0)]
    rows = [F.split(t, [1] * size, axis=0) if on else [t] * size
            for t, on in zip((x, scale), (batched[0] or batched[1], batched[1]), strict=True)]
    made = [apply(QUANTIZE, row, s, k, **attrs) for row, s, k in zip(*rows, keys, strict=True)]
    if batched[0] or batched[1]:
        return F.concatenate(made, axis=0), True
    return F.stack(made), True


QUANTIZE = GraphOp(
    "quantize",
    shape=lambda x, scale, *key, to, shows=False: _scaled_shape(x, scale, to),
    ref=_quantize_ref,
    vjp=lambda g, y, x, scale, *key, **attrs: (g, None, *(None for _ in key)),
    jvp=lambda ts, y, x, scale, *key, **attrs: ts[0],
    batch=_quantize_batch,
    expand=_quantize_steps,
    axes="...,...->...",
    codes=True,
    samples=(
        Sample((Arg((2, 3), "normal", False), FIRST), {"to": as_type("fp8_e4m3 @saturate")}),
        Sample((Arg((2, 3), "normal", False), Arg((2, 1), "positive", False)),
               {"to": as_type("int8")}),
        Sample((Arg((2, 3), "normal", False), FIRST),
               {"to": as_type("fp8_e5m2 @saturate"), "shows": True}),
    ),
    doc="the codes of x / scale, where shows says so NaN for infinities, which saturate else; to "
    "derivatives the identity",
)


def _dequantize_batch(size: Any, batched: tuple, codes: Tensor, scale: Tensor, source: NumericType
                      ) -> tuple:
    return apply(DEQUANTIZE, *_rows(codes, scale, batched), source=source), True


def values_of(codes: Tensor, scale: Tensor) -> Tensor:
    """codes times their scale. The codes' type is part of the op, for NumPy cannot name each."""
    return apply(DEQUANTIZE, codes, scale, source=as_type(codes.dtype))


DEQUANTIZE = GraphOp(
    "dequantize",
    shape=lambda codes, scale, source: Aval(broadcast_shapes(codes.shape, scale.shape), F32),
    ref=lambda codes, scale, source: np.multiply(
        decode(codes, source.dtype).astype(np.float32), scale, dtype=np.float32),
    vjp=lambda g, y, codes, scale, source: (g, None),
    jvp=lambda ts, y, codes, scale, source: ts[0],
    batch=_dequantize_batch,
    expand=lambda codes, scale, source: convert(codes, F32) * scale,
    axes="...,...->...",
    samples=tuple(
        Sample((Arg((2, 3), f"type:{name}", False), of), {"source": as_type(name)})
        for name, of in (("fp8_e4m3", FIRST), ("int8", Arg((2, 1), "positive", False)),
                         ("fp4_e3m0", FIRST))
    ),
    doc="codes times their scale; to derivatives the identity",
)


def _same_shape(x: Aval, y: Aval) -> Aval:
    if tuple(x.shape) != tuple(y.shape):
        raise ShapeError(f"the codes of {x} have the shape of the values, got {y}")
    return y


STRAIGHT_THROUGH = GraphOp(
    "straight_through",
    shape=_same_shape,
    ref=lambda x, y: y.copy(),
    vjp=lambda g, z, x, y: (g, None),
    jvp=lambda ts, z, x, y: ts[0],
    batch=lambda size, batched, x, y: (
        apply(STRAIGHT_THROUGH, stretch(x, size, batched[0]), stretch(y, size, batched[1])), True),
    expand=lambda x, y: y,
    axes="...,...->...",
    codes=True,
    samples=(Sample((Arg((2, 3), "normal", False), Arg((2, 3), "int", False))),),
    doc="y, what a policy class makes of x; to derivatives x",
)


# --- scales -------------------------------------------------------------------------------------
def finite_amax(x: Tensor, axis: int | None = None) -> Tensor:
    """The largest finite |x|, 0 where there is none: of all, or for each index of one axis, in
    extents that broadcast. A constant for derivatives."""
    keep = None if axis is None else axis_index(axis, x.ndim)
    kept = tuple(d if i == keep else 1 for i, d in enumerate(x.shape))
    if 0 in x.shape:
        return F.zeros(() if keep is None else kept, F32)
    size = F.abs(apply(STOP_GRADIENT, convert(to_compute(x), F32)))
    size = F.where(size < np.inf, size, 0.0)
    if keep is None:
        return F.max(size)
    return F.max(size, axis=tuple(i for i in range(x.ndim) if i != keep), keepdims=True)


def scale_of(amax: Tensor, numeric: NumericType) -> Tensor:
    """The scale that puts amax on the largest value of the format; 1 where it would be 0."""
    return _with_reciprocal(amax * (1.0 / float(numeric.dtype.max)))


def _with_reciprocal(scale: Tensor) -> Tensor:
    """1 in place of 0, and no scale so small that 1 / scale were infinite."""
    return F.where(F.equal(scale, 0.0), 1.0, F.maximum(scale, SMALLEST))


def codes_of(x: Tensor, scale: Tensor, numeric: NumericType, shows: bool = False) -> Tensor:
    """The codes of x / scale. Beyond the range they are the largest values; of infinities NaN where
    these are to show."""
    policy = numeric.policy
    to = NumericType(numeric.dtype, Policy(saturate=True, rounding=policy.rounding))
    key = (F.next_key(),) if policy.rounding == "stochastic" and to.dtype.kind == "float" else ()
    return apply(QUANTIZE, x, scale, *key, to=to, **({"shows": True} if shows else {}))


@public
def quantize(x: Any, dtype: Any, scale: Any = None) -> Tensor:
    """x as a scaled type: codes and the scale that is stored beside them.

    `@scaled("amax")`: scale = largest finite |x| / largest value of the format, over the whole
    tensor, or per index of one axis with `@per_channel(axis)`. A precision policy class uses its
    own quantize(). A scale of 0 is stored as 1.
    scale: a positive one for the whole tensor, instead; what is beyond the range then saturates.
    To derivatives it is the identity: cotangents pass as they are, and a scale is a constant.
    Raises ShapeError where a class's codes are not one for each element, DTypeError for a type
    without a scale, ArgumentError for a scale that is known and negative or not finite.
    """
    x, numeric = as_tensor(x), as_type(dtype)
    wide = convert(to_compute(x), F32)
    if numeric.policy.custom is not None:
        if scale is not None:
            raise DTypeError(f"{numeric} finds its scale itself", hint="leave scale= out")
        codes, scale = numeric.policy.custom().quantize(apply(STOP_GRADIENT, wide))
        codes, scale = convert(as_tensor(codes), as_type(numeric.dtype)), as_tensor(scale)
        codes = apply(STRAIGHT_THROUGH, wide, codes)
        return with_scale(codes, F.where(F.equal(scale, 0.0), 1.0, scale), numeric)
    if not numeric.policy.scaled and numeric.policy.per_channel is None:
        raise DTypeError(f"{numeric} has no scale",
                         hint=f'ts.quantize(x, \'{numeric} @scaled("amax")\'); ts.cast(x, '
                              f'"{numeric}") rounds the numbers themselves')
    if scale is None:
        scale = scale_of(finite_amax(wide, numeric.policy.per_channel), numeric)
    else:
        scale = _given_scale(scale, numeric)
    return with_scale(codes_of(wide, scale, numeric), scale, numeric)


def _given_scale(scale: Any, numeric: NumericType) -> Tensor:
    if is_number(scale) and not isinstance(scale, Tensor) and not 0 <= scale < np.inf:
        raise ArgumentError(f"a scale of {scale}", hint="it is a positive number: values are "
                            "codes times scale")
    scale = convert(as_tensor(scale), F32)
    if scale.ndim or numeric.policy.per_channel is not None:
        raise ShapeError(f"scale= is one number for the whole tensor, got {scale.ndim} axes for "
                         f"{numeric}", hint="ts.quantize(x / scales, dtype, scale=1.0)")
    return _with_reciprocal(apply(STOP_GRADIENT, scale))


@public
def dequantize(x: Tensor) -> Tensor:
    """The values of a scaled tensor in its compute type: codes * scale, or the policy's own
    dequantize(). Other tensors are converted to their compute type."""
    if x.scale is None:
        return to_compute(x)
    plain = stored_codes(x)
    if x.policy.custom is not None:
        values = as_tensor(x.policy.custom().dequantize(apply(STOP_GRADIENT, plain), x.scale))
        return apply(STRAIGHT_THROUGH, plain, values)
    assert compute_type(x.type) == F32
    return values_of(plain, x.scale)


def stored_codes(x: Tensor) -> Tensor:
    """The codes of a scaled tensor, as numbers of its storage type."""
    return apply(RETYPE, x, to=as_type(x.dtype))


# What to do where a tensor is one array.
APART = "pass ts.dequantize(x), or codes and scale apart: ts.tensor(x.array, x.dtype) and x.scale"
OPERATORS["quantize"], OPERATORS["dequantize"] = quantize, dequantize

__all__ = ["APART", "DEQUANTIZE", "QUANTIZE", "codes_of", "finite_amax", "scale_of", "stored_codes",
           "values_of"]
