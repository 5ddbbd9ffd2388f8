"""A product whose block sizes, warps and stages are chosen for each set of extents.

    python examples/06_autotuned.py [--device cuda]

The candidates are ordered by an analytic model of the machine. On a GPU the best ones are measured
within the budget; on the host there is nothing worth measuring, so the model's first choice is
taken. `tuning_trace` says what became of each candidate.
"""

import tessera as ts
from tessera import Tensor, bf16

SPACE = dict(BM=[64, 128], BN=[64, 128, 256], BK=[32, 64], warps=[4, 8, 64], stages=[2, 4])


@ts.kernel.autotune(space=SPACE, budget_ms=2000)
def gemm(A: Tensor["M", "K", bf16], B: Tensor["N", "K", bf16], C: Tensor["M", "N", bf16]):
    T = ts.tile.context()                      # the candidate: T.m is BM, and so on
    acc = ts.tile.zeros((T.m, T.n))
    for k in range(0, K, T.k):
        a = ts.tile.load(A[tile_m:tile_m+T.m, k:k+T.k])
        b = ts.tile.load(B[tile_n:tile_n+T.n, k:k+T.k])
        acc = ts.tile.dot(a, b.T, acc)
    C[tile_m:tile_m+T.m, tile_n:tile_n+T.n] = acc


def main() -> None:
    from arrays import Arrays, check

    arrays = Arrays(__doc__)
    for M, N, K in ((512, 512, 256), (64, 512, 256)):
        a, b = arrays.normal(M, K, dtype=bf16), arrays.normal(N, K, dtype=bf16)
        c = arrays.empty(M, N, dtype=bf16)
        gemm(a, b, c)
        check(f"gemm of {M} x {N} x {K}", c, arrays.get(a) @ arrays.get(b).T, 2**-8)

        trace = gemm.tuning_trace
        print("  chosen  ", gemm.best_config)
        print("  of      ", len(trace), "candidates,", sum(t.status == "skipped" for t in trace),
              "of them skipped:", next(t.reason for t in trace if t.status == "skipped"))


if __name__ == "__main__":
    main()
