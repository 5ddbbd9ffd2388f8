"""How a launcher started this process: read from the environment, before ranks reach each other."""

from __future__ import annotations

import os
import re
import sys
from itertools import chain

from .lazy_dataclass import dataclass


@dataclass(frozen=True)
class RankLauncher:
    """How a launcher tells a process what it is: names of variables.

    size, rank: of the processes  here, local: how many are on its machine, and which it is
    wire: what they reach each other by  needs: variables; with none of them it is another's
    """

    name: str
    size: str
    rank: tuple[str, ...]
    here: str
    local: str
    wire: str = "mpi"
    needs: tuple[str, ...] = ()

    def started(self) -> bool:
        """Whether it has started this process among several."""
        told = self.wire == "mpi" or _first(self.rank) is not None
        own = not self.needs or any(map(os.environ.get, self.needs))
        return (_number(self.size) or 1) > 1 and told and own


# The first that has started a process counts: torchrun may run below srun.
LAUNCHERS = (
    RankLauncher("mpirun", "OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_RANK", "PMIX_RANK"),
             "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
    RankLauncher("mpirun", "PMI_SIZE", ("PMI_RANK", "PMIX_RANK"), "MPI_LOCALNRANKS",
             "MPI_LOCALRANKID"),  # MPICH
    RankLauncher("torchrun", "WORLD_SIZE", ("RANK",), "LOCAL_WORLD_SIZE", "LOCAL_RANK", "tcp",
             ("MASTER_ADDR", "MASTER_PORT")),
    # SLURM_NTASKS is there in a batch script too, which is no rank.
    RankLauncher("srun", "SLURM_STEP_NUM_TASKS", ("SLURM_PROCID",), "", "SLURM_LOCALID", "tcp"),
    RankLauncher("srun", "SLURM_NTASKS", ("SLURM_PROCID",), "", "SLURM_LOCALID", "tcp",
             ("MASTER_ADDR",)))


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else None


def _first(names: tuple[str, ...]) -> int | None:
    return next((n for name in names if (n := _number(name)) is not None), None)


def launcher() -> RankLauncher | None:
    """What has started this process among several; None for one that runs alone."""
    return next((way for way in LAUNCHERS if way.started()), None)


def half_told() -> str:
    """What a process that runs alone is told of others, though not which of them it is; "" where
    nothing is."""
    for way in LAUNCHERS:
        if way.wire == "tcp" and (_number(way.size) or 1) > 1 and _first(way.rank) is None and any(
                map(os.environ.get, way.needs)):
            said = " ".join(f"{n}={os.environ[n]}" for n in (way.size, *way.needs)
                            if os.environ.get(n))
            (rank,) = way.rank
            mine = f"{rank}={os.environ[rank]}" if rank in os.environ else f"no {rank}"
            return f"{said} and {mine}"
    return ""


def launched_size() -> int:
    """How many processes a launcher started, 1 without one."""
    way = launcher()
    return 1 if way is None else _number(way.size) or 1


def launched_here() -> int:
    """How many of them are on this machine, all where the launcher does not say."""
    way = launcher()
    if way is None:
        return 1
    told = _tasks_here() if way.name == "srun" else _number(way.here)
    return told or launched_size()


def launched_rank() -> int:
    """The rank that a launcher gave this process."""
    way = launcher()
    return 0 if way is None else _first(way.rank) or 0


def launched_local_rank() -> int:
    """Which of those on this machine it is; its rank where the launcher does not say."""
    way = launcher()
    found = None if way is None else _number(way.local)
    return launched_rank() if found is None else found


# --- children of ranks ---------------------------------------------------------------------------
RANK_PROCESS = "TESSERA_RANK_PROCESS"  # the process of the rank, for the children that it starts


def mark_rank() -> None:
    """This process is a rank: its children get its environment, and are told whose it is."""
    os.environ[RANK_PROCESS] = str(os.getpid())


def rank_above() -> int | None:
    """The process of the rank for which multiprocessing has started this one anew, which then has
    the rank's environment and is none itself; None of any other process."""
    told, process = _number(RANK_PROCESS), sys.modules.get("multiprocessing.process")
    if told in (None, os.getpid()) or process is None:
        return None
    return told if is_preparing() or process.parent_process() is not None else None


def is_preparing() -> bool:
    """Whether it is such a process, and still runs the lines of the rank's script."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and getattr(process.current_process(), "_inheriting", False)


# --- what Slurm writes shortly -------------------------------------------------------------------
def _tasks_here() -> int | None:
    """"2(x3),1" of SLURM_STEP_TASKS_PER_NODE: 2 on each of three machines, 1 on the fourth."""
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    counts = list(chain.from_iterable([int(n)] * int(times or 1) for n, times in runs))
    node = _number("SLURM_NODEID") or 0
    return counts[node] if node < len(counts) else None


def first_host(nodes: str) -> str:
    """The first of a list of machines: "gpu07" of "gpu[07-10,12],login1"."""
    found = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\]([^,]*))?", nodes)
    return "".join(part or "" for part in found.groups()) if found else ""


__all__ = ["LAUNCHERS", "RankLauncher", "first_host", "half_told", "is_preparing",
           "launched_here", "launched_local_rank", "launched_rank", "launched_size", "launcher",
           "mark_rank", "rank_above"]
