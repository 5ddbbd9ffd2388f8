"""What compiled loops make of a dtype, by its record: the register that holds an element, and how.

A narrow float is computed in f32 and rounded when it is stored.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from ...numerics import DType, find_dtype

# uint64 shares i64's bits: sums, products and bit operations agree; comparisons and divisions of
# values >= 2**63 do not.
WHOLE = {"int64": "i64", "uint64": "i64", "int32": "i32", "uint32": "u32", "int16": "i32",
         "uint16": "i32", "int8": "i32", "uint8": "i32", "bool_": "bool_"}


@cache
def is_narrow(dtype: DType) -> bool:
    """Whether it is a float in whole bytes, with a NaN, whose numbers f32 has, too: one of eight
    bits, or the upper half of an f32 or a half itself."""
    return dtype.kind == "float" and dtype.has_own_numpy and dtype.nan_code is not None and (
        dtype.bits == 8 or dtype.bits == 16 and dtype.exp in (5, 8))


@cache
def register_of(name: str) -> str:
    """The register of an element of the memory type `name`; "": loops do not read it."""
    if name in ("f64", "f32"):
        return name
    return "f32" if is_narrow(find_dtype(name)) else WHOLE.get(name, "")


@cache
def item_bytes(name: str) -> int:
    return find_dtype(name).numpy.itemsize


@cache
def numpy_of(name: str) -> np.dtype:
    return find_dtype(name).numpy


__all__ = ["WHOLE", "is_narrow", "item_bytes", "numpy_of", "register_of"]
