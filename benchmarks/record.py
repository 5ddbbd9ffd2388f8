"""Writing a measurement down: device, date, commit and command beside the numbers."""

from __future__ import annotations

import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

from tessera.bench.record import RESULTS, command, commit


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def context() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "device": f"{len(os.sched_getaffinity(0))} cores of {cpu_name()}",
        "python": platform.python_version(),
        "commit": commit(),
        "command": command(),
    }


def mesh_file(name: str, ranks: int) -> Path:
    """Where a measurement on so many GPUs is written: each number of them has its file."""
    return RESULTS / f"{name}_{ranks}gpus.json"


def write(name: str, figures: dict[str, Any], shown: bool = True,
          ranks: int | None = None) -> Path:
    """benchmarks/results/<name>.json with the context and the figures; printed too if shown.
    ranks: of a mesh of GPUs."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json" if ranks is None else mesh_file(name, ranks)
    text = json.dumps({**context(), **figures}, indent=2)
    path.write_text(text + "\n")
    if shown:
        print(text)
    return path
