"""Host time of calls that were made before: single ops beside PyTorch's, and training steps.

    python benchmarks/host_time.py                          # single ops, and a step of GPT-2 350M
    python benchmarks/host_time.py --step gpt2-124m --profile
    mpirun -n 2 python benchmarks/host_time.py --mesh dp fsdp tp   # steps on a mesh of all ranks
    python benchmarks/host_time.py --simulate 4 --mesh tp   # on simulated GPUs, which do nothing

A call returns when all is launched; the GPU is idle when it begins, so nothing waits for a place in
a queue. Microseconds: the least mean of rounds of calls, and the least and the median of steps;
read: where the loss of each step is read before the next, row: where that of every sixth is. The
rows of single ops take turns. --simulate: a step of a narrow model with as many tensors, with warm
caches, and with cold ones: in front of a step 64 MiB are read and written. Writes
benchmarks/results/host_time.json, or host_time_mesh.json, in $OUT when that is set. Needs a GPU,
and torch for single ops.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import record

import tessera as ts
from tessera import launched
from tessera.bench.catalogue import MODELS
from tessera.bench.models.gpt2 import SPELLINGS
from tessera.bench.models.record import StepModel, batch, weights
from tessera.bench.models.step import first_state, training_step
from tessera.graph import tree
from tessera.runtime.device import device

CALLS, ROUNDS = 200, 15
WARM = 5  # steps
Call = Callable[[], Any]


# --- single ops ---------------------------------------------------------------------------------
def single_ops() -> dict[str, Call]:
    """What is called again and again, by row."""
    import torch

    from tessera import stdlib

    def drawn(*shape: int, dtype: Any = torch.float32) -> Any:
        return torch.randn(shape, dtype=dtype, device="cuda")

    x, a, b = drawn(1024), drawn(512, 512, dtype=torch.bfloat16), drawn(512, 512).bfloat16()
    re, im = drawn(16, 4096), drawn(16, 4096)
    z = torch.complex(re, im)
    image, filters = drawn(8, 64, 14, 14).bfloat16(), drawn(64, 64, 1, 1).bfloat16()
    mine = {k: ts.from_dlpack(t).copy() for k, t in {
        "x": x, "a": a, "b": b, "image": image, "filters": filters, "re": re, "im": im}.items()}
    pair = {"w": mine["x"], "b": mine["x"].copy()}
    scaled = ts.jit(lambda x: x * 2.0 + 1.0)
    of_dict = ts.jit(lambda p, x: x * p["w"] + p["b"])
    transform = ts.jit(lambda re, im: ts.fft((re, im)))
    product = ts.jit(lambda a, b: a @ b)
    convolved = ts.jit(lambda x, w: ts.conv2d(x, w))
    return {
        "ts.jit of x * 2 + 1": lambda: scaled(mine["x"]),
        "ts.jit of x * 2 + 1, torch's array": lambda: scaled(x),
        "ts.jit of a dict": lambda: of_dict(pair, mine["x"]),
        "torch x * 2": lambda: x * 2.0,
        "x + x": lambda: mine["x"] + mine["x"],
        "torch x + x": lambda: x + x,
        "ts.jit of fft, 16 x 4096": lambda: transform(mine["re"], mine["im"]),
        "torch.fft.fft": lambda: torch.fft.fft(z),
        "ts.jit of a @ b": lambda: product(mine["a"], mine["b"]),
        "stdlib.gemm, torch's arrays": lambda: stdlib.gemm(a, b),
        "stdlib.gemm": lambda: stdlib.gemm(mine["a"], mine["b"]),
        "torch a @ b": lambda: a @ b,
        "ts.jit of conv2d, 1 x 1": lambda: convolved(mine["image"], mine["filters"]),
        "torch conv2d, 1 x 1": lambda: torch.nn.functional.conv2d(image, filters)}


def microseconds(calls: dict[str, Call]) -> dict[str, float]:
    """Of each, the least mean of a round."""
    for run in calls.values():
        for _ in range(10):
            run()
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, run in calls.items():
            device().synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                run()
            least[name] = min(least[name], (time.perf_counter() - begin) / CALLS)
            device().synchronize()
    return {name: round(1e6 * s, 2) for name, s in least.items()}


# --- steps --------------------------------------------------------------------------------------
TP_SPLITS = {"col": ("q", "k", "v", "up"), "row": ("out", "down")}  # of GPT-2's matrices


class Step:
    """A training step on one GPU, or on a mesh of all ranks' GPUs. way: windows split, "dp";
    parameters too, "fsdp"; matrices of layers alone, "tp"."""

    def __init__(self, model: StepModel, mesh: ts.dist.Mesh | None, way: str = "dp"):
        def there(x: np.ndarray, split: str = "") -> ts.Tensor:
            spec = ts.ShardSpec((split,), ("dp",)) if split else ts.ShardSpec(replicate=True)
            return ts.tensor(x).to("cuda") if mesh is None else \
                ts.dist.distribute(x, spec, mesh=mesh)

        drawn = weights(model.sized(layers=1))  # each layer has the same: times do not ask
        drawn["layers"] *= model.layers
        split = {n: how for how, names in TP_SPLITS.items() for n in names if way == "tp"}
        self.params = tree.map_tree(there, drawn) if way != "fsdp" else \
            ts.dist.fsdp(tree.map_tree(ts.tensor, drawn), "dp", mesh)
        for layer in self.params["layers"] if split else ():
            layer |= {n: there(drawn["layers"][0][n], how) for n, how in split.items()}
        self.state = first_state(model, self.params)
        self.batch = [there(t, "" if way == "tp" else "row") for t in batch(model)]
        self.run = training_step(model, donate=("params", "state"))

    def __call__(self) -> ts.Tensor:
        value, self.params, self.state = self.run(self.params, self.state, *self.batch)
        return value

    def figures(self, steps: int) -> dict[str, Any]:
        host, whole = [], []
        for _ in range(WARM):
            self().item()
        for _ in range(steps):
            device().synchronize()
            begin = time.perf_counter()
            self()
            host.append(time.perf_counter() - begin)
            device().synchronize()
            whole.append(time.perf_counter() - begin)
        read, row = self.loop(steps, 1), self.loop(steps, 6)
        return {"leaves": len(tree.flatten((self.params, self.state))[0]),
                "least_us": round(1e6 * min(host)),
                "median_us": round(1e6 * statistics.median(host)),
                "read_least_us": min(read), "read_median_us": round(statistics.median(read)),
                "row_least_us": min(row), "row_median_us": round(statistics.median(row)),
                "step_ms": round(1e3 * statistics.median(whole), 2), "launched": self.run.capture}

    def loop(self, steps: int, every: int) -> list[int]:
        """Microseconds of each step where the loss of every so many is read."""
        host = []
        for i in range(steps):
            begin = time.perf_counter()
            value = self()
            host.append(round(1e6 * (time.perf_counter() - begin)))
            if i % every == every - 1:
                value.item()
        return host

    def profile(self, steps: int) -> None:
        """The functions that took the most time themselves."""
        seen = cProfile.Profile()
        for _ in range(steps):
            device().synchronize()
            seen.runcall(self)
        pstats.Stats(seen).sort_stats("tottime").print_stats(25)


def simulate(model: StepModel, ranks: int, ways: Sequence[str], steps: int) -> None:
    """The step of one GPU, and those of a mesh."""
    from simulated_gpus import simulated_gpus  # it stands on the tests

    narrow = model.sized(d=32, heads=ranks, vocabulary=64, T=16, B=2 * ranks)
    mesh = ts.dist.mesh([f"cuda:{r}" for r in range(ranks)], axes="dp")
    found = {}
    with simulated_gpus(), ts.config.scope(comm_timeout=0):  # ranks compile in turn
        one = python_us(Step(narrow, None), steps)
        for way in ways:
            found[way] = ts.dist.simulate(
                lambda way=way: python_us(Step(sized_for(way, narrow), mesh, way), steps), mesh)[0]
    record.write("host_time_mesh", {"model": model.name, "ranks": ranks, "simulated": True,
                                    "one_gpu": one, **found})


def sized_for(way: str, model: StepModel) -> StepModel:
    """The model of a mesh that is split so: all ranks have the same windows where matrices are."""
    return model if way != "tp" else model.sized(B=2, spelling=SPELLINGS["three weights"])


def python_us(step: Step, steps: int) -> dict[str, Any]:
    others, found = np.zeros(1 << 23), dict[str, list[float]]()
    for _ in range(WARM):
        step()
    for name in ("", "cold_") * 3:
        for _ in range(steps):
            if name:
                others += 1.0
            begin = time.perf_counter()
            step()
            found.setdefault(name, []).append(time.perf_counter() - begin)
    return {"leaves": len(tree.flatten((step.params, step.state))[0])} | {
        f"{name}{how}_us": round(1e6 * of(times)) for name, times in found.items()
        for how, of in (("least", min), ("median", statistics.median))}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__,
                                    formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--step", choices=MODELS, default="gpt2-350m", help="the model of the step")
    flags.add_argument("--steps", type=int, default=40)
    flags.add_argument("--mesh", nargs="+", choices=("dp", "fsdp", "tp"),
                       help="on a mesh of all ranks, split so, in turn; no single ops")
    flags.add_argument("--simulate", type=int, default=0, help="ranks, on GPUs that do nothing")
    flags.add_argument("--profile", action="store_true", help="of the step, function by function")
    a = flags.parse_args()
    if a.simulate:
        return simulate(MODELS[a.step], a.simulate, a.mesh or ("dp",), a.steps)
    ranks = launched.launched_size() if a.mesh else 1
    model = MODELS[a.step].sized(B=2 * ranks)
    mesh = ts.dist.mesh([f"cuda:{r}" for r in range(ranks)], axes="dp") if a.mesh else None
    figures: dict[str, Any] = {"model": a.step, "ranks": ranks}
    for way in a.mesh or ("step",):
        step = Step(sized_for(way, model), mesh, way)
        figures[way] = step.figures(a.steps)
        if a.mesh and launched.launched_rank() == 0:
            print(way, figures[way], flush=True)
    if launched.launched_rank() == 0:
        single = {} if a.mesh else {"us_per_call": microseconds(single_ops())}
        record.write("host_time_mesh" if a.mesh else "host_time",
                     {"device": device().name, **single, **figures})
    if a.profile:
        step.profile(a.steps)


if __name__ == "__main__":
    main()
