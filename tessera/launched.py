"""How a launcher, mpirun, started this process: read from the environment, before MPI starts."""

from __future__ import annotations

import os

# How launchers tell a process how many there are, how many on its machine, and which it is:
# Open MPI, MPICH.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def _numbers(names: tuple[str, ...]) -> list[int]:
    return [int(text) for v in names if (text := os.environ.get(v, "")).isdigit()]


def launched_size() -> int:
    """How many processes a launcher started, 1 without one."""
    return max(_numbers(_SIZES), default=1)


def launched_here() -> int:
    """How many of them are on this machine, all where the launcher does not say."""
    return next(iter(_numbers(_LOCAL_SIZES)), launched_size())


def launched_rank() -> int:
    """The rank that a launcher gave this process."""
    return next(iter(_numbers(_RANKS)), 0)


def launched_local_rank() -> int:
    """Which of those on this machine it is; its rank where the launcher does not say."""
    return next(iter(_numbers(_LOCAL_RANKS)), launched_rank())


__all__ = ["launched_here", "launched_local_rank", "launched_rank", "launched_size"]
