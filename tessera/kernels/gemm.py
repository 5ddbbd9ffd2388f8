"""Matrix products: D = A B for any extents, and the loop over K that other kernels build on."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dims import show_shape
from ..errors import DTypeError, ShapeError
from ..numerics import NumericType
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.ir.schedule import Schedule
from ..tile.kernel.decorator import kernel
from .record import Benchmark, CompiledCall, KernelSample
from .routine import empty_like, routine, type_of


@kernel
def product(A, B, m, n, batch, layout, sums, BM, BN, BK, part=None, acc=None):
    """The block [m:m+BM, n:n+BN] of A B, kept in the type `sums`. Other kernels call it.

    layout: 'nn', 'nt', 'tn' or 'tt'; t is an operand that lies transposed, [K, M] or [N, K].
    batch: which matrix of each operand, (i, j); None for an operand that is one matrix.
    part: (i, depth, before) of a sum over [i*depth : (i+1)*depth] alone, of K behind as many terms
    of other products.
    acc: what it is added to, such as another product.
    """
    if acc is None:
        acc = tile.zeros((BM, BN), sums)
    begin, end = 0, A.shape[-1] if layout[0] == "n" else A.shape[-2]
    if part is not None:
        begin = part[0] * part[1] - part[2]
        end = tile.minimum(end, begin + part[1])
        if part[2] > 0:
            begin = tile.maximum(begin, 0)
    for k in range(begin, end, BK):
        if layout[0] == "n":
            a = tile.load(A[m:m+BM, k:k+BK] if batch[0] is None else A[batch[0], m:m+BM, k:k+BK])
        else:
            a = tile.load(A[k:k+BK, m:m+BM] if batch[0] is None else A[batch[0], k:k+BK, m:m+BM]).T
        if layout[1] == "n":
            b = tile.load(B[k:k+BK, n:n+BN] if batch[1] is None else B[batch[1], k:k+BK, n:n+BN])
        else:
            b = tile.load(B[n:n+BN, k:k+BK] if batch[1] is None else B[batch[1], n:n+BN, k:k+BK]).T
        acc = tile.dot(a, b, acc)
    return acc


@kernel
def gemm_nn(A: Tensor["M", "K"], B: Tensor["K", "N"], D: Tensor["M", "N"], sums,
            BM=128, BN=256, BK=64):
    D[tile_m:tile_m+BM, tile_n:tile_n+BN] = product(
        A, B, tile_m, tile_n, (None, None), "nn", sums, BM, BN, BK)


@kernel
def gemm_nt(A: Tensor["M", "K"], B: Tensor["N", "K"], D: Tensor["M", "N"], sums,
            BM=128, BN=256, BK=64):
    D[tile_m:tile_m+BM, tile_n:tile_n+BN] = product(
        A, B, tile_m, tile_n, (None, None), "nt", sums, BM, BN, BK)


def reference(a: np.ndarray, b: np.ndarray, transpose_b: bool = False) -> np.ndarray:
    return a @ (b.T if transpose_b else b)


def _in_torch(torch: Any, a: Any, b: Any, transpose_b: bool = False) -> Any:
    b = b.T if transpose_b else b
    return lambda: torch.mm(a, b)


SPECIALISED = "matmuls by wgmma, loads by TMA"


@routine(
    gemm_nn, gemm_nt, arrays="`[M, K]`, `[K, N]` or `[N, K]`", reference=reference,
    ops=lambda F, a, b, transpose_b=False: a @ (F.transpose(b) if transpose_b else b),
    samples=(
        KernelSample("", ((70, 50), (50, 90)), terms=50),
        KernelSample("bf16 nt", ((130, 80), (300, 80)), "bf16", {"transpose_b": True}, terms=4),
    ),
    variant=Schedule(block=(64, 64), k=16, warps=4, stages=3),
    compiled=(
        CompiledCall("nn", ((512, 512),) * 2, "bf16", says=SPECIALISED),
        CompiledCall("nt", ((512, 512),) * 2, "bf16", {"transpose_b": True}, says=SPECIALISED),
        CompiledCall("f32", ((512, 512),) * 2),
    ),
    benchmarks=tuple(
        Benchmark(f"{'A Bᵀ' if nt else 'A B'}, {n}³, bf16", ((n, n),) * 2, "bf16",
                  {"transpose_b": nt}, flops=2 * n**3, beside=("cuBLAS", _in_torch))
        for n in (4096, 8192) for nt in (False, True)),
)
def gemm(run: Any, a: Any, b: Any, *, transpose_b: bool = False) -> Any:
    """D = A B, or A B' with transpose_b.

    a: [M, K]   b: [K, N], or [N, K] with transpose_b   D: [M, N] of a's type
    Both of one type: f64, or a float of up to 32 bits. Sums are kept in f32 (f64 for f64) and
    rounded once. Operands of 16 bits or fewer are multiplied by tensor cores.
    Raises ShapeError, DTypeError.
    """
    kinds = type_of(a, "a"), type_of(b, "b")
    if kinds[0].dtype is not kinds[1].dtype or kinds[0].dtype.kind != "float":
        run.fail(f"the operands are {kinds[0]} and {kinds[1]}", "two of one float type", DTypeError)
    shapes = tuple(a.shape), tuple(b.shape)
    if len(shapes[0]) != 2 or len(shapes[1]) != 2 or shapes[0][1] != shapes[1][transpose_b]:
        run.fail(f"{show_shape(shapes[0])} and {show_shape(shapes[1])} do not fit",
                 "a [M, K] with b [K, N], or b [N, K] and transpose_b=True", ShapeError)
    M, N = shapes[0][0], shapes[1][1 - transpose_b]
    out = empty_like(a, (M, N))
    m, n, k = default_block(kinds[0], M, N)
    run.run("gemm_nt" if transpose_b else "gemm_nn", a, b, out, kinds[0].dtype.compute,
            BM=run.size("m", m), BN=run.size("n", n), BK=run.size("k", k))
    return out


def default_block(numeric: NumericType, M: int, N: int) -> tuple[int, int, int]:
    """Rows, columns and depth of a group's block.

    Tensor cores take 128 x 256 (two consumer warpgroups of 64 rows each); steps are rows of 128
    bytes, the widest swizzle. Small products get blocks that leave less of them empty. Threads
    that multiply and add keep sums and operands in registers: 64 x 64.
    """
    bits = numeric.dtype.bits
    if bits > 16:
        return 64, 64, 1024 // bits // 2
    columns = 256 if N >= 256 and M >= 128 else 128 if N >= 128 else 64
    return (128 if M >= 128 else 64), columns, 1024 // max(bits, 8)
