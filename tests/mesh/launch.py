"""Launchers for tests. mpirun: found beside this Python or on the path, when mpi4py is there."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from mesh import warm_ranks
from mesh.processes import processes_of_run

ROOT = Path(__file__).resolve().parents[2]
BATTERY = Path(__file__).with_name("battery.py")
MPIRUN = shutil.which("mpirun", path=os.path.dirname(sys.executable)) or shutil.which("mpirun")
STOPPED_S = 40  # within which all ranks stop, on a busy machine; waits end after 45 s in any case
needs_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpi4py and mpirun: pip install mpi4py mpich")
# Open MPI asks before it runs as root or puts more ranks than cores on a machine, and binds the
# ranks of every run to the same first cores; MPICH ignores it.
ALLOW = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
         "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # from Open MPI 5 on
         "OMPI_MCA_rmaps_base_oversubscribe": "1",
         "OMPI_MCA_hwloc_base_binding_policy": "none",
         "PRTE_MCA_hwloc_default_binding_policy": "none"}


@dataclass(frozen=True)
class Run:
    """A finished mpirun: exit status, both streams, seconds, and what each rank wrote."""

    status: int
    text: str
    seconds: float
    results: dict[int, str]


def mpirun(ranks: int, program: str, folder: Path, timeout_s: int = 100,
           battery: Path = BATTERY, flags: Sequence[str] = (), fresh: bool = False,
           **env: str) -> Run:
    """A program of battery.py, or of another file that takes flags, on `ranks` processes.

    fresh: each is a Python that begins there; else one that has imported tessera (warm_ranks.py).
    """
    command = [str(MPIRUN), "-n", str(ranks), *rank_command(program, folder, battery, flags, fresh)]
    given = {**rank_environment(), **ALLOW, **env}
    mark = given.setdefault("RUN_OF_TEST", uuid.uuid4().hex)
    with tempfile.TemporaryFile("w+") as shown:
        begin = time.monotonic()
        with subprocess.Popen(command, env=given, cwd=folder, stdin=subprocess.DEVNULL,
                              stdout=shown, stderr=subprocess.STDOUT) as running:
            seconds = _wait(running, begin, timeout_s, str(battery), mark)
        shown.seek(0)
        text = shown.read()
    assert seconds < timeout_s, f"still there after {seconds:.0f} s; it had written:\n{text}"
    return Run(running.returncode, text, seconds, _written(folder))


# What launchers other than mpirun tell a process: (rank, ranks) -> variables.
TOLD: dict[str, Callable[[int, int], dict[str, object]]] = {
    "torchrun": lambda rank, ranks: {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank,
                                     "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "localhost"},
    "srun": lambda rank, ranks: {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": ranks,
                                 "SLURM_NTASKS": ranks, "SLURM_LOCALID": rank, "SLURM_NODEID": 0,
                                 "SLURM_STEP_TASKS_PER_NODE": ranks, "SLURM_JOB_ID": 7,
                                 "SLURM_STEP_ID": 0, "SLURM_STEP_NODELIST": "localhost"}}


def started_as_by(launcher: str, ranks: int, program: str, folder: Path, timeout_s: int = 100,
                  battery: Path = BATTERY, flags: Sequence[str] = (), fresh: bool = False,
                  **env: str) -> Run:
    """The same on processes that are told what torchrun or srun tells. As by srun, nobody ends the
    others when one fails."""
    given = rank_environment() | {"MASTER_PORT": str(_free_port())} | env
    given.setdefault("RUN_OF_TEST", uuid.uuid4().hex)
    with tempfile.TemporaryFile("w+") as shown:
        begin = time.monotonic()
        running = [subprocess.Popen(
            rank_command(program, folder, battery, flags, fresh), cwd=folder,
            stdin=subprocess.DEVNULL, stdout=shown, stderr=subprocess.STDOUT,
            env=given | {k: str(v) for k, v in TOLD[launcher](r, ranks).items()})
            for r in range(ranks)]
        try:
            for process in running:
                process.wait(timeout_s)
            seconds = time.monotonic() - begin
        except subprocess.TimeoutExpired:
            seconds = timeout_s
        finally:
            for process in running:
                process.kill()
                process.wait()
        shown.seek(0)
        text = shown.read()
    assert seconds < timeout_s, f"still there after {seconds:.0f} s; it had written:\n{text}"
    status = next((p.returncode for p in running if p.returncode), 0)
    return Run(status, text, seconds, _written(folder))


def _free_port() -> int:
    with socket.create_server(("", 0)) as listener:
        return listener.getsockname()[1]


def rank_command(program: str, folder: Path, battery: Path, flags: Sequence[str],
            fresh: bool) -> list[str]:
    python = [sys.executable]
    if not fresh:
        names = warm_ranks.servers(rank_environment())
        python += ["-I", "-S", str(warm_ranks.CLIENT), ",".join(names)]
    return [*python, str(battery), program, str(folder), *flags]


def rank_environment() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"),
                             *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _written(folder: Path) -> dict[int, str]:
    return {int(f.name): f.read_text() for f in folder.iterdir() if f.name.isdigit()}


@functools.cache
def results_of_all(battery: Path, programs: str, ranks: int) -> dict[str, dict[int, str]]:
    """{program: {rank: text}} of programs "a,b" in one run, for tests that look at one each."""
    with tempfile.TemporaryDirectory() as folder:
        run = mpirun(ranks, programs, Path(folder), battery=battery)
    assert run.status == 0, run.text
    texts = {rank: json.loads(text) for rank, text in run.results.items()}
    return {name: {rank: text[name] for rank, text in texts.items()}
            for name in programs.split(",")}


def _wait(running: subprocess.Popen, begin: float, timeout_s: float, program: str,
          mark: str) -> float:
    """Seconds until mpirun ends or, where it outlives its ranks by 5 s, until they did.

    Open MPI 4 now and then waits for ever after an abort that ended every rank.
    """
    seen, last = False, begin
    while running.poll() is None and time.monotonic() - begin < timeout_s:
        try:
            running.wait(1 if time.monotonic() - begin > 2 else 0.05)
            break
        except subprocess.TimeoutExpired:
            ranks = [p for p in processes_of_run(mark) if program in p and MPIRUN not in p]
        if ranks:
            seen, last = True, time.monotonic()
        elif seen and time.monotonic() - last > 5:
            running.kill()
            running.wait()
            return last - begin
    if running.poll() is None:
        running.kill()
    return time.monotonic() - begin
