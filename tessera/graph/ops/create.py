"""Ops that make tensors from nothing: constants, fills, ranges."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ... import hooks
from ...dims import Dim
from ...errors import ArgumentError, TraceError, warn_user
from ...numerics import NumericType, as_type
from ...numerics.promote import overflow
from ...tensor import STATIC_HINT, Tensor, TensorType, as_tensor, encode_value
from ..op import Aval, GraphOp, sample
from ..operand import public, shape_tuple
from ..trace import apply, current_builder


def elements_of(value: Any, numeric: NumericType) -> np.ndarray:
    array = np.asarray(value)
    kind: np.dtype = numeric.dtype.numpy
    if numeric.dtype.has_own_numpy and (array.dtype == kind or kind in (np.float32, np.float64)):
        return array.astype(kind)
    if array.dtype == object:  # integers that NumPy has no type for
        array = np.asarray(np.clip(array, -(2**63), 2**64 - 1))
        array = array.astype(np.uint64 if (array >= 2**63).any() else np.int64)
    return encode_value(array, numeric)


CONSTANT_OP = GraphOp(
    "constant",
    shape=lambda value, type: Aval((), type),
    ref=lambda value, type: elements_of(value, type),
    axes="->",
    differentiable=False,
    samples=(sample(value=2.5, type=as_type("f32")),),
    makes="number",
    doc="a Python number",
)
hooks.constant.fill(CONSTANT_OP)


FULL = GraphOp(
    "full",
    shape=lambda shape, value, type: Aval(shape, type),
    ref=lambda shape, value, type: np.full(shape, elements_of(value, type)),
    axes="->...",
    local=lambda attrs, ins, outs: {**attrs, "shape": outs[0]},
    differentiable=False,
    samples=(sample(shape=(2, 3), value=1.5, type=as_type("bf16")),),
    makes="number",
    doc="every element the same number",
)

IOTA = GraphOp(
    "iota",
    shape=lambda size, type: Aval((size,), type),
    ref=lambda size, type: elements_of(np.arange(size), type),
    axes="->i",
    differentiable=False,
    samples=(sample(size=5, type=as_type("f32")),),
    makes="range",
    doc="0, 1, 2, ... size - 1",
)


def _type_of(dtype: Any, call: str, shape: Any, *more: Any) -> NumericType:
    """`dtype` as a numeric type. Raises ArgumentError when it is the next extent: zeros(3, 4)."""
    if isinstance(dtype, int | float) and not isinstance(dtype, bool):
        extents = (shape, *more, dtype)
        value = ""
        if call == "full":
            extents, value = extents[:-1], f", {extents[-1]}"
        given = (shape, *more, dtype)
        raise ArgumentError(f"the extents are one argument, the type comes after it; got {given}",
                            hint=f"ts.{call}({extents}{value})")
    return as_type(dtype)


@public
def full(shape: Any, value: float, dtype: Any = "f32") -> Tensor:
    """A tensor filled with a Python number. shape: int or sequence of extents.

    What an integer type does not hold saturates, as casts do.
    """
    if not isinstance(value, bool | int | float | np.generic):
        raise ArgumentError(f"full needs a number, got {type(value).__name__}",
                            hint="ts.broadcast_to(x, shape) stretches a tensor")
    return _filled(shape_tuple(shape), value, _type_of(dtype, "full", shape, value))


def _filled(shape: tuple, value: float, numeric: NumericType) -> Tensor:
    lost = None if numeric.policy.saturate else overflow(value, numeric.dtype)
    if lost is not None:
        warn_user(lost, RuntimeWarning)
        value = np.inf if value > 0 else -np.inf
    return apply(FULL, shape=shape, value=value, type=numeric)


@public
def zeros(shape: Any, dtype: Any = "f32") -> Tensor:
    """A tensor of zeros."""
    return apply(FULL, shape=shape_tuple(shape), value=0, type=_type_of(dtype, "zeros", shape))


@public
def ones(shape: Any, dtype: Any = "f32") -> Tensor:
    """A tensor of ones."""
    return apply(FULL, shape=shape_tuple(shape), value=1, type=_type_of(dtype, "ones", shape))


@public
def zeros_like(x: Any) -> Tensor:
    """Zeros with the shape and numeric type of x, in its layout on a mesh."""
    return _like(x, 0)


@public
def ones_like(x: Any) -> Tensor:
    """Ones with the shape and numeric type of x, in its layout on a mesh."""
    return _like(x, 1)


@public
def full_like(x: Any, value: float) -> Tensor:
    """A fill with the shape and numeric type of x, in its layout on a mesh."""
    return _like(x, value)


def _like(x: Any, value: float) -> Tensor:
    x = as_tensor(x)
    if x.layout is None or current_builder() is not None:
        made = _filled(tuple(x.shape), value, x.type)
    else:  # one element, read everywhere: no rank makes the whole
        one = _filled((), value, x.type).array
        made = Tensor(np.broadcast_to(one, tuple(x.shape)), x.type)
    return hooks.align.get()(made, x)


@public
def zeros_like_type(kind: TensorType, **sizes: int) -> Tensor:
    """Zeros of a tensor type: `ts.zeros_like_type(Tensor["B", "D", bf16], B=4, D=8)`.

    Raises ArgumentError when an extent's size is missing.
    """
    shape = tuple(d.bind(sizes) if isinstance(d, Dim) else d for d in kind.shape)
    open_names = sorted(set().union(*(d.names for d in shape if isinstance(d, Dim))))
    if open_names:
        raise ArgumentError(f"no size for {', '.join(open_names)} of {kind}",
                            hint="give it as a keyword: " + ", ".join(f"{n}=8" for n in open_names))
    return apply(FULL, shape=shape, value=0, type=kind.type or as_type("f32"))


@public
def arange(start: Any, stop: Any = None, step: Any = 1, *, dtype: Any = None) -> Tensor:
    """start, start + step, ... below stop; `arange(n)` counts from 0.

    int64 when all three are integers, else f32, unless dtype is given. A tensor without axes is its
    number. Raises ArgumentError when step is 0, TraceError for a tensor that is traced.
    """
    first, last = (0, start) if stop is None else (start, stop)
    if isinstance(last, Dim):
        return apply(IOTA, size=last, type=as_type(dtype or "int64"))
    first, last, step = numbers = tuple(_number(n) for n in (first, last, step))
    if step == 0:
        raise ArgumentError("arange with a step of 0 never ends")
    if not np.isfinite(numbers).all():
        raise ArgumentError(f"arange from {first} to {last} by {step}: its ends are finite")
    shape_tuple((max(math.ceil((float(last) - float(first)) / step), 0),))
    whole = all(isinstance(n, int | np.integer) for n in numbers)
    numeric = as_type(dtype or ("int64" if whole else "f32"))
    if (first, step) == (0, 1) and whole:
        return apply(IOTA, size=max(int(last), 0), type=numeric)
    return Tensor(elements_of(np.arange(*numbers), numeric), numeric)


def _number(x: Any) -> Any:
    """A bound of arange."""
    if getattr(x, "traced", False):
        raise TraceError(
            f"a traced {x.aval} as a bound of arange: extents are known before values are",
            hint=f"{STATIC_HINT}; or count up to the most there can be, and leave out the rest: "
            "ts.where(ts.arange(most) < n, x, 0)")
    if isinstance(x, Tensor) and not x.shape:
        return x.item()
    if not isinstance(x, int | float | np.generic):
        what = f"{x.type}{list(x.shape)}" if isinstance(x, Tensor) else repr(x)
        raise ArgumentError(f"arange needs numbers, got {what}")
    return x


@public
def eye(n: int, m: int | None = None, dtype: Any = "f32") -> Tensor:
    """The n x m matrix with ones on its diagonal; m = n when absent."""
    numeric = as_type(dtype)
    shape: Any = shape_tuple((n, n if m is None else m))
    return Tensor(elements_of(np.eye(*shape), numeric), numeric)


@public
def linspace(start: float, stop: float, num: int, dtype: Any = "f32") -> Tensor:
    """num evenly spaced numbers from start to stop, both included."""
    numeric = as_type(dtype)
    shape_tuple((num,))
    return Tensor(elements_of(np.linspace(start, stop, num), numeric), numeric)
