"""A cache of compiled code on disk, shared by the processes of one user.

    loops = DiskCache("loops")
    entry = loops.read(name)                        # CacheEntry(meta, parts) or None
    loops.write(name, CacheEntry({"symbol": "f"}, {"code": elf}))
    loops.made(name, make)                          # read, or made by one process for all

An entry is one file, named by the hash of all that decides its content: magic, sha256 of the rest,
a JSON header that repeats the name, the parts' bytes. It is written beside its place and renamed,
so readers see whole entries; it is hashed again when read, so a damaged one is removed and made
anew. That is also why nothing is synced: an entry that a power cut leaves half on the disk does not
match its hash.

Its content is executed, so it is read as ssh reads keys. The folder is opened once, without
following a link, and must belong to this user and be closed to others' writing; all else goes
through that descriptor, so whoever may rename the folders above it gains nothing. Of a file, owner
and mode are those of the opened one, and what was hashed is what is used. Nothing is unpickled.

A cache that cannot be used, because it is another's, read-only or full, is one warning: code is
compiled, and kept in this process only. When the entries outgrow the limit, those unused for
longest go (reading one renews its time stamp).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import stat
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import Any

from .. import config
from ..errors import ArgumentError, SourceLine, user_line
from ..lazy_dataclass import dataclass

MAGIC = b"tessera-cache-1\n"
DIGEST_BYTES = 32
LIMIT_BYTES = 512 << 20
# A temporary file this old belongs to a process that died.
STALE_S = 3600.0
NEW, LOCK = ".new-", ".lock-"
# A network file system says these where another host replaced or removed the file: it is gone.
_GONE = (errno.ENOENT, errno.ESTALE)
# A file system without locks says these.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
# Nothing waits when a pipe is opened, and a link is not followed.
_PLAINLY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_warned: set[str] = set()


class CacheWarning(RuntimeWarning):
    """The cache on disk is not used: compiled code is kept in this process only."""


@dataclass(frozen=True)
class CacheEntry:
    """Facts (JSON) and named byte strings."""

    meta: Mapping[str, Any]
    parts: Mapping[str, bytes] = field(default_factory=dict)

    def to_bytes(self, name: str) -> bytes:
        sizes = {part: len(content) for part, content in self.parts.items()}
        header = json.dumps({"name": name, "meta": self.meta, "sizes": sizes}).encode()
        body = len(header).to_bytes(4, "little") + header + b"".join(self.parts.values())
        return MAGIC + hashlib.sha256(body).digest() + body

    @staticmethod
    def from_bytes(content: bytes, name: str) -> CacheEntry | None:
        """The entry, or None when `content` is not a whole one of this name."""
        start = len(MAGIC) + DIGEST_BYTES
        body = content[start:]
        if content[:start] != MAGIC + hashlib.sha256(body).digest():
            return None
        at = 4 + int.from_bytes(body[:4], "little")
        try:
            header = json.loads(body[4:at])
            if header["name"] != name:
                return None
            parts = {}
            for part, size in header["sizes"].items():
                parts[part] = body[at:at + size]
                at += size
            return CacheEntry(header["meta"], parts)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None  # sealed, but by another program


@dataclass(frozen=True)
class DiskCache:
    """One kind of entries: the folder `name` below the cache folder of the settings."""

    name: str
    limit_bytes: int = LIMIT_BYTES

    @property
    def path(self) -> Path:
        return Path(config.get("cache_dir")) / self.name

    def folder(self) -> Path:
        """The folder, made with mode 0700. Raises ArgumentError when it is not this user's alone,
        OSError when it cannot be made."""
        with self._opened():
            return self.path

    def read(self, name: str) -> CacheEntry | None:
        """The entry `name`, or None when there is no sound one."""
        with self._tried(), self._opened() as folder:
            return _read(folder, name)
        return None

    def write(self, name: str, entry: CacheEntry) -> None:
        """Store an entry; a half-written one never bears its final name."""
        with self._tried(), self._opened() as folder:
            _write(folder, name, entry.to_bytes(name))
            self._prune(folder, keep=name)

    def write_text(self, name: str, text: str) -> None:
        """A file for people to read, which nothing reads back."""
        with self._tried(), self._opened() as folder:
            _write(folder, name, text.encode())

    def made(self, name: str, make: Callable[[], CacheEntry]) -> tuple[CacheEntry, bool]:
        """The entry, and whether it was there; else one process makes it and the others wait.

        Where the file system has no locks, or the cache is no use, each process makes its own.
        """
        if (entry := self.read(name)) is not None:
            return entry, True
        with contextlib.ExitStack() as held:
            with self._tried():
                held.enter_context(self._lock(name))
            if (entry := self.read(name)) is not None:
                return entry, True
            entry = make()
            self.write(name, entry)
            return entry, False

    @contextmanager
    def claimed(self, name: str) -> Iterator[bool]:
        """Whether nobody else makes the entry: then it is this process's (or thread's) to make in
        the block. It waits for nobody, so several may be held."""
        with contextlib.ExitStack() as held:
            mine = True
            with self._tried():
                try:
                    held.enter_context(self._lock(name, fcntl.LOCK_NB))
                except BlockingIOError:
                    mine = False
            yield mine

    def clear(self) -> int:
        """Remove every entry; how many there were."""
        with self._opened() as folder:
            names = os.listdir(folder)
            for name in names:
                _unlink(folder, name)
        return len(names)

    def names(self) -> list[str]:
        """Of all entries, the one used last first."""
        with self._opened() as folder:
            found = sorted(_listing(folder), reverse=True)
        return [name for _, name, _ in found if not name.startswith((NEW, LOCK))]

    def size_bytes(self) -> int:
        with self._opened() as folder:
            return sum(size for _, _, size in _listing(folder))

    # --- the folder -----------------------------------------------------------------------------
    @contextmanager
    def _opened(self) -> Iterator[int]:
        """A descriptor of the folder. Raises ArgumentError when others may write there."""
        path = self.path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _PLAINLY)
        except (FileExistsError, NotADirectoryError):  # a link is none
            raise ArgumentError(f"the kernel cache {path} is not a folder of this user",
                                hint="set TESSERA_CACHE_DIR to a folder of your own") from None
        try:
            need_private(os.fstat(folder), path)
            yield folder
        finally:
            os.close(folder)

    @contextmanager
    def _tried(self) -> Iterator[None]:
        """What the disk refuses is a warning, once for the cache of the settings."""
        try:
            yield
        except (OSError, ArgumentError) as error:
            root = str(config.get("cache_dir")) if _is_set() else ""
            if root not in _warned:
                _warned.add(root)
                _warn(error.message if isinstance(error, ArgumentError) else str(error))

    @contextmanager
    def _lock(self, name: str, how: int = 0) -> Iterator[None]:
        """Held by one process (or thread) at a time; a process that dies releases it.

        how: LOCK_NB raises BlockingIOError where it would wait.
        """
        with self._opened() as folder:
            handle = os.open(LOCK + name, os.O_RDWR | os.O_CREAT | _PLAINLY, 0o600, dir_fd=folder)
            with open(handle, "wb", buffering=0):
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    raise OSError(errno.EINVAL, f"{LOCK}{name} is no regular file")
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | how)
                except OSError as error:
                    if error.errno not in NO_LOCKS:
                        raise
                try:
                    yield
                finally:
                    # Who waits for the removed file finds the entry; who comes later needs no lock.
                    with contextlib.suppress(OSError):
                        _unlink(folder, LOCK + name)

    def _prune(self, folder: int, keep: str) -> None:
        """Drop what was used longest ago until the rest fits. Other processes may do the same."""
        entries = sorted(_listing(folder))
        excess = sum(size for _, _, size in entries) - self.limit_bytes
        now = time.time()
        for used, name, size in entries:
            if name.startswith((NEW, LOCK)):
                if now - used > STALE_S:
                    _unlink(folder, name)
            elif excess > 0 and name != keep:
                _unlink(folder, name)
                excess -= size


def content_name(*parts: str | bytes) -> str:
    """An entry's name: the hash of everything that decides its content, part by part."""
    hashed = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hashed.update(len(data).to_bytes(8, "little") + data)
    return hashed.hexdigest()


