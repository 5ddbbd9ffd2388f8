"""Ranks that are forks of a process which has imported Tessera are what a launcher starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from mesh.launch import BATTERY, TOLD, rank_command, rank_environment, started_as_by


@pytest.mark.parametrize("fresh", [False, True])
def test_a_rank_has_what_its_launcher_gave_it(fresh: bool, tmp_path: Path) -> None:
    """And hashes strings in a way of its own: what follows sets' order is seen to differ."""
    run = started_as_by("torchrun", 2, "who", tmp_path, fresh=fresh, WORD="told",
                        TESSERA_SEED="17")
    assert run.status == 0, run.text
    said = [json.loads(run.results[r]) for r in range(2)]
    (pid, hashed, *same), (other_pid, other_hashed, *others) = said
    assert same == others == ["told", ["who", str(tmp_path)], str(tmp_path), "__main__", 17]
    assert len({pid, other_pid, os.getpid()}) == 3 and hashed != other_hashed


def test_a_fork_ends_with_what_the_launcher_started(tmp_path: Path) -> None:
    command = rank_command("sleep_long", tmp_path, BATTERY, (), fresh=False)
    given = rank_environment() | {k: str(v) for k, v in TOLD["torchrun"](0, 1).items()}
    with subprocess.Popen(command, env=given, cwd=tmp_path) as client:
        while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
            assert client.poll() is None
            time.sleep(0.02)
        pid = int((tmp_path / "pid").read_text())
        os.kill(pid, 0)
        client.kill()
    assert client.returncode == -signal.SIGKILL
    end = time.monotonic() + 20
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < end:
            os.kill(pid, 0)
            time.sleep(0.02)
