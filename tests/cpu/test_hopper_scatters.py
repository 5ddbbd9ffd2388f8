"""Warp-specialised kernels whose consumers scatter what they made, and write single numbers."""

from __future__ import annotations

import numpy as np

import tessera as ts
from hopper_lowering import compared, poisoned, random
from tessera import Tensor, bf16, f32
from tessera.tile.cuda.lower.warp_specialised.rewrite import ops_in


@ts.kernel(grid=lambda NT: (NT,))
def grouped(X: Tensor["S", "K", bf16], W: Tensor["E", "K", "N", bf16], of: Tensor["NT", ts.int32],
            first: Tensor["NT", ts.int32], ends: Tensor["E", ts.int32], Y: Tensor["S", "N", bf16],
            rows: Tensor["NT", f32]):
    """Products by experts: rows of each follow each other, and its last tile has fewer."""
    i = ts.tile.group_id(0)
    e, r = of[i], first[i]
    acc = ts.tile.zeros((64, 64))
    for k in range(0, K, 64):
        acc = ts.tile.dot(ts.tile.load(X[r:r + 64, k:k + 64]),
                          ts.tile.load(W[e, k:k + 64, 0:64]), acc)
    at = r + ts.tile.arange(0, 64)
    Y[ts.tile.where(at < ends[e], at, -1), 0:64] = acc
    rows[i] = ts.tile.reduce_sum(ts.tile.where(at < ends[e], 1.0, 0.0))


def test_results_go_to_rows_that_are_data(rng):
    """Consumers scatter what they summed, and one of their threads writes a number of the group."""
    args = [random(rng, 130, 128), random(rng, 2, 128, 64), np.array([0, 0, 1], np.int32),
            np.array([0, 64, 80], np.int32), np.array([80, 130], np.int32), poisoned(130, 64),
            np.full(3, np.nan, np.float32)]
    for out in (5, 6):
        made = compared(grouped, (3,), args, out)
    assert ops_in(made.function.body, "store_scatter")
    assert ops_in(made.function.body, "store_element") and made.pipeline.beside == 2
