"""The op of contractions, matmul, and the types of its operands and sums."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ... import wide_arrays
from ...dims import show_shape, size_of
from ...errors import DTypeError, ShapeError
from ...numerics import (
    DType,
    NumericType,
    as_type,
    decode,
    dtype_of_numpy,
    encode,
    result_type,
)
from ...tensor import Tensor
from .. import flops
from .. import functions as F
from ..cpu import blas
from ..op import Arg, Aval, GraphOp, Sample, sample
from ..operand import as_stored, compute_type, convert, dequantized, to_compute
from ..trace import apply
from .broadcasting import broadcast_shapes, pad_batch_axes, unbroadcast

F64 = as_type("f64").dtype


def _matmul_shape(a: Aval, b: Aval, accum: DType) -> Aval:
    if a.ndim < 2 or b.ndim < 2:
        raise ShapeError("matmul needs matrices", hint="use ts.matmul, which takes vectors too")
    if not multiply_together(a.dtype, b.dtype):
        raise DTypeError(f"operands of one type needed, got {a.type} and {b.type}")
    if a.shape[-1] != b.shape[-2]:
        raise ShapeError(
            f"the contracted extents differ: {a.shape[-1]} (last axis of "
            f"{show_shape(a.shape)}) and {b.shape[-2]} (second-last of {show_shape(b.shape)})",
            hint=_matmul_hint(a.shape, b.shape),
        )
    lead = broadcast_shapes(a.shape[:-2], b.shape[:-2])
    sums = wide_type(a.dtype) if is_multiplied_as_stored(a.dtype) else a.type
    return Aval((*lead, a.shape[-2], b.shape[-1]), sums)


def is_multiplied_as_stored(dtype: DType) -> bool:
    """Whether a matmul takes elements of this narrow type as they lie: two of them multiply exactly
    in the wide type. Packed ones, and integers that tensor cores do not take, are widened first."""
    if dtype.kind == "float":
        return (dtype.bits <= 16 or dtype.name == "tf32") and not dtype.packed
    return dtype.name == "int8"


def multiply_together(a: DType, b: DType) -> bool:
    """Whether a matmul takes elements of these types beside each other: of one type, or both floats
    of 8 bits, of which tensor cores take any two."""
    return a is b or (a.bits == b.bits == 8 and a.kind == b.kind == "float")


def wide_type(dtype: DType) -> NumericType:
    """In which products of elements of a narrow type are exact, and added up."""
    return as_type("int32") if dtype.kind == "int" else as_type(dtype.compute)


def _matmul_hint(a: tuple, b: tuple) -> str:
    if a[-1] == b[-1]:
        return "the last axes agree: transpose the second operand, a @ b.T"
    if a[-2] == b[-2]:
        return "the first axes agree: transpose the first operand, a.T @ b"
    if a[-2] == b[-1]:
        return "the operands may be in the wrong order: b @ a"
    return "matmul contracts [..., M, K] with [..., K, N]"


def matmul_ref(a: np.ndarray, b: np.ndarray, accum: DType, out: np.ndarray | None = None) -> Any:
    """BLAS in the operands' type, narrow ones widened; integers exactly; a narrow accumulate type
    step by step."""
    a, b = widened_array(a), widened_array(b)
    if a.dtype.kind in "iu":
        return _integer_matmul(a, b)
    if accum.kind == "float" and accum.bits < 32:
        return _narrow_matmul(a, b, accum)
    if accum.bits == 64 and a.dtype == np.float32:
        wide = np.matmul(a, b, dtype=np.float64)
        return wide.astype(np.float32)
    if out is None:
        return blas.multiply(a, b)
    blas.blocked_matmul(a, b, out)
    return out


def widened_array(x: np.ndarray) -> np.ndarray:
    """Elements of a narrow type in that of their products; others as they are."""
    dtype = dtype_of_numpy(x.dtype)
    if not is_multiplied_as_stored(dtype):
        return x
    wide = wide_type(dtype).dtype.numpy
    return x.astype(wide) if dtype.kind == "int" else decode(x, dtype).astype(wide, copy=False)


def widened(x: Tensor) -> Tensor:
    """Elements of a narrow type in that of their products; others as they are."""
    return convert(x, wide_type(x.dtype)) if is_multiplied_as_stored(x.dtype) else x


def _integer_matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Through f64 BLAS when every partial sum is an exact f64 integer, else in integers. What does
    not fit into the type wraps either way."""
    bound = float(np.abs(a, dtype=np.float64).max(initial=0)) * float(
        np.abs(b, dtype=np.float64).max(initial=0)
    )
    if bound * a.shape[-1] < 2.0**53:
        exact = np.matmul(a.astype(np.float64), b.astype(np.float64))
        return exact.astype(np.int64).astype(a.dtype)
    return np.matmul(a, b)


def _narrow_matmul(a: np.ndarray, b: np.ndarray, accum: DType) -> np.ndarray:
    total: Any = np.zeros((), np.float32)
    for k in range(a.shape[-1]):
        step = a[..., :, k, None] * b[..., None, k, :]
        total = decode(encode(total + step, accum), accum)
    shape = np.broadcast_shapes(a.shape[:-2], b.shape[:-2]) + (a.shape[-2], b.shape[-1])
    return np.broadcast_to(total, shape).astype(a.dtype)


def _mT(x: Tensor) -> Tensor:
    return F.swapaxes(x, -1, -2)


