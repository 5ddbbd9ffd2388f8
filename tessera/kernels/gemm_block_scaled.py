"""Matmuls of fp8 codes whose blocks have scales: 1 x 128 of activations, 128 x 128 of weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dims import show_shape
from ..errors import ArgumentError, DTypeError, ShapeError
from ..numerics import NumericType, bf16, f32, i32
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.ir.schedule import Schedule
from ..tile.kernel.decorator import kernel
from .cards import card_of
from .gemm import aligned_rows, sum_of_parts
from .matmul_blocks import MatmulExtents, choose_blocks
from .matmul_plan import explained
from .record import CompiledCall, Draw, KernelSample
from .routine import empty_like, reshaped, routine, type_of

BLOCK = 128  # codes of K that share a scale; of weights, of as many rows
TAKES = ("fp8_e4m3", "fp8_e5m2")
# With one row of the weights' scales each. 128 x 128 was slower than the first in cubes of 4096 and
# 8192: 115 us to 111, 888 to 784 (H200, 2026-11-26).
BLOCKS = (192, 128), (64, 128), (64, 64)


@kernel
def scaled_sum(A, SA, B, SB, m, n, begin, end, BM, BN, BK):
    """The block [m:m+BM, n:n+BN] of the sum over K from begin to end. Other kernels call it."""
    acc = tile.zeros((BM, BN))
    for k in range(begin, end, BK):
        scale = SB[n // 128, k // 128]  # asked for before the matmul, behind which it arrives
        part = tile.dot(tile.load(A[m:m+BM, k:k+BK]), tile.load(B[n:n+BN, k:k+BK]).T)
        scales = tile.load(SA[k // 128, m:m+BM]) * scale
        acc = acc + part * scales[:, None]
    return acc


@kernel
def block_scaled_nt(A: Tensor["M", "K"], SA: Tensor["KB", "ME", f32], B: Tensor["N", "K"],
                    SB: Tensor["NB", "KB", f32], D: Tensor["M", "N"], BM=128, BN=128, BK=128):
    D[tile_m:tile_m+BM, tile_n:tile_n+BN] = scaled_sum(
        A, SA, B, SB, tile_m, tile_n, 0, K, BM, BN, BK)


@kernel(grid=lambda M, N, parts, BM, BN: (-(-M // BM), -(-N // BN), parts))
def block_scaled_parts(A: Tensor["M", "K"], SA: Tensor["KB", "ME", f32], B: Tensor["N", "K"],
                       SB: Tensor["NB", "KB", f32], P: Tensor["parts", "M", "N", f32], depth: i32,
                       BM=128, BN=128, BK=128):
    """The same with the sum over K in parts of `depth` terms: D is the sum of P over its first
    axis."""
    m, n, p = tile.group_id(0) * BM, tile.group_id(1) * BN, tile.group_id(2)
    P[p, m:m+BM, n:n+BN] = scaled_sum(A, SA, B, SB, m, n, p * depth,
                                      tile.minimum(K, p * depth + depth), BM, BN, BK)


def reference(a: np.ndarray, a_scale: np.ndarray, b: np.ndarray, b_scale: np.ndarray,
              dtype: Any = None) -> np.ndarray:
    (_, K), N = a.shape, b.shape[0]
    a_scales = np.repeat(a_scale.T, BLOCK, 1)[:, :K]
    b_scales = np.repeat(np.repeat(b_scale, BLOCK, 0)[:N], BLOCK, 1)[:, :K]
    return (a * a_scales) @ (b * b_scales).T


def in_ops(F: Any, a: Any, a_scale: Any, b: Any, b_scale: Any, dtype: Any = None) -> Any:
    (_, K), N = a.shape, b.shape[0]
    a_scales = F.repeat(F.transpose(a_scale), BLOCK, 1)[:, :K]
    b_scales = F.repeat(F.repeat(b_scale, BLOCK, 0)[:N], BLOCK, 1)[:, :K]
    y = (F.cast(a, f32) * a_scales) @ F.transpose(F.cast(b, f32) * b_scales)
    return F.cast(y, bf16 if dtype is None else dtype)


def scales(rng: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Powers of two and others, as of blocks that differ."""
    return np.exp2(rng.uniform(-4, 4, shape)).astype(np.float32)


