"""A training step of GPT-2 on several GPUs, data parallel: how its time compares with one GPU's.

    mpirun -n 2 python benchmarks/mesh_step.py                  # 124M, 16 windows a GPU, T 1024
    torchrun --nproc-per-node 4 benchmarks/mesh_step.py --layers 24 --width 1024 --heads 16  # 350M
    mpirun -n 2 python benchmarks/mesh_step.py --fsdp           # parameters split over the GPUs
    mpirun -n 2 python benchmarks/mesh_step.py --zero 2         # states and gradients are
    mpirun -n 2 python benchmarks/mesh_step.py --torch ddp      # PyTorch on them, or fsdp2

In turn, several rounds: rank 0 trains alone, with the windows of one GPU, while the others wait;
each trains alone, all at once, since GPUs that share a host's power are slower then; and all train
together, each with as many. A GPU that has become warm is slower by up to 4 %, so what was timed
first and once would be compared with a cooler one. The model is that of gpt2_step.py. Weak scaling
is the first median, or the slowest rank's of the second, by the last.
--predict: also what the planner says, by TESSERA_FABRIC where that is set.
--start-file NAME: all is compiled, and then waits until there is a file NAME: so several of these
compile side by side, and are timed one after another. NAME.RANK says that a rank is ready.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import record
from gpt2_step import sized

import tessera as ts
from tessera import config, launched
from tessera.bench.models.record import StepModel, batch, weights
from tessera.bench.models.step import OPTIMIZER, training_step
from tessera.graph import tree
from tessera.runtime.device import device

WARM = 4  # steps
ROWS = 3  # of steps, the median of which counts
ROUNDS = 5  # of one GPU, of each and of all


def placed(mesh: ts.dist.Mesh | None, x: np.ndarray, split: bool) -> ts.Tensor:
    if mesh is None:
        return ts.tensor(x).to(f"cuda:{launched.launched_local_rank()}")
    spec = ts.ShardSpec(("row",), ("dp",)) if split else ts.ShardSpec(replicate=True)
    return ts.dist.distribute(ts.tensor(x), spec, mesh=mesh)


class OurStep:
    """On one GPU, or on the mesh. fsdp: parameters and state are split over it; zero: as that
    stage of ZeRO says."""

    def __init__(self, mesh: ts.dist.Mesh | None, model: StepModel, fsdp: bool = False,
                 zero: int = 0):
        optimizer = ts.dist.zero(OPTIMIZER, zero, "dp") if zero else OPTIMIZER
        drawn = weights(model)
        self.params = ts.dist.fsdp(tree.map_tree(ts.tensor, drawn), "dp", mesh) if fsdp else \
            tree.map_tree(lambda w: placed(mesh, w, False), drawn)
        self.run = training_step(model, optimizer, donate=("params", "state"))
        self.state = optimizer.init(self.params)
        self.x, self.y = (placed(mesh, t, True) for t in batch(model))

    def predicted_ms(self) -> float:
        """Of a step, by the model of the planner."""
        return ts.dist.plan_report(self.run, self.params, self.state, self.x,
                                   self.y).step_us / 1e3

    def step(self) -> ts.Tensor:
        value, self.params, self.state = self.run(self.params, self.state, self.x, self.y)
        return value


class StepClock:
    """Of a step that has been taken a few times, so that all is compiled."""

    def __init__(self, step: Callable[[], Any]):
        self.step = step
        self.losses: list[float] = []
        self.times: list[float] = []
        self.host: list[float] = []
        for _ in range(WARM):
            self._read()

    def _read(self) -> None:
        begin = time.perf_counter()
        value = self.step()
        self.host.append(time.perf_counter() - begin)
        self.losses.append(float(value.item()))
        self.times.append(time.perf_counter() - begin)

    def row(self, steps: int) -> float:
        """Seconds of a step in a row of them, whose last loss is waited for, as in training."""
        self._read()
        begin = time.perf_counter()
        for _ in range(steps):
            value = self.step()
        self.losses.append(float(value.item()))
        return (time.perf_counter() - begin) / steps

    def figures(self, steps: int, rows: list[float] | None = None) -> dict[str, Any]:
        """Milliseconds of a step in a row; of one whose loss is read before the next begins; and
        of its call. The losses that were read. rows: seconds that were taken before."""
        rows = rows or [self.row(steps) for _ in range(ROWS)]
        for _ in range(steps):
            self._read()
        return {"ms": 1e3 * float(np.median(rows)),
                "read_ms": 1e3 * float(np.median(self.times[-steps:])),
                "host_ms": 1e3 * float(np.median(self.host[-steps:])),
                "first_call_s": self.times[0], "losses": self.losses}


def wait_for(start: Path | None) -> None:
    """All is compiled here: until there is such a file."""
    if start is not None:
        start.with_name(f"{start.name}.{launched.launched_rank()}").touch()
        while not start.exists():
            time.sleep(0.01)


def step_times(step: Callable[[], Any], steps: int, start: Path | None) -> dict[str, Any]:
    clock = StepClock(step)
    wait_for(start)
    return clock.figures(steps)


def meet() -> None:
    with config.scope(comm_timeout=0):  # one of them compiles, or trains alone
        ts.dist.barrier()


def of_one_gpu(model: StepModel) -> StepClock:
    """The first rank compiles, and the others find its kernels."""
    if ts.dist.rank():
        meet()
    made = StepClock(OurStep(None, model).step)
    if not ts.dist.rank():
        meet()
    return made


def in_turn(one: StepClock, together: StepClock, steps: int) -> tuple[dict[str, Any], list[float]]:
    """Figures of rank 0 while the others wait, and milliseconds of each rank, all at once; seconds
    of all together."""
    alone, each, rows = [], [], []
    for _ in range(ROUNDS):
        if ts.dist.rank() == 0:
            alone.append(one.row(steps))
        meet()
        each.append(one.row(steps))
        meet()
        rows.append(together.row(steps))
    mine = ts.tensor(np.array([1e3 * np.median(each)], np.float32))
    at_once = ts.dist.all_gather(mine).numpy().reshape(-1).tolist()
    figures = one.figures(steps, alone) if ts.dist.rank() == 0 else None
    meet()
    return {"alone": figures, "at_once_ms": at_once,
            "rows_ms": {"alone": [1e3 * t for t in alone],
                        "together": [1e3 * t for t in rows]}}, rows


def ours(a: argparse.Namespace, model: StepModel) -> dict[str, Any]:
    ranks = ts.dist.world_size()
    one = None if a.together else of_one_gpu(model)
    mesh = ts.dist.mesh([f"cuda:{r}" for r in range(ranks)], axes="dp")
    made = OurStep(mesh, model.sized(B=ranks * a.B), a.fsdp, a.zero)
    predicted = made.predicted_ms() if a.predict else None
    with config.scope(comm_timeout=0):
        all_of_them = StepClock(made.step)
    wait_for(a.start_file)
    found, rows = ({}, None) if one is None else in_turn(one, all_of_them, a.steps)
    with ts.dist.traffic() as sent:
        together = all_of_them.figures(a.steps, rows)
    together |= {"plan": [str(c) for c in made.run.plan], "eager_collectives": len(sent),
                 "predicted_ms": predicted}
    if found.get("alone"):
        found["weak_scaling"] = found["alone"]["ms"] / together["ms"]
        found["weak_scaling_at_once"] = max(found["at_once_ms"]) / together["ms"]
    return {"alone": None, **found, "together": together, "backend": mesh.backend}


def torchs(a: argparse.Namespace, model: StepModel) -> dict[str, Any]:
    from mesh_torch import SpreadStep  # it stands on PyTorch

    x, y = batch(model.sized(B=launched.launched_size() * a.B))
    mine = slice(launched.launched_rank() * a.B, (launched.launched_rank() + 1) * a.B)
    return step_times(SpreadStep(model, a.torch, (x[mine], y[mine])).step, a.steps, a.start_file)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--steps", type=int, default=10)
    flags.add_argument("--fsdp", action="store_true", help="split parameters and their state")
    flags.add_argument("--zero", type=int, default=0, choices=(0, 1, 2), help="a stage")
    flags.add_argument("--together", action="store_true", help="no step of one GPU")
    flags.add_argument("--predict", action="store_true")
    flags.add_argument("--torch", choices=("ddp", "fsdp2"))
    flags.add_argument("--start-file", type=Path)
    a, model = sized(flags, B=16)
    figures = torchs(a, model) if a.torch else ours(a, model)
    if launched.launched_rank() == 0:
        name = a.torch or ("fsdp" if a.fsdp else f"zero{a.zero}" if a.zero else "")
        record.write("mesh_step" + f"_{name}" * bool(name), {
            "device": f"{launched.launched_size()} x {device().name}", "model": model.figures(),
            "ranks": launched.launched_size(), **figures}, ranks=launched.launched_size())


if __name__ == "__main__":
    main()
