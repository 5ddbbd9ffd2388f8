"""Object code of CPU loops on disk: what decides it, and what an entry holds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

from ...runtime.cache import CacheEntry, DiskCache, content_name

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
                 "frame.py", "pipeline.py", "tiles.py"):
        generator.update((here / file).read_bytes())
    versions = [f"{name} {version(name)}" for name in ("numba", "llvmlite")]
    return "\n".join([*versions, generator.hexdigest(), cpu_description()])


def entry_name(source: str) -> str:
    return content_name(environment(), source)


def obtain(name: str, compiled: Callable[[], tuple[str, bytes]]) -> tuple[str, bytes]:
    """Symbol and object code: those on disk, else what `compiled` gives. Of several processes that
    need an entry at once, one compiles it and the others wait."""
    def make() -> CacheEntry:
        symbol, code = compiled()
        return CacheEntry({"symbol": symbol}, {"code": code})

    entry, _ = LOOPS.made(name, make)
    return entry.meta["symbol"], entry.parts["code"]
