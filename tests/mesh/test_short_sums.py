"""Short sums of a message lie side by side in one array, on meshes of GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from fake_nccl import nccl as nccl
from lowering_cases import apart as apart
from mesh.test_gpu_programs import DEVICES, SPLIT, on_ranks, placed, values
from mesh.test_gpu_programs import gpus as gpus
from tessera.graph.cuda.passes.overlap import overlapped
from tessera.graph.cuda.program.run import CudaProgram
from tessera.mesh.collectives import exchange_ops
from tessera.mesh.sharding import partitioned_steps
from tessera.mesh.sharding.localize import localize
from tolerance import assert_close


def loss(params: Any, x: Any) -> Any:
    for w, b, c in params:
        x = ts.tanh((x @ w) * c + b)
    return ts.sum(ts.square(x))


def loss_of(params: list, x: np.ndarray) -> float:
    for w, b, c in params:
        x = np.tanh((x @ w) * c + b)
    return float(np.sum(x * x))


def slope(params: list, x: np.ndarray, layer: int, which: int) -> np.ndarray:
    """Of the loss by one parameter, by differences in f64."""
    p, step = params[layer][which], 1e-6
    found = np.empty(p.shape)
    for i in np.ndindex(p.shape):
        ends = []
        for sign in (1, -1):
            moved = [tuple(a.copy() for a in layer) for layer in params]
            moved[layer][which][i] += sign * step
            ends.append(loss_of(moved, x))
        found[i] = (ends[0] - ends[1]) / (2 * step)
    return found


def sums_of(plan: Any) -> list[int]:
    """How many arrays each message has."""
    return [len(s.reads) for s in plan.steps if s.kind == "exchange"]


@pytest.mark.parametrize("least, arrays", [(1 << 6, 4), (0, 10)])
def test_gradients_are_right_either_way(gpus, nccl, rng, monkeypatch, least, arrays):
    """Of vectors of 5 elements and the loss; matrices of 25 are longer than 64 bytes."""
    monkeypatch.setattr(exchange_ops, "SHORT_BYTES", least)
    X, *P = values(rng, (6, 5), *[(5, 5), (5,), (5,)] * 3)
    layers = [tuple(P[i:i + 3]) for i in range(0, 9, 3)]

    def program(mesh):
        params = [tuple(placed(mesh, p, "whole") for p in layer) for layer in layers]
        step, x = ts.jit(ts.value_and_grad(loss, argnums=0)), placed(mesh, X, "rows")
        for _ in range(3):  # step by step, recorded, a graph
            value, made = step(params, x)
        plan = step._last.program.local(ts.dist.rank()).program.plan
        return value.item(), [[g.local.numpy() for g in layer] for layer in made], sums_of(plan)

    wide = [tuple(p.astype("f8") for p in layer) for layer in layers]
    for value, made, sent in on_ranks(2, program):
        assert sent == [arrays]
        assert_close(value, loss_of(wide, X.astype("f8")), "f32", 256)
        for i, layer in enumerate(made):
            for j, g in enumerate(layer):
                assert_close(g, slope(wide, X.astype("f8"), i, j), "f32", 256)


def test_parts_that_are_results_are_copied_when_all_is_made(monkeypatch):
    """A copy right behind a message would wait for it, and every kernel behind the copy."""
    monkeypatch.setattr(partitioned_steps, "GPU_BUCKET_BYTES", 1 << 24)
    mesh = ts.dist.mesh(DEVICES[:2], axes="x")

    def there(how: str, *shape: int) -> Any:
        return ts.dist.stand_in(shape, SPLIT[how], mesh, "f32")

    params = [(there("whole", 2048, 2048), there("whole", 2048), there("whole", 2048))] * 5
    made = ts.jit(ts.grad(loss, argnums=0)).traced(params, there("rows", 4096, 2048)).program.made
    plan = CudaProgram(localize(made, 0), "sm_90a").plan
    assert set(sums_of(plan)[:-1]) == {2}
    sent = [k for k, s in enumerate(plan.steps) if s.kind == "exchange"]
    found = overlapped(plan.steps, sent, (), plan.region)
    assert found is not None
    waits = {k: sent[n] for k, n in found.awaited.items() if k < sent[-1]}
    assert all(any(n < m < k for m in sent) for k, n in waits.items()), (waits, sent)
