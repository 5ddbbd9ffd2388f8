"""Products of fp8 and fp4 numbers with scales, and what a policy in a tensor's type does.

    python examples/07_low_precision.py [--device cuda]

`quantize` finds one scale per row and stores fp8. `gemm_fp8` multiplies the fp8 numbers, sums in
f32 and applies the scales once, at the end. `gemm_fp4` takes weights packed two to a byte: beside
bf16 they are widened to bf16, which holds every fp4 number.
"""

import numpy as np

import tessera as ts
from tessera import Tensor, bf16, f32, fp4_e2m1, fp8_e4m3, saturate, stochastic_round


@ts.kernel
def quantize(x: Tensor["M", "K", bf16], q: Tensor["M", "K", fp8_e4m3 @saturate],
             scale: Tensor["M", f32], BM=16):
    row = ts.tile.load(x[tile_m:tile_m+BM, 0:K])
    s = ts.tile.row_max(ts.tile.abs(row)) / 448.0   # the largest fp8_e4m3
    q[tile_m:tile_m+BM, 0:K] = row / s
    scale[tile_m:tile_m+BM] = s


@ts.kernel
def gemm_fp8(A: Tensor["M", "K", fp8_e4m3], a_scale: Tensor["M", f32],
             B: Tensor["N", "K", fp8_e4m3], b_scale: Tensor["N", f32], C: Tensor["M", "N", bf16],
             BM=128, BN=128, BK=128):
    acc = ts.tile.zeros((BM, BN))
    for k in range(0, K, BK):
        a = ts.tile.load(A[tile_m:tile_m+BM, k:k+BK])
        b = ts.tile.load(B[tile_n:tile_n+BN, k:k+BK])
        acc = ts.tile.dot(a, b.T, acc)
    rows, columns = ts.tile.load(a_scale[tile_m:tile_m+BM]), ts.tile.load(b_scale[tile_n:tile_n+BN])
    C[tile_m:tile_m+BM, tile_n:tile_n+BN] = acc * rows[:, None] * columns[None, :]


@ts.kernel
def gemm_fp4(A: Tensor["M", "K", bf16], W: Tensor["N", "K", fp4_e2m1], scale: Tensor["N", f32],
             C: Tensor["M", "N", bf16], BM=64, BN=64, BK=64):
    acc = ts.tile.zeros((BM, BN))
    for k in range(0, K, BK):
        a = ts.tile.load(A[tile_m:tile_m+BM, k:k+BK])
        w = ts.tile.load(W[tile_n:tile_n+BN, k:k+BK])
        acc = ts.tile.dot(a, w.T, acc)
    C[tile_m:tile_m+BM, tile_n:tile_n+BN] = acc * ts.tile.load(scale[tile_n:tile_n+BN])[None, :]


@ts.kernel
def store_both(x: Tensor["N", f32], near: Tensor["N", bf16],
               random: Tensor["N", bf16 @stochastic_round], BN=1024):
    t = ts.tile.load(x[tile_n:tile_n+BN])
    near[tile_n:tile_n+BN] = t                 # to the nearest, halves to even
    random[tile_n:tile_n+BN] = t               # up or down at random, so that the mean is right


def show_fp8(arrays, check) -> None:
    M, N, K = 200, 300, 500
    x, w = arrays.normal(M, K, dtype=bf16), arrays.normal(N, K, dtype=bf16)
    stored = []
    for t in (x, w):
        q, scale = arrays.empty(*t.shape, dtype=fp8_e4m3), arrays.empty(t.shape[0])
        quantize(t, q, scale)
        stored.append((q, scale))
        want = np.abs(arrays.get(t)).max(1) / 448
        check("quantize, the scales", scale, want, 1e-6)
    (a, a_scale), (b, b_scale) = stored
    c = arrays.empty(M, N, dtype=bf16)
    gemm_fp8(a, a_scale, b, b_scale, c)
    rows, columns = (arrays.get(q) * arrays.get(s)[:, None] for q, s in stored)
    check("gemm_fp8, given the fp8 numbers", c, rows @ columns.T, 2**-8)
    check("gemm_fp8, against bf16", c, arrays.get(x) @ arrays.get(w).T, 0.1)


def show_fp4(arrays, check) -> None:
    M, N, K = 100, 96, 160
    arrays = arrays.on_host()                  # no array library has packed fp4
    x, w = arrays.normal(M, K, dtype=bf16), arrays.rng.standard_normal((N, K), np.float32)
    scale = np.abs(w).max(1) / np.float32(6.0)  # the largest fp4_e2m1
    W = ts.tensor(w / scale[:, None], fp4_e2m1)
    c = arrays.empty(M, N, dtype=bf16)
    gemm_fp4(x, W, scale, c)
    values = ts.numerics.decode(W.numpy(), fp4_e2m1).astype(np.float64) * scale[:, None]
    check(f"gemm_fp4, W of {W.nbytes} bytes", c, arrays.get(x) @ values.T, 2**-8)


def show_policies(arrays, check) -> None:
    value = 1 + 2.0**-9                        # bf16 has 1 and 1 + 2^-7 beside it
    x = arrays.put(np.full(100_000, value, np.float32))
    near, random = (arrays.empty(100_000, dtype=bf16) for _ in range(2))
    store_both(x, near, random)
    check("stored to the nearest: 1", near, np.ones(100_000), 0.0)
    check("stored at random: the mean", arrays.get(random).mean(), np.float64(value), 2e-4)


def main() -> None:
    from arrays import Arrays, check

    arrays = Arrays(__doc__)
    show_fp8(arrays, check)
    show_fp4(arrays, check)
    show_policies(arrays, check)


if __name__ == "__main__":
    main()
