"""Loops on a GPU: launches of a CUDA graph, nodes that loop, and launched by the host."""

from __future__ import annotations

import numpy as np

import tessera as ts
from gpu_harness import require_gpu
from loop_programs import nested, newton
from tessera.graph import host_loop

require_gpu()


def test_a_while_loop(rng):
    x = ts.tensor(rng.uniform(0.5, 4, 1000).astype(np.float32))
    f = ts.jit(newton)
    for k in range(4):  # by the host, then by a node of a graph
        y, _, n = f((x * (k + 1.0)).to("cuda"))
        assert y.device == "cuda:0" and n.item() == ts.jit(newton)(x * (k + 1.0))[2].item()
        np.testing.assert_allclose(y.numpy(), np.sqrt((k + 1.0) * x.numpy().astype(float)),
                                   rtol=1e-6)
    assert f.capture.startswith("on: ") and "in one launch" in f.capture


def test_loops_in_loops(rng, monkeypatch):
    monkeypatch.setattr(host_loop, "LONG", 0)
    w, f = ts.tensor(np.eye(16, dtype=np.float32) * 0.9), ts.jit(nested)
    for _ in range(4):
        x = ts.tensor(rng.uniform(0.5, 4, (4, 16)).astype(np.float32))
        for y, want in zip(f(x.to("cuda"), w.to("cuda")), ts.jit(nested)(x, w), strict=True):
            np.testing.assert_allclose(y.numpy(), want.numpy(), rtol=1e-4, atol=1e-4)
    assert "in one launch" in f.capture


def test_a_scan_of_ten_thousand_iterations(rng):
    """c <- 0.9 c + x, against f64."""
    xs = rng.standard_normal((10_000, 8)).astype(np.float32)

    def f(xs):
        return ts.scan(lambda c, x: (0.9 * c + x, c), ts.zeros(8), xs)

    last, rows = ts.jit(f)(ts.tensor(xs).to("cuda"))
    c, want = np.zeros(8), []
    for x in xs.astype(float):
        want.append(c)
        c = 0.9 * c + x
    np.testing.assert_allclose(last.numpy(), c, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(rows.numpy(), np.stack(want), rtol=1e-4, atol=1e-4)


def test_gradients_and_draws_of_long_scans(rng, monkeypatch):
    monkeypatch.setattr(host_loop, "LONG", 0)
    w, xs, h = (ts.tensor((0.3 * rng.standard_normal(s)).astype(np.float32))
                for s in ((16, 16), (12, 4, 16), (4, 16)))

    def loss(w, xs, h):
        def step(h, x):
            h = ts.tanh(h @ w + x)
            return h, ts.sum(h * h)

        last, sums = ts.scan(step, h, xs)
        return ts.sum(last**2) + ts.sum(sums)

    here, f = ts.jit(ts.grad(loss, (0, 1, 2)))(w, xs, h), ts.jit(ts.grad(loss, (0, 1, 2)))
    for _ in range(3):
        there = f(*(x.to("cuda") for x in (w, xs, h)))
        for a, b in zip(here, there, strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-3, atol=1e-4)
    assert "in one launch" in f.capture
    made = []
    for target in ("cpu", "cuda"):
        ts.random.seed(3)
        f = ts.jit(lambda x: ts.map(lambda r: ts.dropout(r, 0.5), x), target=target)
        made.append(f(ts.ones((5, 64))).numpy())
    assert np.array_equal(*made) and len({r.tobytes() for r in made[0]}) == 5
