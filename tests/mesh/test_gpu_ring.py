"""Rings of long sequences on meshes of GPUs, simulated, with a driver and NCCL that pretend."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from fake_nccl import nccl as nccl
from lowering_cases import apart as apart
from mesh.test_gpu_programs import gpus as gpus
from mesh.test_ring import MESHES, D, S, exact, operands, spread
from tolerance import assert_close


@pytest.mark.parametrize("kind, heads, causal, zigzag", [
    ("ring", 2, False, False), ("ring", 4, True, True), ("batch too", 1, True, False),
    ("two axes", 2, True, True), ("more ranks than rows", 2, True, True)])
def test_results_and_gradients_are_those_of_attention(gpus, nccl, rng, kind, heads, causal,
                                                      zigzag):
    axes, spec = MESHES[kind]
    if kind == "more ranks than rows":
        axes = {"sp": 4}
    length = 3 if kind == "more ranks than rows" else S
    arrays = operands(rng, heads, length)
    mesh = ts.dist.mesh([f"cuda:{i}" for i in range(int(np.prod(list(axes.values()))))],
                        tuple(axes), tuple(axes.values()))

    def slopes(attend):
        return ts.value_and_grad(lambda *xs: ts.sum(ts.sin(attend(*xs))), argnums=(0, 1, 2))

    def program():
        xs = spread(arrays, mesh, spec)
        f = ts.jit(lambda *xs: ts.ring_attention(*xs, causal=causal, zigzag=zigzag))
        step = ts.jit(slopes(f))
        for _ in range(2):
            y, (_, grads) = f(*xs), step(*xs)
        assert y.local.place == 0 and all(g.layout == x.layout for g, x in
                                          zip(grads, xs, strict=True))
        return y.numpy(), [g.numpy() for g in grads], step.capture

    want = slopes(lambda *xs: ts.attention(*xs, causal=causal))(*map(ts.tensor, arrays))[1]
    for y, grads, captured in ts.dist.simulate(program, mesh):
        assert_close(y, exact(*arrays, causal), "f32", n=length * D)
        for g, w in zip(grads, want, strict=True):
            assert_close(g, w.numpy(), "f32", n=length * D)
        assert captured.startswith("on: ")
    assert {what for _, what, _ in nccl.calls} >= {"swap"}
