"""Attention with a mask or dropout as compiled for sm_90a: by wgmma, and at most four numbers of a
thread are not in registers."""

from __future__ import annotations

import numpy as np
import pytest

import tile_gpu
from tessera import bf16
from tessera.kernels.dropout_attention import (
    dropout_attention,
    dropout_attention_keys,
    dropout_attention_queries,
)
from tessera.kernels.masked_attention import (
    masked_attention,
    masked_attention_keys,
    masked_attention_queries,
    masked_blocks,
)

H, S, T = 2, 256, 256
KERNELS = {False: (masked_attention, masked_attention_keys, masked_attention_queries),
           True: (dropout_attention, dropout_attention_keys, dropout_attention_queries)}


@pytest.mark.parametrize("which", range(3), ids=["result", "keys", "queries"])
@pytest.mark.parametrize("draws", [False, True], ids=["mask", "dropout"])
@pytest.mark.parametrize("D", [64, 128])
def test_numbers_stay_in_registers(D, draws, which):
    x, mask = np.zeros((H, S, D), bf16.numpy), np.ones((1, 1, 1 if draws else T), bool)
    words = (np.zeros((1, 2), np.uint32),) if draws else ()
    lse, made = np.zeros((H, S), np.float32), np.zeros((H, S, D), np.float32)
    n, step, gradient_step = masked_blocks(bf16, D, draws)
    rest, BM, BN = [((made, lse), n, step), ((x, lse, lse, made, made), gradient_step, n),
                    ((x, lse, lse, made), n, gradient_step)][which]
    common = {"block": S, "runs": True, "least": 1 << 31, "grown": 2.0} if draws else {
        "columns": True}
    built = tile_gpu.compiled(KERNELS[draws][which], x, x, x, mask, *words, *rest, 0.1, heads=H,
                              causal=True, BM=BM, BN=BN, target="sm_90a", **common)
    assert built.notes[0].startswith("matmuls by wgmma")
    assert built.built.resources.spill_store_bytes <= 16 and not built.built.warnings
