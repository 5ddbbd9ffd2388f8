"""Processes that compile kernels, seen from the program: started, given jobs, ended.

They are started by a command of their own, so nothing of the program's main module runs in them,
and need no `if __name__ == "__main__"`. They are a session of their own: Ctrl-C does not reach
them. They end with the program however it ends, since the pipe to their server ends then; when
nothing was compiled for a while; and with a build that is interrupted.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

from ... import config
from ...launched import LAUNCHERS
from .build import CompileJob, MachineCode

IDLE_S = 30.0
# The path of the program, before anything is imported that another folder could hide.
BOOT = ("import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
        "from tessera.tile.cuda.compile_server import main; main()")
# A server is no rank of a mesh, and its workers compile one kernel each.
LEFT_OUT = ("OMPI_", "PMI", "MPI_", "HYDRA_", "MPIR_",
            *(name for way in LAUNCHERS for name in (way.size, *way.rank)))
SERIAL_MATHS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class CompileProcesses:
    """A server and its workers. Of one thread at a time: see `processes`."""

    def __init__(self, count: int):
        self.owner = os.getpid()
        self._folder = tempfile.mkdtemp(prefix="tessera-")
        self._control, control = socket.socketpair()
        pairs = [socket.socketpair() for _ in range(count)]
        theirs = [control.fileno(), *(b.fileno() for _, b in pairs)]
        command = [sys.executable, "-P", "-c", BOOT, json.dumps([p or os.getcwd() for p in sys.path
                   if isinstance(p, str)]), self._folder, *map(str, theirs)]
        try:
            self._server = subprocess.Popen(
                command, env=environment_of_compilers(), pass_fds=theirs, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        finally:
            for end in (control, *(b for _, b in pairs)):
                end.close()
        self._workers = [Connection(a.detach()) for a, _ in pairs]
        self._idle, self._busy = list(self._workers), dict[Connection, Any]()

    @property
    def pid(self) -> int:
        return self._server.pid

    @property
    def size(self) -> int:
        """How many workers there are: those that died are not replaced."""
        return len(self._idle) + len(self._busy)

    @property
    def busy(self) -> int:
        return len(self._busy)

    @property
    def idle(self) -> int:
        return len(self._idle)

    def submit(self, name: Any, job: CompileJob) -> bool:
        """Gives a job to an idle worker; False when none is left that takes it."""
        content = pickle.dumps(job, pickle.HIGHEST_PROTOCOL)
        while self._idle:
            worker = self._idle.pop(0)
            try:
                worker.send_bytes(content)
            except OSError:  # it died
                continue
            self._busy[worker] = name
            return True
        return False

    def finished(self, timeout_s: float) -> Iterator[tuple[Any, MachineCode | None]]:
        """The jobs that ended within that time: by name, what was made; None where it failed."""
        for worker in wait(list(self._busy), timeout_s):
            assert isinstance(worker, Connection)
            name, reply = self._busy.pop(worker), None
            with contextlib.suppress(EOFError, OSError):  # it died: no reply
                reply = pickle.loads(worker.recv_bytes())
                self._idle.append(worker)
            yield name, reply if isinstance(reply, MachineCode) else None

    def close(self) -> None:
        """Ends all of them at once."""
        self._forget()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _forget(self) -> None:
        self._control.close()
        for worker in self._workers:
            worker.close()
        self._idle, self._busy = [], {}


def environment_of_compilers() -> dict[str, str]:
    """Of a process that compiles: it is no rank, and sees no GPU."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LEFT_OUT)}
    return {**kept, **SERIAL_MATHS, "CUDA_VISIBLE_DEVICES": ""}


# --- those of this program ------------------------------------------------------------------------
_lock = threading.RLock()
_running: CompileProcesses | None = None
_idle: threading.Timer | None = None


def can_start() -> bool:
    """Whether there is a Python to start, and more than one process wanted."""
    known = bool(sys.executable) and not getattr(sys, "frozen", False) and hasattr(os, "fork")
    return known and config.compile_processes > 1


def start() -> None:
    """Starts them, unless they run; in a second they can work. Nobody has to wait for that."""
    if _running is None:
        with _lock:
            _started()
            _end_later()


def _started() -> CompileProcesses | None:
    global _running
    if _running is not None and (_running.size < 1 or _running.owner != os.getpid()):
        close()
    if not can_start():
        return None
    if _running is None:
        with contextlib.suppress(OSError):  # no process, or no descriptors, to be had
            _running = CompileProcesses(config.compile_processes)
    return _running


@contextmanager
def processes(begin: bool = True) -> Iterator[CompileProcesses | None]:
    """Them, for one thread at a time; None where kernels are compiled in this process. What is
    raised inside ends those that are at work: nobody takes what they make.

    begin: whether to start them when they do not run.
    """
    with _lock:
        _stop_timer()
        try:
            yield _started() if begin or _running is not None else None
        finally:
            if _running is not None and _running.busy:
                close()
            _end_later()


def close() -> None:
    """Ends them."""
    global _running
    with _lock:
        _stop_timer()
        if _running is not None:
            _running.close()
        _running = None


def _end_later() -> None:
    global _idle
    _stop_timer()
    if _running is not None:
        _idle = threading.Timer(IDLE_S, close)
        _idle.daemon = True
        _idle.start()


def _stop_timer() -> None:
    global _idle
    if _idle is not None:
        _idle.cancel()
    _idle = None


def _forget_in_child() -> None:
    """After a fork they are the parent's: only its pipe keeps them."""
    global _lock, _running, _idle
    _lock, _idle = threading.RLock(), None
    if _running is not None:
        _running._forget()
    _running = None


atexit.register(close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
