"""Products of a step on a GPU: ours and cuBLAS's are the same numbers, and both take time."""

from __future__ import annotations

import pytest

from gpu_harness import require_gpu
from tessera.bench.catalogue import MODELS
from tessera.bench.step_matmuls import measure_matmuls
from tessera.runtime.device import device
from tessera.runtime.sustained import SustainedClock

require_gpu()
pytest.importorskip("torch")


@pytest.mark.alone
@pytest.mark.parametrize("name, extents", [
    ("gpt2-124m-b8", {"layers": 1, "vocabulary": 512}),
    ("llama", {"layers": 1, "B": 1, "d": 512, "heads": 8, "kv_heads": 2, "hidden": 1024,
               "vocabulary": 512})])
def test_products_of_a_step_beside_cublas(name, extents):
    from tessera.bench.torch_matmuls import TorchMatmul

    clock = SustainedClock(device(), settle_ms=1, window_ms=3, rounds=1)
    rows = measure_matmuls(MODELS[name].sized(**extents), clock, TorchMatmul, lambda text: None)
    assert len(rows) >= 10
    for r in rows:
        assert r["ours"]["us"] > 1 and r["cuBLAS"]["us"] > 1 and r["kernels"], r
        assert r["off"] is None or r["off"] < 2.0**-7, r
    apart = [r["product"] for r in rows if r["off"] is None]  # "ntnt 64x32x16 + 16": parts of one
    assert len(apart) <= 2 and all(len(p.split()[0]) > 2 for p in apart)  # array, not compared
