"""Writing a measurement down: device, date, commit and command beside the numbers."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """The commit measured; `+` after it when the working tree differs from it."""
    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], capture_output=True, text=True, cwd=RESULTS.parent)
        return done.stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")


def _shown(argument: str) -> str:
    """Paths of this machine say nothing to others: their last part does."""
    return Path(argument).name if os.path.isabs(argument) else argument


def context() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "device": f"{len(os.sched_getaffinity(0))} cores of {cpu_name()}",
        "python": platform.python_version(),
        "commit": commit(),
        "command": " ".join(["python", os.path.relpath(sys.argv[0]), *map(_shown, sys.argv[1:])]),
    }


def write(name: str, figures: dict[str, Any], shown: bool = True) -> Path:
    """benchmarks/results/<name>.json with the context and the figures; printed too if shown."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    text = json.dumps({**context(), **figures}, indent=2)
    path.write_text(text + "\n")
    if shown:
        print(text)
    return path
