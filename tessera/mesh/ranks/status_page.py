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
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from .output import error_streams
from .watcher import (
    ASK,
    CALL,
    CLAIM,
    COMPUTES,
    GPU,
    LATE,
    LEFT,
    LENGTH,
    LONG,
    PAGE_BYTES,
    SAID,
    STATE,
    TEXT_BYTES,
    TICKS,
    WAITS,
    WHAT,
)
from .wire import ProcessWire

_ANSWER_S = 2.0  # in which the watcher answers, on a busy machine
_LATER_S = 1.0  # before ranks of another machine than rank 0's say why they fail

_page: bytearray | mmap.mmap = bytearray(PAGE_BYTES)  # until `join` makes it the watcher's too
_links: list[socket.socket] = []  # the connection to the watcher, which ends with this process
_lock = threading.Lock()  # for one question at a time
_lowest = 0  # the lowest rank of this machine


# --- what is written ------------------------------------------------------------------------------
def enter(what: str) -> None:
    """From here on this rank waits for others."""
    _put(WHAT, what)
    _page[STATE] = WAITS


def resume() -> None:
    """It waits no more."""
    _page[STATE] = COMPUTES


@contextmanager
def long_act() -> Iterator[None]:
    """Something of ours that may take minutes, such as compiling: others wait for it."""
    _page[LONG] += 1
    try:
        yield
    finally:
        _page[LONG] -= 1


def wait_on_gpu(what: str) -> None:
    """What was sent there has not arrived so far; "": it has."""
    _put(GPU, what)


def stop_all() -> None:
    """This rank ends all others and says why itself: no news for the watcher."""
    _page[STATE] = SAID


def end() -> None:
    """This rank has come to the end of its program, and waits for others to."""
    _put(CALL, "")
    enter("the end of its program")


def _put(start: int, text: str) -> None:
    data = text.encode(errors="backslashreplace")[:TEXT_BYTES - 1] + b"\0"
    _page[start:start + len(data)] = data


note = partial(_put, CALL)  # the call that the next messages belong to, with the user's line


# --- what is asked --------------------------------------------------------------------------------
def rank_locations() -> list[str]:
    """A line for each place where other ranks of this machine are; none without a watcher."""
    return (_ask(ASK) or "").splitlines()


def late() -> set[int]:
    """Other ranks of this machine that do not wait on their GPUs; none without a watcher."""
    return set(map(int, (_ask(LATE) or "").split()))


def ticks() -> dict[int, int]:
    """What other ranks of this machine have used of its cores, in ticks of the clock, of those that
    are in the user's program."""
    told = [*map(int, (_ask(TICKS) or "").split())]
    return dict(zip(told[::2], told[1::2], strict=True))


def claim_report(what: str) -> bool | None:
    """Whether this rank is the first of its machine that fails, and so is to say why for all; None
    when nobody knows. what: the error in a line."""
    _put(WHAT, what)
    _page[STATE] = SAID
    found = _ask(CLAIM)
    if found and _lowest:
        time.sleep(_LATER_S)
    return None if found is None else found == "first"


def _ask(question: bytes) -> str | None:
    with _lock:
        try:
            for link in _links:
                link.send(question)
                size = int.from_bytes(_exactly(link, LENGTH), "little")
                return _exactly(link, size).decode(errors="replace")
        except OSError:  # no answer: the watcher is gone, or does not come to it
            pass
    return None


def _exactly(link: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = link.recv(count - len(data))
        if not more:
            raise ConnectionError
        data += more
    return data


# --- the watcher ----------------------------------------------------------------------------------
def join(wire: ProcessWire) -> None:
    """Let the ranks of one machine be watched; its first one starts the watcher. All of them call
    it."""
    if sys.platform != "linux" or wire.here == 1:
        return
    global _lowest
    name = np.array([os.getpid(), time.time_ns(), wire.rank])
    with socket.socket(socket.AF_UNIX) as listener:
        if wire.local == 0:
            listener.bind(_address(name))
            listener.listen(wire.here)
        wire.share_here(name)
        if wire.local == 0:
            _start_watcher(listener.fileno())
    _lowest = int(name[2])
    _connect(_address(name), wire.rank, wire.size)


def _address(name: np.ndarray) -> str:
    """In no folder: on Linux a name that begins with a zero ends with its socket."""
    return f"\0tessera-{name[0]}-{name[1]}"


def _start_watcher(listener: int) -> None:
    """In a session of its own: the launcher's signals are not for it. It has nothing of ours but
    stderr, and above all not the connection whose end tells mpirun that we are gone."""
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
        link.settimeout(_ANSWER_S)
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
    _links.clear()


def _leave() -> None:
    if _page[STATE] != SAID:
        _page[STATE] = LEFT
