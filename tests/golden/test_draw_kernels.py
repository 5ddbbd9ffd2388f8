"""Kernels that draw, compiled: what a launch passes, and that seeds are arguments."""

from __future__ import annotations

import re

import pytest

import tessera as ts
from tessera import Tensor, bf16, f32, stochastic_round

tile = ts.tile


@ts.kernel
def draw(x: Tensor["N", f32], y: Tensor["N", bf16 @stochastic_round], u: Tensor["N", f32],
         seed: int):
    t, i = tile.load(x[tile_n:tile_n + 256]), tile.arange(256) + tile_n
    y[tile_n:tile_n + 256] = t
    u[tile_n:tile_n + 256] = tile.dropout(t, 0.5) + tile.random_uniform(i) \
        + tile.random_uniform(i, seed)


@pytest.mark.parametrize("target", ["sm_75", "sm_90a"])
def test_the_key_of_a_launch_is_passed_and_that_of_a_replay_read(target):
    ptx = draw.inspect_ir("ptx", target=target)
    source = draw.inspect_ir("target", target=target)
    (head,) = re.findall(r"def draw\((.*)\):", source)
    assert {"launch", "launch_1", "replays", "seed"} <= set(head.split(", "))
    assert len(re.findall(r"@pred_p ld\.global\.b64", ptx)) == 1  # the replay's number, if any
    assert not draw.specializations[-1].constants  # the seed is none
