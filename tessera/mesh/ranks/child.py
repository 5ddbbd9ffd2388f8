"""A process that multiprocessing has started for a rank, as a data loader does.

It has the rank's environment, and runs the lines of the rank's script anew: those that ask for the
rank or make a mesh give what they gave there. What communicates is an error, since this process is
no rank. In those lines it ends the rank: a pool would start such a child again and again.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from tessera.errors import user_line
from tessera.launched import is_preparing, launched_rank, launched_size, rank_above

from ..errors import MeshError
from .envelope import MessageLabel
from .transport import Transport


class ChildOfRank(Transport):
    """Knows its rank's number and how many there are, and reaches none."""

    processes = forked = True

    def __init__(self, name: str):
        super().__init__()
        self.name, self.rank, self.size = name, launched_rank(), launched_size()

    def _ready(self, ranks: Iterable[int], label: MessageLabel | None = None) -> NoReturn:
        raise self._error()

    def begin_send(self, *args: Any) -> NoReturn:
        raise self._error()

    def begin_receive(self, *args: Any) -> NoReturn:
        raise self._error()

    def _error(self) -> MeshError:
        error = MeshError(
            f"this process was started by multiprocessing from rank {self.rank} of {self.size}, "
            "and is no rank itself", where=user_line(),
            hint="a child that is not forked runs the lines of the script anew: put those that "
            "communicate under if __name__ == '__main__':, and let children compute and give back "
            "results; or fork them: multiprocessing.get_context('fork')")
        rank = rank_above()
        if is_preparing() and rank is not None:
            print(f"tessera: a child of rank {self.rank} of {self.size} failed as it began; "
                  f"stopping all ranks\n{error}", file=sys.stderr, flush=True)
            os.kill(rank, signal.SIGTERM)
            os._exit(1)
        return error


__all__ = ["ChildOfRank"]
