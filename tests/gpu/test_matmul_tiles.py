"""Products of tiles, drawn masks and buffered loops of kernels on a GPU, and interpreted."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
import tile_gpu
from gpu_harness import require_gpu
from tessera import Tensor, bf16, f16, f32, tile

require_gpu()
EXACT = {"rtol": 0.0, "atol": 0.0}


def tensors(rng, dtype, *shapes):
    return [ts.tensor(rng.standard_normal(s).astype(np.float32), dtype) for s in shapes]


@ts.kernel
def shared(A: Tensor["M", "K", bf16], B: Tensor["N", "K", bf16], C: Tensor["M", "N", f32],
           D: Tensor["M", "N", f32]):
    a, b = tile.alloc_shared((32, 48), bf16), tile.alloc_shared((64, 48), bf16, swizzle="xor")
    tile.cp_async(a, A[0:32, 0:48])
    tile.cp_async(b, B[0:64, 0:48])
    tile.barrier()
    C[0:32, 0:64] = tile.mma(a, b.T)
    D[0:32, 0:64] = tile.dot(a, b.T)


@pytest.mark.row("TILE-31", "TILE-33", "TILE-50")
def test_of_shared_tiles(rng):
    a, b = tensors(rng, "bf16", (32, 48), (64, 48))
    c, d = (np.full((32, 64), np.nan, np.float32) for _ in "cd")
    made = tile_gpu.compare(shared, a, b, c, d, rtol=1e-5, atol=1e-5)
    want = np.asarray(a.numpy(), np.float64) @ np.asarray(b.numpy(), np.float64).T
    for name in "CD":
        assert np.abs(made.arrays[name] - want).max() < 1e-3 * np.sqrt(48)


@ts.kernel
def accumulated(A: Tensor["M", "K", f16], B: Tensor["K", "N", f16], wide: Tensor["M", "N", f32],
                narrow: Tensor["M", "N", f32], added: Tensor["M", "N", f32]):
    a, b = tile.load(A[0:16, 0:64]), tile.load(B[0:64, 0:16])
    x = tile.mma(a, b, accumulator=f32)
    wide[0:16, 0:16] = x
    narrow[0:16, 0:16] = tile.mma(a, b, accumulator=f16)
    added[0:16, 0:16] = tile.mma(a, b, accumulator=x)


@pytest.mark.row("TILE-32")
def test_accumulators(rng):
    a, b = tensors(rng, "f16", (16, 64), (64, 16))
    sums = [np.zeros((16, 16), np.float32) for _ in range(3)]
    made = tile_gpu.compare(accumulated, a, b, *sums, rtol=1e-2, atol=5e-2).arrays
    want = np.asarray(a.numpy(), np.float64) @ np.asarray(b.numpy(), np.float64)
    assert np.abs(made["wide"] - want).max() < 1e-4
    assert np.abs(made["added"] - 2 * want).max() < 2e-4
    narrow = made["narrow"]
    assert np.array_equal(narrow, narrow.astype(np.float16))
    assert not np.array_equal(narrow, made["wide"])


@ts.kernel
def dropped(x: Tensor["B*H", "M", "N", f32], y: Tensor["B*H", "M", "N", f32], p: float, R=16, C=32):
    P = tile.load(x[tile_m:tile_m+R, tile_n:tile_n+C])
    y[tile_m:tile_m+R, tile_n:tile_n+C] = tile.dropout_in_kernel(P, p=p)


@pytest.mark.row("TILE-59")
def test_masks_do_not_depend_on_tiles(rng):
    """Each is the interpreter's, bit for bit."""
    x = rng.uniform(0.5, 1.5, (4, 90, 70)).astype(np.float32)
    drawn = [tile_gpu.compare(dropped, x, np.full_like(x, np.nan), 0.25, R=R, C=C,
                              **EXACT).arrays["y"] for R, C in ((16, 32), (32, 16), (16, 32))]
    assert all(np.array_equal(d, drawn[0]) for d in drawn)
    kept = drawn[0] != 0
    assert abs(kept.mean() - 0.75) < 4 * np.sqrt(0.25 * 0.75 / x.size)
    assert not np.array_equal(kept[0], kept[1])


@ts.kernel
def product(A: Tensor["M", "K", bf16], B: Tensor["K", "N", bf16], C: Tensor["M", "N", f32]):
    acc = tile.zeros((64, 64), f32)
    for k in range(0, K, 32):
        acc = tile.dot(tile.load(A[tile_m:tile_m+64, k:k+32]),
                       tile.load(B[k:k+32, tile_n:tile_n+64]), acc)
    C[tile_m:tile_m+64, tile_n:tile_n+64] = acc


@pytest.mark.row("TILE-62")
def test_any_number_of_buffers_gives_the_same(rng):
    a, b = tensors(rng, "bf16", (100, 200), (200, 90))
    found = []
    for stages in (1, 2, 3):
        k = product.with_schedule(ts.Schedule(stages=stages, warps=4))
        args = a, b, np.zeros((100, 90), np.float32)
        made = tile_gpu.compiled(k, *args, target="sm_90")
        assert made.emitted.shared_bytes == stages * 2 * 64 * 32 * 2
        found.append(tile_gpu.compare(k, *args, rtol=1e-4, atol=1e-3, target="sm_90").arrays["C"])
    assert all(np.array_equal(c, found[0]) for c in found)
    want = a.numpy().astype(np.float64) @ b.numpy().astype(np.float64)
    assert np.abs(found[0] - want).max() < 1e-3 * np.sqrt(200)
