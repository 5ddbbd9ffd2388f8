"""What Tessera costs before any arithmetic: import time and memory, and a cached call.

    python benchmarks/overhead.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from record import write

import tessera as ts

IMPORT = """
import resource, time
start = time.perf_counter()
import tessera
print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def import_cost(runs: int = 7) -> dict[str, float]:
    """Seconds and peak megabytes of `import tessera` in fresh processes, medians."""
    rows = []
    for _ in range(runs):
        done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True,
                              check=True)
        rows.append([float(x) for x in done.stdout.split()])
    seconds, kilobytes = zip(*rows, strict=True)
    return {"import_s": round(statistics.median(seconds), 3),
            "import_peak_mb": round(statistics.median(kilobytes) / 1024, 1)}


def call_us(f: Callable, *args: object, calls: int = 2000, rounds: int = 15) -> float:
    """Microseconds per call of a warm function: the median of rounds."""
    f(*args)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            f(*args)
        times.append((time.perf_counter() - start) / calls * 1e6)
    return round(statistics.median(times), 1)


def main() -> None:
    x = ts.tensor(np.ones(16), dtype="f32")
    big = ts.tensor(np.ones(4096), dtype="f32")
    params = {"w": ts.tensor(np.ones((16, 16)), dtype="f32"),
              "b": ts.tensor(np.ones(16), dtype="f32")}

    @ts.jit
    def axpy(x: ts.Tensor, y: ts.Tensor) -> ts.Tensor:
        return x * y + 1.0

    @ts.jit
    def layer(p: dict, x: ts.Tensor) -> ts.Tensor:
        return ts.relu(x @ p["w"] + p["b"])

    write("overhead", {
        **import_cost(),
        "jit_call_2_args_us": call_us(axpy, x, x),
        "jit_call_2_args_compiled_loop_us": call_us(axpy, big, big),
        "jit_call_dict_of_params_us": call_us(layer, params, x),
        "eager_add_us": call_us(ts.add, x, x),
    })


if __name__ == "__main__":
    main()
