"""Loops of ranks are compiled in a process beside them, so that no rank holds Numba and LLVM.

    symbol, code = compile_apart(source, name)      # as compile.compile_source

A rank that compiled a loop kept 120 to 170 MB for the rest of the program. With nothing in the
cache that was the first rank, which compiles ahead of the others, and each whose parts have loops
of their own: three of 72, of which two had 271 and 315 MB for 148 and more of others (dp=8,tp=9 on
2 cores of AMD EPYC, Python 3.11, 2026-11-28). The process ends with its pipe, and when nothing came
for a while; it is a session of its own, so Ctrl-C does not reach it.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
import traceback
from multiprocessing.connection import Connection

from ...errors import CompileError
from ...tile.cuda.compile_processes import environment_of_compilers

IDLE_S = 2.0
BOOT = ("import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
        "from tessera.graph.cpu.compile_apart import serve; serve(int(sys.argv[2]))")


class _Compiler:
    """The process, seen from the rank."""

    def __init__(self) -> None:
        mine, theirs = socket.socketpair()
        paths = json.dumps([p or os.getcwd() for p in sys.path if isinstance(p, str)])
        self.pipe = Connection(mine.detach())
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-c", BOOT, paths, str(theirs.fileno())],
                    env=environment_of_compilers(), pass_fds=[theirs.fileno()],
                    start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL)
        except OSError as error:
            raise CompileError(f"no process that compiles loops can be started: {error}") from None
        self.idle: threading.Timer | None = None

    def compiled(self, source: str, name: str) -> tuple[str, bytes]:
        try:
            self.pipe.send((source, name))
            reply = self.pipe.recv()
        except (EOFError, OSError):
            close()
            raise CompileError(
                f"the process that compiles loops ended with status {self.process.returncode}",
                hint="-9: the system had no memory left for it") from None
        if isinstance(reply, str):
            raise CompileError(f"loops do not compile:\n{reply}")
        symbol, code = reply
        return symbol, code


_lock = threading.RLock()
_running: _Compiler | None = None


def compile_apart(source: str, name: str) -> tuple[str, bytes]:
    """Symbol and object code of a source. Raises CompileError for what the compiler refuses, and
    where its process is killed."""
    global _running
    with _lock:
        if _running is None:
            _running = _Compiler()
        elif _running.idle is not None:
            _running.idle.cancel()
        made = _running.compiled(source, name)
        _running.idle = threading.Timer(IDLE_S, close)
        _running.idle.daemon = True
        _running.idle.start()
        return made


def close() -> None:
    """End it."""
    global _running
    with _lock:
        ended, _running = _running, None
        if ended is not None:
            if ended.idle is not None:
                ended.idle.cancel()
            ended.pipe.close()
            ended.process.wait()


def _forget_in_child() -> None:
    """After a fork it is the parent's."""
    global _lock, _running
    _lock = threading.RLock()
    if _running is not None:
        _running.pipe.close()
        _running.process.returncode = 0  # not this process's to wait for
    _running = None


def serve(handle: int) -> None:
    """In the process: compiles what comes until nothing can come any more."""
    from .compile import compile_source

    with Connection(handle) as jobs:
        while True:
            try:
                source, name = jobs.recv()
            except EOFError:
                return
            try:
                reply: object = compile_source(source, name)
            except Exception:  # the rank raises it
                reply = traceback.format_exc()
            jobs.send(reply)


atexit.register(close)
os.register_at_fork(after_in_child=_forget_in_child)
__all__ = ["compile_apart"]
