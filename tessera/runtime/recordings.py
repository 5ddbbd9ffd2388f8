"""Graphs that are being recorded, and what would spoil them: in any thread, however it is asked.

A stream's capture is invalid when anybody waits for its whole context meanwhile: the context has
the stream in it, and what is captured never runs (CUDA Programming Guide, "Prohibited and Unhandled
Operations" of stream capture). An event that another thread puts on the stream becomes part of the
graph, and to ask for it spoils that. So who waits for a context lets recordings end first, and none
begins meanwhile; what a garbage collection frees in the middle of one, and has to wait before it
does, is freed behind it. docs/internals/graph_calls.md says from where that is known.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_state = threading.Condition(threading.RLock())  # a collection may come while it is held
_later: deque[Callable[[], None]] = deque()
_under_way = 0  # how many threads record a graph now
_waits = 0  # how many wait for a context


class _ThreadRecordings(threading.local):
    recordings = 0


_own = _ThreadRecordings()


@contextmanager
def recording() -> Iterator[None]:
    """This thread records a graph in the block."""
    global _under_way
    with _state:
        _state.wait_for(lambda: not _waits)
        _under_way += 1
    _own.recordings += 1
    try:
        yield
    finally:
        _own.recordings -= 1
        with _state:
            _under_way -= 1
            _state.notify_all()
        _do_what_was_left()


def is_recording() -> bool:
    """Whether this thread records a graph."""
    return bool(_own.recordings)


@contextmanager
def nothing_recorded() -> Iterator[bool]:
    """Whether no graph is being recorded; then none is begun in the block, which is short."""
    with _state:
        yield not _under_way


class _ContextWait:
    def __enter__(self) -> None:
        global _waits
        with _state:
            if _under_way:
                _state.wait_for(lambda: bool(_own.recordings) or not _under_way)
            _waits += 1

    def __exit__(self, *error: object) -> None:
        global _waits
        with _state:
            _waits -= 1
            _state.notify_all()


_context_wait = _ContextWait()  # no generator: each x.item() enters it


def context_waited_for() -> _ContextWait:
    """A block: recordings of other threads are over, and none begins in it. For a thread that
    records one itself the driver has an error."""
    return _context_wait


def between_recordings(work: Callable[[], None]) -> None:
    """Does what waits for a context and is asked of a garbage collection, which may not wait: now,
    or behind the last graph that is being recorded."""
    with _state:
        _later.append(work)
    _do_what_was_left()


def _do_what_was_left() -> None:
    global _waits
    while True:
        with _state:
            if _under_way or not _later:
                return
            work = _later.popleft()
            _waits += 1
        try:
            work()
        finally:
            with _state:
                _waits -= 1
                _state.notify_all()


__all__ = ["between_recordings", "context_waited_for", "is_recording", "nothing_recorded",
           "recording"]
