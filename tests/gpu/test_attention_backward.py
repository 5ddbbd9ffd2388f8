"""The kernels of attention's gradient on a GPU against f64, on outputs that begin as NaN."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
import tile_gpu
from attention_cases import numbers, truth
from gpu_harness import needs_hopper
from library_cases import attention as attention_in_f64
from tessera import bf16, f16
from tessera.graph.cuda.passes import attention_kernels
from tessera.kernels.attention_backward import (
    LONG,
    attention_keys,
    attention_queries,
    keys_block,
    queries_block,
)
from tessera.kernels.attention_fused_backward import attention_fused_backward
from tessera.runtime.device import device

CASES = [(64, 128, 128, 1, False), (64, 333, 333, 1, True), (64, 1000, 1000, 2, True),
         (64, 72, 1096, 2, False), (128, 128, 128, 1, True), (128, 333, 333, 2, False),
         (128, 1000, 1000, 1, True), (128, 72, 1096, 2, True), (80, 200, 200, 2, True),
         (96, 130, 130, 1, False), (192, 200, 200, 2, True), (256, 130, 200, 1, True)]


@pytest.mark.parametrize("D, S, T, group, causal", CASES, ids=str)
def test_as_on_the_interpreter(rng, D, S, T, group, causal):
    H = 4
    q, g = numbers(rng, bf16, H, S, D), numbers(rng, bf16, H, S, D)
    k, v = numbers(rng, bf16, H // group, T, D), numbers(rng, bf16, H // group, T, D)
    lse = np.abs(rng.standard_normal((H, S))).astype(np.float32) + 4  # weights of about 1 / 16
    delta, scale = rng.standard_normal((H, S)).astype(np.float32), D ** -0.5
    chip = device().target.generation
    common = {"group": group, "causal": causal, "rtol": 2e-2, "atol": 2e-2}  # a rounding of weights
    for kernel, like, rows, block in ((attention_keys, (k, v), T, keys_block),
                                      (attention_queries, (q,), S, queries_block)):
        made = block(bf16, D, chip)
        outs = [np.full(x.shape, np.nan, bf16.numpy) for x in like]
        tile_gpu.compare(kernel, q, k, v, g, lse, delta, *outs, scale,
                         groups=(-(-rows // made["BM"]), len(like[0])), **made, **common)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("cotangent", ["f32", "bf16"])
@pytest.mark.parametrize("D, S", [(64, 1024), (64, 1999), (64, 777), (128, 2048), (128, 777)])
def test_gradients_of_functions(rng, D, S, cotangent, causal):
    """Through ts.vjp, against f64 differences of the meaning; and two runs give the same bits.
    With a cotangent as wide as operands the kernel of queries sums its products with the result."""
    q, k, v, g = (ts.tensor(numbers(rng, bf16, 1, 2, S, D), "bf16") for _ in "qkvg")

    @ts.jit
    def both(q, k, v, g):
        y, pull = ts.vjp(lambda *x: ts.cast(ts.attention(*x, causal=causal), cotangent), q, k, v)
        return y, pull(ts.cast(g, cotangent))

    given = [x.to("cuda") for x in (q, k, v, g)]
    y, found = both(*given)
    again = both(*given)[1]
    a, b, c, ct = (np.asarray(x.array, np.float64) for x in (q, k, v, g))
    want = gradients(a, b, c, ct, causal)
    assert distance(y, attention_in_f64(a, b, c, causal=causal)) < 6e-3
    for x, z, w in zip(found, again, want, strict=True):
        assert distance(x, w) < 8e-3 and np.array_equal(x.numpy(), z.numpy())


@pytest.mark.parametrize("S", [777, 2048])
def test_pairs_of_blocks_give_the_same_bits(rng, S, monkeypatch):
    """Blocks that bring keys and values for each other; of an odd number of them one has no
    queries."""
    given = [ts.tensor(numbers(rng, bf16, 1, 3, S, 64), "bf16").to("cuda") for _ in "qkvg"]
    found = []
    for queries in (S, LONG):
        def block(dtype, width, chip, many=queries, **rules):
            return queries_block(dtype, width, chip, many)

        monkeypatch.setattr(attention_kernels, "queries_block", block)
        both = ts.jit(lambda q, k, v, g: ts.vjp(ts.attention, q, k, v)[1](ts.cast(g, "f32")))
        found.append([x.numpy() for x in both(*given)])
    for alone, pairs in zip(*found, strict=True):
        assert np.array_equal(alone, pairs)


@needs_hopper
@pytest.mark.parametrize("dtype, H, S, T, heads, slots", [
    (bf16, 2, 128, 512, 1, 1), (f16, 6, 192, 768, 3, 3), (bf16, 8, 512, 1024, 4, 8),
    (bf16, 3, 1024, 1024, 1, 2), (f16, 1, 320, 512, 1, 1)], ids=str)
def test_sums_in_turn(rng, dtype, H, S, T, heads, slots):
    """Against f64; and again on memory of NaN, with the same bits."""
    q, g = (rng.standard_normal((H, S, 128)).astype(dtype.numpy) for _ in "qg")
    k, v = (rng.standard_normal((H, T, 128)).astype(dtype.numpy) for _ in "kv")
    lse, delta, *want = truth(q, k, v, g, False)
    given = [ts.tensor(x).to("cuda") for x in (q, k, v, g, lse, delta)]
    found = []
    for _ in range(3):
        sums = ts.tensor(np.full((slots, S, 128), np.nan, np.float32)).to("cuda")
        turns = ts.zeros((slots * S // 32 + 1,), "int32").to("cuda")
        outs = [ts.tensor(np.full(x.shape, np.nan, dtype.numpy)).to("cuda") for x in want]
        attention_fused_backward(*given, sums, turns, *outs, 128 ** -0.5, heads=heads, slots=slots)
        found.append([x.numpy() for x in outs])
    for i, w in enumerate(want):
        assert distance(found[0][i], w) < (4e-3 if dtype is bf16 else 6e-4)
        assert all(np.array_equal(found[0][i], again[i]) for again in found[1:])


@needs_hopper
def test_gradients_in_turn(rng, monkeypatch):
    """Of functions, again and again."""
    monkeypatch.setattr(attention_kernels, "fused_backward_plan",
                        lambda *_: {"heads": 3, "slots": 6})
    S = 1024
    q, k, v, g = (ts.tensor(numbers(rng, bf16, 1, 12, S, 128), "bf16") for _ in "qkvg")
    both = ts.jit(lambda *x: tuple(ts.cast(y, "bf16") for y in ts.vjp(
        ts.attention, *x[:3])[1](ts.cast(x[3], "f32"))))
    given = [x.to("cuda") for x in (q, k, v, g)]
    found = [x.numpy() for x in both(*given)]
    want = gradients(*(np.asarray(x.array, np.float64) for x in (q, k, v, g)), False)
    for x, w in zip(found, want, strict=True):
        assert distance(x, w) < 8e-3
    for _ in range(20):
        again = both(*given)
    assert all(np.array_equal(x, y.numpy()) for x, y in zip(found, again, strict=True))


def gradients(q, k, v, g, causal):
    scale = q.shape[-1] ** -0.5
    s = q @ k.swapaxes(-1, -2) * scale
    if causal:
        s = np.where(np.tril(np.ones(s.shape[-2:], bool)), s, -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    dp = g @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
    return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ g


def distance(x, y):
    x, y = np.asarray(x.numpy() if hasattr(x, "numpy") else x, np.float64), np.asarray(y)
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))
