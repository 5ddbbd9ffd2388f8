"""How values of each dtype are held while a kernel is interpreted.

A float of at most 32 bits is float32 holding a value of its format; other types are NumPy's own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.numerics import DType, Policy, decode, encode

_POISON = 0x7EADBEEF  # uninitialised integers


def array_dtype(dtype: DType) -> np.dtype:
    """The NumPy type that holds values of `dtype`."""
    if dtype.kind == "float":
        return np.dtype(np.float64 if dtype.name == "f64" else np.float32)
    return np.dtype(np.int8) if dtype.packed else dtype.numpy


def convert(x: Any, dtype: DType, rounding: str = "nearest_even", saturate: bool = False,
            key: Any = None, index: Any = None) -> np.ndarray:
    """Values of another type, rounded to it once."""
    x = np.asarray(x)
    held = array_dtype(dtype)
    if dtype.kind == "float" and x.dtype == held and dtype.name in ("f32", "f64") and not saturate:
        return x
    if x.dtype == held and dtype.kind != "float" and not dtype.packed:
        return x
    whole = dtype.kind in ("int", "uint") and not dtype.packed
    if whole and x.dtype.kind in "iub" and np.can_cast(x.dtype, held):
        return x.astype(held)  # every number of the one is a number of the other
    given = index if index is None else np.broadcast_to(index, x.shape)
    return decode(encode(x, dtype, rounding=rounding, saturate=saturate, key=key, index=given),
                  dtype)


def cast_attrs(policy: Policy) -> dict[str, Any]:
    """What a cast to a type of this policy says of its rounding, where it is not the usual one."""
    attrs: dict[str, Any] = {}
    if policy.rounding != "nearest_even":
        attrs["rounding"] = policy.rounding
    if policy.saturate:
        attrs["saturate"] = True
    return attrs


def rounded(x: float, dtype: DType, **policy: Any) -> Any:
    """A Python number as the value of a type that is nearest to it: what `convert` makes of it."""
    if isinstance(x, int):  # of any size
        x = min(max(x, -(2**63)), 2**64 - 1)
    return convert(np.asarray(x), dtype, **policy).item()


def poison(shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    """Memory that nothing has written: NaN, or a number nobody expects."""
    held = array_dtype(dtype)
    if held.kind == "f":
        return np.full(shape, np.nan, held)
    if held.kind == "b":
        return np.ones(shape, held)
    return np.full(shape, _POISON & np.iinfo(held).max, held)


def constant(value: Any, dtype: DType) -> np.ndarray:
    """A literal as [1, 1]: one value for all groups and lanes."""
    held = array_dtype(dtype)
    if held.kind in "iu":
        return np.array([[int(value)]], dtype=np.int64).astype(held) if held != np.uint64 else (
            np.array([[int(value)]], dtype=held))
    return np.array([[value]], dtype=held)
