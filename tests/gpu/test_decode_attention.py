"""Attention of few queries over long caches on a GPU: against f64, and the same bits each time."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from attention_cases import attended64
from gpu_harness import require_gpu
from tessera.stdlib import flash_attention_2
from tolerance import assert_close

require_gpu()


@pytest.mark.parametrize("D", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("B, H, Hk, S, T", [
    (1, 32, 8, 1, 5000), (2, 8, 2, 4, 1031), (3, 8, 1, 3, 277), (1, 4, 4, 1, 20000),
    (2, 32, 8, 16, 2048), (16, 16, 8, 1, 1100), (2, 16, 4, 2, 20001), (40, 16, 8, 1, 4100)])
def test_few_queries(B, H, Hk, S, T, D, rng):
    q, k, v = (ts.tensor(rng.standard_normal((B, h, n, D)).astype(np.float32), "bf16")
               for h, n in ((H, S), (Hk, T), (Hk, T)))
    want, size = attended64(q, k, v, True)
    there = [x.to("cuda") for x in (q, k, v)]
    f = ts.jit(lambda *x: ts.attention(*x, causal=True))
    with ts.config.scope(poison=True):
        made = [flash_attention_2(*there, causal=True) for _ in range(2)]
        made += [f(*(x.copy() for x in there)) for _ in range(4)]  # the later ones are CUDA graphs
    got = [np.asarray(ts.cast(x, "f64")) for x in made]
    assert_close(got[0], want, "bf16", n=2, scale=size)
    assert all(np.array_equal(got[0], x) for x in got)


@pytest.mark.parametrize("D", [64, 128, 192])
@pytest.mark.parametrize("codes", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("S, n", [(1, 1000), (8, 2050), (70, 1500)])
def test_a_cache_of_codes(S, n, codes, D, rng):
    q, k, v = (ts.tensor(rng.standard_normal((2, h, m, D)).astype(np.float32), t)
               for h, m, t in ((16, S, "bf16"), (4, n, codes), (4, n, codes)))
    cache = ts.kv_cache((2, 4, 3072, D), codes).append(k, v)
    f = ts.jit(lambda q, c: ts.flash_attention(q, c), target="cuda")
    with ts.config.scope(poison=True):
        got = np.asarray(ts.cast(f(q, cache), "f64"))
    kernel = "cluster" if S == 1 else "rows"
    assert (f"call decode_{kernel}(" in f.inspect_ir("schedule")) == (S <= 16)
    want, size = (x.swapaxes(1, 2).reshape(got.shape) for x in attended64(q, k, v, True))
    assert_close(got, want, "bf16", n=2, scale=size)


@pytest.mark.parametrize("S, n, room, causal", [
    (1, 1000, 3072, True), (1, 4096, 4096, True), (4, 2050, 3072, True), (3, 77, 3072, False),
    (16, 3000, 4096, True), (1, 20, 32768, True), (2, 30001, 32768, True)])
def test_a_cache_whose_length_is_data(S, n, room, causal, rng):
    q, k, v = (ts.tensor(rng.standard_normal((2, h, m, 128)).astype(np.float32), "bf16")
               for h, m in ((16, S), (4, n), (4, n)))
    cache = ts.kv_cache((2, 4, room, 128), "bf16").append(k, v)
    for x in (cache._storage.K, cache._storage.V):
        x.array[:, :, n:] = 1e30
    f = ts.jit(lambda q, c: ts.flash_attention(q, c, causal=causal), target="cuda")
    with ts.config.scope(poison=True):
        got = np.asarray(ts.cast(f(q, cache), "f64"))
    kind = "many_rows" if S * 4 > 16 or room > 4096 else "cluster" if room <= 3072 else "rows"
    assert f"call decode_{kind}" in f.inspect_ir("schedule")
    want, size = (x.swapaxes(1, 2).reshape(got.shape) for x in attended64(q, k, v, causal))
    assert_close(got, want, "bf16", n=2, scale=size)
