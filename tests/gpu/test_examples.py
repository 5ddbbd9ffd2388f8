"""The examples on the GPU: the numbered ones judge themselves against NumPy in f64, training is
compared with the CPU's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpu_harness import require_gpu

require_gpu()

ROOT = Path(__file__).resolve().parents[2]
LADDER = sorted((ROOT / "examples").glob("[0-9][0-9]_*.py"))
MOST_GIB = 16  # what a GPU has on which all examples run
# Runs a file as it is, and says last how much memory it needed.
MEASURED = """
import os, runpy, sys
from tessera.runtime import memory_pools
from tessera.runtime.device import device
memory_pools.reset_peak(device())
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])  # as of a file that Python runs
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("peak bytes", memory_pools.peak_bytes(device()))
"""


@pytest.mark.row("CORE-24", "SYS-04", "EX-24")
@pytest.mark.parametrize("path", LADDER, ids=lambda p: p.stem)
def test_an_example_runs(path, pytestconfig):
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", MEASURED, str(path), "--device", "cuda", "--seed",
                           str(pytestconfig.option.seed)], env=env, cwd=ROOT, text=True,
                          capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"^peak bytes (\d+)$", done.stdout, re.M)[-1]) < MOST_GIB << 30
    verdicts = re.findall(r"error \d\.\de[+-]\d\d  (\w+)$", done.stdout, re.M)
    assert verdicts and set(verdicts) == {"ok"}, done.stdout


@pytest.mark.parametrize("flags", [(), ("--dropout", "0.1", "--mlp", "swiglu"),
                                   ("--dtype", "bf16", "--norm", "layernorm")],
                         ids=lambda f: "_".join(f).replace("--", "") or "plain")
def test_training_is_that_of_the_cpu(flags, tmp_path):
    """The same file, the same losses; dropout draws the same bits."""
    losses = {}
    for target in ("cpu", "cuda"):
        command = [sys.executable, str(ROOT / "examples" / "train.py"), "--steps", "20", "--sample",
                   "8", "--out", str(tmp_path / target), "--target", target, *flags]
        env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run(command, env=env, cwd=ROOT, text=True, capture_output=True,
                              timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        losses[target] = json.loads((tmp_path / target / "result.json").read_text())["losses"]
    limit = 1e-4 if "--dtype" not in flags else 2e-2
    np.testing.assert_allclose(losses["cuda"], losses["cpu"], rtol=limit)
    assert losses["cuda"][-1] < losses["cuda"][0] - 1
