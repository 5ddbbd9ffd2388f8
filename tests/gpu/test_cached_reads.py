"""Kernels whose last groups start first, and launches in another order: the bits stay."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu
from tessera.graph import tree
from tessera.graph.cuda import lower

require_gpu()

BF16 = "bf16 @accum(f32)"


def train(ws, x):
    def loss(ws):
        h = x
        for w in ws:
            h = ts.gelu(ts.softmax(h, axis=-1) @ ts.cast(w, BF16))
        return ts.mean(ts.square(ts.cast(h, "f32")))

    value, grads = ts.value_and_grad(loss)(ws)
    return value, [w - 0.1 * g for w, g in zip(ws, grads, strict=True)]


@pytest.mark.parametrize("rows", [4096, 4100])
def test_results_are_those_of_the_usual_order(rows, rng, monkeypatch):
    ws = ts.to([ts.tensor(rng.standard_normal((1536, 1536)).astype(np.float32) / 40)
                for _ in range(3)], "cuda")
    x = ts.to(ts.tensor(rng.standard_normal((rows, 1536)).astype(np.float32), "bf16"), "cuda")
    step = ts.jit(train)
    found = [y.array.tobytes() for y in tree.flatten(step(ws, x))[0]]
    assert "the last groups start first" in str(step.inspect_ir("schedule"))
    monkeypatch.setattr(lower, "turn_around", lambda plan: plan)
    monkeypatch.setattr(lower, "order_for_cache", lambda groups, target: groups)
    assert found == [y.array.tobytes() for y in tree.flatten(ts.jit(train)(ws, x))[0]]
