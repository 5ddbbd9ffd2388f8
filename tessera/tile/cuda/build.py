"""Emitted source -> a kernel that can be launched, through the disk cache.

An entry holds PTX, cubin and what ptxas reported, so a kernel that is in the cache needs neither
Numba nor ptxas. Its name hashes the source and everything that decides the code.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ...errors import UnsupportedTargetError
from ...runtime.cache import CacheEntry, DiskCache, content_name
from ...runtime.device import device
from ...runtime.module import Grid, LoadedKernel
from ...runtime.ptxas import Resources, assemble, sass
from ...runtime.target import OLDEST, Target, target_for
from ...runtime.toolchain import sources, toolchain
from .instruction import Kind
from .ptx_text import LineMap

KERNELS = DiskCache("kernels")
SOURCES = DiskCache("sources")
FLOORS = ("numerics", "runtime", "tile")  # of the package, whose sources decide code


@dataclass(frozen=True)
class Built:
    """A kernel, the text of each level below Tile IR, and what it took."""

    kernel: LoadedKernel
    source: str
    file: str
    ptx: str
    target: Target
    resources: Resources
    warnings: tuple[str, ...]  # of ptxas: correct, but slow
    cached: bool
    seconds: float

    def sass(self) -> str:
        return sass(self.kernel.cubin)


def build(source: str, name: str, parameters: Sequence[Kind], target: Target | None = None, *,
          threads: int, needs: Target = OLDEST, min_blocks: int = 1, shared_bytes: int = 0,
          cluster: Grid = (), dependent: bool = False, lines: LineMap | None = None) -> Built:
    """The function `name` of `source` as a kernel of scalar parameters (pointers are i64).

    target: by default that of this machine's first GPU, where launches go by default. needs: the
    oldest target that has the instructions; "sm_90a" makes the default architecture-specific.
    shared_bytes: dynamic shared memory. lines: emitted line -> (user's file, line).
    Raises CompileError where Numba or ptxas refuses, UnsupportedTargetError without what it needs.
    """
    start = time.perf_counter()
    target = _checked(target, name, needs)
    key = content_name(source, name, ",".join(parameters), str(target), f"{threads} {min_blocks}",
                       repr(sorted((lines or {}).items())), environment())
    file = str(SOURCES.path / f"{name}-{key[:16]}.py")
    entry = KERNELS.read(key)
    cached = entry is not None
    if entry is None:
        entry = _compile(source, file, name, parameters, target, threads, min_blocks, lines)
        KERNELS.write(key, entry)
    kernel = LoadedKernel(entry.parts["cubin"], name, parameters, target=target, threads=threads,
                          shared_bytes=shared_bytes, cluster=cluster, dependent=dependent)
    return Built(kernel, source, file, entry.parts["ptx"].decode(), target,
                 Resources(**entry.meta["resources"]), tuple(entry.meta["warnings"]), cached,
                 time.perf_counter() - start)


def _checked(target: Target | None, name: str, needs: Target) -> Target:
    if target is None:
        return target_for(device().cc, needs)
    if not target.runs(needs):
        raise UnsupportedTargetError(f"kernel {name} needs {needs}, it is built for {target}",
                                     hint=f"build it for {needs}")
    return target


def _compile(source: str, file: str, name: str, parameters: Sequence[Kind], target: Target,
             threads: int, min_blocks: int, lines: LineMap | None) -> CacheEntry:
    from .numba_gate import compile_source

    SOURCES.write_text(os.path.basename(file), source)
    ptx = compile_source(source, file, name, parameters, target, threads=threads,
                         min_blocks=min_blocks, lines=lines)
    made = assemble(ptx.text, target, lineinfo=True)
    meta = {"resources": asdict(made.kernels[name]), "warnings": list(made.warnings)}
    return CacheEntry(meta, {"ptx": ptx.text.encode(), "cubin": made.cubin})


@functools.cache
def environment() -> str:
    """Everything but the source that decides the code. Imports and runs nothing.

    What emitted source names are intrinsics, whose bodies also read numerics, layouts and flags.
    """
    package = Path(__file__).parents[2]
    parts = [sources(package / floor) for floor in FLOORS]
    return "\n".join([*parts, toolchain()])
