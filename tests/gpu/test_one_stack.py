"""The file of tests/mesh/test_one_stack.py, unchanged, on one GPU and on several."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_harness import mesh_ranks, require_gpu
from mesh import one_stack
from mesh.launch import mpirun, needs_mpi
from tessera.runtime.device import device_count

require_gpu()
FILE = Path(one_stack.__file__)


@pytest.mark.row("CORE-08", "AD-27")
def test_on_one_gpu() -> None:
    run = subprocess.run([sys.executable, str(FILE)], capture_output=True, text=True,
                         env={**os.environ, "TESSERA_DEVICE": "cuda"})
    assert run.stdout == "1 ranks, on cuda:0: results on cuda:0, equal to NumPy\n", run.stderr


@needs_mpi
@pytest.mark.skipif(device_count() < 2, reason="needs two GPUs")
@pytest.mark.row("CORE-08")
def test_on_gpus(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    n = mesh_ranks()
    run = mpirun(n, "run", tmp_path, battery=FILE, fresh=True, TESSERA_DEVICE="cuda")
    assert run.status == 0, run.text
    assert run.results == {r: f"{n} ranks, on cuda:{r}: results on cuda:{r}, equal to NumPy"
                           for r in range(n)}
