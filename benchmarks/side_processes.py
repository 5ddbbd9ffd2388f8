"""Cases that compile side by side in processes and are then measured one after another.

A program calls `results`, and `work` where it is run again with --work: see attention_forward.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

READY = "ready"
Case = list[Any]


def flag(parser: argparse.ArgumentParser) -> None:
    """--work, the cases of one of the processes."""
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)


def work(cases: list[Case], prepared: Callable[..., Any],
         measured: Callable[..., dict[str, Any]]) -> None:
    """One of the processes: says when it has compiled, and measures when it is told to. prepared
    takes the parts of a case, measured what it gave. A case that fails is told of, and left out."""
    made = [(case, _tried(prepared, case)) for case in cases]
    print(READY, flush=True)
    if sys.stdin.readline():
        for case, given in made:
            found = _tried(measured, given) if given is not None else None
            print(json.dumps([case, found]), flush=True)
    if any(given is None for _, given in made):
        sys.exit(1)


def _tried(fn: Callable[..., Any], args: Any) -> Any | None:
    try:
        return fn(*args)
    except Exception:
        traceback.print_exc()
        return None


def results(script: str, cases: list[Case], processes: int, measured: bool = True
            ) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Those of all cases, each when it is there. script: called with --work and some of them.
    measured: else they are compiled alone."""
    few = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    workers = [subprocess.Popen(
        [sys.executable, script, "--work", json.dumps(cases[i::processes])], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**few, **os.environ})
        for i in range(min(processes, len(cases)))]
    began, failed = time.perf_counter(), list[Case]()
    for worker in workers:
        assert worker.stdout is not None
        while (line := worker.stdout.readline()) and line.strip() != READY:
            pass
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    for i, worker in enumerate(workers):
        assert worker.stdout is not None
        mine = cases[i::processes]
        if worker.poll() is None and measured:
            for line in _told(worker):
                case, found = json.loads(line)
                mine.remove(case)
                if found is None:
                    failed.append(case)
                else:
                    yield case, found
        worker.communicate()
        failed += mine if measured or worker.returncode else []
    if failed:
        raise SystemExit(f"not measured: {', '.join(map(str, failed))}")


def _told(worker: subprocess.Popen[str]) -> Iterator[str]:
    """What a process says of its cases, once it may measure."""
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write("go\n")
    worker.stdin.flush()
    return (line for line in worker.stdout if line.startswith("[["))
