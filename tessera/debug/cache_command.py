"""`python -m tessera cache`: what the cache folder holds, of which kernels and schedules.

    python -m tessera cache                    kinds of entries, how many, how large
    python -m tessera cache --list             each kernel and tuned schedule
    python -m tessera cache --clear            all compiled code goes; tuned schedules stay
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from .. import config
from ..graph.cpu.disk import LOOPS
from ..graph.cuda.program.compile_program import PROGRAMS
from ..runtime.cache import DiskCache
from ..tile.cuda.build import SOURCES
from ..tile.launch.machine_code import HASHES, IMAGES
from ..tile.tuning.tuned_schedules import TuningCache

KINDS: dict[str, tuple[DiskCache, str]] = {
    "images": (IMAGES, "kernels for GPUs"), "loops": (LOOPS, "fused loops for CPUs"),
    "sources": (SOURCES, "emitted sources"), "programs": (PROGRAMS, "functions compiled whole"),
    "hashes": (HASHES, "of the compiler's own sources")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list", action="store_true", help="each kernel and tuned schedule")
    parser.add_argument("--clear", action="store_true",
                        help="remove compiled code; tuned schedules stay")


def run(args: argparse.Namespace) -> int:
    print(f"cache folder {config.cache_dir}")
    for name, (cache, what) in KINDS.items():
        count, size = len(cache.names()), cache.size_bytes()
        if args.clear:
            cache.clear()
        gone = ", removed" if args.clear else ""
        print(f"{name:10s}{count:6d} entries {size / 1e6:9.2f} MB  {what}{gone}")
    schedules = TuningCache.of(None)
    tuned = [] if schedules is None else schedules.entries()
    print(f"{'tuned':10s}{len(tuned):6d} entries {'':12s}  tuned schedules")
    if args.list:
        print("\n".join([*_kernels(), *(f"  {t.key['kernel']} on {t.key['gpu']}: {t.schedule}"
                                        for t in tuned)]))
    return 0


def _kernels() -> Iterator[str]:
    for name in sorted(IMAGES.names()):
        entry = IMAGES.read(name)
        if entry is not None:
            yield (f"  {name[:12]}  {entry.meta['name']} for {entry.meta['target']}, "
                   f"{len(entry.parts['cubin'])} bytes")
