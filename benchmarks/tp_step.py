"""A training step of a decoder as Llama's, tensor parallel over all GPUs.

    mpirun -n 4 python benchmarks/tp_step.py                      # 4 layers of d 4096, 2 x 4096
    mpirun -n 4 python benchmarks/tp_step.py --torch dtensor      # PyTorch on them, or async_tp
    mpirun -n 4 python benchmarks/tp_step.py --whole              # sequences whole between matmuls

Queries, keys, values and the feed-forward part are split by columns, what follows them by rows, the
vocabulary by words; between matmuls each rank has its part of every sequence.
--predict, --start-file NAME: as in mesh_step.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import record
from mesh_step import step_times

import tessera as ts
from tessera import config, launched
from tessera.bench.models import llama
from tessera.bench.models.record import MODELS, StepModel, batch, weights
from tessera.bench.models.step import OPTIMIZER, training_step
from tessera.graph import tree
from tessera.runtime.device import device

COLUMNS, ROWS = ts.ShardSpec(("col",), ("tp",)), ts.ShardSpec(("row",), ("tp",))
SPLIT = {**dict.fromkeys(("q", "k", "v", "gate", "up"), COLUMNS),
         **dict.fromkeys(("out", "down", "table"), ROWS)}
PART_OF_SEQUENCES = ts.ShardSpec((1,), ("tp",))
EXTENTS = {"layers": 4, "d": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336, "B": 2, "T": 4096}


def split_loss(p: dict, tokens: Any, targets: Any, m: StepModel,
               part: ts.ShardSpec = PART_OF_SEQUENCES) -> Any:
    """The loss of llama.py, each rank with its part of every sequence between matmuls."""
    x = ts.shard(ts.embedding(p["table"], tokens), part)
    for w in p["layers"]:
        x = ts.shard(llama.layer(x, w, m), part)
    x = ts.rmsnorm(x, p["norm"])
    logits = ts.cast(x, llama.BF16) @ ts.transpose(ts.cast(p["table"], llama.BF16))
    return ts.cross_entropy(ts.cast(logits, "f32"), targets)


def placed(mesh: ts.dist.Mesh, params: Any) -> Any:
    leaves, structure = tree.flatten(params)
    names = [path.rpartition(".")[2] for path in tree.paths(structure)]
    return tree.unflatten(structure, [
        ts.dist.distribute(x, SPLIT.get(name), mesh=mesh)
        for name, x in zip(names, leaves, strict=True)])


def ours(a: argparse.Namespace, model: StepModel) -> dict[str, Any]:
    if not a.whole:
        model = replace(model, family=replace(model.family, loss=split_loss))
    mesh = ts.dist.mesh([f"cuda:{r}" for r in range(ts.dist.world_size())], axes="tp")
    params = placed(mesh, weights(model))
    state, run = OPTIMIZER.init(params), training_step(model, donate=("params", "state"))
    x, y = (ts.dist.distribute(t, None, mesh=mesh) for t in batch(model))
    predicted = ts.dist.plan_report(run, params, state, x, y).step_us / 1e3 if a.predict else None

    def step() -> ts.Tensor:
        nonlocal params, state
        value, params, state = run(params, state, x, y)
        return value

    with config.scope(comm_timeout=0):  # the first call compiles
        figures = step_times(step, a.steps, a.start_file)
    return figures | {"predicted_ms": predicted, "plan": [str(c) for c in run.plan]}


def torchs(a: argparse.Namespace, model: StepModel) -> dict[str, Any]:
    from tp_torch import SplitStep  # it stands on PyTorch

    return step_times(SplitStep(model, a.torch, batch(model)).step, a.steps, a.start_file)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    for name, usual in EXTENTS.items():
        longer = ["--width"] * (name == "d")  # torchrun takes --d for one of its own
        flags.add_argument(f"--{name}", *longer, type=int, default=usual)
    flags.add_argument("--steps", type=int, default=10)
    flags.add_argument("--predict", action="store_true")
    flags.add_argument("--whole", action="store_true", help="sequences whole on every rank")
    flags.add_argument("--torch", choices=("dtensor", "async_tp"))
    flags.add_argument("--start-file", type=Path)
    a = flags.parse_args()
    model = MODELS["llama"].sized(**{name: getattr(a, name) for name in EXTENTS})
    run: Callable[..., dict[str, Any]] = torchs if a.torch else ours
    figures = run(a, model)
    if launched.launched_rank() == 0:
        name = a.torch or ("whole" if a.whole else "")
        record.write("tp_step" + f"_{name}" * bool(name), {
            "device": f"{launched.launched_size()} x {device().name}", "model": model.figures(),
            "ranks": launched.launched_size(), **figures}, ranks=launched.launched_size())


if __name__ == "__main__":
    main()
