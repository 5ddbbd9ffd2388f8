"""A training step of GPT-2 on a GPU, written in ops of ts: milliseconds, tokens per second, memory.

    python benchmarks/gpt2_step.py                    # 124M: 12 layers, d 768, B 32, T 1024, bf16
    python benchmarks/gpt2_step.py --layers 2 --B 4
    python benchmarks/gpt2_step.py --profile          # and one more step, launch by launch

The model is that of `python -m tessera bench step gpt2-124m`: weights and moments are f32, matmuls
bf16 with f32 sums. A step ends when its loss is on the host; host_ms is what its call takes until
it returns.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import record

import tessera as ts
from tessera.bench.models.gpt2 import SMALL
from tessera.bench.models.record import StepModel, batch, weights
from tessera.bench.models.step import OPTIMIZER, training_step
from tessera.graph import tree
from tessera.runtime.device import device


def sized(flags: argparse.ArgumentParser, **usual: int) -> tuple[argparse.Namespace, StepModel]:
    """GPT-2 124M, or of the extents that flags say. usual: in place of its own."""
    names = ("layers", "d", "heads", "B", "T", "vocabulary")
    for name in names:
        longer = ["--width"] * (name == "d")  # torchrun takes --d for one of its own
        flags.add_argument(f"--{name}", *longer, type=int,
                           default=usual.get(name, getattr(SMALL, name)))
    a = flags.parse_args()
    return a, SMALL.sized(**{name: getattr(a, name) for name in names})


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--steps", type=int, default=10)
    flags.add_argument("--profile", action="store_true")
    a, model = sized(flags)
    params, step = tree.map_tree(ts.tensor, weights(model)), training_step(model)
    state = OPTIMIZER.init(params)
    x, y = (ts.tensor(t) for t in batch(model))
    params, state, x, y = (ts.to(t, "cuda") for t in (params, state, x, y))
    begin = time.perf_counter()
    value, params, state = step(params, state, x, y)
    first = float(value.item())
    cold = time.perf_counter() - begin
    times, host = [], []
    for _ in range(a.steps):
        begin = time.perf_counter()
        value, params, state = step(params, state, x, y)
        host.append(time.perf_counter() - begin)
        last = float(value.item())
        times.append(time.perf_counter() - begin)
    ms = 1e3 * float(np.median(times))
    if a.profile:
        with ts.debug.profile() as p:
            value, params, state = step(params, state, x, y)
        print(p.launches.table())
        record.write("gpt2_profile", {"device": device().name, "model": vars(a), "ms": ms,
                                      **p.launches.figures()}, shown=False)
    schedule = step.inspect_ir("schedule")
    record.write("gpt2_step", {
        "device": device().name,
        "model": vars(a), "ms": ms, "host_ms": 1e3 * float(np.median(host)),
        "tokens_per_second": 1e3 * a.B * a.T / ms,
        "first_call_s": cold, "loss_first": first, "loss_last": last,
        "launches": int(schedule.partition("launches: ")[2].partition(":")[0])})


if __name__ == "__main__":
    main()
