"""Under mpirun, an exception on one rank ends the program on all.

Installed by `import tessera` when a launcher started several processes; costs nothing otherwise.
Before MPI has started there is nothing to abort: Open MPI's mpirun ends the others when a process
exits with status 1, MPICH's only when a signal ended it (seen with 5.0.2), so it gets one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import TracebackType

from .errors import DisagreementError, StalledError
from .world import launched_rank, launched_size

# Ranks that notice the same thing do so within this time of each other; each is to say its part.
_GRACE_S: dict[type[BaseException], float] = {DisagreementError: 0.5, StalledError: 2.0}


def install() -> None:
    """Put our hook before the one that prints a traceback."""
    if launched_size() > 1 and sys.excepthook is not _stop_all:
        global _print
        _print = sys.excepthook
        sys.excepthook = _stop_all


_print = sys.excepthook


def _stop_all(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    rank, size = launched_rank(), launched_size()
    print(f"tessera: rank {rank} of {size} failed; stopping all ranks", file=sys.stderr)
    _print(kind, error, trace)
    sys.stderr.flush()
    sys.stdout.flush()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        time.sleep(_GRACE_S.get(kind, 0.1))
        mpi.COMM_WORLD.Abort(1)
    elif "PMI_RANK" in os.environ:
        os.kill(os.getpid(), signal.SIGTERM)
