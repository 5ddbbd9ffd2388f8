"""Matmuls whose first operand is computed and transposed, for the tests of every target."""

from __future__ import annotations

from typing import Any

import tessera as ts
from tessera import Tensor, bf16, f32

SPELLINGS = ["of the rounded", "rounded", "masked"]


def spelled(how: str) -> Any:
    """C = X' B of X = A K', which is computed and therefore in registers."""

    @ts.kernel(grid=lambda M, BM: -(-M // BM))
    def gemm(A: Tensor["S", "D", bf16], K: Tensor["M", "D", bf16], B: Tensor["S", "E", bf16],
             C: Tensor["M", "E", f32], BM=64, BK=64):
        m0 = ts.tile.group_id(0) * BM
        k = ts.tile.load(K[m0:m0+BM, :])
        c = ts.tile.zeros((BM, E))  # noqa: F821
        for s0 in range(0, S, BK):  # noqa: F821
            x = ts.tile.dot(ts.tile.load(A[s0:s0+BK, :]), k.T)
            b = ts.tile.load(B[s0:s0+BK, :])
            if how == "of the rounded":
                y = ts.tile.cast(x, bf16).T
            elif how == "rounded":
                y = ts.tile.cast(x.T, bf16)
            else:
                y = ts.tile.cast(ts.tile.where(x.T > 0.0, x.T, 0.0), bf16)
            c = ts.tile.dot(y, b, c)
        C[m0:m0+BM, :] = c

    return gemm


__all__ = ["SPELLINGS", "spelled"]
