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

import tessera

CHECKOUT = Path(tessera.__file__).resolve().parents[1]
RESULTS = CHECKOUT / "benchmarks" / "results"


def commit() -> str:
    """The commit measured, `+` after it when the working tree differs from it; outside of a
    checkout the version."""
    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], capture_output=True, text=True, cwd=CHECKOUT)
        return done.stdout.strip()

    if not (CHECKOUT / ".git").exists():
        return tessera.__version__
    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")


def _without_directory(argument: str) -> str:
    """Paths of this machine say nothing to others: their last part does."""
    return Path(argument).name if os.path.isabs(argument) else argument


def command() -> str:
    """What was typed."""
    module = Path(sys.argv[0])
    run = ["-m", "tessera"] if module.name == "__main__.py" else [os.path.relpath(module)]
    return " ".join(["python", *run, *map(_without_directory, sys.argv[1:])])


def context(device: str) -> dict[str, Any]:
    return {"date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"), "device": device,
            "python": platform.python_version(), "commit": commit(), "command": command()}


def folder() -> Path:
    """benchmarks/results of a checkout, else the working directory."""
    return RESULTS if RESULTS.is_dir() else Path.cwd()


def write(path: Path, device: str, figures: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**context(device), **figures}, indent=1) + "\n")


__all__ = ["CHECKOUT", "RESULTS", "command", "commit", "context", "folder", "write"]