def stored_product(a: Tensor, b: Tensor, accum: DType) -> Tensor:
    """a b in a derivative: of elements of a narrow type where both are such, as a cotangent is that
    was rounded behind the forward matmul; else in the wide type."""
    (x, i), (y, j) = as_stored(a), as_stored(b)
    if not multiply_together(x.dtype, y.dtype) or not is_multiplied_as_stored(x.dtype):
        return apply(MATMUL, to_compute(a), to_compute(b), accum=accum)
    out = apply(MATMUL, x, y, accum=accum)
    return out if i * j == 1.0 else out * (i * j)


def _matmul_vjp(g: Tensor, y: Tensor, a: Tensor, b: Tensor, accum: DType) -> tuple:
    da, db = stored_product(g, _mT(b), accum), stored_product(_mT(a), g, accum)
    return unbroadcast(da, tuple(a.shape)), unbroadcast(db, tuple(b.shape))


def _matmul_jvp(ts: tuple, y: Tensor, a: Tensor, b: Tensor, accum: DType) -> Tensor | None:
    left = None if ts[0] is None else stored_product(ts[0], b, accum)
    right = None if ts[1] is None else stored_product(a, ts[1], accum)
    return right if left is None else left if right is None else left + right


def _matmul_batch(size: Any, batched: tuple, a: Tensor, b: Tensor, accum: DType) -> tuple:
    ndim = max(a.ndim - batched[0], b.ndim - batched[1])
    left = pad_batch_axes(a, ndim) if batched[0] else a
    right = pad_batch_axes(b, ndim) if batched[1] else b
    return matmul_compute(left, right, accum), True


_F32 = as_type("f32").dtype
MATMUL = GraphOp(
    "matmul",
    shape=_matmul_shape,
    ref=matmul_ref,
    vjp=_matmul_vjp,
    jvp=_matmul_jvp,
    batch=_matmul_batch,
    axes="...mk,...kn->...mn",
    reduces="sum",
    samples=(
        sample((3, 4), (4, 5), accum=_F32),
        sample((2, 3, 4), (2, 4, 2), accum=_F32),
        sample((2, 1, 3, 4), (3, 4, 2), accum=_F32),
        Sample(sample(((2, 3), "int"), ((3, 2), "int")).args, {"accum": as_type("int64").dtype}),
        *(Sample((Arg((2, 3, 4), f"type:{narrow}", False), Arg((2, 4, 2), f"type:{narrow}", False)),
                 {"accum": as_type("int32" if narrow == "int8" else "f32").dtype})
          for narrow in ("bf16", "f16", "fp8_e4m3", "int8")),
    ),
    flops=flops.matmul,
    matmul=True,
    shows=(0, 1),
    hint="a product or sum beyond the range of the type; of an operand with inf, 0 * inf",
    doc="[..., M, K] x [..., K, N] -> [..., M, N], leading axes broadcast; operands of 16 bits or "
    "fewer, and of tf32, keep their type, and the result is wide",
    out=True,
)


def matmul_compute(a: Tensor, b: Tensor, accum: DType) -> Tensor:
    """matmul of operands of one type; a 2-D right operand makes it one 2-D product."""
    return as_one_matrix(a, b, lambda x, y: apply(MATMUL, x, y, accum=accum))


def as_one_matrix(a: Tensor, b: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """multiply(a, b) by one 2-D product where the right operand is 2-D."""
    if a.ndim > 2 and b.ndim == 2 and a.shape[-1] == b.shape[-2]:
        flat = F.reshape(a, (size_of(a.shape[:-1]), a.shape[-1]))
        return F.reshape(multiply(flat, b), (*a.shape[:-1], b.shape[-1]))
    return multiply(a, b)


@functools.lru_cache(maxsize=1024)
def matmul_type(a: NumericType, b: NumericType) -> tuple[NumericType, NumericType, DType]:
    """(type of the operands, result type, accumulate type) of a product of these operands.

    Those of a type that is multiplied as it is stored keep it; others are computed in the wide one.
    """
    common = result_type(a, b)
    if common.dtype.kind in ("int", "uint") and common.dtype.bits <= 8:
        wide = as_type("int32")
        return common if is_multiplied_as_stored(common.dtype) else wide, wide, wide.dtype
    compute = compute_type(common)
    plain = is_multiplied_as_stored(common.dtype) and not (
        common.policy.scaled or common.policy.custom or common.policy.per_channel is not None)
    return common if plain else compute, common, common.policy.accum or compute.dtype


def matmul_operands(a: Any, b: Any) -> tuple[Tensor, Tensor, NumericType, DType]:
    a, b = dequantized(a), dequantized(b)
    compute, result, accum = matmul_type(a.type, b.type)
    if compute.dtype is F64 and wide_arrays.UNSTATED:
        wide_arrays.check_widening((a, b))
    pair = [_product_operand(x, compute, result) for x in (a, b)]
    return pair[0], pair[1], result, accum


def _product_operand(x: Tensor, numeric: NumericType, result: NumericType) -> Tensor:
    if result.dtype.name == "tf32" and x.dtype.name != "tf32":
        x = convert(to_compute(x), as_type("tf32"))
    return operand_as(x, numeric)


def operand_as(x: Tensor, numeric: NumericType) -> Tensor:
    """x in the type of a product's operands; elements of that type stay as they are."""
    if x.scale is None and x.dtype is numeric.dtype:
        return x
    return convert(to_compute(x), numeric)
