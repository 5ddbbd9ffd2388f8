"""What carries bytes between ranks: one small interface.

A transport is a rank, a size, and `exchange`: all sends and receives of one step at once, so that
no order of them can block. Collectives are written on it once (collectives/record.py), and give
the same bits on every transport. `isend` and `irecv` begin a message between two ranks and return
at once; a pipeline moves its activations by them while it computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NoReturn

import numpy as np

from ..errors import MeshError


class Request(ABC):
    """A message on its way: what isend and irecv return."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it has arrived, or its bytes may be overwritten. Does not wait."""

    @abstractmethod
    def wait(self) -> None:
        """Return when done. Raises what `exchange` raises."""


class Transport(ABC):
    """A rank among `size`. Buffers are contiguous uint8 arrays, of the length that was sent."""

    name: str
    rank: int
    size: int

    @abstractmethod
    def exchange(self, sends: Mapping[int, np.ndarray], receives: Mapping[int, np.ndarray],
                 what: str) -> None:
        """Send each array to its rank and fill each buffer from its rank; returns when all is done.

        Messages between two ranks arrive in the order in which they were sent. what: the
        operation, for messages. Raises StalledError when a rank does not come, StoppedError when
        another one failed.
        """

    @abstractmethod
    def isend(self, to: int, data: np.ndarray, tag: int, what: str = "send") -> Request:
        """Begin to send bytes, which stay as they are until the request is done.

        tag: 0 to 16383. Messages of one tag between two ranks arrive in the order in which they
        were sent; those of different tags, and those of `exchange`, do not wait for each other.
        """

    @abstractmethod
    def irecv(self, source: int, buffer: np.ndarray, tag: int, what: str = "receive") -> Request:
        """Begin to receive: the buffer holds the message when the request is done."""

    def note(self, call: str) -> None:  # noqa: B027  most have nobody to tell
        """The call that the next messages belong to, with its line, for what is said of a rank that
        is killed."""

    def send(self, to: int, data: np.ndarray, what: str = "send") -> None:
        """Send bytes to a rank."""
        self.exchange({to: data}, {}, what)

    def receive(self, source: int, buffer: np.ndarray, what: str = "receive") -> None:
        """Fill a buffer with the bytes that a rank sends."""
        self.exchange({}, {source: buffer}, what)

    def need(self, rank: int) -> None:
        """Raise MeshError for a rank that is not there, or that is this one."""
        if not 0 <= rank < self.size or rank == self.rank:
            raise MeshError(f"rank {self.rank} of {self.size} cannot exchange with rank {rank}")


class Single(Transport):
    """The transport of a program that runs alone."""

    name, rank, size = "single", 0, 1

    def exchange(self, sends: Mapping[int, np.ndarray], receives: Mapping[int, np.ndarray],
                 what: str) -> None:
        for rank in (*sends, *receives):
            self.need(rank)

    def isend(self, to: int, data: np.ndarray, tag: int, what: str = "send") -> Request:
        return self._nobody(to)

    def irecv(self, source: int, buffer: np.ndarray, tag: int, what: str = "receive") -> Request:
        return self._nobody(source)

    def _nobody(self, rank: int) -> NoReturn:
        raise MeshError(f"rank 0 of 1 cannot exchange with rank {rank}")
