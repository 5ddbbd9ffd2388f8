"""Matmuls in six lines: C = A B^T and C = A B, for any extents.

    python examples/04_gemm.py [--device cuda]

Nothing here says how blocks travel, how many are under way at once or which warps multiply: that is
the schedule's. The sums are kept in f32, whatever the operands are, and rounded when C is stored.
"""

import tessera as ts
from tessera import Tensor, bf16


@ts.kernel
def gemm_nt(A: Tensor["M", "K", bf16], B: Tensor["N", "K", bf16], C: Tensor["M", "N", bf16],
            BM=128, BN=256, BK=64):
    acc = ts.tile.zeros((BM, BN))
    for k in range(0, K, BK):
        a = ts.tile.load(A[tile_m:tile_m+BM, k:k+BK])
        b = ts.tile.load(B[tile_n:tile_n+BN, k:k+BK])
        acc = ts.tile.dot(a, b.T, acc)
    C[tile_m:tile_m+BM, tile_n:tile_n+BN] = acc


@ts.kernel
def gemm_nn(A: Tensor["M", "K", bf16], B: Tensor["K", "N", bf16], C: Tensor["M", "N", bf16],
            BM=128, BN=256, BK=64):
    acc = ts.tile.zeros((BM, BN))
    for k in range(0, K, BK):
        a = ts.tile.load(A[tile_m:tile_m+BM, k:k+BK])
        b = ts.tile.load(B[k:k+BK, tile_n:tile_n+BN])
        acc = ts.tile.dot(a, b, acc)
    C[tile_m:tile_m+BM, tile_n:tile_n+BN] = acc


def main() -> None:
    from arrays import Arrays, check

    arrays = Arrays(__doc__)
    for M, N, K in ((256, 512, 320), (200, 300, 100), (1, 1, 1)):  # the last two: ragged blocks
        a, b = arrays.normal(M, K, dtype=bf16), arrays.normal(N, K, dtype=bf16)
        b_nn = arrays.put(arrays.get(b).T.astype("f4"), bf16)
        want = arrays.get(a) @ arrays.get(b).T
        for kernel, right in ((gemm_nt, b), (gemm_nn, b_nn)):
            c = arrays.empty(M, N, dtype=bf16)
            kernel(a, right, c)
            check(f"{kernel.__name__}, K = {K}", c, want, 2**-8)


if __name__ == "__main__":
    main()
