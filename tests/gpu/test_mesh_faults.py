"""A rank that goes wrong while others wait for it on a GPU: all stop, and it is said who."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_harness import require_gpu
from mesh.launch import mpirun, needs_mpi
from tessera.runtime.device import device_count

require_gpu()
PROGRAMS = Path(__file__).with_name("mesh_faults.py")


WORDS = {
    "killed": ("tessera: rank 1 of 2",),
    "raised": ("tessera: rank 1 of 2 failed", "RuntimeError: on purpose"),
    "hangs": ("tessera: rank 0 of 2 failed", "has waited 5 s for rank 1"),
    "another": ("tessera: rank 0 of 2 failed", "has waited 5 s for rank 1"),
    "mixed": ("ranks 0 and 1 have made different calls over", "# one", "# other"),
    "memory": ("tessera: rank 1 of 2 failed", "OutOfMemoryError"),
    "programs": ("the ranks of 'dp' disagree", "  rank 0: ", "  rank 1: "),
    "overflow": ("tessera: rank 1 of 2 failed", "(exp", "call 7, random step 0, rank 1")}


@needs_mpi
@pytest.mark.skipif(device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("program", WORDS)
def test_all_ranks_stop_and_it_is_said_why(tmp_path, program):
    made = mpirun(2, program, tmp_path, battery=PROGRAMS, TESSERA_COMM_TIMEOUT="5", timeout_s=60)
    assert made.status != 0
    for words in WORDS[program]:
        assert words in made.text, made.text
