"""Softmax and rms norm of rows, each in three lines; and softmax of rows too long for one tile.

    python examples/03_softmax.py [--device cuda]

A tile of rank 1 beside a matrix is a column: `row - row_max(row)` subtracts each row's own maximum.
Arithmetic on bf16 is done in f32, and the store rounds once.
"""

import math

import numpy as np

import tessera as ts
from tessera import Tensor, bf16, f32


@ts.kernel
def softmax(x: Tensor["M", "N", bf16], y: Tensor["M", "N", bf16], BM=1):
    row = ts.tile.load(x[tile_m:tile_m+BM, 0:N])
    p = ts.tile.exp(row - ts.tile.row_max(row))
    y[tile_m:tile_m+BM, 0:N] = p / ts.tile.row_sum(p)


@ts.kernel
def rms_norm(x: Tensor["M", "N", bf16], w: Tensor["N", bf16], y: Tensor["M", "N", bf16],
             eps: f32 = 1e-6, BM=1):
    row = ts.tile.load(x[tile_m:tile_m+BM, 0:N])
    scale = ts.tile.rsqrt(ts.tile.row_mean(row * row) + eps)
    y[tile_m:tile_m+BM, 0:N] = row * scale * ts.tile.load(w[0:N])[None, :]


@ts.kernel
def long_softmax(x: Tensor["M", "N", bf16], y: Tensor["M", "N", bf16], BM=4, BN=1024):
    m, z = ts.tile.full((BM,), -math.inf), ts.tile.zeros((BM,))
    for k in range(0, N, BN):                  # the maximum and the sum so far
        s = ts.tile.load(x[tile_m:tile_m+BM, k:k+BN])
        m_new = ts.tile.maximum(m, ts.tile.row_max(s))
        z = z * ts.tile.exp(m - m_new) + ts.tile.row_sum(ts.tile.exp(s - m_new))
        m = m_new
    for k in range(0, N, BN):
        s = ts.tile.load(x[tile_m:tile_m+BM, k:k+BN])
        y[tile_m:tile_m+BM, k:k+BN] = ts.tile.exp(s - m) / z


def softmax_f64(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def main() -> None:
    from arrays import Arrays, check

    arrays = Arrays(__doc__)
    x, w = arrays.normal(200, 1000, dtype=bf16), arrays.normal(1000, dtype=bf16)
    a, y = arrays.get(x), arrays.empty(200, 1000, dtype=bf16)
    softmax(x, y)
    check("softmax", y, softmax_f64(a), 2**-8)

    rms_norm(x, w, y)
    want = a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-6) * arrays.get(w)
    check("rms_norm", y, want, 2**-8)

    x, y = arrays.normal(30, 5000, dtype=bf16), arrays.empty(30, 5000, dtype=bf16)
    long_softmax(x, y)
    check("long_softmax", y, softmax_f64(arrays.get(x)), 2**-8)


if __name__ == "__main__":
    main()
