"""Where the parts of distributed tensors lie: on hosts, or on the GPU of each rank.

Entry i of a mesh is rank i. Of the GPUs of a machine its ranks take one each, in their order; where
there are fewer they share them, and then what they exchange goes through the host. A program that
runs alone takes the GPU that a mesh of one names. Ranks that are simulated compute on the host,
whatever the mesh names.
"""

from __future__ import annotations

import functools
import re

from tessera.errors import UnsupportedTargetError, warn_user
from tessera.launched import launched_local_rank

from .device_mesh import Mesh
from .world import transport

REAL = {"mpi", "tcp", "single"}  # transports whose ranks are processes
HOST_NAME = re.compile(r"cpu(:\d+)?")
HOSTS = "ts.dist.mesh(axes=..., shape=...) computes on hosts"


def gpu_of(mesh: Mesh) -> int | None:
    """The number of this rank's GPU for a mesh of GPUs; None where it computes on hosts.

    Sends nothing. Raises UnsupportedTargetError where this machine has no GPU, and for a mesh of
    GPUs and hosts.
    """
    return _device_number(mesh, transport().rank) if computes_on_gpus(mesh) else None


def computes_on_gpus(mesh: Mesh) -> bool:
    """Whether ranks compute on GPUs for a mesh: it names some, and the program has its ranks. One
    that runs alone plays those of a larger mesh on the host."""
    return mesh.names_gpus and (here := transport()).name in REAL and (
        here.size == mesh.world_size)


@functools.lru_cache(maxsize=256)
def _need_hosts(mesh: Mesh) -> None:
    """Raise UnsupportedTargetError where a mesh names devices that nothing computes on: a name of
    another spelling would be a host without being asked."""
    other = next((d for d in mesh.devices if not HOST_NAME.fullmatch(d)), None)
    if other is not None:
        raise UnsupportedTargetError(
            f"{mesh} names {other!r}, which is no device that ranks compute on",
            hint=f'GPUs are "cuda:0", "cuda:1", ..., hosts "cpu:0", "cpu:1", ...; {HOSTS}')


@functools.lru_cache(maxsize=256)
def _device_number(mesh: Mesh, rank: int) -> int:
    from tessera.runtime.device import device_count  # a program on hosts needs none of it

    if not all(d.startswith("cuda") for d in mesh.devices):
        raise UnsupportedTargetError(f"{mesh} names GPUs ({_names(mesh)}) and others",
                                     hint="a mesh computes on GPUs or on hosts: name one sort")
    try:
        count = device_count()
    except UnsupportedTargetError as error:
        raise UnsupportedTargetError(
            f"{mesh} names GPUs ({_names(mesh)}), and rank {rank} has none: {error.message}",
            hint=f"leave out devices=: {HOSTS}. ts.dist.simulate(program, mesh) plays the ranks of "
            "a mesh of GPUs on the host") from error
    if count == 0:
        raise UnsupportedTargetError(f"{mesh} names GPUs ({_names(mesh)}), and rank {rank} sees "
                                     "none", hint="see CUDA_VISIBLE_DEVICES")
    if mesh.world_size > 1:
        return launched_local_rank() % count
    number = int(mesh.devices[0].partition(":")[2] or 0)  # of a program that runs alone
    if number >= count:
        raise UnsupportedTargetError(
            f"{mesh} names {mesh.devices[0]}, and this machine has {count} GPUs",
            hint="cuda:0 is the first")
    return number


def _names(mesh: Mesh) -> str:
    return ", ".join(mesh.devices[:2]) + (", ..." if mesh.size() > 2 else "")


def warn_of_play(mesh: Mesh) -> None:
    """Where this process plays the ranks of a mesh of GPUs on the host without being asked to."""
    if mesh.names_gpus and mesh.world_size > 1 and transport().name == "single":
        _warn_of_play(mesh)


@functools.lru_cache(maxsize=256)  # once for a mesh
def _warn_of_play(mesh: Mesh) -> None:
    warn_user(f"{mesh} names GPUs; this process plays its {mesh.world_size} ranks on the host: "
              f"mpirun -n {mesh.world_size} gives each a process and a GPU")


def join(mesh: Mesh) -> None:
    """Make the communicators of a mesh of GPUs, once. All its ranks call it; others return. Raises
    UnsupportedTargetError for devices that nothing computes on."""
    if not mesh.names_gpus:
        _need_hosts(mesh)
    index = gpu_of(mesh)
    if index is not None and mesh.has(transport().rank):
        from .ranks.communicator import join as join_communicators  # it stands on NCCL

        join_communicators(mesh, index)


__all__ = ["computes_on_gpus", "gpu_of", "join", "warn_of_play"]
