"""A step of the example on a mesh of GPUs, simulated, with a driver and NCCL that pretend."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from fake_nccl import nccl as nccl
from lowering_cases import apart as apart
from mesh.test_gpu_programs import compute_on_hosts
from mesh.test_gpu_programs import gpus as gpus
from mesh.test_moe import on_mesh, operands
from tolerance import assert_close

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from train import Model, Pipelined, Run  # noqa: E402
from transformer import Config, init_params, place_batch, stage_params  # noqa: E402

SMALL = {"d": 8, "layers": 2, "heads": 2, "T": 8, "B": 4, "steps": 3, "microbatches": 2}


@functools.cache
def losses_of_hosts() -> list[tuple[float, float]]:
    """Of two hosts: how ranks share the work does not matter."""
    return losses({"dp": 2}, False)


def losses(axes: dict[str, int], gpus: bool, **more) -> list[tuple[float, float]]:
    """Loss and norm of some steps on each rank's mesh, the same on all ranks."""
    names = [f"cuda:{i}" for i in range(int(np.prod(list(axes.values()))))]
    grid = ts.dist.mesh(names if gpus else None, tuple(axes), tuple(axes.values()))

    def program() -> list:
        c = Config(**SMALL, **more)
        object.__setattr__(c, "__dict__", {**c.__dict__, "grid": grid})
        ts.random.seed(1)
        params = stage_params(c, init_params(c))
        run = Run(params, [None if p is None else c.optimizer.init(p) for p in params])
        model = Model(c) if c.stages == 1 else Pipelined(c)
        rng, found = np.random.default_rng(5), []
        for _ in range(2):
            batch = rng.integers(0, 256, (2, c.B, c.T))
            found.append(model.advance(run, place_batch(c, tuple(batch)), 1e-3))
        return found

    made = ts.dist.simulate(program, grid)
    assert all(m == made[0] for m in made)
    return made[0]


@pytest.mark.parametrize("axes, zero", [({"dp": 2}, 0), ({"tp": 2}, 0), ({"dp": 2, "tp": 2}, 0),
                                        ({"dp": 2}, 1), ({"dp": 2}, 2), ({"dp": 2}, 3),
                                        ({"pp": 2}, 0), ({"dp": 2, "pp": 2}, 0),
                                        ({"dp": 2, "pp": 2}, 1)], ids=str)
def test_losses_are_those_of_hosts(gpus, nccl, monkeypatch, axes, zero):
    got = losses(axes, True, zero=zero)
    compute_on_hosts(monkeypatch)
    np.testing.assert_allclose(got, losses_of_hosts(), rtol=1e-5)
    sent = {what for _, what, _ in nccl.calls}
    assert ("all_reduce" in sent or axes == {"pp": 2}) and ("send" in sent) == ("pp" in axes)


@pytest.mark.parametrize("top_k, factor", [(1, 1.25), (2, None)])
def test_experts_on_ranks_are_those_of_one_process(gpus, nccl, rng, top_k, factor):
    """Tokens and experts on the ranks of one axis: forward, derivatives, and a step as a graph."""
    arrays = operands(rng)

    def loss(router, w1, w2, x):
        return ts.mean(ts.square(ts.moe(x, router, (w1, w2), top_k=top_k, groups=2,
                                        capacity_factor=factor)))

    x, *weights = map(ts.tensor, arrays)
    meant, slopes = ts.value_and_grad(loss, argnums=(0, 1, 2))(*weights, x)

    def program():
        x, *weights = on_mesh(arrays, mesh)
        step = ts.jit(ts.value_and_grad(loss, argnums=(0, 1, 2)))
        for _ in range(3):
            made, grads = step(*weights, x)
        assert all(g.local.place == 0 for g in grads) and "all_to_all" in str(step.plan)
        return made.numpy(), [g.numpy() for g in grads]

    mesh = ts.dist.mesh(["cuda:0", "cuda:1"], axes="ep")
    for made, grads in ts.dist.simulate(program, mesh):
        assert_close(made, meant.numpy(), "f32", 100)
        for g, s in zip(grads, slopes, strict=True):
            assert_close(g, s.numpy(), "f32", 1000, scale=np.abs(s.numpy()).max())
