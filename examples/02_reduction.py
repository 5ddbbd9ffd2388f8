"""The sum of many numbers, three ways: by tiles, by lanes with shared memory, and by rows.

    python examples/02_reduction.py [--device cuda]

`total` lets the compiler reduce a tile. `total_by_lanes` does the same by hand, with barriers.
Both end with one atomic addition per group. `row_sums` needs no atomics: a row belongs to a group.
"""

import numpy as np

import tessera as ts
from tessera import Tensor, f32


@ts.kernel
def total(x: Tensor["N", f32], out: Tensor["one", f32], BN=4096):
    part = ts.tile.reduce_sum(ts.tile.load(x[tile_n:tile_n+BN]))
    ts.tile.atomic_add(out, 0, part)           # uniform: once per group


@ts.kernel
def total_by_lanes(x: Tensor["N", f32], out: Tensor["one", f32]):
    shared = ts.tile.alloc_shared((128,), f32)
    i, lane = ts.tile.linear_id(), ts.tile.local_id()
    shared[lane] = x[i] if i < N else 0.0
    ts.tile.barrier()
    stride = 64
    while stride > 0:                          # 128 numbers, then 64, 32, ...
        if lane < stride:
            shared[lane] += shared[lane + stride]
        ts.tile.barrier()
        stride //= 2
    if lane == 0:
        ts.tile.atomic_add(out, 0, shared[0])


@ts.kernel
def row_sums(x: Tensor["M", "N", f32], out: Tensor["M", f32], BM=16, BN=256):
    acc = ts.tile.zeros((BM,))
    for k in range(0, N, BN):
        acc += ts.tile.row_sum(ts.tile.load(x[tile_m:tile_m+BM, k:k+BN]))
    out[tile_m:tile_m+BM] = acc


def main() -> None:
    from arrays import Arrays, check

    arrays = Arrays(__doc__)
    x = arrays.put(arrays.rng.random(50_001, np.float32))
    want = arrays.get(x).sum(keepdims=True)
    for kernel in (total, total_by_lanes):
        out = arrays.zeros(1)
        kernel(x, out)
        check(kernel.__name__, out, want, 1e-5)

    x, out = arrays.normal(100, 3000), arrays.empty(100)
    row_sums(x, out)
    check("row_sums", out, arrays.get(x).sum(1), 1e-5)


if __name__ == "__main__":
    main()
