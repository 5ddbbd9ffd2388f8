"""Functions as files on a GPU, and which features of it their kernels use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from gpu_harness import needs_hopper, require_gpu
from tolerance import assert_close

require_gpu()
ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


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


EXPORT = """
import sys, tessera as ts
from tessera.runtime.device import has_gpu
assert not has_gpu()

@ts.jit
def f(x, w):
    y = ts.attention(x, x, x, causal=True)
    y = ts.transpose(y, (0, 2, 1, 3)).reshape(512, 512)
    return {"y": ts.softmax(ts.cast(ts.tanh(y @ w), "f32")), "s": ts.sum(y, axis=0)}

x, w = ts.Tensor[2, 4, 256, 128, ts.bf16], ts.Tensor[512, 384, ts.bf16]
ts.export(f, sys.argv[1], x, w, targets=("sm_80", "sm_90a"))
"""
CALL = """
import sys, time, numpy as np, tessera as ts
from tessera.tile.launch import machine_code

def refuse(*args):
    raise AssertionError("something is compiled")

if sys.argv[3] == "refuse":
    machine_code.compile_request = machine_code.emit_request = refuse
given = np.load(sys.argv[2])
x, w = (ts.tensor(given[n], "bf16").to("cuda") for n in "xw")
begin = time.perf_counter()
f = ts.load(sys.argv[1])
first = f(x, w)["y"].numpy()
print(f"first result after {time.perf_counter() - begin:.3f} s")
made = f(x, w)
assert made["y"].device == "cuda:0" and first.tobytes() == made["y"].numpy().tobytes()
if sys.argv[3] == "refuse":
    assert f.chosen == ("sm_90a",), f.chosen
    assert "numba" not in sys.modules
np.savez(sys.argv[2], x=given["x"], w=given["w"], y=first, s=made["s"].numpy().astype("f"))
"""


@pytest.mark.row("DEP-01", "DEP-02")
@needs_hopper
def test_a_file_made_without_a_gpu_starts_without_compiling(rng, tmp_path):
    """One process sees no GPU and exports for two generations; another has an empty cache and a
    compiler that refuses."""
    X, W = (np.asarray(ts.tensor(rng.standard_normal(s), "bf16").numpy(), np.float64)
            for s in ((2, 4, 256, 128), (512, 384)))
    np.savez(tmp_path / "in.npz", x=X.astype("f"), w=W.astype("f"))

    def run(code, cache, *args, **env):
        done = subprocess.run([sys.executable, "-c", code, *args], text=True, capture_output=True,
                              cwd=tmp_path, env={**os.environ, "PYTHONPATH": PATHS, **env,
                                                 "TESSERA_CACHE_DIR": str(tmp_path / cache)})
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(EXPORT, "a", "f.tsf", CUDA_VISIBLE_DEVICES="")
    print(run(CALL, "b", "f.tsf", "in.npz", "refuse"))
    s = np.einsum("bhqd,bhkd->bhqk", X, X) / np.sqrt(128)
    s[..., np.triu(np.ones((256, 256), bool), 1)] = -np.inf
    e = np.exp(s - s.max(-1, keepdims=True))
    y = np.einsum("bhqk,bhkd->bhqd", e / e.sum(-1, keepdims=True), X)
    y = y.transpose(0, 2, 1, 3).reshape(512, 512)
    e = np.exp(np.tanh(y @ W))
    made = np.load(tmp_path / "in.npz")
    assert_close(made["y"], e / e.sum(-1, keepdims=True), "bf16", 512)
    assert_close(made["s"], y.sum(0), "bf16", 512, scale=float(np.abs(y.sum(0)).max()))


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
