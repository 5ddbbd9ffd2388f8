"""The training example under mpirun with something done to one rank.

    mpirun -n 4 python tests/mesh/rehearsal.py WHAT FOLDER FLAGS...
    WHAT: run, or one of kill, fail, overflow, full with RANK STEP

Each rank writes FOLDER/<rank> when its program ends well: its peak memory in MB.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import tessera as ts
from mesh import example
from tessera.data import ByteCorpus

train, transformer = example.modules()


def at_step(rank: int, step: int, action: Any) -> None:
    """Do something on one rank when it makes the batch of a step."""
    real = ByteCorpus.batch

    def batch(self: ByteCorpus, now: int, **sizes: int) -> Any:
        made = real(self, now, **sizes)
        return action(made) if (ts.dist.rank(), now) == (rank, step) else made

    ByteCorpus.batch = batch  # type: ignore[method-assign]


def kill(batch: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(batch: Any) -> Any:
    raise RuntimeError("broken on purpose")  # the line that is to be shown


def full(batch: Any) -> Any:
    """From here on nothing this rank writes comes to the disk."""
    def fsync(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    os.fsync = fsync
    return batch


def overflow(rank: int, step: int) -> None:
    """At a step the weights of one layer that this rank has become so large, though finite, that
    their products are not."""
    real = train.Model.advance

    def advance(self: Any, run: Any, batch: Any, lr: float) -> Any:
        if (ts.dist.rank(), run.step) == (rank, step):
            run.params[0]["blocks"]["0"]["up"].local[...] = 3e38
        return real(self, run, batch, lr)

    train.Model.advance = advance


def main() -> int:
    what, folder, *flags = sys.argv[1:]
    if what != "run":
        rank, step = int(flags.pop(0)), int(flags.pop(0))
        if what == "overflow":
            overflow(rank, step)
        else:
            at_step(rank, step, {"kill": kill, "fail": fail, "full": full}[what])
    status = train.main(flags)
    if status:
        return status
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    Path(folder, str(ts.dist.rank())).write_text(f"{peak:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
