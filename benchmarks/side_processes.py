"""Cases that compile side by side in processes and are then measured one after another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

READY = "ready"
Case = list[Any]


def work(cases: list[Case], prepared: Callable[..., Any],
         measured: Callable[..., dict[str, Any]]) -> None:
    """One of the processes: says when it has compiled, and measures when it is told to. prepared
    takes the parts of a case, measured what it gave."""
    made = [prepared(*case) for case in cases]
    print(READY, flush=True)
    if sys.stdin.readline():
        for case, given in zip(cases, made, strict=True):
            print(json.dumps([case, measured(*given)]), flush=True)


def results(script: str, cases: list[Case], processes: int
            ) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Those of all cases, each when it is there. script: called with --work and some of them."""
    few = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "2"}
    workers = [subprocess.Popen(
        [sys.executable, script, "--work", json.dumps(cases[i::processes])], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**few, **os.environ})
        for i in range(min(processes, len(cases)))]
    began = time.perf_counter()
    for worker in workers:
        assert worker.stdout is not None
        while (line := worker.stdout.readline()) and line.strip() != READY:
            pass
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    for i, worker in enumerate(workers):
        assert worker.stdin is not None and worker.stdout is not None
        if worker.poll() is None:
            worker.stdin.write("go\n")
            worker.stdin.flush()
            for _ in cases[i::processes]:
                if line := worker.stdout.readline():
                    yield tuple(json.loads(line))
    if failed := [w.args[-1] for w in workers if w.wait()]:  # type: ignore[index]
        raise SystemExit(f"not measured: {', '.join(map(str, failed))}")
