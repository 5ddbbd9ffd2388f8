"""Which ranks this program runs on: simulated ones, those of mpirun, or itself alone."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from tessera.errors import ArgumentError

from .device_mesh import Mesh
from .errors import MeshError
from .local import run_ranks
from .transport import Single, Transport

# How launchers tell a process how many there are, and which it is: Open MPI, MPICH.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_simulated: ContextVar[Transport | None] = ContextVar("simulated rank", default=None)


def launched_size() -> int:
    """How many processes a launcher started, 1 without one. Reads the environment only."""
    return max([int(os.environ[v]) for v in _SIZES if os.environ.get(v, "").isdigit()], default=1)


def launched_rank() -> int:
    """The rank that a launcher gave this process. Reads the environment only."""
    return next((int(os.environ[v]) for v in _RANKS if os.environ.get(v, "").isdigit()), 0)


def transport() -> Transport:
    """The transport of this rank: of a simulation inside one, of MPI under mpirun, else none.

    Raises MeshError under mpirun when mpi4py is missing.
    """
    return _simulated.get() or _process_transport()


@functools.cache
def _process_transport() -> Transport:
    if launched_size() == 1:
        return Single()
    from .mpi import MpiTransport

    return MpiTransport()


def rank() -> int:
    """This rank's number, from 0; 0 for a program that runs alone."""
    return transport().rank


def world_size() -> int:
    """The number of ranks that run this program."""
    return transport().size


def simulate(program: Callable[..., Any], ranks: int | Mesh, *args: Any) -> list[Any]:
    """program(*args) on every rank of a mesh, or on so many ranks, all in this process.

    Ranks take turns at their collectives, so that a run is the same every time. A mesh is the
    current one inside. Returns the results by rank; an error of a rank stops the others and is
    raised here. Raises StalledError when ranks wait for each other, or one hangs.
    """
    size = ranks.size() if isinstance(ranks, Mesh) else ranks
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ArgumentError(f"simulate runs on a mesh or on 1 or more ranks, got {ranks!r}")

    def one(simulated: Transport) -> Any:
        _simulated.set(simulated)
        if isinstance(ranks, Mesh):
            with ranks:
                return program(*args)
        return program(*args)

    return run_ranks(size, one)


def need_world(mesh: Mesh) -> Transport:
    """The transport, when it has one rank per entry of the mesh; else MeshError."""
    here = transport()
    if here.size != mesh.size():
        raise MeshError(
            f"{mesh} has {mesh.size()} ranks and this program runs on {here.size}",
            hint=f"start {mesh.size()}: mpirun -n {mesh.size()} python train.py, simulate them: "
            "ts.dist.simulate(program, mesh), or build a mesh of "
            f"{here.size}")
    return here
