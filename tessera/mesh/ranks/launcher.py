"""Which rank this process is, as its launcher or a simulation says: known before MPI starts."""

from __future__ import annotations

import os
from contextvars import ContextVar

from .transport import Transport

# How launchers tell a process how many there are, and which it is: Open MPI, MPICH.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
simulated_rank: ContextVar[Transport | None] = ContextVar("simulated rank", default=None)


def launched_size() -> int:
    """How many processes a launcher started, 1 without one. Reads the environment only."""
    return max([int(os.environ[v]) for v in _SIZES if os.environ.get(v, "").isdigit()], default=1)


def launched_rank() -> int:
    """The rank that a launcher gave this process. Reads the environment only."""
    return next((int(os.environ[v]) for v in _RANKS if os.environ.get(v, "").isdigit()), 0)


def rank_of_program() -> int:
    """This rank's number, without starting MPI for it."""
    here = simulated_rank.get()
    return launched_rank() if here is None else here.rank


__all__ = ["launched_rank", "launched_size", "rank_of_program", "simulated_rank"]
