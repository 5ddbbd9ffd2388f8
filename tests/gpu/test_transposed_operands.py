"""A computed first operand that is transposed, by wgmma on a GPU and interpreted."""

from __future__ import annotations

import numpy as np
import pytest

import tile_gpu
from tessera import bf16
from transposed_kernels import SPELLINGS, spelled


@pytest.mark.parametrize("M, BM", [(128, 64), (200, 128)])
@pytest.mark.parametrize("S", [128, 100])
@pytest.mark.parametrize("how", SPELLINGS)
def test_as_on_the_interpreter(how, S, M, BM, rng):
    a, k, b = (rng.standard_normal(s).astype(bf16.numpy) for s in ((S, 64), (M, 64), (S, 64)))
    c = np.full((M, 64), np.nan, np.float32)
    kernel = spelled(how)
    # a product of 64 terms that rounds to the other neighbour, among S of them of size 8
    tile_gpu.compare(kernel, a, k, b, c, BM=BM, BK=BM, rtol=2e-2, atol=2.0)
