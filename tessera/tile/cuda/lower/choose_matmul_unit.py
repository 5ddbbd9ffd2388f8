"""Which unit does a matmul: the tensor cores and in what format, or threads with multiply-adds."""

from __future__ import annotations

from typing import Any

from tessera.numerics import DType, f64
from tessera.runtime.generations import Generation
from tessera.tile.cuda.intrinsics.narrow_floats import FP8

HALF = {"bf16": "bf16", "f16": "f16"}
# Every number of these is an f16 number, so f16 matmuls of them are exact.
IN_F16 = frozenset({"fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "fp4_e3m0"})
IN_INT8 = {"int8": "s8", "int4": "s8", "uint8": "u8"}


def tensor_core_type(a: DType, b: DType, attrs: dict[str, Any]) -> tuple[str, str] | None:
    """The formats in which mma reads A and B; None: no tensor core keeps this matmul's precision.

    f32 operands are multiplied as tf32 only where precision="tf32" asks for it. Low-precision
    floats are f16 here; targets with fp8 matmuls take them as they are.
    """
    if attrs["dtype"] is f64 or a is f64 or b is f64:
        return None
    if a is b and a.name in HALF:
        return HALF[a.name], HALF[a.name]
    if a.name == b.name == "tf32" or (a.name == b.name == "f32" and attrs["precision"] == "tf32"):
        return "tf32", "tf32"
    if attrs["precision"] in ("f32", "tf32"):
        return None
    if a.name in IN_F16 and b.name in IN_F16:
        return "f16", "f16"
    if a.name in IN_INT8 and b.name in IN_INT8 and attrs["dtype"].name == "int32":
        return IN_INT8[a.name], IN_INT8[b.name]
    return None


def format_of(a: DType, b: DType, attrs: dict[str, Any],
              generation: Generation) -> tuple[str, str] | None:
    """As tensor_core_type, on a generation: fp8 as it is where mma takes it; None for a format that
    its tensor cores do not have."""
    kinds, known = tensor_core_type(a, b, attrs), set(generation.warp_matmul.formats)
    if kinds is None:
        return None
    if a.name in FP8 and b.name in FP8 and known.issuperset(FP8.values()):
        return FP8[a.name], FP8[b.name]
    return kinds if known.issuperset(kinds) else None
