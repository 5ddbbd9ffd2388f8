"""The first call of a compiled function, in a process that compiles its kernels and in the next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_harness import require_gpu

require_gpu()

SCRIPT = """\
import json, sys, time
import numpy as np
import tessera as ts
from models.training import model, step_of, tensors
from tessera.tile.launch.machine_code import IMAGES

m, rng = model("gpt"), np.random.default_rng(1)
p, batch = (ts.to(tensors(x), "cuda") for x in (m.parameters(rng), m.batch(rng)))
begin = time.perf_counter()
loss = float(step_of(m)(p, batch)[0].item())
seconds = time.perf_counter() - begin
pool = sys.modules.get("tessera.tile.cuda.compile_processes")
print(json.dumps({"loss": loss, "seconds": seconds, "kernels": len(list(IMAGES.path.iterdir())),
                  "numba": "numba" in sys.modules, "started": bool(pool and pool._running)}))
"""


def first_call(folder: Path, processes: int) -> dict[str, Any]:
    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "TESSERA_CACHE_DIR": str(folder),
                   "TESSERA_COMPILE_PROCESSES": str(processes)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True,
                          text=True, timeout=300, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_the_next_process_compiles_nothing(tmp_path, note):
    """It starts no process for that and imports no compiler; results are the same bits."""
    cold = first_call(tmp_path, 4)
    assert cold["started"] and not cold["numba"]
    warm = first_call(tmp_path, 4)
    assert not warm["started"] and not warm["numba"]
    assert warm["loss"] == cold["loss"] and warm["kernels"] == cold["kernels"]
    note(cold_s=round(cold["seconds"], 2), warm_s=round(warm["seconds"], 2),
         kernels=cold["kernels"])


def test_kernels_of_processes_are_those_of_one(tmp_path):
    many, one = first_call(tmp_path / "many", 4), first_call(tmp_path / "one", 1)
    assert one["numba"] and not one["started"]
    assert many["loss"] == one["loss"] and many["kernels"] == one["kernels"]
