"""Faults of one rank of a mesh of GPUs, many times over: do all ranks stop, how soon, and do they
say who and why?

    python benchmarks/mesh_faults.py --runs 20         # each fault 20 times, four runs at a time
    python benchmarks/mesh_faults.py --runs 2 --faults killed hangs

The programs are those of tests/gpu/mesh_faults.py, and what must be said is what
tests/gpu/test_mesh_faults.py expects. Written: of each fault how often it went as it should, the
longest run in seconds, from its start with Python's, and what the others said.
--hold NAME: no run is begun while there is such a file, as in mesh_all.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests")]

import record  # noqa: E402

from gpu.test_mesh_faults import PROGRAMS, words_of  # noqa: E402
from mesh.launch import mpirun  # noqa: E402
from tessera.runtime.device import device, device_count  # noqa: E402

LIMIT_S = 60


class Holding:
    """No run begins while another program times something."""

    def __init__(self, path: Path | None):
        self.path, self.lock, self.running = path, threading.Lock(), 0

    def __enter__(self) -> None:
        while self.path is not None and self.path.exists():
            time.sleep(0.2)
        self._count(1)

    def __exit__(self, *fault: object) -> None:
        self._count(-1)

    def _count(self, more: int) -> None:
        with self.lock:
            self.running += more
            if self.path is not None:
                busy = self.path.with_name(self.path.name + ".busy")
                busy.touch() if self.running else busy.unlink(missing_ok=True)


def one_run(fault: str, ranks: int, holding: Holding) -> tuple[str, float, str]:
    """The fault, seconds of the run, and what was wrong with it, if anything."""
    with holding, tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        try:
            made = mpirun(ranks, fault, Path(folder), battery=PROGRAMS, timeout_s=LIMIT_S,
                          TESSERA_COMM_TIMEOUT="5")
        except AssertionError as late:
            return fault, time.monotonic() - begin, str(late)
    missing = [words for words in words_of(ranks)[fault] if words not in made.text]
    wrong = f"not said: {missing}\n{made.text}" if missing else "" if made.status else "status 0"
    return fault, made.seconds, wrong


def in_turn(faults: list[str], runs: int) -> Iterator[str]:
    for _ in range(runs):
        yield from faults


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--runs", type=int, default=20)
    flags.add_argument("--faults", nargs="*", default=sorted(words_of(2)))
    flags.add_argument("--ranks", type=int, default=device_count())
    flags.add_argument("--wide", type=int, default=4, help="runs at a time")
    flags.add_argument("--hold", type=Path)
    flags.add_argument("--until", type=float, default=1e9, help="seconds: then none is begun")
    a = flags.parse_args()
    holding, begin = Holding(a.hold), time.monotonic()
    found: dict[str, dict[str, Any]] = {
        f: {"runs": 0, "right": 0, "longest_s": 0.0, "wrong": []} for f in a.faults}

    def run(fault: str) -> tuple[str, float, str] | None:
        return None if time.monotonic() - begin > a.until else one_run(fault, a.ranks, holding)

    with ThreadPoolExecutor(a.wide) as pool:
        for done in filter(None, pool.map(run, in_turn(a.faults, a.runs))):
            fault, seconds, wrong = done
            of = found[fault]
            of["runs"] += 1
            of["right"] += not wrong
            of["longest_s"] = max(of["longest_s"], round(seconds, 1))
            of["wrong"] += [wrong] * bool(wrong)
            if wrong:
                print(f"{fault}: {wrong[-1500:]}", flush=True)
            record.write("mesh_faults", {"device": f"{a.ranks} x {device().name}",
                                         "limit_s": LIMIT_S, "faults": found}, shown=False)
    for fault, of in found.items():
        print(f"{fault}: {of['right']} of {of['runs']} right, longest {of['longest_s']} s")


if __name__ == "__main__":
    main()
