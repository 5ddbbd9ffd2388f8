"""Under mpirun, an exception or `sys.exit(n)` on one rank ends the program on all.

Installed by `import tessera` when a launcher started several processes; costs nothing otherwise.
mpirun's exit status is then 1 for an exception and n for sys.exit(n). `raise SystemExit(n)` is not
seen here: ranks that wait for one that left so notice it after `config.comm_timeout`.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from types import TracebackType
from typing import Any, NoReturn

from tessera import config

from ..errors import DisagreementError, StalledError
from ..world import launched_rank, launched_size
from .output import also_on_terminal, log_to_file, silence_other_ranks

# Ranks that notice the same thing do so within this time of each other; each is to say its part.
_GRACE_S: dict[type[BaseException], float] = {DisagreementError: 0.5, StalledError: 2.0}
# Others speak in turn: of ranks that fail alike, rank 0 has ended the others when it is theirs.
_FIRST_TURN_S, _TURN_S, _LAST_TURN_S = 0.5, 0.05, 3.0
_LEFT: list[int] = []  # the status with which sys.exit has ended this rank, unless it is 0


def install() -> None:
    """Put our hooks before those of Python, and lead what this rank prints where it is to go."""
    if launched_size() == 1 or sys.excepthook is _stop_all:
        return
    global _print
    _print = sys.excepthook
    sys.excepthook = _stop_all
    sys.exit = _exit
    atexit.register(_leave)
    if config.rank_logs is not None:
        log_to_file(config.rank_logs, launched_rank())
    elif config.rank_output == "first":
        silence_other_ranks()


_print = sys.excepthook


def _stop_all(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    rank, size = launched_rank(), launched_size()
    if kind not in _GRACE_S and rank:
        time.sleep(min(_FIRST_TURN_S + rank * _TURN_S, _LAST_TURN_S))
    with also_on_terminal():
        print(f"tessera: rank {rank} of {size} failed; stopping all ranks", file=sys.stderr)
        _print(kind, error, trace)
    _end_all(1, _GRACE_S.get(kind, 0.1))


class _Exit(SystemExit):
    """What sys.exit raises. When it is dropped with no frame left it has ended the program; else
    somebody has caught it."""

    def __del__(self) -> None:
        try:
            sys._getframe(1)
        except ValueError:
            _LEFT.append(_status_of(self.code))  # the first counts: it held those before it


def _exit(status: Any = None, /) -> NoReturn:
    raise _Exit(status)


def _status_of(code: Any) -> int:
    """As Python has it: None is 0, and what is no integer is printed and is 1."""
    return 0 if code is None else code if isinstance(code, int) else 1


def _leave() -> None:
    """At the end of this process."""
    if _LEFT and _LEFT[0] != 0:
        rank, size = launched_rank(), launched_size()
        with also_on_terminal():
            print(f"tessera: rank {rank} of {size} has left by sys.exit({_LEFT[0]}); stopping all "
                  "ranks", file=sys.stderr)
        _end_all(_LEFT[0], 0.1)


def _end_all(status: int, grace_s: float) -> None:
    """End the processes of all ranks with this exit status, before or after MPI has started.

    Before, MPICH's mpirun is told so by a line of its PMI-1 protocol: it goes on when a process
    exits, whatever its status. Open MPI's ends the others when this one exits.
    """
    sys.stderr.flush()
    sys.stdout.flush()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        from . import board  # what it needs is not loaded before there are ranks

        board.stop_all()
        time.sleep(grace_s)
        mpi.COMM_WORLD.Abort(status)
    elif "PMI_FD" in os.environ:
        time.sleep(0.1)  # mpirun passes on what was printed
        os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={status}\n".encode())
