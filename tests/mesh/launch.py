"""mpirun for tests: found beside this Python, or on the path, when mpi4py is there too."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BATTERY = Path(__file__).with_name("battery.py")
MPIRUN = shutil.which("mpirun", path=os.path.dirname(sys.executable)) or shutil.which("mpirun")
needs_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpi4py and mpirun: pip install mpi4py mpich")
# Open MPI asks before it runs as root or puts more ranks than cores on a machine; MPICH ignores it.
ALLOW = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
         "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # from Open MPI 5 on
         "OMPI_MCA_rmaps_base_oversubscribe": "1"}


def processes_of_run(mark: str) -> list[str]:
    """Command lines of the processes that were started with RUN_OF_TEST=mark."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"RUN_OF_TEST={mark}\0".encode() in \
                    (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it has ended
            continue
    return found


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
    begin = time.monotonic()
    done = subprocess.run(command, env=env, cwd=folder, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=timeout_s)
    return Run(done.returncode, done.stdout, time.monotonic() - begin,
               {int(f.name): f.read_text() for f in folder.iterdir() if f.name.isdigit()})
