"""The numbered examples on the GPU: each judges itself against NumPy in f64."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_harness import require_gpu

require_gpu()

ROOT = Path(__file__).resolve().parents[2]
LADDER = sorted((ROOT / "examples").glob("[0-9][0-9]_*.py"))


@pytest.mark.parametrize("path", LADDER, ids=lambda p: p.stem)
def test_an_example_runs(path, pytestconfig):
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, str(path), "--device", "cuda", "--seed",
                           str(pytestconfig.option.seed)], env=env, cwd=ROOT, text=True,
                          capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = re.findall(r"error \d\.\de[+-]\d\d  (\w+)$", done.stdout, re.M)
    assert verdicts and set(verdicts) == {"ok"}, done.stdout
