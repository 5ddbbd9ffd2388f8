"""Attention with masks in memory and dropout as compiled for sm_90a: by wgmma, and at most four
numbers of a thread are not in registers. The fastest kernels have masks brought by TMA."""

from __future__ import annotations

import numpy as np
import pytest

import tile_gpu
from tessera import bf16
from tessera.kernels.attention import attention, attention_block
from tessera.kernels.attention_backward import attention_keys, keys_block
from tessera.kernels.attention_scores import DropoutRule, MaskRule, ScoreRule
from tessera.kernels.modified_attention import (
    modified_attention,
    modified_attention_keys,
    modified_attention_queries,
    modified_blocks,
)
from tessera.runtime.target import parse_target

CHIP = parse_target("sm_90a").generation
H, S, T = 2, 256, 256
KERNELS = modified_attention, modified_attention_keys, modified_attention_queries
MASK, DRAWS = MaskRule(False, H, columns=True), DropoutRule(S, True, 1 << 31, 2.0)
LINE, TILE = MaskRule(True, H, 1, 0, False, True), MaskRule(True, H, 0, 1, True, True)


@pytest.mark.parametrize("which", range(3), ids=["result", "keys", "queries"])
def test_numbers_stay_in_registers(which):
    D, draws = 128, True
    x = np.zeros((H, S, D), bf16.numpy)
    M, W = np.ones((1, 1, T), bool), np.zeros((1, 2), np.uint32)
    lse, made = np.zeros((H, S), np.float32), np.zeros((H, S, D), np.float32)
    n, step, gradient_step = modified_blocks(bf16, D, draws)
    rest, BM, BN = [((made, lse), n, step), ((x, lse, lse, made, made), gradient_step, n),
                    ((x, lse, lse, made), n, gradient_step)][which]
    rule = ScoreRule(True, MASK, DRAWS)
    built = tile_gpu.compiled(KERNELS[which], x, x, x, M, W, *rest, 0.1, rule=rule, BM=BM, BN=BN,
                              target="sm_90a")
    assert built.notes[0].startswith("matmuls by wgmma")
    assert built.built.resources.spill_store_bytes <= 16 and not built.built.warnings


@pytest.mark.parametrize("which, kind, D", [
    ("result", "line", 64), ("result", "tile", 64), ("keys", "tile", 64), ("keys", "draws", 128)])
def test_the_fastest_kernels_are_brought_their_masks(which, kind, D):
    x, r = np.zeros((H, S, D), bf16.numpy), np.zeros((H, S), np.float32)
    extra = {"line": {"L": np.zeros((1, T), np.float32), "mask": LINE},
             "tile": {"M": np.zeros((H, S, T), np.float32), "mask": TILE},
             "draws": {"W": np.zeros((1, 2), np.uint32), "draws": ScoreRule(False, None, DRAWS)}}
    if which == "result":
        m, n = attention_block(bf16, 4096, D, False, CHIP, mask=kind)
        kernel, args, block = attention, (x, x, x, x, 0.1), {"BM": m, "BN": n}
    else:
        kernel, args = attention_keys, (x, x, x, x, r, r, x, x, 0.1)
        block = keys_block(bf16, D, CHIP, mask=kind)
    made = tile_gpu.compiled(kernel, *args, target="sm_90a", **block, **extra[kind])
    rings = " ".join(n for n in made.notes if n.startswith("ring"))
    brought = {"line": "k_of_keys", "tile": "_m"}
    assert made.notes[0].startswith("matmuls by wgmma")
    assert [name in rings for name in brought.values()] == [name == kind for name in brought]
    assert made.built.resources.spill_store_bytes <= 16 and not made.built.warnings
