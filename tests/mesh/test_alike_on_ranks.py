"""Programs of ranks that compute what all of them have: to the same bits."""

from __future__ import annotations

import tessera as ts
from mesh.planned_steps import gpus
from tessera.graph.cuda import CudaProgram
from tessera.mesh.sharding.localize import localize


def test_what_all_have_is_summed_in_one_order():
    """The square of the gradient of what all ranks have is the term of the first in the norm of
    all gradients. The others compute it too: where they left it out, their kernel summed that
    gradient in other blocks, and the parameter drifted apart by roundings."""
    mesh, R = gpus(tp=2), ts.ShardSpec(replicate=True)
    x, gain = ts.dist.stand_in((512, 64), R, mesh), ts.dist.stand_in((64,), R, mesh)
    up, down = (ts.dist.stand_in(shape, ts.ShardSpec((split,), ("tp",)), mesh)
                for shape, split in (((64, 128), "col"), ((128, 64), "row")))

    def step(params: dict, x: ts.Tensor) -> tuple:
        grads = ts.grad(lambda p: ts.mean(ts.square(
            (ts.relu(x @ p["up"]) @ p["down"]) * p["gain"])))(params)
        return ts.optim.clip_by_global_norm(grads, 1.0)

    program = ts.jit(step).traced({"gain": gain, "up": up, "down": down}, x).program
    made = [[(g.kind, g.grid, str(g.schedule)) for g in CudaProgram(
        localize(program.made, rank, False, True), "sm_90a", on_host=()).plan.groups]
        for rank in range(2)]
    assert made[0] == made[1] and any(kind == "columns" for kind, *_ in made[0])
