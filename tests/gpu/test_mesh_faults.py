"""A rank that goes wrong while others wait for it on a GPU: all stop, and it is said who."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_harness import require_gpu
from mesh.launch import mpirun, needs_mpi
from tessera.runtime.device import device_count

require_gpu()
PROGRAMS = Path(__file__).with_name("mesh_faults.py")


@needs_mpi
@pytest.mark.skipif(device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("program, words", [
    ("killed", "rank 1"), ("raised", "RuntimeError: on purpose"),
    ("hangs", "has waited 5 s for rank 1"), ("another", "has waited 5 s for rank 1")])
def test_all_ranks_stop_and_it_is_said_why(tmp_path, program, words):
    made = mpirun(2, program, tmp_path, battery=PROGRAMS, TESSERA_COMM_TIMEOUT="5", timeout_s=60)
    assert made.status != 0
    assert words in made.text
