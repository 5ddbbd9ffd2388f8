"""Four patterns of matmuls: a pipeline by hand, split-K, a persistent kernel, a fused epilogue.

    python examples/09_patterns.py [--device cuda]

`pipelined` keeps two copies under way while a third block is multiplied. `split_k` shares the sum
over K among groups, for matmuls with few blocks. `persistent` starts a fixed number of groups, and
each takes block after block. `fused` adds bias, activation and residual before anything is stored.
"""

import math

import numpy as np

import tessera as ts
from tessera import Tensor, bf16, f32

Left, Right = Tensor["M", "K", bf16], Tensor["N", "K", bf16]


@ts.kernel
def pipelined(A: Left, B: Right, C: Tensor["M", "N", f32], BM=64, BN=64, BK=32):
    a = [ts.tile.alloc_shared((BM, BK), bf16, swizzle="xor") for _ in range(3)]
    b = [ts.tile.alloc_shared((BN, BK), bf16, swizzle="xor") for _ in range(3)]
    for stage in (0, 1):                       # a loop over a tuple is unrolled
        ts.tile.cp_async(a[stage], A[tile_m:tile_m+BM, stage*BK:stage*BK+BK])
        ts.tile.cp_async(b[stage], B[tile_n:tile_n+BN, stage*BK:stage*BK+BK])
        ts.tile.cp_commit_group()
    acc, stage = ts.tile.zeros((BM, BN)), 0
    for k in range(0, K, BK):
        ts.tile.cp_wait_group(1)               # all copies have arrived, but the last
        ts.tile.barrier()                      # and all lanes are done with the block before
        later = (stage + 2) % 3
        ts.tile.cp_async(a[later], A[tile_m:tile_m+BM, k+2*BK:k+3*BK])
        ts.tile.cp_async(b[later], B[tile_n:tile_n+BN, k+2*BK:k+3*BK])
        ts.tile.cp_commit_group()
        acc = ts.tile.mma(a[stage], b[stage].T, acc)
        stage = (stage + 1) % 3
    C[tile_m:tile_m+BM, tile_n:tile_n+BN] = acc


@ts.kernel(grid=lambda M, N, BM, BN, SPLIT: (-(-M // BM), -(-N // BN), SPLIT))
def split_k(A: Left, B: Right, C: Tensor["M", "N", f32], BM=64, BN=64, BK=32, SPLIT=4):
    m, n = ts.tile.group_id(0) * BM, ts.tile.group_id(1) * BN
    acc = ts.tile.zeros((BM, BN))
    for k in range(ts.tile.group_id(2) * BK, K, SPLIT * BK):
        a, b = ts.tile.load(A[m:m+BM, k:k+BK]), ts.tile.load(B[n:n+BN, k:k+BK])
        acc = ts.tile.dot(a, b.T, acc)
    ts.tile.atomic_add(C[m:m+BM, n:n+BN], acc)  # C holds zeros before


@ts.kernel(grid=(8,))
def persistent(A: Left, B: Right, C: Tensor["M", "N", f32], BM=64, BN=64, BK=32):
    columns = ts.tile.cdiv(N, BN)
    blocks = ts.tile.cdiv(M, BM) * columns
    for block in range(ts.tile.group_id(0), blocks, ts.tile.num_groups(0)):
        m, n = block // columns * BM, block % columns * BN
        acc = ts.tile.zeros((BM, BN))
        for k in range(0, K, BK):
            a, b = ts.tile.load(A[m:m+BM, k:k+BK]), ts.tile.load(B[n:n+BN, k:k+BK])
            acc = ts.tile.dot(a, b.T, acc)
        C[m:m+BM, n:n+BN] = acc


@ts.kernel
def fused(A: Left, B: Right, bias: Tensor["N", f32], residual: Tensor["M", "N", bf16],
          C: Tensor["M", "N", bf16], BM=64, BN=64, BK=32):
    acc = ts.tile.zeros((BM, BN))
    for k in range(0, K, BK):
        a = ts.tile.load(A[tile_m:tile_m+BM, k:k+BK])
        b = ts.tile.load(B[tile_n:tile_n+BN, k:k+BK])
        acc = ts.tile.dot(a, b.T, acc)
    y = acc + ts.tile.load(bias[tile_n:tile_n+BN])[None, :]
    y = 0.5 * y * (1.0 + ts.tile.erf(y * math.sqrt(0.5)))      # gelu
    y = y + ts.tile.load(residual[tile_m:tile_m+BM, tile_n:tile_n+BN])
    C[tile_m:tile_m+BM, tile_n:tile_n+BN] = y


def main() -> None:
    from arrays import Arrays, check

    arrays = Arrays(__doc__)
    M, N, K = 200, 300, 500
    a, b = arrays.normal(M, K, dtype=bf16), arrays.normal(N, K, dtype=bf16)
    product = arrays.get(a) @ arrays.get(b).T
    for kernel in (pipelined, split_k, persistent):
        c = arrays.zeros(M, N)
        kernel(a, b, c)
        check(kernel.__name__, c, product, 1e-5)

    bias, residual = arrays.normal(N), arrays.normal(M, N, dtype=bf16)
    c = arrays.empty(M, N, dtype=bf16)
    fused(a, b, bias, residual, c)
    y = product + arrays.get(bias)
    gelu = 0.5 * y * (1 + np.vectorize(math.erf)(y * math.sqrt(0.5)))
    check("fused", c, gelu + arrays.get(residual), 2**-8)


if __name__ == "__main__":
    main()
