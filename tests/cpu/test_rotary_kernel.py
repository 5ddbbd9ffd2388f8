"""The library's rotary kernel: matrices that share sines and cosines, and how exact these are."""

from __future__ import annotations

import math

import numpy as np
import pytest

import tessera as ts
from tessera import Tensor, f32, f64
from tessera.kernels import ROUTINES
from tessera.kernels.rotary import GROUPS, cosine_and_sine, reference, sharing
from tolerance import assert_close


@ts.kernel
def both(turns: Tensor["N", f64], c: Tensor["N", f32], s: Tensor["N", f32], BN=256):
    x, y = cosine_and_sine(ts.tile.load(turns[tile_n:tile_n+BN]))
    c[tile_n:tile_n+BN] = x
    s[tile_n:tile_n+BN] = y


def test_cosines_and_sines_are_within_two_last_places_of_one(rng: np.random.Generator) -> None:
    eighths = np.arange(-16, 17) / 8
    near = (eighths[:, None] + np.array([-1e-9, 0, 1e-9])).ravel()
    turns = np.concatenate([near, rng.uniform(-1, 1, 2000), rng.uniform(-1e6, 1e6, 1000)])
    c, s = np.full((2, len(turns)), np.nan, np.float32)
    both(turns, c, s)
    angle = 2 * math.pi * (turns - np.round(turns))
    assert np.abs(c - np.cos(angle)).max() < 2.0**-22
    assert np.abs(s - np.sin(angle)).max() < 2.0**-22
    whole = turns == np.round(turns)
    assert whole.sum() >= 5 and (c[whole] == 1).all() and (s[whole] == 0).all()


@pytest.mark.parametrize("BZ", [1, 3, 8])
def test_matrices_share_what_turns_them(BZ: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((7, 20, 12)).astype(np.float32)
    y = np.full_like(x, np.nan)
    ROUTINES["rotary_embedding"].kernels["rotary"](
        x, y, 5, half=6, rate=-math.log2(10000.0) / 6, BM=8, BZ=BZ)
    assert_close(y, reference(x.astype(np.float64), start=5), "f32", n=8)


def test_as_many_share_as_leave_groups_enough() -> None:
    for Z, S, BM in ((1, 1, 32), (64, 4096, 32), (37, 1000, 16), (4096, 32, 32)):
        BZ = sharing(Z, S, BM)
        assert 1 <= BZ <= 8 and (BZ == 1 or -(-S // BM) * -(-Z // BZ) >= GROUPS)
    assert sharing(64, 4096, 32) > 1
