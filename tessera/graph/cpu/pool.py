"""Worker threads of CPU loops and products: they help with work that is already running.

A worker takes jobs, functions of no arguments, from a queue. One job is to serve the launches of
loops, which machine code tells it of through its mailbox (shared_launch.py). Workers are daemon
threads, one fewer than `config.num_threads`, made at first use: they cost nothing while idle.

A worker runs on the cores of the thread that tells it of work, without the one that this is on.
Left alone, a system may wake it there, where the two take turns: it looks at how busy cores were
(2 cores of AMD EPYC, Linux 6.18, a step of the U-Net of benchmarks/cpu_models.py that begins after
a pause of 20 or 50 ms, 2026-11-26: 20 ms in most steps, and 14 of each with this).
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from ... import config

# The first word of a mailbox. The second is set where a job waits in the queue.
STATES = ("asleep", "idle", "filled", "posted", "taken", "done")
STATE, RECALL, WORDS = 0, 1, 16
ASLEEP, IDLE = STATES.index("asleep"), STATES.index("idle")
LINE = 64  # bytes of a cache line, which no other mailbox shares


class Worker:
    """A thread that is there from the first job on, its queue and its mailbox."""

    serve: Callable[[int], Any]  # of the address of a mailbox

    def __init__(self, name: str) -> None:
        self.name, self.lock = name, threading.Lock()
        raw = np.zeros(WORDS + LINE // 8, np.int64)
        begin = -raw.ctypes.data % LINE // 8
        mailbox = raw[begin:begin + WORDS]
        self.address, self.words = mailbox.ctypes.data, mailbox.data
        self.forget()

    def forget(self) -> None:
        """Threads do not survive fork: a child starts its own. Its launches know the mailboxes."""
        self.queue: SimpleQueue = SimpleQueue()
        self.thread: threading.Thread | None = None
        self.avoids, self.words[STATE] = -1, ASLEEP

    def put(self, job: Callable[[], Any]) -> None:
        """A job that comes before any launch whose loop is not begun."""
        self.words[RECALL] = 1
        with self.lock:
            self._tell(job)

    def wake(self) -> None:
        """Have it look at its mailbox."""
        if self.words[STATE] == ASLEEP:
            with self.lock:
                if self.words[STATE] == ASLEEP:
                    self.words[RECALL], self.words[STATE] = 0, IDLE
                    self._tell(partial(self.serve, self.address))

    def _tell(self, job: Callable[[], Any]) -> None:
        if self.thread is None:
            self.thread = threading.Thread(
                target=_work, args=(self.queue,), name=self.name, daemon=True)
            self.thread.start()
        here, helper = _core(), self.thread.native_id
        if here != self.avoids and helper is not None:
            self.avoids, cores = here, os.sched_getaffinity(0)
            os.sched_setaffinity(helper, cores - {here} or cores)
        self.queue.put(job)


class Pool:
    """Workers, grown to the number asked for."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.lock = threading.Lock()

    def helpers(self, count: int) -> list[Worker]:
        """The first `count` workers."""
        with self.lock:
            while len(self.workers) < count:
                self.workers.append(Worker(f"tessera-loops-{len(self.workers)}"))
        return self.workers[:max(0, count)]


def _find_core() -> Callable[[], int]:
    """What tells the core of the calling thread: -1 where a thread cannot be kept off a core."""
    return ctypes.PyDLL(None).sched_getcpu if sys.platform == "linux" else lambda: -1


_core = _find_core()


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
    for worker in POOL.workers:
        worker.forget()


os.register_at_fork(after_in_child=_forget_workers)
