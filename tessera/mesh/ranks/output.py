"""Where the ranks' output goes: all to the terminal, rank 0's alone, or each to a file.

Errors always reach the terminal.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from .launcher import rank_of_program

_silent: ContextVar[bool] = ContextVar("prints are dropped", default=False)
_terminal: list[io.TextIOBase] = []  # the stderr there was before it became a file


# --- rank 0 alone ---------------------------------------------------------------------------------
class _Prints(io.TextIOBase):
    """Standard output for ranks some of which are silent."""

    def __init__(self, plain: Any):
        self.plain, self.users = plain, 0

    def write(self, text: str) -> int:
        return len(text) if _silent.get() else self.plain.write(text)

    def flush(self) -> None:
        self.plain.flush()

    def fileno(self) -> int:
        return self.plain.fileno()

    def isatty(self) -> bool:
        return self.plain.isatty()


_lock = threading.Lock()


@contextmanager
def rank0_only() -> Iterator[None]:
    """In the block, what ranks above 0 print is dropped; stderr is not.

    TESSERA_RANK_OUTPUT=first does so for a whole program under mpirun.
    """
    with _lock:
        if not isinstance(sys.stdout, _Prints):
            sys.stdout = _Prints(sys.stdout)
        ours = sys.stdout
        ours.users += 1
    token = _silent.set(_silent.get() or rank_of_program() > 0)
    try:
        yield
    finally:
        _silent.reset(token)
        with _lock:
            ours.users -= 1
            if ours.users == 0 and sys.stdout is ours:
                sys.stdout = ours.plain


def silence_other_ranks() -> None:
    """Until the program ends, what ranks above 0 print is dropped."""
    if rank_of_program() > 0:
        sys.stdout = open(os.devnull, "w")


# --- files ----------------------------------------------------------------------------------------
def log_to_file(folder: Path, rank: int) -> None:
    """Lead both streams of this process, those of its libraries too, to folder/rank-N.log."""
    folder.mkdir(parents=True, exist_ok=True)
    _terminal[:] = [os.fdopen(os.dup(2), "w")]
    file = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(file, number)
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.close(file)


def error_streams() -> list[int]:
    """The descriptors that errors go to: stderr, and the terminal if stderr is a file of ours."""
    return [2, *(terminal.fileno() for terminal in _terminal)]


@contextmanager
def also_on_terminal() -> Iterator[None]:
    """What is written to stderr in the block goes to the log and to the terminal."""
    if not _terminal:
        yield
        return
    log, text = sys.stderr, io.StringIO()
    sys.stderr = text
    try:
        yield
    finally:
        sys.stderr = log
        for stream in (log, _terminal[0]):
            stream.write(text.getvalue())
            stream.flush()
