"""Softmax of rows: in a group's registers, longer ones in passes; see row_blocks.py."""

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
from .routine import empty_like, generation_of, reshaped, routine, type_of
from .row_blocks import block_of, bring_row, own_part, routine_blocks


@kernel
def powers(x, top, rounded):
    """e^(x - top). rounded: only 16 bits of what it gives are kept."""
    return tile.exp_approx(x + -top) if rounded else tile.exp(x + -top)


@kernel
def softmax(x: Tensor["M", "N"], y: Tensor["M", "N"], BM=1):
    row = tile.load(x[tile_m:tile_m+BM, 0:N])
    top = tile.row_max(row)
    p = powers(row, tile.where(top == -math.inf, 0.0, top), y.dtype.bits <= 16)
    total = tile.row_sum(p)
    y[tile_m:tile_m+BM, 0:N] = p * (1.0 / tile.where(total == 0.0, 1.0, total))


@kernel(grid=lambda M, GROUPS: M * GROUPS)
def long_softmax(x: Tensor["M", "N"], y: Tensor["M", "N"], BN=4096, held: bool = True, GROUPS=1):
    """Each place of the blocks has a maximum and a sum, so that threads wait for each other twice a
    row. Without shared memory the second pass goes backwards and begins with what is in cache.
    GROUPS: of a cluster, that share a row."""
    m, first = own_part(N, 1, GROUPS)
    P, rounded = N // GROUPS, y.dtype.bits <= 16
    row, last = bring_row(x, m, first, P, 1, BN) if held else x, (P - 1) // BN * BN
    most, total = tile.full((1, BN), -math.inf), tile.zeros((1, BN))
    for k in range(0, P, BN):
        most = tile.maximum(most, block_of(x, row, m, k, P, BN, -math.inf, held))
    top = tile.cluster_max(tile.row_max(most), GROUPS)
    top = tile.where(top == -math.inf, 0.0, top)
    for k in range(last, -1, -BN):
        total = total + powers(block_of(x, row, m, k, P, BN, -math.inf, held), top, rounded)
    whole = tile.cluster_sum(tile.row_sum(total), GROUPS)
    scale = 1.0 / tile.where(whole == 0.0, 1.0, whole)
    for k in range(0, P, BN):
        p = powers(block_of(x, row, m, k, P, BN, 0, held), top, rounded)
        y[m:m+1, first+k:first+k+BN] = p * scale


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
    Computed in f32, rounded once. A row of -inf gives zeros. Rows of up to 96 KB are read once, and
    longer ones of which the groups of a cluster can have equal parts.
    Raises AxisError for another axis than the last, DTypeError.
    Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 2.
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
    b = routine_blocks(*flat, numeric.dtype.bits, generation_of(x))
    if b.columns < shape[-1]:
        run.run("long_softmax", *arrays, BN=run.size("n", b.columns), held=b.held, GROUPS=b.groups,
                warps=b.warps)
    else:
        run.run("softmax", *arrays, BM=run.size("m", b.rows), warps=b.warps)
    return out
