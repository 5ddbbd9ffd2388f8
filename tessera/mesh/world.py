"""Which ranks this program runs on: simulated ones, those of a launcher, or itself alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tessera import config
from tessera.errors import ArgumentError, warn_user
from tessera.launched import half_told, rank_above
from tessera.numerics.random_state import isolate

from .device_mesh import Mesh, current_mesh
from .errors import MeshError
from .ranks.child import ChildOfRank
from .ranks.launcher import launcher, simulated_rank
from .ranks.local import run_ranks
from .ranks.transport import Single, Transport


def transport() -> Transport:
    """The transport of this rank: of a simulation inside one, of processes under a launcher, else
    none.

    Raises MeshError under mpirun when mpi4py is missing, StalledError when ranks do not come.
    """
    return simulated_rank.get() or _process_transport()


@functools.cache
def _process_transport() -> Transport:
    way = launcher()
    if way is None:
        if said := half_told():
            warn_user(f"the environment has {said}: this process is told of others and not which "
                      "rank it is, so it runs alone")
        return Single()
    if rank_above() is not None:
        return ChildOfRank(way.wire)
    from .ranks.processes import ProcessTransport  # what it stands on is for programs with ranks

    if way.wire == "mpi":
        from .ranks.mpi import MpiWire

        return ProcessTransport(MpiWire())
    from .ranks.tcp import TcpWire

    return ProcessTransport(TcpWire())


def rank() -> int:
    """This rank's number, from 0; 0 for a program that runs alone.

    Under a launcher the first use of ts.dist waits until all ranks make it.
    """
    return transport().rank


def backend() -> str:
    """What carries bytes between this program's ranks: "mpi" under mpirun, "tcp" under torchrun and
    srun, "local" in a simulation, "single" for a program that runs alone."""
    return transport().name


def world_size() -> int:
    """The number of ranks that run this program."""
    return transport().size


def surroundings() -> Any:
    """What a traced function depends on beside its arguments: the open mesh, and in a simulation,
    whose ranks share the functions of this process, the rank."""
    here = simulated_rank.get()
    return current_mesh(), here and (here.rank, here.size)


COMPILE_S = 600
MOST_PLAYED = 4096  # ranks of one process: each is a thread, and has its part of every tensor


def need_playable(ranks: int, what: str) -> None:
    """Raise ArgumentError for more ranks than one process can play."""
    if ranks > MOST_PLAYED:
        raise ArgumentError(f"{what} has {ranks} ranks: one process plays {MOST_PLAYED} at most",
                            hint=f"mpirun -n {ranks} runs them; ts.dist.plan_report and python -m "
                            "tessera plan tell what a step would take on them")


@contextmanager
def patience(first: bool) -> Iterator[None]:
    """While active, processes wait for each other as long as compiling may take, if this is the
    `first` run of something: many ranks on few cores do not get there together. For one of their
    machine that does nothing they wait as ever."""
    usual_s = config.comm_timeout
    if not first or not usual_s or not (here := transport()).processes:
        yield
        return
    with config.scope(comm_timeout=max(usual_s, COMPILE_S)), here.long_act(usual_s):
        yield


def simulate(program: Callable[..., Any], ranks: int | Mesh, *args: Any) -> list[Any]:
    """program(*args) on every rank of a mesh, or on so many ranks, all in this process.

    Ranks take turns at their collectives, so that a run is the same every time. A mesh is the
    current one inside. Returns the results by rank; of a part of a mesh, those of its ranks, and
    only they run. An error of a rank stops the others and is raised here. Raises StalledError when
    ranks wait for each other, or one hangs.
    """
    size = ranks.world_size if isinstance(ranks, Mesh) else ranks
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ArgumentError(f"simulate runs on a mesh or on 1 or more ranks, got {ranks!r}")
    need_playable(size, "a simulation" if ranks is size else str(ranks))

    def one(simulated: Transport) -> Any:
        simulated_rank.set(simulated)
        isolate()
        if not isinstance(ranks, Mesh):
            return program(*args)
        if not ranks.has(simulated.rank):
            return None
        with ranks:
            return program(*args)

    results = run_ranks(size, one)
    return [results[r] for r in ranks.world_ranks] if isinstance(ranks, Mesh) else results


def need_world(mesh: Mesh) -> Transport:
    """The transport, when it has the ranks that the mesh, or the one it is a part of, asks for;
    else MeshError."""
    here, needed = transport(), mesh.world_size
    if here.size != needed:
        raise MeshError(
            f"{mesh} has {needed} ranks and this program runs on {here.size}"
            if mesh.ranks is None else
            f"{mesh} is part of a mesh of {needed} ranks and this program runs on {here.size}",
            hint=f"start {needed}: mpirun -n {needed} python train.py, simulate them: "
            "ts.dist.simulate(program, mesh), or build a mesh of "
            f"{here.size}")
    return here


def mesh_rank(mesh: Mesh) -> int:
    """This rank's number in the mesh. Raises MeshError on a rank that is not in it, and when the
    program runs on another number of ranks than the mesh asks for."""
    here = need_world(mesh)
    if not mesh.has(here.rank):
        raise MeshError(f"rank {here.rank} is not in {mesh}",
                        hint="only its ranks may communicate on it: if mesh.has(ts.dist.rank()):")
    return mesh.world_ranks.index(here.rank)


def own_ranks(mesh: Mesh) -> tuple[int, ...]:
    """This rank's number in the mesh, none where it is not in it. Raises MeshError as need_world
    does."""
    here = need_world(mesh)
    return (mesh.world_ranks.index(here.rank),) if mesh.has(here.rank) else ()


def is_here(mesh: Mesh) -> bool:
    """Whether this rank is one of the mesh. Raises MeshError as need_world does."""
    return mesh.has(need_world(mesh).rank)