def sample(name: str, M: int, N: int, K: int, dtype: str = "fp8_e4m3", **options: Any
           ) -> KernelSample:
    many, rows = -(-K // BLOCK), -(-N // BLOCK)
    return KernelSample(name, ((M, K), Draw((many, M), "f32", scales), (N, K),
                               Draw((rows, many), "f32", scales)), dtype, options, "bf16", 16)


@routine(
    block_scaled_nt, block_scaled_parts, sum_of_parts, aligned_rows,
    arrays="`[M, K]`, `[K/128, M]`, `[N, K]`, `[N/128, K/128]`", reference=reference, ops=in_ops,
    samples=(sample("", 72, 136, 256), sample("ragged", 5, 130, 200, dtype="fp8_e4m3"),
             sample("e5m2", 66, 40, 384, "fp8_e5m2")),
    variant=Schedule(block=(64, 64), warps=4),
    compiled=(
        CompiledCall("large", ((4096, 4096), Draw((32, 4096), "f32", scales), (4096, 4096),
                               Draw((32, 32), "f32", scales)), "fp8_e4m3",
                     schedule=Schedule(block=(64, 128)), says="matmuls by wgmma, loads by TMA"),
        CompiledCall("few rows", ((16, 4096), Draw((32, 16), "f32", scales), (4096, 4096),
                                  Draw((32, 32), "f32", scales)), "fp8_e4m3"),
    ),
)
def gemm_block_scaled(run: Any, a: Any, a_scale: Any, b: Any, b_scale: Any, *, dtype: Any = None
                      ) -> Any:
    """D_mn = sum_j s_jm t_ij sum_{k in block j} a_mk b_nk, with n in block i; blocks of 128.

    a: [M, K] fp8   a_scale, s: [ceil(K / 128), M] f32, those of a block of K side by side
    b: [N, K] of a's type   b_scale, t: [ceil(N / 128), ceil(K / 128)] f32   D: [M, N] of `dtype`,
    by default bf16
    Sums of a block are the tensor cores', scaled sums of blocks are kept in f32 and rounded once.
    Raises ShapeError, DTypeError, ArgumentError.
    Activations and weights of DeepSeek-V3 2024, arXiv:2412.19437, section 3.3.2.
    """
    kind, (M, N, K) = _checked(run, a, a_scale, b, b_scale)
    out, card = empty_like(a, (M, N), bf16 if dtype is None else dtype), card_of(a)
    if card.copies and M % 4 and 0 not in a_scale.shape:
        padded = empty_like(a, (a_scale.shape[0], -(-M // 4) * 4), f32)
        run.run("aligned_rows", a_scale, padded)
        a_scale = padded
    extents = MatmulExtents(M, N, K, kind.dtype.bits, type_of(out, "D").dtype.bits, short=True)
    blocks = BLOCKS if kind.dtype.name in card.formats else ((64, 64),)
    plan = choose_blocks(extents, blocks, not run.has_sizes, card)
    run.note(explained(plan, card))
    columns = run.size("n", plan.columns)
    if BLOCK % columns:
        run.fail(f"a schedule's n={columns}", f"a divisor of {BLOCK}: a group takes one scale of b",
                 ArgumentError)
    how = {"BM": run.size("m", plan.rows), "BN": columns}
    if plan.parts == 1:
        run.run("block_scaled_nt", a, a_scale, b, b_scale, out, **how)
        return out
    parts = empty_like(a, (plan.parts, M, N), f32)
    run.run("block_scaled_parts", a, a_scale, b, b_scale, parts, plan.depth, **how)
    run.run("sum_of_parts", reshaped(parts, (plan.parts, M * N)), reshaped(out, (M * N,)),
            count=plan.parts)
    return out


def _checked(run: Any, a: Any, a_scale: Any, b: Any, b_scale: Any
             ) -> tuple[NumericType, tuple[int, int, int]]:
    """The operands' type, and M, N, K. Raises ShapeError, DTypeError."""
    kinds = type_of(a, "a"), type_of(b, "b")
    if kinds[0].dtype.name not in TAKES or kinds[0].dtype is not kinds[1].dtype:
        run.fail(f"the operands are {kinds[0]} and {kinds[1]}",
                 f"two of {' or of '.join(TAKES)}", DTypeError)
    shapes = tuple(a.shape), tuple(b.shape)
    if len(shapes[0]) != 2 or len(shapes[1]) != 2 or shapes[0][1] != shapes[1][1]:
        run.fail(f"a is {show_shape(shapes[0])}, b is {show_shape(shapes[1])}",
                 "a [M, K] with b [N, K]", ShapeError)
    (M, K), N = shapes[0], shapes[1][0]
    many, rows = -(-K // BLOCK), -(-N // BLOCK)
    for name, x, want in (("a_scale", a_scale, (many, M)), ("b_scale", b_scale, (rows, many))):
        if type_of(x, name).dtype is not f32:
            run.fail(f"{name} is {type_of(x, name)}", "f32", DTypeError)
        if tuple(x.shape) != want:
            run.fail(f"{name} is {show_shape(tuple(x.shape))}", f"{show_shape(want)}, for blocks "
                     f"of {BLOCK}", ShapeError)
    return kinds[0], (M, N, K)
