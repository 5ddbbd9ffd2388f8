"""What carries bytes between ranks: one small interface.

A transport is a rank, a size, and `exchange`: all sends and receives of one step at once, so that
no order of them can block. Collectives are written on it once (collective.py), and give the same
bits on every transport.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np

from .errors import MeshError


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
