"""A cache of compiled code on disk, shared by the processes of one user.

    loops = DiskCache("loops")
    entry = loops.read(name)                        # Entry(meta, parts) or None
    loops.write(name, Entry({"symbol": "f"}, {"code": elf}))
    loops.made(name, make)                          # read, or made by one process for all

An entry is one file, named by the hash of all that decides its content: magic, sha256 of the rest,
a JSON header, the parts' bytes. It is written beside its place and renamed, so readers see whole
entries; it is hashed again when read, so a damaged one is removed and made anew. That is also why
nothing is synced: an entry that a power cut leaves half on the disk does not match its hash.

The folder has mode 0700 and must belong to this user and be closed to others, since its content is
executed; nothing in it is unpickled. When the entries outgrow the limit, those unused for longest
go (reading one renews its time stamp).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import config
from ..errors import ArgumentError

MAGIC = b"tessera-cache-1\n"
DIGEST_BYTES = 32
LIMIT_BYTES = 512 << 20
# A temporary file this old belongs to a process that died.
STALE_S = 3600.0
LOCK = ".lock-"
# A network file system says these where another host replaced or removed the file: it is gone.
_GONE = (errno.ENOENT, errno.ESTALE)


@dataclass(frozen=True)
class Entry:
    """Facts (JSON) and named byte strings."""

    meta: Mapping[str, Any]
    parts: Mapping[str, bytes] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        sizes = {name: len(part) for name, part in self.parts.items()}
        header = json.dumps({"meta": self.meta, "sizes": sizes}).encode()
        body = len(header).to_bytes(4, "little") + header + b"".join(self.parts.values())
        return MAGIC + hashlib.sha256(body).digest() + body

    @staticmethod
    def from_bytes(content: bytes) -> Entry | None:
        """The entry, or None when `content` is not a whole one."""
        start = len(MAGIC) + DIGEST_BYTES
        body = content[start:]
        digest = hashlib.sha256(body).digest()
        if content[:start] != MAGIC + digest:
            return None
        at = 4 + int.from_bytes(body[:4], "little")
        header = json.loads(body[4:at])
        parts = {}
        for name, size in header["sizes"].items():
            parts[name] = body[at:at + size]
            at += size
        return Entry(header["meta"], parts)


@dataclass(frozen=True)
class DiskCache:
    """One kind of entries: the folder `name` below the cache folder of the settings."""

    name: str
    limit_bytes: int = LIMIT_BYTES

    def folder(self) -> Path:
        """The folder, made with mode 0700.

        Raises ArgumentError when it is another user's, a link, or writable by others.
        """
        path = Path(config.get("cache_dir")) / self.name
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check(path)
        return path

    def read(self, name: str) -> Entry | None:
        """The entry `name`, or None when there is no sound one."""
        path = self.folder() / name
        try:
            content = path.read_bytes()
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise
        entry = Entry.from_bytes(content)
        if entry is None:
            path.unlink(missing_ok=True)
            return None
        _touch(path)
        return entry

    def write(self, name: str, entry: Entry) -> None:
        """Store an entry; a half-written one never bears its final name."""
        folder = self.folder()
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(entry.to_bytes())
            os.replace(temporary, folder / name)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        self._prune(folder, keep=name)

    def made(self, name: str, make: Callable[[], Entry]) -> tuple[Entry, bool]:
        """The entry, and whether it was there; else one process makes it and the others wait.

        Where the file system has no locks, each process makes its own.
        """
        if (entry := self.read(name)) is not None:
            return entry, True
        with self._lock(name):
            if (entry := self.read(name)) is not None:
                return entry, True
            entry = make()
            self.write(name, entry)
            return entry, False

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        """Held by one process (or thread) at a time; a process that dies releases it."""
        path = self.folder() / (LOCK + name)
        with open(path, "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
            try:
                yield
            finally:
                # Who waits for the removed file finds the entry; who comes later needs no lock.
                path.unlink(missing_ok=True)

    def clear(self) -> int:
        """Remove every entry; how many there were."""
        files = list(self.folder().iterdir())
        for file in files:
            file.unlink(missing_ok=True)
        return len(files)

    def size_bytes(self) -> int:
        return sum(size for _, _, size in _listing(self.folder()))

    def _prune(self, folder: Path, keep: str) -> None:
        """Drop what was used longest ago until the rest fits. Other processes may do the same."""
        entries = sorted(_listing(folder))
        excess = sum(size for _, _, size in entries) - self.limit_bytes
        now = time.time()
        for used, path, size in entries:
            if path.name.startswith((".new-", LOCK)):
                if now - used > STALE_S:
                    path.unlink(missing_ok=True)
            elif excess > 0 and path.name != keep:
                path.unlink(missing_ok=True)
                excess -= size


def content_name(*parts: str | bytes) -> str:
    """An entry's name: the hash of everything that decides its content, part by part."""
    hashed = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hashed.update(len(data).to_bytes(8, "little") + data)
    return hashed.hexdigest()


def _listing(folder: Path) -> Iterator[tuple[float, Path, int]]:
    """(last use, path, bytes) of each file; one that another process just removed is left out."""
    with os.scandir(folder) as found:
        for item in found:
            try:
                about = item.stat(follow_symlinks=False)
            except OSError as error:
                if error.errno not in _GONE:
                    raise
            else:
                yield about.st_mtime, Path(item.path), about.st_size


def _touch(path: Path) -> None:
    try:
        os.utime(path)
    except OSError as error:
        # A read-only cache is a fair set-up, and so is one that another process prunes meanwhile.
        if error.errno not in (*_GONE, errno.EROFS, errno.EACCES, errno.EPERM):
            raise


def _check(path: Path) -> None:
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        raise ArgumentError(
            f"the kernel cache {path} is not a folder of this user",
            hint="set TESSERA_CACHE_DIR to a folder of your own",
        )
    if about.st_mode & 0o022:
        raise ArgumentError(
            f"the kernel cache {path} is writable by others (mode {about.st_mode & 0o777:o})",
            hint=f"chmod 700 {path}, after making sure nobody wrote there",
        )
