"""Object code on disk, shared by the processes of one user.

An entry is a file: magic, sha256 of the rest, length of the symbol, symbol, ELF bytes. It is
written to a temporary file and renamed, so readers see whole entries. The folder must belong to
this user and be closed to others, since its content is executed. An entry that does not match its
hash is removed and compiled again.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from functools import cache
from pathlib import Path

from ... import config
from ...errors import ArgumentError

MAGIC = b"tessera-loops-1\n"


def folder() -> Path:
    """The cache folder for loops, made with mode 0700.

    Raises ArgumentError when it, or the cache folder above it, is another user's or open to others.
    """
    path = Path(config.get("cache_dir")) / "loops"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check(path)
    return path


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


@cache
def environment() -> str:
    """Everything but the source that decides the object code. Reads versions without importing."""
    from importlib.metadata import version

    from .load import cpu_description

    here = Path(__file__).parent
    generator = hashlib.sha256()
    for file in ("emit.py", "instructions.py", "maths.py", "storage.py", "spell.py", "compile.py",
                 "frame.py", "pipeline.py"):
        generator.update((here / file).read_bytes())
    versions = [f"{name} {version(name)}" for name in ("numba", "llvmlite")]
    return "\n".join([*versions, generator.hexdigest(), cpu_description()])


def entry_name(source: str) -> str:
    return hashlib.sha256(f"{environment()}\n{source}".encode()).hexdigest()


def read(name: str) -> tuple[str, bytes] | None:
    """Symbol and object code, or None when there is no sound entry."""
    path = folder() / name
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    body = content[len(MAGIC) + 32:]
    digest = content[len(MAGIC):len(MAGIC) + 32]
    if not content.startswith(MAGIC) or hashlib.sha256(body).digest() != digest:
        path.unlink(missing_ok=True)
        return None
    size = int.from_bytes(body[:4], "little")
    return body[4:4 + size].decode(), body[4 + size:]


def write(name: str, symbol: str, code: bytes) -> None:
    """Store an entry; a half-written one never bears its final name."""
    label = symbol.encode()
    body = len(label).to_bytes(4, "little") + label + code
    handle, temporary = tempfile.mkstemp(dir=folder(), prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(MAGIC + hashlib.sha256(body).digest() + body)
        os.replace(temporary, folder() / name)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
