"""A run that is killed has said which tests failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os, signal, time

def test_one():
    assert 1 + 1 == 3

def test_end_of_the_run():
    end = time.monotonic() + 60  # the report of a worker's test is on its way
    while "FAILED" not in open("said").read() and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(PROCESS, signal.SIGKILL)
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_that_is_killed_has_named_what_failed(workers: int, tmp_path: Path) -> None:
    process = "os.getppid()" if workers else "os.getpid()"
    (tmp_path / "test_two.py").write_text(TESTS.replace("PROCESS", process))
    folder = str(Path(__file__).parents[1])
    command = f"import sys; sys.path.insert(0, {folder!r}); import pytest; sys.exit(pytest.main())"
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}  # of this run
    # A worker whose parent is gone ends by itself.
    with open(said := tmp_path / "said", "w") as stderr:
        made = subprocess.run(
            [sys.executable, "-c", command, "-q", "-p", "failed_names", "-p", "no:cacheprovider",
             *(["-n", str(workers)] if workers else []), "test_two.py"],
            cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=120)
    assert made.returncode == -signal.SIGKILL
    assert "FAILED test_two.py::test_one (call): assert (1 + 1) == 3\n" in said.read_text()
