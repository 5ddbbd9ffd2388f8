"""A rank that is killed, ends, or does something else, in every call that communicates: nothing is
lost, nothing is wrong, and who it was is said once, in time.

In a simulation each time. TESSERA_SLOW=1: under mpirun, on 2 and 4 ranks, each call with each kind
of mistake, and 60 kills; of MPICH, and of Open MPI where TESSERA_OTHER_MPI names the folder of an
environment with it (bin/mpirun and bin/python, with what Tessera needs).
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from mesh import trials
from mesh.launch import ALLOW, MPIRUN, ROOT, needs_mpi
from mesh.trials import CALLS, FAULTS, State

LIMIT_S = 5  # of a collective
SLOW = pytest.mark.skipif(not os.environ.get("TESSERA_SLOW"), reason="minutes: TESSERA_SLOW=1")
OTHER = os.environ.get("TESSERA_OTHER_MPI")
LAUNCHERS = {"here": (MPIRUN, sys.executable)} | (
    {"other": (f"{OTHER}/bin/mpirun", f"{OTHER}/bin/python")} if OTHER else {})
KILLS = 60


def named(text: str) -> set[int]:
    """The ranks that a text names: `rank 2`, `ranks 0, 3`, `ranks 0-2`, `ranks 0 and 2`."""
    found: set[int] = set()
    for part in re.findall(r"\branks? ((?:\d+(?:-\d+)?(?:, | and )?)+)", text):
        for low, high in re.findall(r"(\d+)(?:-(\d+))?", part):
            found |= set(range(int(low), int(high or low) + 1))
    return found


def test_named_ranks():
    assert named("rank 2 of 4; ranks 0-1, 3: x, ranks 5 and 7") == {0, 1, 2, 3, 5, 7}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", CALLS)
def test_simulated_ranks(name, fault, tmp_path):
    ranks = 2 if len(name) % 2 else 4
    victim = (len(name) + len(fault)) % ranks

    def program():
        s = State(tmp_path)
        s.history.save(0, {"w": s.x})
        trials.mistaken(s, name, fault, victim)

    with pytest.raises(ts.dist.MeshError) as info:
        ts.dist.simulate(program, ranks)
    text = str(info.value)
    assert victim in named(text) and "trials.py:" in text, text


# --- under mpirun -------------------------------------------------------------------------------
def launch(launcher: str, ranks: int, folder: Path, *args: object) -> tuple[int, str, float]:
    mpirun, python = LAUNCHERS[launcher]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"),
                             *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, **ALLOW, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1",
           "OPENBLAS_NUM_THREADS": "1", "TESSERA_COMM_TIMEOUT": str(LIMIT_S)}
    command = [str(mpirun), "-n", str(ranks), python, trials.__file__, *map(str, args), str(folder)]
    begin = time.monotonic()
    done = subprocess.run(command, env=env, cwd=folder, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=120)
    return done.returncode, done.stdout, time.monotonic() - begin


def need_report(status: int, text: str, victim: int) -> str:
    """The report, which there is once; it names the victim and a line of the program."""
    assert status != 0 and "AssertionError" not in text, text
    reports = [line for line in text.splitlines() if line.startswith("tessera: ")]
    assert len(reports) == 1, text
    assert victim in named(text) and "trials.py:" in text, text
    return reports[0]


@SLOW
@needs_mpi
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("name", CALLS)
def test_mistakes_under_mpirun(name, launcher, ranks, tmp_path):
    draw = random.Random(f"{name} {launcher} {ranks}")
    fault, victim = draw.choice(FAULTS), draw.randrange(ranks)
    status, text, seconds = launch(launcher, ranks, tmp_path, name, fault, victim, 0)
    report = need_report(status, text, victim)
    print(f"{name}, rank {victim} of {ranks} {fault}: {report} after {seconds:.1f} s")
    assert "failed; stopping all ranks" in report and seconds < LIMIT_S + 30, text
    assert re.search(r"MeshError|DisagreementError|StalledError|PolicyMismatch", text), text


@SLOW
@needs_mpi
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("number", range(KILLS // (2 * len(LAUNCHERS))))
def test_kills_under_mpirun(number, launcher, ranks, tmp_path):
    draw = random.Random(f"{number} {launcher} {ranks}")
    name = list(CALLS)[number % len(CALLS)]
    victim = draw.randrange(ranks)
    status, text, seconds = launch(launcher, ranks, tmp_path, name, "killed", victim,
                                   draw.randrange(10**6))
    report = need_report(status, text, victim)
    print(f"{name}, rank {victim} of {ranks}: {report} after {seconds:.1f} s")
    assert report.startswith(f"tessera: rank {victim} of {ranks} (pid ") and "killed" in report
    assert seconds < LIMIT_S + 30, text
    promised = tmp_path / "promised"
    found = ts.checkpoints.History(tmp_path / "history").load()
    assert found.step >= (int(promised.read_text() or 0) if promised.exists() else 0)
    assert found.tensors["w"].tolist() == [float(found.step)] * 5
    values = np.arange(4 * ranks, dtype=np.float32)
    assert (found.tensors["x"].numpy() == values).all()
