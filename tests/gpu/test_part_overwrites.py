"""Results that are written over a part of what their loop reads: the bits are those of copies."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu
from tessera.graph.schedule import place_views

require_gpu()


def attend(x, w, g):
    """x: [B, T, d]   w: [d, 3 H D], a head after another"""
    B, T, _ = x.shape

    def rotated(w):
        parts = ts.reshape(x @ w, (B, T, g.shape[1], 3, g.shape[3]))
        q, k, v = (ts.swapaxes(parts[:, :, :, i], 1, 2) for i in range(3))
        return ts.attention(ts.rotary_embedding(q), ts.rotary_embedding(k), v, causal=True)

    y, back = ts.vjp(rotated, w)
    return y, back(g)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("T", [256, 1000])
def test_bits_of_rotated_heads(width, T, rng, monkeypatch):
    shapes = (2, T, 256), (256, 3 * 4 * width), (2, 4, T, width)
    xs = [ts.to(ts.tensor(rng.standard_normal(s).astype(np.float32) / 8, "bf16"), "cuda")
          for s in shapes]
    found, taken = [], []
    find = place_views.find_part_overwrites
    for places in (lambda *args: taken.append(find(*args)) or taken[-1], lambda *args: {}):
        monkeypatch.setattr(place_views, "find_part_overwrites", places)
        found.append([y.array.tobytes() for y in ts.jit(attend)(*xs)])
    assert taken[0] and found[0] == found[1]
