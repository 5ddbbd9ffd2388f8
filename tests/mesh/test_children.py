"""Processes that multiprocessing starts for a rank: they know its number, and are no ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesh.launch import Run, mpirun, needs_mpi

SCRIPT = Path(__file__).with_name("children.py")
pytestmark = needs_mpi


def run(program: str, folder: Path) -> Run:
    return mpirun(2, program, folder, timeout_s=60, battery=SCRIPT, fresh=True)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_make_the_batches_of_their_rank(method: str, tmp_path: Path) -> None:
    """Those that are not forked make the mesh anew: they started MPI for it, which failed, and the
    pool started others for ever."""
    done = run(method, tmp_path)
    assert done.status == 0, done.text
    assert done.results == dict.fromkeys(range(2), "[0.5, 1.5, 2.5]")


@pytest.mark.parametrize("when, says", [
    ("at once", ["failed as it began; stopping all ranks", "put those that communicate under if "
                 "__name__ == '__main__'", "w = ts.dist.tensor("]),
    ("later", ["is no rank itself", "ts.dist.barrier()"])])
def test_a_child_that_communicates_ends_the_program(when: str, says: list[str], tmp_path: Path
                                                    ) -> None:
    done = run(f"spawn,{when}", tmp_path)
    assert done.status != 0 and "was started by multiprocessing from rank" in done.text
    for text in says:
        assert text in done.text, done.text
