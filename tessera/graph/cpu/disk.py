"""Object code of CPU loops on disk: what decides it, and what an entry holds."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from ...runtime.cache import DiskCache, Entry, content_name

LOOPS = DiskCache("loops")
folder = LOOPS.folder


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
    return content_name(environment(), source)


def read(name: str) -> tuple[str, bytes] | None:
    """Symbol and object code, or None when there is no sound entry."""
    entry = LOOPS.read(name)
    return (entry.meta["symbol"], entry.parts["code"]) if entry else None


def write(name: str, symbol: str, code: bytes) -> None:
    LOOPS.write(name, Entry({"symbol": symbol}, {"code": code}))
