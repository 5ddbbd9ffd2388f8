"""Which iterations of loops a thread runs while it goes through them op by op, for reports."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .. import hooks
from .ir import Graph


class _Running(threading.local):
    def __init__(self) -> None:
        self.loops: list[tuple[str, int]] = []
        self.lengths: list[int] = []


_running = _Running()


@contextmanager
def iterating(loop: str, body: Graph | None = None, carries: int = 0, length: int = 1
              ) -> Iterator[Callable[[int], None]]:
    """Inside, a loop runs, and `begin(i)` tells which of its iterations. body: what each of them
    runs; its inputs are the iteration's number and the carries, which are its first outputs.
    length: how many there are; 1 where nobody knows."""
    loops, lengths = _running.loops, _running.lengths
    depth = len(loops)
    loops.append((loop, 0))
    lengths.append(length)
    takes = () if body is None else body.inputs[1:1 + carries]
    gives = () if body is None else body.outputs[:carries]
    first = True

    def begin(i: int) -> None:
        nonlocal first
        loops[depth] = loop, i
        for sentinel in () if first else hooks.sentinels:
            sentinel.carried(takes, gives)
        first = False

    try:
        yield begin
    finally:
        del loops[depth:], lengths[depth:]


def iterations() -> tuple[tuple[str, int], ...]:
    """(loop, number of its iteration) of each loop that runs, the outermost first."""
    return tuple(_running.loops)


def repeats() -> int:
    """How often a body is run that these loops hold."""
    return math.prod(_running.lengths)
