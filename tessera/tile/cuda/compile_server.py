"""The processes that compile kernels, seen from inside: one server, and workers forked from it.

The server imports the compiler once and forks; so a worker costs a few milliseconds, and no CUDA,
no MPI, no thread and nothing of the user's program is in any of them. A worker takes jobs from its
connection and gives back machine code, or the text of what went wrong. The server waits until its
control pipe ends, as it does when the program ends in whatever way, and takes all with it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection

from ...runtime.target import DEFAULT_TARGET, parse_target
from .build import CompileJob

# What a process does once, for its first kernel: half a second.
WARM_UP = """\
from tessera.tile.cuda import ptx, use
from tessera.tile.cuda.numba_gate import f32, f64, i32, i64
thread_number = use('tid_x')
def warm_up(x):
    total = f32(0.0)
    for i in range(i32(4)):
        if i < thread_number():
            total = total + f32(i)
"""


def serve(control: int, connections: Sequence[int], folder: str) -> None:
    """The server. control, connections: descriptors; folder: for temporary files, it is removed."""
    tempfile.tempdir = folder
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a worker ended
    try:
        warm_up()
        gc.freeze()
        for mine in connections:
            if not os.fork():
                _become_worker(control, connections, mine)
        for each in connections:
            os.close(each)
        while os.read(control, 1):
            pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)


def warm_up() -> None:
    """Imports the compiler, and compiles something."""
    from .numba_gate import compile_source

    compile_source(WARM_UP, "<warm up>", "warm_up", ("i64",), parse_target(DEFAULT_TARGET),
                   threads=128)


def _become_worker(control: int, connections: Sequence[int], mine: int) -> None:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ptxas is waited for
        for other in {control, *connections} - {mine}:
            with contextlib.suppress(OSError):
                os.close(other)
        work(Connection(mine))
    finally:
        os._exit(0)


def work(jobs: Connection) -> None:
    """Compiles what comes until nothing can come any more."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            job: CompileJob = pickle.loads(jobs.recv_bytes())
            try:
                reply: object = job.run()
            except Exception:  # the program compiles it again, and raises what is wrong
                reply = traceback.format_exc()
            jobs.send_bytes(pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))


def main() -> None:
    folder, control, *connections = sys.argv[2:]
    serve(int(control), list(map(int, connections)), folder)
