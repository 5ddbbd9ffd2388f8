"""How much of a training step's time is the GPU's power limit: steps after a pause, and in a row.

    python benchmarks/power_limit.py                      # GPT-2 124M and 350M
    python benchmarks/power_limit.py llama

A GPU that has been idle runs the first steps at its highest clock. Steps in a row draw as much
power as it is allowed, so the clock falls: from then on a step takes the energy that it needs,
divided by the power, and what saves no energy saves little time.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import record

from tessera.bench.catalogue import model_named
from tessera.bench.models.record import batch, weights
from tessera.bench.our_step import OurStep
from tessera.runtime.device import device

PAUSE_S, BURSTS, IN_A_ROW = 0.25, 8, 80


class Clocks:
    """Clock in MHz and power in W, asked of nvidia-smi every 20 ms."""

    FIELDS = "clocks.sm,power.draw"

    def __enter__(self) -> Clocks:
        self.file = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            ["nvidia-smi", "-i", "0", f"--query-gpu={self.FIELDS}",
             "--format=csv,noheader,nounits", "-lms", "20"], stdout=self.file)
        time.sleep(0.6)
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.terminate()
        self.process.wait()
        self.file.seek(0)
        lines = [line.split(", ") for line in self.file if line.count(",") == 1]
        self.clock, self.power = (sorted(float(row[i]) for row in lines) for i in (0, 1))


def burst(side: OurStep, steps: int) -> float:
    """Milliseconds of each of so many steps, the loss of the last one read."""
    device().synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        value = side.step()
    side.read(value)
    return 1e3 * (time.perf_counter() - begin) / steps


def measured(name: str) -> dict[str, Any]:
    model = model_named(name)
    side = OurStep(model, weights(model), batch(model))
    burst(side, 6)
    alone = []
    for _ in range(BURSTS):
        time.sleep(PAUSE_S)
        alone.append(burst(side, 1))
    with Clocks() as seen:
        burst(side, IN_A_ROW // 2)
        ms = burst(side, IN_A_ROW)
    kernels = side.classes().total_us / 1e3
    return {"ms_alone": float(np.median(alone)), "ms_in_a_row": ms, "kernels_ms": kernels,
            "median_mhz": seen.clock[len(seen.clock) // 2], "highest_mhz": seen.clock[-1],
            "most_w": seen.power[-1]}


def main() -> None:
    names = sys.argv[1:] or ["gpt2-124m", "gpt2-350m"]
    found = {name: measured(name) for name in names}
    record.write("power_limit", {"device": device().name, "models": found})


if __name__ == "__main__":
    main()