def _warn(why: str) -> None:
    where = user_line() or SourceLine(__file__, 1)
    warnings.warn_explicit("compiled code is not kept on disk, the next process compiles it again: "
                           f"{why}. TESSERA_CACHE_DIR names another folder", CacheWarning,
                           where.file, where.line)


def _is_set() -> bool:
    """Whether the setting of the folder can be read at all."""
    try:
        return bool(config.get("cache_dir"))
    except ArgumentError:
        return False


def _read(folder: int, name: str) -> CacheEntry | None:
    try:
        handle = os.open(name, os.O_RDONLY | _PLAINLY, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link
            _unlink(folder, name)
        elif error.errno not in _GONE:
            raise
        return None
    try:
        about = os.fstat(handle)
        private = stat.S_ISREG(about.st_mode) and _is_private(about)
        entry = CacheEntry.from_bytes(_content(handle), name) if private else None
        if entry is not None:
            _touch(handle)
    finally:
        os.close(handle)
    if entry is None:
        _unlink(folder, name)
    return entry


def _content(handle: int) -> bytes:
    with open(handle, "rb", buffering=0, closefd=False) as file:
        return file.read()


def _write(folder: int, name: str, content: bytes) -> None:
    temporary = NEW + secrets.token_hex(8)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _PLAINLY, 0o600,
                     dir_fd=folder)
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            _unlink(folder, temporary)
        raise


def _unlink(folder: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def _listing(folder: int) -> Iterator[tuple[float, str, int]]:
    """(last use, name, bytes) of each file; one that another process just removed is left out."""
    with os.scandir(folder) as found:
        for item in found:
            try:
                about = item.stat(follow_symlinks=False)
            except OSError as error:
                if error.errno not in _GONE:
                    raise
            else:
                yield about.st_mtime, item.name, about.st_size


def _touch(handle: int) -> None:
    try:
        os.utime(handle)
    except OSError as error:
        # A read-only cache is a fair set-up, and so is one that another process prunes meanwhile.
        if error.errno not in (*_GONE, errno.EROFS, errno.EACCES, errno.EPERM):
            raise


def _is_private(about: os.stat_result) -> bool:
    return about.st_uid == os.geteuid() and not about.st_mode & 0o022


def need_private(about: os.stat_result, path: Path) -> None:
    """Raise ArgumentError for a folder whose content this user cannot vouch for."""
    if about.st_uid != os.geteuid():
        raise ArgumentError(f"the kernel cache {path} is not a folder of this user",
                            hint="set TESSERA_CACHE_DIR to a folder of your own")
    if not _is_private(about):
        raise ArgumentError(
            f"the kernel cache {path} is writable by others (mode {about.st_mode & 0o777:o})",
            hint=f"chmod 700 {path}, after making sure nobody wrote there")
