"""A training step of GPT-2 on several GPUs, data parallel: how its time compares with one GPU's.

    mpirun -n 2 python benchmarks/mesh_step.py                  # 124M, 16 windows a GPU, T 1024
    mpirun -n 4 python benchmarks/mesh_step.py --layers 24 --d 1024 --heads 16     # 350M

Rank 0 trains alone first, with the windows of one GPU, while the others wait; then all together,
each with as many. The model is that of gpt2_step.py. Weak scaling is the one time by the other.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import record
from gpt2_step import sized

import tessera as ts
from tessera import config
from tessera.bench.models.record import StepModel, batch, weights
from tessera.bench.models.step import OPTIMIZER, training_step
from tessera.graph import tree
from tessera.runtime.device import device


def placed(mesh: ts.dist.Mesh | None, x: np.ndarray, split: bool) -> ts.Tensor:
    if mesh is None:
        return ts.tensor(x).to("cuda")
    spec = ts.ShardSpec(("row",), ("dp",)) if split else ts.ShardSpec(replicate=True)
    return ts.dist.distribute(ts.tensor(x), spec, mesh=mesh)


def step_times(mesh: ts.dist.Mesh | None, model: StepModel, steps: int) -> dict[str, Any]:
    """Milliseconds of a step until its loss is on the host, and of its call; the losses."""
    params = tree.map_tree(lambda w: placed(mesh, w, False), weights(model))
    step, state = training_step(model, donate=("params", "state")), OPTIMIZER.init(params)
    x, y = (placed(mesh, t, True) for t in batch(model))
    losses, times, host = [], [], []
    for _ in range(4 + steps):
        begin = time.perf_counter()
        value, params, state = step(params, state, x, y)
        called = time.perf_counter()
        losses.append(float(value.item()))
        host.append(called - begin)
        times.append(time.perf_counter() - begin)
    plan = [] if mesh is None else [str(c) for c in step.plan]
    return {"ms": 1e3 * float(np.median(times[4:])), "host_ms": 1e3 * float(np.median(host[4:])),
            "first_call_s": times[0], "losses": losses, "plan": plan}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--steps", type=int, default=10)
    a, model = sized(flags, B=16)
    rank, ranks = ts.dist.rank(), ts.dist.world_size()
    alone = step_times(None, model, a.steps) if rank == 0 else None
    with config.scope(comm_timeout=0):  # it compiles first
        ts.dist.barrier()
    mesh = ts.dist.mesh([f"cuda:{r}" for r in range(ranks)], axes="dp")
    model = model.sized(B=ranks * a.B)
    together = step_times(mesh, model, a.steps)
    if rank == 0 and alone is not None:
        record.write("mesh_step", {
            "device": f"{ranks} x {device().name}", "model": vars(a), "ranks": ranks,
            "alone": alone, "together": together, "weak_scaling": alone["ms"] / together["ms"]})


if __name__ == "__main__":
    main()
