"""One element along an axis of a tile, and tiles beside each other along a new one."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from emulator import compare
from tessera import Tensor, bf16, f32

tile = ts.tile


@ts.kernel
def rotated(q: Tensor["H", "D", bf16], table: Tensor["D", f32], o: Tensor["H", "D", bf16]):
    """Pairs of neighbours turned by an angle each."""
    x = tile.reshape(tile.load(q[0:H, 0:D]), (H, D // 2, 2))
    cs = tile.reshape(tile.load(table[0:D]), (D // 2, 2))
    a, b, c, s = x[:, :, 0], x[..., -1], cs[:, 0][None, :], cs[:, 1][None, :]
    o[0:H, 0:D] = tile.reshape(tile.stack((a * c - b * s, a * s + b * c)), (H, D))


@pytest.mark.parametrize("lanes", [32, 128])
def test_pairs_of_neighbours(lanes, rng):
    q = ts.tensor(rng.standard_normal((4, 32)).astype(np.float32), bf16)
    angle = rng.standard_normal(16)
    table = np.stack([np.cos(angle), np.sin(angle)], 1).reshape(-1).astype(np.float32)
    o = ts.zeros((4, 32), bf16)
    rotated(q, table, o)
    pairs = ts.cast(q, f32).numpy().astype(float).reshape(4, 16, 2)
    want = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle)
    want = np.stack([want.real, want.imag], -1).reshape(4, 32)
    assert np.abs(ts.cast(o, f32).numpy() - want).max() < 2 ** -7 * np.abs(want).max()
    compare(rotated, q, table, ts.zeros((4, 32), bf16), lanes=lanes, target="sm_90", rtol=1e-2)


@ts.kernel
def hadamard(x: Tensor["M", 16, f32], y: Tensor["M", 16, f32], first: Tensor["M", ts.bool_]):
    t = tile.load(x[tile_m:tile_m+4, 0:16])
    for s in (1, 2, 4, 8):
        v = tile.reshape(t, (4, 8 // s, 2, s))
        a, b = v[:, :, 0, :], v[:, :, 1, :]
        t = tile.reshape(tile.stack((a + b, a - b), axis=2), (4, 16))
    y[tile_m:tile_m+4, 0:16] = t
    first[tile_m:tile_m+4] = (t > 0.0)[:, 0]


def test_halves_of_any_width_and_their_gradient(rng):
    h = np.array([[1.0]])
    while len(h) < 16:
        h = np.block([[h, h], [h, -h]])
    x, y = rng.standard_normal((6, 16), np.float32), np.zeros((6, 16), np.float32)
    first = np.zeros(6, bool)
    hadamard(x, y, first)
    assert np.allclose(y, x @ h, atol=1e-5) and np.array_equal(first, y[:, 0] > 0)
    compare(hadamard, x, np.zeros_like(x), np.zeros(6, bool), lanes=64, target="sm_90", atol=1e-5)

    def loss(x):
        y, first = ts.zeros_like(x), ts.zeros((6,), "bool")
        hadamard(x, y, first)
        return ts.sum(y * y)

    assert np.allclose(ts.grad(loss)(ts.tensor(x)).numpy(), 32 * x, atol=1e-4)


@ts.kernel
def refused(x: Tensor["M", "N", f32], y: Tensor["M", f32], MODE: int):
    t = tile.load(x[tile_m:tile_m+4, 0:8])
    if MODE == 0:
        y[tile_m:tile_m+4] = t[:, 8]
    elif MODE == 1:
        y[0] = tile.reduce_sum(t[0, :])
    elif MODE == 2:
        y[tile_m:tile_m+4] = tile.stack((t, tile.zeros((4, 8))[:, 0]))[:, 0, 0]
    else:
        y[tile_m:tile_m+4] = tile.stack((t, t), axis=3)[:, 0, 0]


@pytest.mark.parametrize("mode, said", [
    (0, "element 8 along axis 1"), (1, "one element along axis 0"), (2, "a tuple of tiles of one"),
    (3, "stack along axis 3 of tiles with 2 axes")])
def test_what_is_no_part(mode, said):
    with pytest.raises(ts.TesseraError, match=said):
        refused(np.zeros((6, 8), np.float32), np.zeros(6, np.float32), mode)
