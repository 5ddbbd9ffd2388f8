"""The type of a result: which storage, and which policy, when two operands differ."""

from __future__ import annotations

import reprlib
from dataclasses import replace
from typing import Any, overload

import numpy as np

from tessera.errors import ArgumentError, DTypeError
from tessera.numerics.dtypes import (
    DType,
    bf16,
    dtype_of_numpy,
    f16,
    f32,
    int4,
    int8,
    int64,
    tf32,
)
from tessera.numerics.policy import NumericType, Policy, as_type

# Fields that any operand can pass on; scaled, per_channel and custom belong to one storage.
_SHARED_FIELDS = ("accum", "rounding", "saturate", "loss_scale", "device")
_STORAGE_FIELDS = ("scaled", "per_channel", "custom", "packed_for")


@overload
def result_type(a: DType, b: DType) -> DType: ...
@overload
def result_type(a: Any, b: Any) -> NumericType: ...
def result_type(a: Any, b: Any) -> Any:
    """The type of an operation on a and b: a DType for two DTypes, else a NumericType.

    Storage: equal gives the same; bool gives way to anything; an integer to any float; two integers
    follow NumPy (int4 counts as int8); of two floats the wider; bf16 with f16, and tf32 with f32,
    give f32. Two formats of one width (fp8_e4m3 with fp8_e5m2), and a wider one with fewer digits
    or less range (fp8_e5m2 with fp6_e2m3), raise DTypeError: neither holds the other, so the user
    says which.
    Policy: that of the operand that gave the storage, its gaps filled from the other; of two
    accumulate types the wider. A @precision_policy operand counts as its `compute` type.
    """
    if isinstance(a, DType) and isinstance(b, DType):
        return _storage(a, b)
    a, b = as_type(a), as_type(b)
    if a == b:
        return a
    a, b = _decoded(a), _decoded(b)
    dtype = _storage(a.dtype, b.dtype)
    first, second = (b, a) if dtype is b.dtype and dtype is not a.dtype else (a, b)
    return NumericType(dtype, merge_policies(first, second, dtype))


def _decoded(t: NumericType) -> NumericType:
    cls = t.policy.custom
    if cls is None:
        return t
    compute: DType = cls.compute  # type: ignore[attr-defined]
    accum = None if t.policy.accum is compute.compute else t.policy.accum
    return NumericType(compute, replace(t.policy, custom=None, accum=accum))


def _storage(a: DType, b: DType) -> DType:
    if a is b:
        return a
    if "bool" in (a.kind, b.kind):
        return b if a.kind == "bool" else a
    if (a.kind == "float") != (b.kind == "float"):
        return a if a.kind == "float" else b
    return _wider_float(a, b) if a.kind == "float" else _common_int(a, b)


def _common_int(a: DType, b: DType) -> DType:
    a, b = (int8 if t is int4 else t for t in (a, b))
    return dtype_of_numpy(np.result_type(a.numpy, b.numpy))


def _wider_float(a: DType, b: DType) -> DType:
    if {a, b} in ({bf16, f16}, {tf32, f32}):
        return f32
    if a.bits == b.bits:
        raise DTypeError(
            f"{a} and {b} are different formats of one width; neither holds the other's values",
            hint=f"cast one of them: x.astype({a}) or y.astype({b})",
        )
    wide, narrow = (a, b) if a.bits > b.bits else (b, a)
    if not _holds(wide, narrow):
        raise DTypeError(
            f"{wide} is wider than {narrow} and does not hold all of its values",
            hint=f"cast one of them: x.astype({a}) or y.astype({b}), or both to bf16",
        )
    return wide


def _holds(wide: DType, narrow: DType) -> bool:
    """Whether each number of a float format is one of another: its digits and its range."""
    least = [t.value_of(1) for t in (wide, narrow)]
    return wide.man >= narrow.man and wide.max >= narrow.max and least[0] <= least[1]


def merge_policies(first: NumericType, second: NumericType, dtype: DType) -> Policy:
    """The policy of a result stored as `dtype`: `first`'s, its gaps filled from `second`.

    A field at its default is a gap. The fields that describe a storage (scale, channel axis) pass
    on only from an operand of that storage; an accumulate type that is `dtype`'s own anyway too.
    """
    default = Policy()
    merged = {}
    for name in _SHARED_FIELDS + _STORAGE_FIELDS:
        sources = [first, second]
        if name in _STORAGE_FIELDS:
            sources = [t for t in sources if t.dtype is dtype]
        values = [getattr(t.policy, name) for t in sources]
        gap = getattr(default, name)
        merged[name] = next((v for v in values if v != gap), gap)
    a, b = first.policy.accum, second.policy.accum
    if a is not None and b is not None:
        merged["accum"] = _storage(a, b)
    declared = any(t.dtype is dtype and t.policy.accum is not None for t in (first, second))
    if merged["accum"] is dtype.compute and not declared:
        merged["accum"] = None
    return Policy(**merged)


def weak_result(dtype: DType, value: bool | int | float) -> DType:
    """The type of an operation on a tensor of `dtype` and a Python scalar.

    The scalar takes the tensor's type wherever that can hold its kind: float with integer or bool
    gives f32, int with bool gives int64. Raises ArgumentError for an int outside an integer type's
    range, DTypeError for what is not a real number.
    """
    if isinstance(value, bool):
        return dtype
    if isinstance(value, float):
        return dtype if dtype.kind == "float" else f32
    if not isinstance(value, int):
        raise DTypeError(f"{value!r} is not a real number", hint="use a bool, int or float")
    if dtype.kind == "bool":
        return int64
    if dtype.kind != "float" and not dtype.min <= value <= dtype.max:
        raise ArgumentError(
            f"{value} is outside {dtype} ({dtype.min} .. {dtype.max})",
            hint="cast the tensor to a wider integer first",
        )
    return dtype

def overflow(value: Any, dtype: DType) -> str | None:
    """What to say of a number of the program's text that is finite, and infinite in a type."""
    if dtype.kind != "float" or dtype.bits < 16 or not dtype.max < abs(value) or value in (
            np.inf, -np.inf):
        return None
    try:
        with np.errstate(over="ignore"):
            held = np.asarray(float(value)).astype(dtype.numpy)
    except OverflowError:  # an integer beyond f64
        held = np.asarray(np.inf if value > 0 else -np.inf)
    if np.isfinite(held):  # rounded down
        return None
    return (f"{reprlib.repr(value)} is beyond the largest number of {dtype}, {dtype.max:.4g}: it "
            f"is {held}. Write it so if that is meant")
