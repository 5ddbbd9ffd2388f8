"""What carries arrays between ranks where there is no GPU; tests/gpu has the other machines."""

from __future__ import annotations

import pytest

import tessera as ts
from mesh.launch import mpirun, needs_mpi
from tessera.runtime.device import has_gpu

PROGRAM = """
import sys
from pathlib import Path
import tessera as ts
grid = ts.dist.mesh(["cpu:0", "cpu:1"], axes="dp")
if ts.dist.rank() == 1:  # a property: nobody else needs to look
    print(grid.backend)
Path(sys.argv[2], str(ts.dist.rank())).write_text(grid.backend)
"""


@pytest.mark.row("DIST-37", "RT-07")
def test_a_simulation_and_a_program_alone_need_no_backend_of_gpus():
    pair = ts.dist.mesh(["cpu:0", "cpu:1"], axes="dp")
    assert ts.dist.simulate(lambda: pair.backend, pair) == ["local"] * 2
    assert ts.dist.mesh(["cpu:0"]).backend == "single"


@needs_mpi
@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
@pytest.mark.row("DIST-37", "RT-07")
def test_without_gpus_it_is_mpi(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run = mpirun(2, "backend", tmp_path, battery=program)
    assert run.status == 0, run.text
    assert run.results == {0: "mpi", 1: "mpi"}


@needs_mpi
@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
def test_nccl_that_is_demanded_and_not_there_is_an_error(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run = mpirun(2, "backend", tmp_path, battery=program, TESSERA_COMM="nccl")
    assert run.status != 0
    assert "the ranks of mesh(dp=2) cannot use NCCL, which TESSERA_COMM=nccl demands" in run.text
