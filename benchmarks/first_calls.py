"""First calls of training steps of several models on a GPU, with an empty cache and from disk.

    python benchmarks/first_calls.py [model ...]

Each in processes of its own. Seconds until the first loss is on the host, how many processes
compiled, and milliseconds of the second call.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import record

import tessera as ts
from tessera.runtime.device import device

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests")]  # the models are there


def once(name: str) -> dict[str, Any]:
    from models.training import model, step_of, tensors

    m, rng = model(name), np.random.default_rng(1)
    params, batch = (ts.to(tensors(x), "cuda") for x in (m.parameters(rng), m.batch(rng)))
    step, seconds = step_of(m), []
    for _ in range(2):
        begin = time.perf_counter()
        step(params, batch)[0].item()
        seconds.append(time.perf_counter() - begin)
    return {"first_s": round(seconds[0], 2), "second_ms": round(1e3 * seconds[1], 2),
            "processes": ts.config.compile_processes}


def main() -> None:
    from models.training import NAMES

    figures: dict[str, Any] = {"device": device().name}
    for name in sys.argv[1:] or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            env = {**os.environ, "TESSERA_CACHE_DIR": folder}
            for cache in ("empty cache", "from disk"):
                run = subprocess.run([sys.executable, __file__, "--one", name], env=env, text=True,
                                     stdout=subprocess.PIPE, check=True)
                figures.setdefault(name, {})[cache] = json.loads(run.stdout.splitlines()[-1])
        print(name, figures[name], flush=True)
    record.write("first_calls", figures, shown=False)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(once(sys.argv[2])))
    else:
        main()
