"""Writing a measurement down: device, date, commit and command beside the numbers.

Imported first: a program that runs from a checkout finds its package by this module.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from tessera.bench import record as of_package  # noqa: E402
from tessera.bench.record import RESULTS  # noqa: E402


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def folder() -> Path:
    """$OUT where that is set, else benchmarks/results."""
    return Path(os.environ.get("OUT", RESULTS))


def mesh_file(name: str, ranks: int) -> Path:
    """Where a measurement on so many GPUs is written: each number of them has its file."""
    return folder() / f"{name}_{ranks}gpus.json"


def write(name: str, figures: dict[str, Any], shown: bool = True, ranks: int | None = None,
          indent: int = 2) -> Path:
    """<name>.json with the context and the figures; printed too if shown. figures: with `device`
    where that is no CPU.  ranks: of a mesh of GPUs."""
    path = folder() / f"{name}.json" if ranks is None else mesh_file(name, ranks)
    path.parent.mkdir(parents=True, exist_ok=True)
    where = of_package.context(f"{len(os.sched_getaffinity(0))} cores of {cpu_name()}")
    text = json.dumps({**where, **figures}, indent=indent)
    path.write_text(text + "\n")
    if shown:
        print(text)
    return path
