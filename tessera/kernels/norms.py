"""Layer normalisation of rows, with scale and shift."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..dims import show_shape
from ..errors import DTypeError, ShapeError
from ..numerics import f32
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.ir.schedule import Schedule
from ..tile.kernel.decorator import kernel
from .record import Benchmark, CompiledCall, KernelSample
from .routine import empty_like, generation_of, reshaped, routine, type_of
from .row_blocks import block_of, bring_part, bring_row, own_part, routine_blocks


@kernel
def layernorm(x: Tensor["M", "N"], gamma: Tensor["N"], beta: Tensor["N"], y: Tensor["M", "N"],
              eps: f32, BM=1):
    row = tile.load(x[tile_m:tile_m+BM, 0:N])
    centred = row - tile.row_mean(row)
    scale = tile.rsqrt(tile.row_mean(centred * centred) + eps)
    y[tile_m:tile_m+BM, 0:N] = (centred * scale * tile.load(gamma[0:N])[None, :]
                                + tile.load(beta[0:N])[None, :])


@kernel(grid=lambda M, ROWS, GROUPS: M // ROWS * GROUPS)
def long_layernorm(x: Tensor["M", "N"], gamma: Tensor["N"], beta: Tensor["N"],
                   y: Tensor["M", "N"], eps: f32, ROWS=1, BN=4096, held: bool = True, GROUPS=1,
                   brings: bool = False):
    """Each place of the blocks has sums of its own, so that threads wait for each other twice a
    row; centred first: no difference of large numbers. GROUPS: of a cluster, that share rows.
    brings: weights come to shared memory with them"""
    m, first = own_part(N, ROWS, GROUPS)
    P = N // GROUPS
    scales = bring_part(gamma, first, P, BN) if brings else gamma
    shifts = bring_part(beta, first, P, BN) if brings else beta
    row, last = bring_row(x, m, first, P, ROWS, BN) if held else x, (P - 1) // BN * BN
    total, spread = tile.zeros((ROWS, BN)), tile.zeros((ROWS, BN))
    for k in range(0, P, BN):
        total = total + block_of(x, row, m, k, P, BN, 0, held)
    mean = tile.cluster_sum(tile.row_sum(total), GROUPS) / N
    for k in range(last, -1, -BN):             # backwards: it begins with what is in cache
        centred = block_of(x, row, m, k, P, BN, 0, held) - mean
        if P % BN:
            centred = tile.where(tile.arange(0, BN)[None, :] < P - k, centred, 0.0)
        spread = spread + centred * centred
    scale = tile.rsqrt(tile.cluster_sum(tile.row_sum(spread), GROUPS) / N + eps)
    less = -mean * scale
    for k in range(0, P, BN):
        block, at = block_of(x, row, m, k, P, BN, 0, held), first + k
        g = tile.load(scales[k // BN]) if brings else tile.load(gamma[at:at+BN])
        b = tile.load(shifts[k // BN]) if brings else tile.load(beta[at:at+BN])
        scaled = block * scale + less if x.dtype.bits <= 16 else (block - mean) * scale
        y[m:m+ROWS, at:at+BN] = scaled * g[None, :] + b[None, :]


SAMPLE, AHEAD = 32, 3  # elements of a row; rows in shared memory


@kernel(grid=lambda STRIPS, GROUPS: STRIPS * GROUPS)
def strip_layernorm(x: Tensor["M", "N"], gamma: Tensor["N"], beta: Tensor["N"],
                    y: Tensor["M", "N"], eps: f32, BN=4096, GROUPS=1, STRIPS=1):
    """Row after row of a strip, which has every so many-th, through shared memory, where the next
    ones are on their way. Sums are of distances from the mean of a sample, so that one exchange
    gives mean and variance; graph/cuda/kernels/shifted_sums.py says what that loses. GROUPS: of a
    cluster, that share rows"""
    strip, P = tile.group_id(0) // GROUPS, N // GROUPS
    first, blocks = tile.group_id(0) % GROUPS * P, P // BN
    own = (M - strip + STRIPS - 1) // STRIPS
    scales, shifts = bring_part(gamma, first, P, BN), bring_part(beta, first, P, BN)
    tile.cp_commit_group()  # here: waits in the loop count groups of rows alone
    rows = tile.alloc_shared((1, BN), x.dtype, stages=AHEAD * blocks)
    for i in range(AHEAD - 1):
        ask_row(x, rows, strip + i * STRIPS, first, i * blocks, i < own, P, BN)
    sample = tile.load(x[strip:strip+1, 0:SAMPLE])
    for i in range(0, own):
        near, late = tile.row_mean(sample), i + AHEAD - 1
        m = strip + min(i + 1, own - 1) * STRIPS
        sample = tile.load(x[m:m+1, 0:SAMPLE])
        tile.cp_wait_group(AHEAD - 2)
        tile.barrier()                         # the row before this one has been read
        ask_row(x, rows, strip + late * STRIPS, first, late % AHEAD * blocks, late < own, P, BN)
        m, now = strip + i * STRIPS, i % AHEAD * blocks
        total, spread = tile.zeros((1, BN)), tile.zeros((1, BN))
        for k in range(0, P, BN):
            away = tile.load(rows[now + k // BN]) - near
            total, spread = total + away, spread + away * away
        sums, squares = tile.row_sum(total), tile.row_sum(spread)
        sums, squares = tile.cluster_sum(sums, GROUPS), tile.cluster_sum(squares, GROUPS)
        off = sums / N
        scale = tile.rsqrt((squares - off * sums) / N + eps)
        less = -(near + off) * scale
        for k in range(0, P, BN):
            scaled, at = tile.load(rows[now + k // BN]) * scale + less, first + k
            g, b = tile.load(scales[k // BN]), tile.load(shifts[k // BN])
            y[m:m+1, at:at+BN] = scaled * g[None, :] + b[None, :]


@kernel
def ask_row(x, rows, m, first, slot, there, P, BN):
    """P columns of row m for the buffers from `slot` on, if it is there."""
    if there:
        for k in range(0, P, BN):
            tile.cp_async(rows[slot + k // BN], x[m:m+1, first+k:first+k+BN])
    tile.cp_commit_group()


def reference(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    c = x - x.mean(-1, keepdims=True)
    return c / np.sqrt((c * c).mean(-1, keepdims=True) + eps) * gamma + beta


@routine(
    layernorm, long_layernorm, strip_layernorm, arrays="`[..., N]`, `[N]`, `[N]`",
    reference=reference,
    ops=lambda F, x, gamma, beta, eps=1e-5: F.layernorm(x, gamma, beta, eps=eps),
    samples=(
        KernelSample("", ((3, 7, 300), (300,), (300,)), terms=300),
        KernelSample("f16", ((7, 129), (129,), (129,)), "f16", terms=4),
        KernelSample("of long rows", ((3, 17000), (17000,), (17000,)), terms=17000),
    ),
    variant=Schedule(m=2, warps=8),
    compiled=(
        CompiledCall("bf16", ((64, 4096), (4096,), (4096,)), "bf16"),
        CompiledCall("of long rows", ((64, 32768), (32768,), (32768,)), "bf16"),
        CompiledCall("of many long rows", ((512, 131072), (131072,), (131072,)), "bf16"),
    ),
    benchmarks=(Benchmark(
        "bf16[16384, 4096]", ((16384, 4096), (4096,), (4096,)), "bf16", bytes=4 * 16384 * 4096,
        beside=("PyTorch", lambda torch, x, gamma, beta: lambda: torch.nn.functional.layer_norm(
            x, x.shape[-1:], gamma, beta))),),
)
def efficient_layernorm(run: Any, x: Any, gamma: Any, beta: Any, *, eps: float = 1e-5) -> Any:
    """y = (x - mean x) / sqrt(var x + eps) * gamma + beta, along the last axis.

    x: [..., N] any float of up to 32 bits   gamma, beta: [N], any such float   y: as x
    Mean and variance are kept in f32; the variance is that of the centred row. Rounded once. Rows
    of up to 96 KB are read once, and longer ones of which the groups of a cluster can have equal
    parts. Raises ShapeError, DTypeError.
    Ba, Kiros and Hinton 2016, arXiv:1607.06450, eq. 4.
    """
    shape = tuple(x.shape)
    for name, w in (("gamma", gamma), ("beta", beta)):
        if not shape or tuple(w.shape) != shape[-1:]:
            run.fail(f"{name} is {show_shape(tuple(w.shape))}, x is {show_shape(shape)}",
                     f"{name} has x's last extent", ShapeError)
    for name, t in (("x", x), ("gamma", gamma), ("beta", beta)):
        dtype = type_of(t, name).dtype
        if dtype.kind != "float" or dtype.bits > 32:
            run.fail(f"{name} is {dtype}", "a float of up to 32 bits", DTypeError)
    out = empty_like(x)
    if 0 in shape:
        return out
    flat = math.prod(shape[:-1]), shape[-1]
    arrays = reshaped(x, flat), gamma, beta, reshaped(out, flat), float(eps)
    b = routine_blocks(*flat, type_of(x, "x").dtype.bits, generation_of(x),
                       type_of(gamma, "gamma").dtype.bits + type_of(beta, "beta").dtype.bits)
    if b.strips:
        run.run("strip_layernorm", *arrays, BN=run.size("n", b.columns), GROUPS=b.groups,
                STRIPS=b.strips, warps=b.warps)
    elif b.columns < shape[-1]:
        run.run("long_layernorm", *arrays, ROWS=b.rows, BN=run.size("n", b.columns), held=b.held,
                GROUPS=b.groups, brings=b.brings, warps=b.warps)
    else:
        run.run("layernorm", *arrays, BM=run.size("m", b.rows), warps=b.warps)
    return out
