"""Cases of a benchmark that compile in processes side by side and are measured one by one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPT = """
import argparse, sys
import side_processes

def prepared(name, n):
    print("compiling", name)
    if name == "refused":
        raise ValueError("no kernel")
    return name, n

def measured(name, n):
    if name == "wrong":
        raise ValueError("the error is too large")
    return {"twice": 2 * n}

parser = argparse.ArgumentParser()
parser.add_argument("names", nargs="*")
parser.add_argument("--compile", action="store_true")
side_processes.flag(parser)
given = parser.parse_args()
if given.work is not None:
    side_processes.work(given.work, prepared, measured)
else:
    cases = [[name, i] for i, name in enumerate(given.names)]
    for (name, i), found in side_processes.results(__file__, cases, 2, not given.compile):
        print(name, i, found["twice"])
"""


@pytest.mark.parametrize("flags, lines, failed", [
    (["a", "b", "c"], {"a 0 0", "b 1 2", "c 2 4"}, ""),
    (["a", "wrong", "c"], {"a 0 0", "c 2 4"}, "not measured: ['wrong', 1]"),
    (["a", "refused", "c", "d"], {"a 0 0", "c 2 4", "d 3 6"}, "not measured: ['refused', 1]"),
    (["--compile", "a", "b"], set(), ""),
    (["--compile", "a", "refused"], set(), "not measured: ['refused', 1]")])
def test_what_fails_is_told_and_all_else_measured(flags, lines, failed, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script), *flags], text=True, capture_output=True,
                          env=os.environ | {"PYTHONPATH": str(BENCHMARKS)}, timeout=60)
    first, *rest = done.stdout.splitlines()
    assert first.startswith("compiled in ") and set(rest) == lines
    assert done.returncode == bool(failed) and failed in done.stderr
    assert ("Traceback" in done.stderr) == bool(failed)
