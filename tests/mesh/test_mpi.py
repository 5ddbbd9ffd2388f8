"""The same programs under mpirun; how all ranks stop when one does not go on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import tessera as ts
from mesh.battery import collectives, rows
from mesh.launch import ROOT, STOPPED_S, mpirun, needs_mpi


@needs_mpi
@pytest.mark.row("DIST-39")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_mpi_gives_the_bits_of_the_simulation(ranks, tmp_path):
    run = mpirun(ranks, "collectives", tmp_path, fresh=ranks == 2)
    assert run.status == 0, run.text
    assert run.results == dict(enumerate(ts.dist.simulate(collectives, ranks)))


@needs_mpi
@pytest.mark.row("DIST-36", "NUM-42")
@pytest.mark.parametrize("ranks", [12, pytest.param(72, marks=pytest.mark.skipif(
    not os.environ.get("TESSERA_SLOW"), reason="a minute of imports: TESSERA_SLOW=1"))])
def test_many_ranks_add_with_the_error_of_f32(ranks, tmp_path):
    """In the order of the simulation, whose sums over 72 ranks test_collective_rows.py judges."""
    run = mpirun(ranks, "rows", tmp_path)
    assert run.status == 0, run.text
    assert len(run.results) == ranks
    assert set(run.results.values()) == {ts.dist.simulate(rows, ranks)[0]}


FAILURES = {
    "fail_early": ["rank 1 of 3 failed", "ValueError: broken before the first collective"],
    "fail": ["rank 1 of 3 failed", "ValueError: broken on purpose"],
    "disagree": ["ranks 0, 2: all_reduce(f32[4], op=sum) over all ranks at ",
                 "rank 1: all_gather(f32[4], dim=0) over all ranks at ",
                 "battery.py", "ts.dist.all_gather(x)"],
    "hang": ["has waited 3 s for rank 1 in all_reduce(f32[4], op=sum)", "battery.py"],
    "leave": ["for rank 1 in barrier() over all ranks, and rank 1 has ended the program",
              "battery.py"],
    "killed": ["rank 1 of 3 (pid ", " after all_reduce(f32[4], op=sum) over all ranks at ",
               "ranks 0, 2: in all_reduce(f32[4], op=sum) over all ranks at ", "battery.py:",
               "checkpoints that were complete are whole"],
}


@needs_mpi
@pytest.mark.parametrize("program", FAILURES)
def test_all_ranks_stop(program, tmp_path):
    run = mpirun(3, program, tmp_path, fresh=program in ("fail_early", "leave", "killed"))
    print(f"{program}: all stopped after {run.seconds:.1f} s with status {run.status}")
    assert run.status != 0 and run.seconds < STOPPED_S, run.text
    assert not {0, 2} & run.results.keys(), run.text
    for words in FAILURES[program]:
        assert words in run.text, run.text
    assert run.text.count("(pid ") == (program == "killed"), run.text


@needs_mpi
def test_ranks_that_fail_alike_say_it_once(tmp_path):
    run = mpirun(4, "fails", tmp_path, fresh=True)
    assert run.status != 0 and run.seconds < STOPPED_S, run.text
    assert run.text.count("failed; stopping all ranks") == 1, run.text
    assert run.text.count("matmul:") == 1 and "battery.py:" in run.text, run.text


@pytest.mark.skipif(sys.platform != "linux", reason="the name is one of Linux's")
def test_before_mpi_starts_one_rank_speaks_while_it_lives():
    """However long it takes until the launcher, here this process, ends the others."""
    code = ("from tessera.mesh.ranks import abort; import sys; "
            "print(abort._take_name(), flush=True); sys.stdin.read()")
    with subprocess.Popen([sys.executable, "-c", code], text=True, cwd=ROOT, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as first:
        assert first.stdout.readline() == "True\n"
        assert python(code).stdout == "False\n"
    assert python(code).stdout == "True\n"


def python(code: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, cwd=ROOT,
                          stdin=subprocess.DEVNULL,
                          env={**os.environ, **env}, timeout=180)


def test_importing_starts_no_mpi_and_asks_for_the_abort_only_under_a_launcher():
    code = ("import sys, tessera; from tessera.mesh import abort; "
            "print('mpi4py' in sys.modules, sys.excepthook is abort._stop_all)")
    assert python(code, PMI_SIZE="", OMPI_COMM_WORLD_SIZE="").stdout.split() == ["False", "False"]
    assert python(code, PMI_SIZE="1", OMPI_COMM_WORLD_SIZE="").stdout.split() == ["False", "False"]
    assert python(code, OMPI_COMM_WORLD_SIZE="2").stdout.split() == ["False", "True"]


def test_without_mpi4py_the_error_says_what_to_install():
    code = ("import sys; sys.modules['mpi4py'] = None; import tessera as ts; "
            "ts.dist.all_reduce(ts.ones(3))")
    done = python(code, OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="1")
    assert done.returncode == 1
    assert "rank 1 of 2 was started by mpirun, and mpi4py cannot be loaded" in done.stderr
    assert "pip install mpi4py mpich" in done.stderr
