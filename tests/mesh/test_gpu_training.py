"""A step of the example on a mesh of GPUs, simulated, with a driver and NCCL that pretend."""

from __future__ import annotations

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

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from train import Model, Run  # noqa: E402
from transformer import Config, init_params, place_batch, place_params  # noqa: E402

SMALL = {"d": 8, "layers": 1, "heads": 2, "T": 8, "B": 4, "steps": 3}


def losses(axes: dict[str, int], gpus: bool, **more) -> list[tuple[float, float]]:
    """Loss and norm of some steps on each rank's mesh, the same on all ranks."""
    names = [f"cuda:{i}" for i in range(int(np.prod(list(axes.values()))))]
    grid = ts.dist.mesh(names if gpus else None, tuple(axes), tuple(axes.values()))

    def program() -> list:
        c = Config(**SMALL, **more)
        object.__setattr__(c, "__dict__", {**c.__dict__, "grid": grid})
        ts.random.seed(1)
        params = place_params(grid, init_params(c))
        if c.zero:
            params = c.optimizer.shard(params)
        run, model = Run([params], [c.optimizer.init(params)]), Model(c)
        rng, found = np.random.default_rng(5), []
        for _ in range(2):
            batch = rng.integers(0, 256, (2, c.B, c.T))
            found.append(model.advance(run, place_batch(c, tuple(batch)), 1e-3))
        return found

    made = ts.dist.simulate(program, grid)
    assert all(m == made[0] for m in made)
    return made[0]


@pytest.mark.parametrize("axes, zero", [({"dp": 2}, 0), ({"tp": 2}, 0), ({"dp": 2, "tp": 2}, 0),
                                        ({"dp": 2}, 1), ({"dp": 2}, 2), ({"dp": 2}, 3)], ids=str)
def test_losses_are_those_of_hosts(gpus, nccl, monkeypatch, axes, zero):
    got = losses(axes, True, zero=zero)
    compute_on_hosts(monkeypatch)
    np.testing.assert_allclose(got, losses(axes, False, zero=zero), rtol=1e-5)
    assert {what for _, what, _ in nccl.calls} >= {"all_reduce"}
