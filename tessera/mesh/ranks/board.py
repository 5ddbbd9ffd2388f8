"""What this rank does, where the watcher of its machine reads it when the rank is killed.

A page of memory without a name, shared with watcher.py: a rank writes its calls there, 0.2 us each,
and sends nothing. Nothing has to be tidied up, however the ranks end. Linux only; elsewhere, and
for ranks alone on their machine, mpirun's words are all there is.
"""

from __future__ import annotations

import atexit
import mmap
import os
import socket
import subprocess
import sys
import time
import warnings
from typing import Any

import numpy as np

from .output import error_streams
from .watcher import CALL, COMPUTES, LEFT, PAGE_BYTES, SAID, STATE, TEXT_BYTES, WAITS, WHAT

_page: bytearray | mmap.mmap = bytearray(PAGE_BYTES)  # until `join` makes it the watcher's too
_links: list[socket.socket] = []  # the connection to the watcher, which ends with this process


# --- what is written ------------------------------------------------------------------------------
def note(call: str) -> None:
    """The call that the next messages belong to, with the user's line."""
    _put(CALL, call)


def enter(what: str) -> None:
    """From here on this rank waits for others."""
    _put(WHAT, what)
    _page[STATE] = WAITS


def resume() -> None:
    """It waits no more."""
    _page[STATE] = COMPUTES


def stop_all() -> None:
    """This rank ends all others and says why itself: no news for the watcher."""
    _page[STATE] = SAID


def _put(start: int, text: str) -> None:
    data = text.encode()[:TEXT_BYTES - 1] + b"\0"
    _page[start:start + len(data)] = data


# --- the watcher ----------------------------------------------------------------------------------
def join(comm: Any, rank: int, size: int) -> None:
    """Let the ranks of one machine, those of comm, be watched; its first one starts the watcher.

    rank, size: in the program. All of comm call it.
    """
    if sys.platform != "linux" or comm.size == 1:
        return
    name = np.array([os.getpid(), time.time_ns()])
    with socket.socket(socket.AF_UNIX) as listener:
        if comm.rank == 0:
            listener.bind(_address(name))
            listener.listen(comm.size)
        comm.Bcast(name)
        if comm.rank == 0:
            _start_watcher(listener.fileno())
    _connect(_address(name), rank, size)


def _address(name: np.ndarray) -> str:
    """In no folder: on Linux a name that begins with a zero ends with its socket."""
    return f"\0tessera-{name[0]}-{name[1]}"


def _start_watcher(listener: int) -> None:
    """In a session of its own: mpirun's signals are not for it. It has nothing of ours but stderr,
    and above all not the connection whose end tells mpirun that we are gone."""
    streams = error_streams()
    code = os.path.join(os.path.dirname(__file__), "watcher.py")
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", code, str(listener), *map(str, streams)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[listener, *streams],
            start_new_session=True)
    except OSError as error:
        warnings.warn(f"when a rank is killed nothing will say which: {error}", stacklevel=2)
    else:
        process.returncode = 0  # it outlives us: nobody is to wait for it, or warn that none does


def _connect(address: str, rank: int, size: int) -> None:
    """Give the watcher our page, and wait until it has it: of a rank that is killed earlier it
    would know nothing."""
    global _page
    link, file = socket.socket(socket.AF_UNIX), os.memfd_create("tessera-board")
    os.ftruncate(file, PAGE_BYTES)
    try:
        link.connect(address)
        socket.send_fds(link, [f"{rank} {size}".encode()], [file])
        link.recv(1)
        _page = mmap.mmap(file, PAGE_BYTES)
    except ConnectionError:  # there is no watcher, and rank 0 or the watcher has said why
        link.close()
        return
    finally:
        os.close(file)
    _links.append(link)
    os.register_at_fork(after_in_child=_forget)
    atexit.register(_leave)


def _forget() -> None:
    """A child that is forked is no rank."""
    global _page
    _page = bytearray(PAGE_BYTES)
    for link in _links:
        link.close()


def _leave() -> None:
    if _page[STATE] != SAID:
        _page[STATE] = LEFT
