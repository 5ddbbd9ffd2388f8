"""Block sizes follow from how `tile_m` is used: slices, sums with a range, or an index alone."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from kernels.build import build
from tessera import Tensor, f32
from tessera.errors import TesseraError
from tolerance import assert_close

tile = ts.tile


@ts.kernel
def products(a: Tensor["B", "M", "K", f32], b: Tensor["B", "K", "N", f32],
             c: Tensor["B", "M", "N", f32], T=16):
    acc = tile.zeros((T, T))
    for k in range(0, K, T):
        x, y = a[tile_b, tile_m:tile_m + T, k:k + T], b[tile_b, k:k + T, tile_n:tile_n + T]
        acc = tile.dot(tile.load(x), tile.load(y), acc, precision="f32")
    c[tile_b, tile_m:tile_m + T, tile_n:tile_n + T] = acc


def test_an_index_alone_is_a_block_of_one(rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((3, 20, 30), (3, 30, 25)))
    c = np.full((3, 20, 25), np.nan, np.float32)
    products(a, b, c)
    assert_close(c, a.astype(np.float64) @ b, n=30)


@ts.kernel
def blurred(x: Tensor["H", "W", f32], y: Tensor["H", "W", f32]):
    total = tile.zeros((8, 16))
    for i in range(-1, 2):
        for j in range(-1, 2):
            total += tile.load(x[tile_h + i:tile_h + i + 8, tile_w + j:tile_w + j + 16])
    y[tile_h:tile_h + 8, tile_w:tile_w + 16] = total


def test_a_range_that_moves_a_slice_is_no_block(rng: np.random.Generator) -> None:
    x = rng.standard_normal((19, 37)).astype(np.float32)
    y, around = np.full_like(x, np.nan), np.pad(x.astype(np.float64), 1)
    blurred(x, y)
    assert_close(y, sum(around[i:i + 19, j:j + 37] for i in range(3) for j in range(3)), n=9)


def test_a_sum_with_a_range_is_one(rng: np.random.Generator) -> None:
    k = build('''@kernel
def k(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    for i in range(4):
        for j in range(8):
            y[tile_m + i, tile_n + j] = 2.0 * x[tile_m + i, tile_n + j]''')["k"]
    x = rng.standard_normal((8, 16)).astype(np.float32)
    y = np.full_like(x, np.nan)
    k(x, y)
    assert np.array_equal(y, 2 * x)


def test_a_range_beside_a_store_at_the_index_alone_is_refused() -> None:
    """It would write every third element only."""
    k = build('''@kernel
def k(x: Tensor["N", f32], y: Tensor["M", f32]):
    total = 0.0
    for i in range(3):
        total += x[tile_m + i]
    y[tile_m] = total''')["k"]
    with pytest.raises(TesseraError, match="blocks of 3 and 1 begin at tile_m"):
        k(np.ones(12, np.float32), np.ones(10, np.float32))


@pytest.mark.parametrize("body", [
    "    m, n = tile_m, tile_n\n    y[m:m+B, n:n+C] = tile.load(x[m:m+B, n:n+C]) * 2.0",
    "    m = tile_m\n    k = m\n    for c in range(0, N, C):\n"
    "        y[k, c:c+C] = tile.load(x[m, c:c+C]) * 2.0",
    "    r, c = tile_m + tile.arange(B), tile_n + tile.arange(C)[None, :]\n"
    "    y[r[:, None], c] = x[r[:, None], c] * 2.0",
    "    i = tile_h * B\n    y[i:i+B, 0:N] = tile.load(x[i:i+B, 0:N]) * 2.0",
    "    t = tile.zeros((B, C))\n    k = tile_l\n    t += tile.load(z[0:B, k:k+16, 0:C]).shape[1]\n"
    "    y[tile_m:tile_m+B, tile_n:tile_n+C] = tile.load(x[tile_m:tile_m+B, tile_n:tile_n+C]) * 2.0"
    " + 0.0 * t",
])
def test_names_of_origins_and_positions_from_them(body: str, rng: np.random.Generator) -> None:
    names = build('@kernel\ndef k(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32], '
                  'h: Tensor["H", f32], z: Tensor["B4", "L", "C4", f32], B=8, C=16):\n' + body)
    x, z = rng.standard_normal((37, 45)).astype(np.float32), np.ones((8, 40, 16), np.float32)
    y = np.full_like(x, np.nan)
    names["k"](x, y, np.zeros(5, np.float32), z)
    np.testing.assert_array_equal(y, 2 * x)


def test_a_name_that_changes_is_no_origin() -> None:
    names = build('@kernel\ndef k(x: Tensor["N", f32], y: Tensor["N", f32], B=8):\n'
                  "    i = tile_n\n    for _ in range(2):\n        i = i + 1\n"
                  "    y[i:i+B] = tile.load(x[i:i+B])\n")
    x = np.zeros(20, np.float32)
    with pytest.raises(TesseraError, match="the block size of tile_n is not known"):
        names["k"](x, x.copy())
