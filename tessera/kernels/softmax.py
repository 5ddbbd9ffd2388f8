"""Softmax of rows, in one pass over rows that fit a group's registers, in two over longer ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import AxisError, DTypeError
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.ir.schedule import Schedule
from ..tile.kernel.decorator import kernel
from .record import Benchmark, CompiledCall, KernelSample
from .routine import empty_like, reshaped, routine, type_of

LONGEST = 16384  # elements of a row in registers: 32 in each lane of 16 warps


@kernel
def softmax(x: Tensor["M", "N"], y: Tensor["M", "N"], BM=1):
    row = tile.load(x[tile_m:tile_m+BM, 0:N])
    p = tile.exp(row - tile.row_max(row))
    y[tile_m:tile_m+BM, 0:N] = p / tile.row_sum(p)


@kernel
def long_softmax(x: Tensor["M", "N"], y: Tensor["M", "N"], BM=4, BN=1024):
    m, z = tile.full((BM,), -math.inf), tile.zeros((BM,))
    for k in range(0, N, BN):                  # the maximum and the sum so far
        s = tile.load(x[tile_m:tile_m+BM, k:k+BN])
        m_new = tile.maximum(m, tile.row_max(s))
        z = z * tile.exp(m - m_new) + tile.row_sum(tile.exp(s - m_new))
        m = m_new
    for k in range(0, N, BN):
        s = tile.load(x[tile_m:tile_m+BM, k:k+BN])
        y[tile_m:tile_m+BM, k:k+BN] = tile.exp(s - m) / z


def reference(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@routine(
    softmax, long_softmax, arrays="`[..., N]`", reference=reference,
    ops=lambda F, x, axis=-1: F.softmax(x, axis),
    samples=(
        KernelSample("", ((3, 7, 100),), terms=100),
        KernelSample("bf16", ((9, 1000),), "bf16"),
        KernelSample("of long rows", ((3, 17000),), terms=170),
        KernelSample("of a vector", ((33,),), terms=33),
    ),
    variant=Schedule(m=4, warps=2),
    compiled=(
        CompiledCall("bf16", ((64, 4096),), "bf16"),
        CompiledCall("f32", ((64, 16384),)),
        CompiledCall("of long rows", ((64, 32768),), "bf16"),
    ),
    benchmarks=(Benchmark("bf16[16384, 4096]", ((16384, 4096),), "bf16", bytes=4 * 16384 * 4096,
                          beside=("PyTorch", lambda torch, x: lambda: torch.softmax(x, -1))),),
)
def stable_softmax(run: Any, x: Any, *, axis: int = -1) -> Any:
    """y_i = exp(x_i - max x) / sum_j exp(x_j - max x), along the last axis.

    x: [..., N] any float of up to 32 bits   y: same shape and type
    Computed in f32, rounded once. A row of -inf gives zeros. Rows of up to 16384 elements are read
    once, longer ones twice. Raises AxisError for another axis than the last, DTypeError.
    Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3.
    """
    shape = tuple(x.shape)
    if not shape or axis not in (-1, len(shape) - 1):
        run.fail(f"axis {axis} of {len(shape)} axes: the kernel works on rows", "the last axis; "
                 "ts.softmax takes any", AxisError)
    numeric = type_of(x, "x")
    if numeric.dtype.kind != "float" or numeric.dtype.bits > 32:
        run.fail(f"x is {numeric}", "a float of up to 32 bits", DTypeError)
    out = empty_like(x)
    if 0 in shape:
        return out
    flat = math.prod(shape[:-1]), shape[-1]
    arrays = reshaped(x, flat), reshaped(out, flat)
    if shape[-1] > LONGEST:
        run.run("long_softmax", *arrays, BM=run.size("m", 4), BN=run.size("n", 1024))
    else:
        run.run("softmax", *arrays, BM=run.size("m", 1))
    return out
