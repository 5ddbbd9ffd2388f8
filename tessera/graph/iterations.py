"""Which iterations of loops a thread runs while it goes through them op by op, for reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Running(threading.local):
    def __init__(self) -> None:
        self.loops: list[tuple[str, int]] = []


_running = _Running()


@contextmanager
def iterating(loop: str) -> Iterator[Callable[[int], None]]:
    """Inside, a loop runs, and `begin(i)` tells which of its iterations."""
    loops = _running.loops
    depth = len(loops)
    loops.append((loop, 0))

    def begin(i: int) -> None:
        loops[depth] = loop, i

    try:
        yield begin
    finally:
        del loops[depth:]


def iterations() -> tuple[tuple[str, int], ...]:
    """(loop, number of its iteration) of each loop that runs, the outermost first."""
    return tuple(_running.loops)
