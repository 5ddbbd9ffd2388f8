"""What sentinels cost: a training step of GPT-2 on a GPU with TESSERA_NUMERICS off and on `flag`.

    python benchmarks/sentinel_cost.py                # 124M, B 32, T 1024, bf16
    python benchmarks/sentinel_cost.py --layers 2

The two programs take steps in turns, in one process, so that clocks and caches are the same for
both. With --profile the launches that differ most are shown.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import record
from gpt2_step import sized

import tessera as ts
from tessera.bench.models.record import StepModel, batch, weights
from tessera.bench.models.step import OPTIMIZER, training_step
from tessera.graph import tree
from tessera.runtime.device import device

MODES = ("off", "flag")


class Steps:
    """The training step in one mode, and how long each call took."""

    def __init__(self, mode: str, model: StepModel):
        self.mode, self.times = mode, list[float]()
        params = tree.map_tree(ts.tensor, weights(model))
        self.step = training_step(model)
        self.trained = ts.to((params, OPTIMIZER.init(params)), "cuda")
        self.batch = ts.to(tuple(ts.tensor(t) for t in batch(model)), "cuda")

    def run(self) -> float:
        """One step; its loss."""
        begin = time.perf_counter()
        with ts.debug.numerics(self.mode):
            value, *trained = self.step(*self.trained, *self.batch)
            self.trained = tuple(trained)
            loss = float(value.item())
        self.times.append(1e3 * (time.perf_counter() - begin))
        return loss

    @property
    def ms(self) -> float:
        return float(np.median(self.times[1:]))


def most_changed(modes: dict[str, Steps], count: int) -> list[dict[str, Any]]:
    """Launches whose time on the GPU grew most."""
    us: dict[str, dict[str, float]] = {}
    for mode, steps in modes.items():
        with ts.debug.profile() as p:
            steps.run()
        steps.times.pop()
        for g in p.launches.by_launch():
            us.setdefault(g.name, {})[mode] = g.us
    rows = [{"launch": name, **found, "more_us": found.get("flag", 0.0) - found.get("off", 0.0)}
            for name, found in us.items()]
    return sorted(rows, key=lambda r: -r["more_us"])[:count]


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--steps", type=int, default=8)
    flags.add_argument("--profile", action="store_true")
    a, model = sized(flags)
    modes = {mode: Steps(mode, model) for mode in MODES}
    losses: dict[str, float] = {}
    for _ in range(a.steps + 1):
        losses = {mode: steps.run() for mode, steps in modes.items()}
    found = ts.debug.flags()
    off, flag = (modes[m].ms for m in MODES)
    rows = most_changed(modes, 25) if a.profile else []
    for row in rows:
        print(f"{row['more_us']:9.1f} us more  {row.get('off', 0):9.1f} -> "
              f"{row.get('flag', 0):9.1f}  {row['launch']}")
    record.write("sentinel_cost", {
        "device": device().name, "model": vars(a), "off_ms": off, "flag_ms": flag,
        "cost_percent": 100 * (flag / off - 1), "losses": losses,
        "first_call_s": {m: modes[m].times[0] / 1e3 for m in MODES},
        "found": str(found)})


if __name__ == "__main__":
    main()
