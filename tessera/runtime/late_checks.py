"""Checks of calls that have not been waited for: each is made when the GPU has come to its end.

A call puts its check here; it is looked at by the next call that finds its work done, by what waits
for results (x.numpy(), x.item()), by ts.debug.flags(), before something that the call was given is
written, and when the program ends. Of calls under way at most MOST are unchecked: then the oldest
is waited for, while the GPU has the others to do.
"""

from __future__ import annotations

import threading
from typing import Protocol

MOST = 2  # each keeps what its call was given


class LateCheck(Protocol):
    """done: whether the call has ended. look: the check; it waits for that. host_memory: ids of
    host memory that its call reads anew when it is made again."""

    host_memory: frozenset[int]

    @property
    def done(self) -> bool: ...

    def look(self) -> None: ...


_waiting: list[LateCheck] = []
_lock = threading.Lock()


class _Local(threading.local):
    looking = False


_local = _Local()


def add(check: LateCheck) -> None:
    """A call has been launched."""
    with _lock:
        _waiting.append(check)


def settle(wait: bool = False, most: int = 0) -> None:
    """Makes the checks of calls that have ended, oldest first. wait: of all but `most`, waiting for
    them. Nothing inside of a check."""
    while _waiting and not _local.looking:
        with _lock:
            if not _waiting or not (_waiting[0].done or (wait and len(_waiting) > most)):
                return
            check = _waiting.pop(0)
        _local.looking = True
        try:
            check.look()
        finally:
            _local.looking = False


def pending() -> int:
    """How many calls are unchecked."""
    return len(_waiting)


def before_write(memory: int) -> None:
    """Host memory of this id is about to be written."""
    if any(memory in check.host_memory for check in _waiting):
        settle(wait=True)


__all__ = ["MOST", "LateCheck", "add", "before_write",
           "pending", "settle"]
