"""How ranks wait for each other when a program starts: not for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tessera import config
from tessera.errors import user_line

from ..errors import StalledError
from .abort import stop_with
from .launcher import launched_rank, launched_size


def never_started(limit_s: int) -> StalledError:
    """The error of a rank whose others do not come."""
    return StalledError(
        f"rank {launched_rank()} of {launched_size()} has waited {limit_s} s for other ranks to "
        "communicate at all", where=user_line(),
        hint="all ranks make the first call of ts.dist; look for a branch that depends on the rank "
        "around this one. TESSERA_COMM_TIMEOUT is the limit in seconds; 0 waits forever")


@contextmanager
def limited_start() -> Iterator[None]:
    """MPI starts when all ranks start it, and knows no limit: a rank that never communicates would
    keep the others for ever."""
    limit, started = config.comm_timeout, threading.Event()
    error = never_started(limit)

    def watch() -> None:
        if not started.wait(limit):
            stop_with(error)

    if limit:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        started.set()


__all__ = ["limited_start", "never_started"]
