"""Random numbers of kernels on a GPU: the interpreter's, anew at each launch and each replay."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu
from tessera import Tensor, bf16, config, f32, stochastic_round

require_gpu()
tile = ts.tile


@ts.kernel
def draw(x: Tensor["N", f32], u: Tensor["N", f32], r: Tensor["N", bf16 @stochastic_round],
         d: Tensor["N", f32], seed: int, s: Tensor["N", f32]):
    t = tile.load(x[tile_n:tile_n + 128])
    i = tile.arange(128) + tile_n
    u[tile_n:tile_n + 128] = tile.random_uniform(i)
    r[tile_n:tile_n + 128] = t
    d[tile_n:tile_n + 128] = tile.dropout(t, 0.5)
    s[tile_n:tile_n + 128] = tile.random_uniform(i, seed)


def arguments(rng, seed):
    x = rng.standard_normal(1000).astype(np.float32)
    return (x, np.zeros_like(x), np.zeros(1000, ml_dtypes.bfloat16), np.zeros_like(x), seed,
            np.zeros_like(x))


def test_launches_draw_what_the_interpreter_draws(rng):
    first, found = arguments(rng, 3), []
    for target in ("cpu", "cuda"):
        with config.scope(seed=11):
            for _ in range(3):
                args = tuple(np.copy(a) if isinstance(a, np.ndarray) else a for a in first)
                draw.launch(*args, target=target)
                found.append([np.asarray(a, np.float32) for a in args if not isinstance(a, int)])
    for here, there in zip(found[:3], found[3:], strict=True):
        for a, b in zip(here, there, strict=True):
            assert np.array_equal(a, b)
    for k, same in ((1, False), (2, False), (3, False), (4, True)):
        assert np.array_equal(found[0][k], found[1][k]) == same


def test_replays_draw_anew(rng):
    torch = pytest.importorskip("torch")

    def replays(count):
        given = [torch.as_tensor(np.asarray(a, np.float32), device="cuda")
                 if isinstance(a, np.ndarray) else a for a in arguments(rng, 3)]
        given[0].fill_(1.001)
        given[2] = given[2].to(torch.bfloat16)
        graph, out = torch.cuda.CUDAGraph(), []
        with config.scope(seed=5):
            draw(*given)
            torch.cuda.synchronize()
            out.append([given[k].float().cpu().numpy() for k in (1, 2, 3)])
            with torch.cuda.graph(graph):
                draw(*given)
        for _ in range(count):
            graph.replay()
            torch.cuda.synchronize()
            out.append([given[k].float().cpu().numpy() for k in (1, 2, 3)])
        return out

    first, again = replays(3), replays(3)
    for a, b in zip(first, again, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    for k in range(3):
        assert len({draws[k].tobytes() for draws in first}) == 4
