"""mpirun for tests: found beside this Python, or on the path, when mpi4py is there too."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

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
           battery: Path = BATTERY, flags: Sequence[str] = (), **env: str) -> Run:
    """A program of battery.py, or of another file that takes flags, on `ranks` processes."""
    command = [str(MPIRUN), "-n", str(ranks), sys.executable, str(battery), program, str(folder),
               *flags]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"),
                             *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, **ALLOW, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1",
           "OPENBLAS_NUM_THREADS": "1", **env}
    mark = env.setdefault("RUN_OF_TEST", uuid.uuid4().hex)
    with tempfile.TemporaryFile("w+") as shown:
        begin = time.monotonic()
        with subprocess.Popen(command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=shown,
                              stderr=subprocess.STDOUT) as running:
            seconds = _wait(running, begin, timeout_s, str(battery), mark)
        shown.seek(0)
        text = shown.read()
    assert seconds < timeout_s, f"still there after {seconds:.0f} s; it had written:\n{text}"
    return Run(running.returncode, text, seconds,
               {int(f.name): f.read_text() for f in folder.iterdir() if f.name.isdigit()})


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
