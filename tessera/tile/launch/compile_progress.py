"""The line on stderr that says how far compiling is, when it takes long."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from tessera import config
from tessera.launched import launched_rank

AFTER_S = 2.0
EVERY_S = 10.0  # where lines stay


class CompileProgress:
    """How many of the kernels of a program are compiled: nothing in the first two seconds, then one
    line, which changes on a terminal; elsewhere another one every ten. Rank 0 alone says it."""

    def __init__(self, processes: int, total: int = 0):
        self.processes, self.total, self.done = processes, total, 0
        self._begun = time.perf_counter()
        self._shown, self._next_s = "", AFTER_S
        self._on = config.compile_progress and not launched_rank() and sys.stderr is not None
        self._terminal = self._on and sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._terminal:
            self._write("")

    def step(self, done: int = 0) -> None:
        """`done` more are compiled, or some time has gone by."""
        self.done += done
        seconds = time.perf_counter() - self._begun
        if not self._on or seconds < self._next_s:
            return
        where = f" in {self.processes} processes" if self.processes > 1 else ""
        text = f"tessera: compiling kernels{where}: {self.done} of {self.total}, {seconds:.0f} s"
        if self._terminal:
            self._write(text)
        else:
            self._print(text + "\n")
            self._next_s = seconds + EVERY_S

    def _write(self, text: str) -> None:
        """In place of the line that is there."""
        if text != self._shown:
            self._print("\r" + text + " " * (len(self._shown) - len(text)) + "\r" * (not text))
            self._shown = text

    def _print(self, text: str) -> None:
        if self._on:
            try:
                sys.stderr.write(text)
                sys.stderr.flush()
            except (OSError, ValueError):  # closed
                self._on = self._terminal = False


__all__ = ["CompileProgress"]
