"""Attention with a mask, and dropout, as compiled for sm_90a: by wgmma, and at most four numbers of
a thread are not in registers."""

from __future__ import annotations

import numpy as np
import pytest

import tile_gpu
from tessera import bf16
from tessera.kernels.attention_scores import DropoutRule, MaskRule, ScoreRule
from tessera.kernels.modified_attention import (
    modified_attention,
    modified_attention_keys,
    modified_attention_queries,
    modified_blocks,
)

H, S, T = 2, 256, 256
KERNELS = modified_attention, modified_attention_keys, modified_attention_queries
MASK, DRAWS = MaskRule(False, H, columns=True), DropoutRule(S, True, 1 << 31, 2.0)


@pytest.mark.parametrize("which", range(3), ids=["result", "keys", "queries"])
@pytest.mark.parametrize("D, draws", [(64, False), (128, True)], ids=["mask", "mask and dropout"])
def test_numbers_stay_in_registers(D, draws, which):
    x = np.zeros((H, S, D), bf16.numpy)
    M = np.ones((1, 1, T), bool)
    W = np.zeros((1, 2), np.uint32) if draws else None
    lse, made = np.zeros((H, S), np.float32), np.zeros((H, S, D), np.float32)
    n, step, gradient_step = modified_blocks(bf16, D, draws)
    rest, BM, BN = [((made, lse), n, step), ((x, lse, lse, made, made), gradient_step, n),
                    ((x, lse, lse, made), n, gradient_step)][which]
    rule = ScoreRule(True, MASK, DRAWS if draws else None)
    built = tile_gpu.compiled(KERNELS[which], x, x, x, M, W, *rest, 0.1, rule=rule, BM=BM, BN=BN,
                              target="sm_90a")
    assert built.notes[0].startswith("matmuls by wgmma")
    assert built.built.resources.spill_store_bytes <= 16 and not built.built.warnings
