"""One writer at a time: a lock file in the folder that says who holds it.

The lock is flock's, so the system lets go of it however the process ends; the text in the file is
for whoever is refused. A file that is left after a kill is nobody's, and the next writer takes it.
Everything goes through the folder's descriptor: a folder that is moved away or replaced by a link
meanwhile changes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path

from ..errors import CheckpointError
from ..lazy_dataclass import dataclass
from ..runtime.cache import NO_LOCKS
from .layout import close_folder, make_folder, open_folder

LOCK = "writer.lock"
_TAKEN = (errno.EAGAIN, errno.EACCES)
_HINT = "remove it: who writes a checkpoint locks a file of this name"


@dataclass(eq=False)
class Claim:
    """A folder that this process holds.

    loaded: the step of the checkpoint that was read since, or None
    """

    handle: int
    pid: int = field(default_factory=os.getpid)
    busy: threading.Lock = field(default_factory=threading.Lock)
    loaded: int | None = None


_claims: dict[tuple[int, int], Claim] = {}  # of `claimed`, by device and inode of the folder
_handles: set[int] = set()


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[Claim]:
    """Hold a folder, made if it is not there, until the block ends; one that was made for nothing
    goes again. Within it `writing` takes this claim.

    Raises CheckpointError that says who writes there.
    """
    made = not path.is_dir()
    with contextlib.ExitStack() as held:
        with could_write(path):
            make_folder(path)
            folder = open_folder(path)
            held.callback(close_folder, folder)
            if made:
                held.callback(_remove_empty, path)
            claim = held.enter_context(_locked(folder, path))
        key = _identity(folder)
        _claims[key] = claim
        held.callback(_claims.pop, key, None)
        yield claim


@contextlib.contextmanager
def writing(folder: int, path: Path) -> Iterator[Claim]:
    """Hold an open folder for one save: under the claim of this process, or a lock of its own.

    Raises CheckpointError that says who writes there.
    """
    claim = _claims.get(_identity(folder))
    if claim is None:
        with _locked(folder, path) as claim:
            yield claim
    elif claim.busy.acquire(blocking=False):
        try:
            yield claim
        finally:
            claim.busy.release()
    else:
        raise CheckpointError(f"another thread of this process writes to {path}",
                              hint="one thread saves at a time")


def claim_of(path: Path) -> Claim | None:
    """The claim under which this process holds a folder."""
    try:
        about = os.stat(path)
    except OSError:
        return None
    return _claims.get((about.st_dev, about.st_ino))


@contextlib.contextmanager
def could_write(path: Path) -> Iterator[None]:
    """What the system refuses as a CheckpointError."""
    try:
        yield
    except CheckpointError:  # one of OSError too
        raise
    except OSError as err:
        raise CheckpointError(f"cannot write to {path}: {err}", hint="choose another folder, or "
                              "see that this one is yours and the disk has room") from err


def _remove_empty(path: Path) -> None:
    with contextlib.suppress(OSError):  # it holds something now
        os.rmdir(path)


def _identity(folder: int) -> tuple[int, int]:
    about = os.fstat(folder)
    return about.st_dev, about.st_ino


@contextlib.contextmanager
def _locked(folder: int, path: Path) -> Iterator[Claim]:
    claim = Claim(_acquired(folder, path))
    _handles.add(claim.handle)
    try:
        try:
            _sign(claim.handle)
            yield claim
        finally:
            if claim.pid == os.getpid():  # a forked child does not hold it
                with contextlib.suppress(OSError):
                    os.unlink(LOCK, dir_fd=folder)
    finally:
        if claim.pid == os.getpid():
            _handles.discard(claim.handle)
            close_folder(claim.handle)


def _acquired(folder: int, path: Path) -> int:
    """The lock file, held. Its last holder removes it, so what was locked is looked up again."""
    while True:
        handle = _lock_file(folder, path)
        try:
            if _is_taken(handle, path):
                raise _refusal(handle, path)
            now = os.stat(LOCK, dir_fd=folder, follow_symlinks=False)
            if (now.st_dev, now.st_ino) == _identity(handle):
                return handle
        except FileNotFoundError:
            pass
        except BaseException:
            close_folder(handle)
            raise
        close_folder(handle)


def _lock_file(folder: int, path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(LOCK, flags, 0o644, dir_fd=folder)
    except OSError as err:
        if err.errno == errno.ELOOP:
            raise CheckpointError(f"cannot write to {path}: {LOCK} is a link", hint=_HINT) from err
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        close_folder(handle)
        raise CheckpointError(f"cannot write to {path}: {LOCK} is no regular file", hint=_HINT)
    return handle


def _is_taken(handle: int, path: Path) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        if err.errno in NO_LOCKS:
            warnings.warn(f"the file system of {path} has no locks ({err.strerror}): two programs "
                          "that save there at once may lose a checkpoint", stacklevel=2)
            return False
        if err.errno in _TAKEN:
            return True
        raise
    return False


def _refusal(handle: int, path: Path) -> CheckpointError:
    pid, host = _signature(handle)
    hint = "choose another folder, or wait until it has ended"
    if (pid, host) == (str(os.getpid()), os.uname().nodename):
        return CheckpointError(f"this process writes to {path} already", hint=hint)
    who = f" (pid {pid} on {host})" if pid else ""
    return CheckpointError(f"another process{who} writes to {path}", hint=hint)


def _sign(handle: int) -> None:
    os.ftruncate(handle, 0)
    os.write(handle, f"pid {os.getpid()} host {os.uname().nodename}\n".encode())


def _signature(handle: int) -> tuple[str, str]:
    """(pid, host) of the holder, who writes them right after it has the lock; else empty."""
    for _ in range(20):
        words = os.pread(handle, 300, 0).decode(errors="replace").split()
        if len(words) == 4 and words[1].isdecimal() and words[3].isprintable():
            return words[1], words[3]
        time.sleep(0.005)
    return "", ""


def _leave_to_parent() -> None:
    """A forked child holds nothing: a lock that it kept open would outlive its parent."""
    _claims.clear()
    for handle in _handles:
        with contextlib.suppress(OSError):
            os.close(handle)
    _handles.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
