"""Functions as files on a GPU, and which features of it their kernels use."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from gpu_harness import needs_hopper, require_gpu
from tolerance import assert_close

require_gpu()


@pytest.mark.row("CORE-22", "DEP-03")
def test_a_loaded_function_runs_where_its_arguments_lie(rng, tmp_path):
    """Exported from the host, called on the GPU: matmuls, attention, a captured table; and its
    gradient."""
    X, W = rng.standard_normal((2, 4, 64, 32)), rng.standard_normal((128, 96))
    table = ts.tensor(rng.standard_normal((96,)), "f32")

    @ts.jit
    def f(x, w):
        y = ts.attention(x, x, x, causal=True)
        y = ts.transpose(y, (0, 2, 1, 3)).reshape(128, 128)
        return ts.tanh(y @ w) + table

    x, w = ts.tensor(X, "f32"), ts.tensor(W, "f32")
    again = ts.load(ts.export(f, tmp_path / "f.tsf", x, w))
    here, there = (x, w), (x.to("cuda"), w.to("cuda"))
    made = again(*there)
    assert made.device == "cuda:0"
    s = np.einsum("bhqd,bhkd->bhqk", X, X) / np.sqrt(32)
    s[..., np.triu(np.ones((64, 64), bool), 1)] = -np.inf
    e = np.exp(s - s.max(-1, keepdims=True))
    y = np.einsum("bhqk,bhkd->bhqd", e / e.sum(-1, keepdims=True), X)
    want = np.tanh(y.transpose(0, 2, 1, 3).reshape(128, 128) @ W) + table.numpy()
    assert_close(made.numpy(), want, "f32", 128, scale=4.0)
    assert made.numpy().tobytes() == f(*there).numpy().tobytes() == again(*there).numpy().tobytes()

    def loss(x, w):
        return ts.mean(ts.square(again(x, w)))

    for a, b in zip(ts.grad(loss, (0, 1))(*there), ts.grad(loss, (0, 1))(*here), strict=True):
        assert_close(a.numpy(), b.numpy(), "f32", 128, scale=float(np.abs(b.numpy()).max()))


@pytest.mark.row("SYS-12")
@needs_hopper
def test_what_kernels_that_were_launched_use_is_reported(rng):
    x, w = (ts.tensor(rng.standard_normal((512, 512)), "bf16").to("cuda") for _ in range(2))
    f = ts.jit(lambda x, w: ts.softmax(ts.cast(x @ w, "f32")))
    f(x, w)
    report = ts.arch_report()
    counts = report.used["sm_90a"]
    assert counts["wgmma"] >= 1 and counts["TMA"] >= 1
    assert any({"wgmma", "TMA"} <= k.features for k in report.kernels)
    assert any("wgmma" not in k.features for k in report.kernels)  # softmax multiplies nothing
