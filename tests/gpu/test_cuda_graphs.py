"""Compiled functions as CUDA graphs without being asked: the bits and the places of launches."""

from __future__ import annotations

import numpy as np
import pytest

import hopper_programs
import tessera as ts
from gpu_harness import require_gpu
from tessera.graph import tree
from tessera.runtime.device import device

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


def test_tiles_of_attention_are_given_out_anew_at_each_launch(rng):
    """Causal attention counts the tiles that blocks have taken, and nothing clears the counter in
    front of it: step by step, and in graphs."""
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(2, 8, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    want = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=True)
    several = ts.jit(lambda q, k, v: [ts.attention(q, k, n * v, causal=True)
                                      for n in (1.0, 2.0, 4.0)])
    for graphs in (False, True, False):
        with ts.config.scope(cuda_graphs=graphs):
            for _ in range(6):
                for n, y in zip((1.0, 2.0, 4.0), several(q, k, v), strict=True):
                    got = torch.from_dlpack(y).float()
                    assert (got - n * want).abs().max() < 2e-2 * n
            assert several.capture.endswith("in one launch") == graphs


def test_tiles_of_a_matmul_are_given_out_anew_in_graphs_of_others(rng):
    """Two graphs of torch's are replayed beside each other and beside plain launches, which have
    counters of their own."""
    torch = pytest.importorskip("torch")
    if device().cc != (9, 0):
        pytest.skip("the form is that of sm_90a")
    kernel = hopper_programs.gemm_nt.with_schedule(ts.Schedule(TILES="dynamic"))
    a, b = (torch.randn(2048, 512, device="cuda").bfloat16() for _ in range(2))
    want = a.float() @ b.float().T

    def product():
        c = torch.full((2048, 2048), float("nan"), device="cuda", dtype=torch.bfloat16)
        kernel[(16, 16)](a, b, c)
        return c

    def right(c):
        assert (c.float() - want).abs().max() < 0.5

    for _ in range(4):
        right(product())
    captured = []
    for _ in range(2):
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            c = product()
        captured.append((graph, c, torch.cuda.Stream()))
    for _ in range(8):
        torch.cuda.synchronize()
        for graph, _, stream in captured:
            with torch.cuda.stream(stream):
                for _ in range(4):
                    graph.replay()
        right(product())
        torch.cuda.synchronize()
        for _, c, _ in captured:
            right(c)


@pytest.mark.alone
def test_the_host_waits_less(rng):
    """Forty launches as one."""
    import time

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
