"""Compiled functions as CUDA graphs without being asked: the bits and the places of launches."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu
from tessera import stdlib
from tessera.graph import tree

require_gpu()


def train(params, state, x):
    def loss(p):
        h = x
        for w in p["ws"]:
            h = ts.gelu(ts.cast(h, "bf16 @accum(f32)") @ ts.cast(w, "bf16 @accum(f32)"))
        return ts.mean(ts.square(ts.cast(h, "f32") + p["b"]))

    value, grads = ts.value_and_grad(loss)(params)
    params, state = ts.optim.AdamW().update(params, grads, state, 1e-3)
    return value, params, state


def copied(value):
    return tree.map_tree(lambda x: x.copy(), value)


@pytest.mark.parametrize("donate", [(), ("params", "state")])
def test_training_steps_have_the_same_bits(donate, rng):
    """With kernels that read by TMA, batches at new places, and losses that are kept."""
    params = {"ws": [ts.param(ts.tensor(
        rng.standard_normal((512, 512)).astype(np.float32) / 24)) for _ in range(4)],
        "b": ts.param(ts.zeros(512))}
    params, state = ts.to((params, ts.optim.AdamW().init(params)), "cuda")
    batches = [ts.tensor(rng.standard_normal((256, 512)).astype(np.float32)).to("cuda")
               for _ in range(8)]
    found = []
    for graphs in (False, True):
        with ts.config.scope(cuda_graphs=graphs):
            step, losses = ts.jit(train, donate=donate), []
            p, s = copied(params), copied(state)
            for x in batches:
                value, p, s = step(p, s, x)
                losses.append(value)
            assert step.capture.endswith("in one launch") == graphs
            found.append([x.array.tobytes() for x in (*losses, *tree.flatten((p, s))[0])])
    assert found[0] == found[1] and len(set(found[0][:8])) == 8


def test_results_that_are_kept_and_torch_on_a_side_stream(rng):
    torch = pytest.importorskip("torch")
    ws = [ts.tensor(rng.standard_normal((256, 256)).astype(np.float32) / 16).to("cuda")
          for _ in range(5)]

    def chain(x, *ws):
        for w in ws:
            x = ts.tanh(x @ w)
        return x

    f, plain = ts.jit(chain), ts.jit(chain, capture_graph=False)
    kept, want = [], []
    for i in range(8):
        with torch.cuda.stream(torch.cuda.Stream()):
            big = torch.randn(2048, 2048, device="cuda")
            for _ in range(5):
                big = torch.sin(big @ big)
            x = torch.full((256, 256), 0.01 * i, device="cuda") + 0 * big[:256, :256]
            with ts.config.scope(cuda_graphs=True):
                kept.append(f(x, *ws))
            want.append(plain(x, *ws).array)
    with ts.config.scope(cuda_graphs=True):
        assert f.capture.endswith("in one launch")
    for y, expected in zip(kept, want, strict=True):
        np.testing.assert_array_equal(y.array, expected)
    assert len({y.memory.pointer for y in kept}) == 8


def test_tiles_are_given_out_anew_at_each_launch(rng):
    """Causal attention counts the tiles that blocks have taken, and nothing clears the counter in
    front of it: step by step, in graphs of ours, and in two of torch's beside each other."""
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(2, 8, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    want = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=True)

    def right(y, times=1.0):
        assert (y.float() - times * want).abs().max() < 2e-2 * times

    several = ts.jit(lambda q, k, v: [ts.attention(q, k, n * v, causal=True)
                                      for n in (1.0, 2.0, 4.0)])
    for graphs in (False, True, False):
        with ts.config.scope(cuda_graphs=graphs):
            for _ in range(6):
                for n, y in zip((1.0, 2.0, 4.0), several(q, k, v), strict=True):
                    right(torch.from_dlpack(y), n)
            assert several.capture.endswith("in one launch") == graphs
    captured = []
    for _ in range(2):
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            y = stdlib.attention(q, k, v, causal=True)
        captured.append((graph, y, torch.cuda.Stream()))
    for _ in range(5):
        for _, y, _ in captured:
            y.fill_(float("nan"))
        torch.cuda.synchronize()
        for graph, _, stream in captured:
            with torch.cuda.stream(stream):
                for _ in range(4):
                    graph.replay()
        right(stdlib.attention(q, k, v, causal=True))
        torch.cuda.synchronize()
        for _, y, _ in captured:
            right(y)


@pytest.mark.alone
def test_the_host_waits_less(rng):
    """Forty launches as one."""
    import time

    from tessera.runtime.device import device

    x = ts.ones((64, 64)).to("cuda")
    found = {}
    for graphs in (False, True):
        with ts.config.scope(cuda_graphs=graphs):
            f = ts.jit(lambda x: [x := ts.tanh(x @ x) for _ in range(40)][-1])
            for _ in range(4):
                f(x)
            times = []
            for _ in range(5):
                device().synchronize()
                begin = time.perf_counter()
                for _ in range(20):
                    f(x)
                times.append((time.perf_counter() - begin) / 20)
                device().synchronize()
            found[graphs] = 1e6 * min(times)
    print("test_the_host_waits_less", {"plain_us": found[False], "graph_us": found[True]})
    assert found[True] < found[False]
