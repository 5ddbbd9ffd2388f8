"""A rank that goes wrong while others wait for it on a GPU: all stop, and it is said who."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_harness import mesh_ranks, require_gpu
from mesh.launch import mpirun, needs_mpi
from tessera.runtime.device import device_count

require_gpu()
PROGRAMS = Path(__file__).with_name("mesh_faults.py")

def words_of(ranks: int) -> dict[str, tuple[str, ...]]:
    """What is said where rank ranks // 2 goes wrong."""
    wrong = ranks // 2
    failed = f"tessera: rank {wrong} of {ranks} failed"
    waited = f" of {ranks} has waited 5 s for rank {wrong} in "
    return {
        "killed": (f"tessera: rank {wrong} of {ranks}",),
        "raised": (failed, "RuntimeError: on purpose"),
        "hangs": (waited,),
        "another": (waited,),
        "mixed": ("have made different calls over", f"  rank {wrong}: ", "# one", "# other"),
        "memory": (failed, "OutOfMemoryError"),
        "programs": ("the ranks of 'dp' have traced", f"  rank {wrong}: "),
        "overflow": (failed, "(exp", f"call 7, random step 0, rank {wrong}")}


@needs_mpi
@pytest.mark.skipif(device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("program", words_of(2))
def test_all_ranks_stop_and_it_is_said_why(tmp_path, program):
    ranks = mesh_ranks()
    made = mpirun(ranks, program, tmp_path, battery=PROGRAMS, TESSERA_COMM_TIMEOUT="5",
                  timeout_s=60, fresh=True)
    assert made.status != 0
    for words in words_of(ranks)[program]:
        assert words in made.text, made.text
