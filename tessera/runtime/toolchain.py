"""Which compiler this is: what the names of entries in the disk cache depend on besides sources.

Imports and runs nothing, so that a launch from the cache costs no more than its file.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from pathlib import Path

from .ptxas import find_ptxas

_COMPILERS = ("numba_cuda-", "numba-", "llvmlite-", "nvidia_nvvm-", "nvidia_cuda_nvcc")


@functools.cache
def toolchain() -> str:
    """A ptxas is known by its path, size and time stamp; NVVM by its wheel, or it belongs to the
    same toolkit as ptxas."""
    parts = _wheels()
    if path := find_ptxas():
        about = os.stat(path)
        parts.append(f"{path} {about.st_size} {about.st_mtime_ns}")
    return "\n".join(parts)


def _wheels() -> list[str]:
    """Names and versions of the compiler's wheels, from the folders that pip leaves; quicker than
    importlib.metadata, which costs a launch from the cache 100 ms."""
    found = []
    for site in filter(os.path.isdir, sys.path):
        found += sorted(name for name in os.listdir(site)
                        if name.startswith(_COMPILERS) and name.endswith(".dist-info"))
    return found


def stamps(folder: Path | str, without: tuple[str, ...] = ()) -> str:
    """Sizes and time stamps of the same files: while these stay, so does their hash. A tenth of
    the time that reading them takes.

    Both times: a tool may set the one of the content, nobody that of the last change.
    """
    found = []
    with os.scandir(folder) as items:
        for item in items:
            if item.name.endswith(".py"):
                about = item.stat()
                found.append(f"{item.path} {about.st_size} {about.st_mtime_ns} "
                             f"{about.st_ctime_ns}")
            elif item.name not in (*without, "__pycache__") and item.is_dir():
                found.append(stamps(item.path, without))
    return "\n".join(sorted(found))


def sources(folder: Path, without: tuple[str, ...] = ()) -> str:
    """The hash of the Python files below a folder, and of where they stand in it.

    without: names of folders that do not matter.
    """
    hashed = hashlib.sha256()
    for at, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in (*without, "__pycache__"))
        for name in sorted(f for f in files if f.endswith(".py")):
            with open(os.path.join(at, name), "rb") as file:
                content = file.read()
            hashed.update(f"{os.path.relpath(at, folder)}/{name} {len(content)}\n".encode())
            hashed.update(content)
    return hashed.hexdigest()
