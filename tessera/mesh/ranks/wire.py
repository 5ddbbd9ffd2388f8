"""Raw bytes between processes: what MPI and sockets do below processes.py, which frames them.

Messages of one tag between two ranks arrive in the order in which they were sent; those of
different tags do not wait for each other. Nothing here waits, unless it says so.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

MAX_TAG = 32767  # MPI promises so many


class WireBatch(ABC):
    """Some requests that are looked at together, until one of them is done."""

    @abstractmethod
    def arrived(self) -> list[tuple[int, int]]:
        """Which of them are done now, by number, and the bytes that came."""


class ProcessWire(ABC):
    """This process among `size`. `here` of them are on its machine, of which it is number `local`.
    """

    name: str
    rank: int
    size: int
    here: int
    local: int
    any_thread = True  # whether threads may use it side by side

    @abstractmethod
    def send(self, data: Any, to: int, tag: int) -> Any:
        """Begin to send bytes, which stay as they are until the request is done."""

    @abstractmethod
    def receive(self, buffer: np.ndarray, source: int, tag: int) -> Any:
        """Begin to receive a message of at most so many bytes."""

    @abstractmethod
    def batch(self, requests: Sequence[Any]) -> WireBatch:
        """To look at these requests."""

    @abstractmethod
    def all_done(self, requests: Sequence[Any]) -> bool:
        """Whether all of these are done."""

    @abstractmethod
    def probe(self, source: int | None, tag: int | None) -> tuple[int, int, int] | None:
        """A message that has come and that nobody has asked for: source, tag, bytes."""

    @abstractmethod
    def take(self, found: tuple[int, int, int]) -> np.ndarray:
        """The bytes of a message that `probe` has found."""

    def pause(self, seconds: float) -> None:
        """Let others compute for so long; 0 gives up the core. May end when something comes."""
        time.sleep(seconds)

    @abstractmethod
    def share_here(self, numbers: np.ndarray) -> None:
        """Fill these with those of the first rank of this machine. All of them call it; waits."""

    @abstractmethod
    def stop(self, status: int) -> None:
        """End the processes of all ranks with this exit status."""

    def closed(self) -> bool:
        """Whether somebody has ended it, so that nothing can be sent any more."""
        return False

    def close(self) -> None:  # noqa: B027  MPI closes itself
        """All ranks have ended well, this one too."""

    @abstractmethod
    def forget(self) -> None:
        """This process is a child of the rank."""


__all__ = ["MAX_TAG", "WireBatch", "ProcessWire"]
