"""Products of matrices as users call them: matmul, gemm, linear, batched products."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ... import hooks
from ...dims import show_shape
from ...errors import ShapeError
from ...numerics import NumericType, as_type, result_type
from ...tensor import Tensor, as_tensor
from .. import functions as F
from ..operand import convert, public, store, to_compute
from .contract import matmul_compute, matmul_operands
from .scaled_matmul import multiplies_scaled, scaled_product


@public
def matmul(a: Any, b: Any) -> Tensor:
    """Matrix product, NumPy's rules: vectors are promoted, leading axes broadcast.

    a: [..., M, K]   b: [..., K, N]   y: [..., M, N]
    Computes in the accumulate type and rounds once to the common type of the operands; int8 and
    int4 give int32, scaled operands f32. Of fp8 with `@scaled("amax")` the codes are multiplied as
    they are stored, and the sums by both scales; in the derivatives the cotangent is
    fp8_e5m2 @scaled("amax"). Raises ShapeError, DTypeError.
    """
    out, result = _unrounded_product(a, b)
    return store(out, result)


def _operands(a: Any, b: Any) -> tuple[Tensor, Tensor, NumericType, Callable[..., Tensor]]:
    """(operands, type of the result, what multiplies them)"""
    x, y = as_tensor(a), as_tensor(b)
    if multiplies_scaled(x, y):
        return x, y, as_type("f32"), scaled_product
    x, y, result, accum = matmul_operands(x, y)
    return x, y, result, functools.partial(matmul_compute, accum=accum)


def _unrounded_product(a: Any, b: Any) -> tuple[Tensor, NumericType]:
    """The product in the type it is computed in, and the type it is to be rounded to."""
    x, y, result, multiply = _operands(a, b)
    if x.ndim == 0 or y.ndim == 0:
        raise ShapeError("matmul of a scalar", hint="multiply with *")
    left, right = x.ndim == 1, y.ndim == 1
    x = F.reshape(x, (1, x.shape[0])) if left else x
    y = F.reshape(y, (y.shape[0], 1)) if right else y
    out = multiply(x, y)
    if left or right:
        shape = list(out.shape)
        del shape[len(shape) - 2 if left else len(shape) - 1]
        if left and right:
            shape = shape[:-1]
        out = F.reshape(out, shape)
    return out, result


@public
def gemm(a: Any, b: Any, c: Any = None, *, alpha: float = 1.0, beta: float = 1.0,
         out: Any = None) -> Tensor:
    """alpha a b + beta c, with matmul's types and broadcasting, rounded once; c may be absent.

    a: [..., M, K]   b: [..., K, N]   c: broadcasts to [..., M, N]
    out: of tensors on a mesh, how the result is to lie: "replicate" or a layout; by default as it
    is made, sums over ranks scattered
    """
    y, numeric = _unrounded_product(a, b)
    y = y if alpha == 1.0 else y * alpha
    if c is not None:
        c = as_tensor(c)
        numeric = result_type(numeric, c.type)
        wide = to_compute(c)
        y = y + (wide if beta == 1.0 else wide * beta)
    if numeric.dtype.kind != y.dtype.kind:  # integers times a float
        numeric = y.type
    y = store(y, numeric)
    return y if out is None else hooks.shard.get()(y, out)


@public
def gemv(a: Any, x: Any) -> Tensor:
    """Matrix times vector. a: [..., M, K]   x: [K]   y: [..., M]"""
    x = as_tensor(x)
    if x.ndim != 1:
        raise ShapeError(f"gemv needs a vector, got {show_shape(x.shape)}")
    return matmul(a, x)


@public
def batched_gemm(a: Any, b: Any) -> Tensor:
    """One product per leading index. a: [B, M, K]   b: [B, K, N]   y: [B, M, N]"""
    a, b = as_tensor(a), as_tensor(b)
    if a.ndim != 3 or b.ndim != 3 or a.shape[0] != b.shape[0]:
        raise ShapeError(
            f"batched_gemm needs [B, M, K] and [B, K, N], got {show_shape(a.shape)} and "
            f"{show_shape(b.shape)}"
        )
    return matmul(a, b)




@public
def linear(x: Any, w: Any, bias: Any = None) -> Tensor:
    """y = x w' + bias: torch.nn.functional.linear, whose weights have a row for each output.

    x: [..., I]   w: [O, I]   bias: [O]   y: [..., O]
    Weights [I, O] need no transpose: x @ w + bias. Computed in the accumulate type, the bias too,
    and rounded once. Raises ShapeError, DTypeError.
    """
    a, b, result, multiply = _operands(x, w)
    if b.ndim != 2 or a.ndim < 1 or a.shape[-1] != b.shape[1]:
        raise ShapeError(f"linear takes x [..., I] and w [O, I], got {show_shape(a.shape)} and "
                         f"{show_shape(b.shape)}", hint="x @ w takes w [I, O]")
    rows = a if a.ndim > 1 else F.reshape(a, (1, -1))
    y = multiply(rows, F.swapaxes(b, 0, 1))
    y = F.reshape(y, (*a.shape[:-1], b.shape[0]))
    if bias is not None:
        c = convert(to_compute(as_tensor(bias)), y.type)
        if tuple(c.shape) != (b.shape[0],):
            raise ShapeError(f"the bias has shape {show_shape(c.shape)}, the rows of w need "
                             f"{show_shape((b.shape[0],))}")
        y = y + c
    return store(y, result)
