"""What runs of a test: for the tests, and for programs on ranks, which import no pytest for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import tessera as ts


def run_programs(functions: Mapping[str, Callable[[], str]], names: str, folder: str) -> None:
    """On a rank: one program, or several as "a,b", one after another; their texts by name."""
    texts = {name: functions[name]() for name in names.split(",")}
    text = json.dumps(texts) if len(texts) > 1 else texts[names]
    (Path(folder) / str(ts.dist.rank())).write_text(text)


def processes_of_run(mark: str) -> list[str]:
    """Command lines of the processes that were started with RUN_OF_TEST=mark."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"RUN_OF_TEST={mark}\0".encode() in \
                    (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it has ended
            continue
    return found
