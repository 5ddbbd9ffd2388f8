"""Several results of a kernel on the GPU, tuples through branches, loops and early returns, and
reductions and scans by functions of tuples."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
import tile_gpu
from combinations import later, linear
from gpu_harness import require_gpu
from tessera import Tensor, f32, int32

require_gpu()
tile = ts.tile


@ts.kernel
def moments(x: Tensor["M", "N", f32]) -> tuple[Tensor["M", f32], Tensor["M", "N", f32]]:
    s = (tile.zeros((4,)), tile.full((4,), -1e30))
    for j in range(0, N, 8):
        block = tile.load(x[tile_m:tile_m + 4, j:j + 8])
        s = (s[0] + tile.row_sum(block), tile.maximum(s[1], tile.row_max(block)))
    return s[1], tile.load(x[tile_m:tile_m + 4, 0:N]) - s[0]


@ts.kernel
def extremes(x: Tensor["N", f32]) -> tuple[f32, int32]:
    t = tile.load(x[0:N])
    return tile.reduce_max(t), tile.argmax(t, axis=None)


def first_above(x, n, limit):
    for j in range(n):
        if x[j] > limit:
            return j, x[j]
    return -1, 0.0


@ts.kernel
def searched(x: Tensor["N", f32], y: Tensor["N", f32], z: Tensor["N", int32]):
    i = tile.linear_id()
    if i < N:
        pair = first_above(x, N, i * 0.1 - 1.0)
        for j in range(i % 3):
            pair = (pair[0] + j, pair[1] * 2.0)
        y[i] = pair[1]
        z[i] = pair[0]


def test_tuples_as_interpreted(rng):
    x = rng.standard_normal((37, 100), np.float32)
    tile_gpu.compare(moments, x)
    tile_gpu.compare(extremes, x[0])
    tile_gpu.compare(searched, x[0], np.zeros(100, np.float32), np.zeros(100, np.int32))


@pytest.mark.parametrize("library", ["numpy", "torch", "cupy"])
def test_results_in_the_library_of_the_argument(library, rng):
    x = rng.standard_normal((37, 100), np.float32)
    given = x
    if library == "torch":
        given = pytest.importorskip("torch").from_numpy(x).cuda()
    elif library == "cupy":
        given = pytest.importorskip("cupy").asarray(x)
    with ts.config.scope(device="cuda"):
        for _ in range(2):  # the long way and the short one
            largest, rest = moments(given)
            found = extremes(given[0])
    assert type(largest) is type(rest) is type(given)
    largest, rest = (np.asarray(y.get() if library == "cupy" else y.cpu() if library == "torch"
                                else y) for y in (largest, rest))
    assert np.array_equal(largest, x.max(1)) and found == (float(x[0].max()), int(x[0].argmax()))
    assert np.allclose(rest, x - x.sum(1, keepdims=True, dtype=np.float64), atol=1e-4)


def test_several_results_in_a_graph(rng):
    x = rng.standard_normal((37, 100), np.float32)
    with ts.config.scope(device="cuda"):
        largest, rest = ts.jit(lambda x: moments(2.0 * x))(ts.tensor(x))
        assert np.array_equal(largest.numpy(), 2 * x.max(1)) and rest.shape == (37, 100)


# --- reductions and scans by functions -----------------------------------------------------------
@ts.kernel
def recurrence(g: Tensor["M", "N", f32], x: Tensor["M", "N", f32], y: Tensor["M", "N", f32],
               end: Tensor["M", f32], top: Tensor["M", int32]):
    gates, t = tile.load(g[tile_m:tile_m + 2, 0:N]), tile.load(x[tile_m:tile_m + 2, 0:N])
    _, y[tile_m:tile_m + 2, 0:N] = tile.scan((gates, t), linear)
    _, end[tile_m:tile_m + 2] = tile.reduce((gates, t), linear)
    _, top[tile_m:tile_m + 2] = tile.reduce(
        (t, tile.broadcast(tile.arange(0, N)[None, :], (2, N))), later)


@pytest.mark.parametrize("lanes", [32, 128, 512])
@pytest.mark.parametrize("n", [3, 128, 1000])
def test_combinations_as_interpreted(n, lanes, rng):
    g, x = rng.uniform(0.5, 1.0, (5, n)).astype(np.float32), rng.standard_normal((5, n), np.float32)
    y, end = np.full_like(x, np.nan), np.zeros(5, np.float32)
    ran = tile_gpu.compare(recurrence, g, x, y, end, np.zeros(5, np.int32), lanes=lanes, rtol=1e-4,
                           atol=1e-4)
    assert np.array_equal(ran.arrays["top"], x.argmax(1))
    want = np.zeros(5)
    for i in range(n):
        want = want * g[:, i].astype(np.float64) + x[:, i]
    assert np.allclose(ran.arrays["end"], want, rtol=1e-4, atol=1e-4)
