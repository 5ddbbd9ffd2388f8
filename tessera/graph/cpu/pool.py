"""Worker threads of CPU loops and products: they help with work that is already running.

A job is a function of no arguments. That of a launch is a ctypes call that claims chunks until none
is left, then waits until all are done. The launching thread starts at once; workers that are told
of the launch claim chunks too. A worker that wakes late finds nothing to claim and touches nothing,
so a launch never waits for a thread that did not start. Workers are daemon threads made at first
use, one fewer than `config.num_threads`, and block in a queue: they cost nothing while idle.
"""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue

import numpy as np

from ... import config


class Pool:
    """Queues and threads, grown to the number asked for."""

    def __init__(self) -> None:
        self.queues: list[SimpleQueue] = []
        self.lock = threading.Lock()

    def helpers(self, count: int) -> list[SimpleQueue]:
        """At least `count` running workers' queues (the first `count` of them)."""
        if len(self.queues) < count:
            with self.lock:
                while len(self.queues) < count:
                    queue: SimpleQueue = SimpleQueue()
                    name = f"tessera-loops-{len(self.queues)}"
                    threading.Thread(target=_work, args=(queue,), name=name, daemon=True).start()
                    self.queues.append(queue)
        return self.queues[:count]


def _work(queue: SimpleQueue) -> None:
    while True:
        job = queue.get()
        job()
        del job  # a waiting worker must not keep a launch's arrays alive


class _Scratch(threading.local):
    """One growing buffer per thread for the row values kept between passes."""

    size = 0
    address = 0


_scratch = _Scratch()
POOL = Pool()


def scratch(size: int) -> int:
    """Address of this thread's scratch memory of at least `size` bytes, aligned to 64."""
    if _scratch.size < size:
        buffer = np.empty(size + 64, np.uint8)
        _scratch.buffer = buffer
        _scratch.address = (buffer.ctypes.data + 63) // 64 * 64
        _scratch.size = size
    return _scratch.address


def threads_wanted() -> int:
    """Threads a large launch may use, this one included."""
    return config.num_threads


def _forget_workers() -> None:
    """Threads do not survive fork: a child starts its own."""
    global POOL
    POOL = Pool()


os.register_at_fork(after_in_child=_forget_workers)
