"""The kernels of attention's gradient in emulated machine instructions, against the interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from emulator import compare
from matmul_kernels import array
from tessera.kernels.attention_backward import attention_keys, attention_queries


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("S, T, group, causal", [(70, 70, 1, True), (33, 50, 2, False)])
def test_gradient(S, T, group, causal, target, rng):
    q, g = (array(rng, "bf16", (2, S, 32)) for _ in range(2))
    k, v = (array(rng, "bf16", (2 // group, T, 32)) for _ in range(2))
    lse, delta = (array(rng, "f32", (2, S)) for _ in range(2))
    lse = np.abs(lse) + 6  # no weight is far above 1
    made = [array(rng, "f32", s) for s in ((2, S, 32), *((2 // group, T, 32),) * 2)]
    common = {"group": group, "causal": causal, "rtol": 2e-2, "atol": 2e-2, "lanes": 128,
              "target": target}
    compare(attention_keys, q, k, v, g, lse, delta, made[1], made[2], 0.17, **common)
    compare(attention_queries, q, k, v, g, lse, delta, made[0], 0.17, **common)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_columns_of_blocks(target, rng):
    q, k, v, g, *made = (array(rng, "bf16", (2, 130, 32)) for _ in range(7))
    lse, delta = np.abs(array(rng, "f32", (2, 130))) + 6, array(rng, "f32", (2, 130))
    sums = [array(rng, "f32", (9, 2, 32)) for _ in range(3)]
    common = {"causal": True, "rtol": 2e-2, "atol": 5e-2, "lanes": 128, "target": target, "BM": 96}
    compare(attention_keys, q, k, v, g, lse, delta, *made[:2], 0.17, *sums[:2], **common)
    compare(attention_queries, q, k, v, g, lse, delta, made[2], 0.17, sums[2], **common)
