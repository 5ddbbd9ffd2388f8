"""Conversions between numeric types: the only place where a graph rounds.

cast(x, t) rounds once as t's policy says. Its derivative is where cotangents are stored: the
cotangent of a value of a low-precision type t is rounded to t, after multiplication by t's loss
scale, and divided by it again in the compute type. Converting up (bf16 -> f32) never rounds, so a
parameter's gradient arrives in f32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import hooks, wide_arrays
from ...numerics import (
    CastCounts,
    DType,
    NumericType,
    Policy,
    as_type,
    decode,
    encode,
)
from ...numerics.policy import clamps, without_draws, without_host
from ...tensor import OPERATORS, Tensor, as_tensor
from .. import functions as F
from ..op import FLAT_VIEW, FRESH, Arg, GraphOp, ResultMemory, Sample
from ..operand import (
    compute_type,
    convert,
    public,
    states_type,
    to_compute,
)
from ..trace import apply
from .place import PLACE


def cast_ref(
    x: np.ndarray,
    key: np.ndarray | None = None,
    *,
    source: NumericType,
    to: NumericType,
    counts: CastCounts | None = None,
    index: np.ndarray | None = None,
) -> np.ndarray:
    """The NumPy meaning of a cast: decode from `source`, round once to `to`. `counts` gets what
    was lost; `index` is where each element of a part stands in the whole."""
    if source.dtype is to.dtype and not clamps(source, to):
        return x
    policy = to.policy
    wide = decode(x, source.dtype) if source.dtype.kind == "float" else x
    if to.dtype.kind == "bool":
        return np.asarray(wide != 0)
    stochastic = policy.rounding == "stochastic" and key is not None
    return encode(
        wide,
        to.dtype,
        rounding=policy.rounding if stochastic else _deterministic(policy.rounding),
        saturate=policy.saturate,
        key=key,
        counts=counts,
        index=index if stochastic else None,
    )


def _deterministic(rounding: str) -> str:
    return "nearest_even" if rounding == "stochastic" else rounding


def _cast_vjp(g: Tensor, y: Tensor, x: Tensor, *key: Tensor, source: Any, to: Any) -> tuple:
    if source.dtype.kind != "float" or to.dtype.kind != "float":
        return (None,) * (1 + len(key))
    if compute_type(to).dtype is not to.dtype:
        g = store_cotangent(g, to)
    return (convert(g, compute_type(source)),) + (None,) * len(key)


def _cast_jvp(ts: tuple, y: Tensor, x: Tensor, *key: Tensor, source: Any, to: Any) -> Any:
    if ts[0] is None or source.dtype.kind != "float" or to.dtype.kind != "float":
        return None
    return convert(ts[0], compute_type(to))


def store_cotangent(g: Tensor, numeric: NumericType) -> Tensor:
    """g rounded to the storage of a tensor of type `numeric` under its loss scale."""
    k = numeric.policy.loss_scale
    rounding = _deterministic(numeric.policy.rounding)
    plain = NumericType(numeric.dtype, Policy(rounding=rounding, saturate=numeric.policy.saturate))
    stored = cast_to(g * k if k != 1.0 else g, plain)
    back = cast_to(stored, compute_type(plain))
    return back * (1.0 / k) if k != 1.0 else back


def _cast_memory(source: NumericType, to: NumericType) -> ResultMemory:
    """Between policies of one storage nothing is rounded: the elements are the operand's own, where
    infinities may stay."""
    return FLAT_VIEW if source.dtype is to.dtype and not clamps(source, to) else FRESH


def _cast_tile(source: NumericType, to: NumericType) -> str | None:
    if to.policy.rounding == "stochastic":
        return None
    return "{0} != 0" if to.dtype.kind == "bool" else "tile.cast({0}, {to})"


_TO = [("f32", "f32 @accum(f32)"), ("bf16", "bf16 @saturate"), ("f16 @saturate", "f16"),
       ("f32", "bf16"), ("f32", "fp8_e4m3"), ("bf16", "f32"), ("f32", "int8"), ("f64", "f32")]
CAST = GraphOp(
    "cast",
    shape=lambda x, source, to: type(x)(x.shape, to),
    ref=cast_ref,
    vjp=_cast_vjp,
    jvp=_cast_jvp,
    batch=lambda size, batched, x, source, to: (apply(CAST, x, source=source, to=to), True),
    axes="...->...",
    tile=_cast_tile,
    memory=_cast_memory,
    samples=tuple(
        Sample((Arg((2, 3), f"type:{a}", False),), {"source": as_type(a), "to": as_type(b)})
        for a, b in _TO
    ),
    converts=True,
    hint="beyond the range of the format: @saturate, or a scale",
    doc="convert to another numeric type, rounding once as its policy says",
)

def _stochastic_rows(size: Any, batched: tuple, x: Tensor, key: Tensor, **attrs: Any) -> tuple:
    if not batched[1]:
        return apply(CAST_STOCHASTIC, x, key, **attrs), True
    keys = [F.reshape(k, (2,)) for k in F.split(key, [1] * size, axis=0)]
    rows = F.split(x, [1] * size, axis=0) if batched[0] else [x] * size
    shape = tuple(x.shape[1:] if batched[0] else x.shape)
    made = [apply(CAST_STOCHASTIC, F.reshape(row, shape), k, **attrs)
            for row, k in zip(rows, keys, strict=True)]
    return F.stack(made), True


def _stochastic_spread(size: Any, batched: tuple, x: Tensor, key: Tensor, **attrs: Any) -> tuple:
    if not batched[0]:
        x = F.broadcast_to(x, (size, *x.shape))
    return apply(CAST_STOCHASTIC, x, key, **attrs), True


CAST_STOCHASTIC = GraphOp(
    "cast_stochastic",
    shape=lambda x, key, source, to: type(x)(x.shape, to),
    ref=cast_ref,
    vjp=_cast_vjp,
    jvp=_cast_jvp,
    batch=_stochastic_rows,
    spread=_stochastic_spread,
    axes="...,k->...",
    samples=(
        Sample(
            (Arg((2, 3), "type:f32", False), Arg((2,), "key", False)),
            {"source": as_type("f32"), "to": as_type("bf16 @stochastic_round")},
        ),
    ),
    converts=True,
    doc="convert with stochastic rounding: Philox bits of (key, global element index)",
)


def cast_to(x: Tensor, numeric: NumericType) -> Tensor:
    """x as `numeric`; draws a key when the policy rounds stochastically and something is lost."""
    if numeric.policy.device == "host":
        return apply(PLACE, cast_to(x, without_host(numeric)), to="host")
    if x.type == numeric:
        return x
    attrs = {"source": x.type, "to": numeric}
    if numeric.policy.rounding == "stochastic" and _may_lose(x.dtype, numeric.dtype):
        return apply(CAST_STOCHASTIC, x, F.next_key(), **attrs)
    return apply(CAST, x, **attrs)


def _may_lose(source: DType, to: DType) -> bool:
    """Whether a cast between two types rounds: what it has a choice in."""
    if to.kind == "float":
        return to is not source and to.bits <= source.bits
    return to.kind in ("int", "uint") and source.kind == "float"


hooks.cast.fill(cast_to)


@public
@states_type
def cast(x: Any, dtype: Any) -> Tensor:
    """x converted to `dtype`, rounded once as its policy says.

    dtype: a numeric type, a string such as "fp8_e4m3 @saturate", or a NumPy dtype
    Overflow: inf where the format has it, NaN for fp8_e4m3, the largest value for fp6 and fp4 or
    with @saturate. Float to integer truncates and saturates; NaN becomes 0. Another policy of the
    same storage gives a copy; x's own type gives x. Raises DTypeError.
    """
    x, numeric = as_tensor(x), as_type(dtype)
    wide_arrays.forget(x)
    if numeric.policy.custom is not None or numeric.policy.scaled or _per_channel(numeric):
        return F.quantize(x, numeric)
    out = convert(to_compute(x) if x.scale is not None else x, numeric)
    if type(x) is type(out) is Tensor and out is not x and out.buffer is x.buffer:
        return out.copy()
    return out


def _per_channel(numeric: NumericType) -> bool:
    return numeric.policy.per_channel is not None


@public
@states_type
def cast_like(x: Any, like: Tensor) -> Tensor:
    """x converted to the numeric type and policy of `like`."""
    return cast(x, like.type)


RETYPE = GraphOp(
    "retype",
    shape=lambda x, to: type(x)(x.shape, to),
    ref=lambda x, to: x,
    vjp=lambda g, y, x, to: (g,),
    jvp=lambda ts, y, x, to: ts[0],
    batch=lambda size, batched, x, to: (apply(RETYPE, x, to=to), True),
    axes="...->...",
    memory=FLAT_VIEW,
    samples=(Sample((Arg((2, 3)),), {"to": as_type("f32 @loss_scale(2.0)")}),),
    doc="the same elements under another policy of the same storage",
)


def to_nearest(x: Any, dtype: Any) -> Tensor:
    """x converted to `dtype`, to the nearest where that rounds at random: what making and assigning
    tensors does, as encode_value on the host."""
    numeric = as_type(dtype)
    plain = without_draws(numeric)
    made = cast(x, plain)
    return made if plain is numeric else apply(RETYPE, made, to=numeric)


OPERATORS["to_nearest"] = to_nearest


def with_scale(codes: Tensor, scale: Tensor, numeric: NumericType) -> Tensor:
    """Codes and scale as one tensor of a scaled type."""
    out = codes if codes.type == numeric else apply(RETYPE, codes, to=numeric)
    if out is codes:
        out = apply(RETYPE, codes, to=numeric)
    out.scale = scale
    return out
