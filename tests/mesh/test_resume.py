"""The training example stopped and resumed: on other meshes, after a kill, and what is said when
one rank fails."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from mesh import example
from mesh.example import losses_of
from mesh.launch import mpirun, needs_mpi

pytestmark = needs_mpi
REHEARSAL = Path(__file__).with_name("rehearsal.py")
STEPS, SAVED_AT = 10, 5
FLAGS = ["--checkpoint-every", str(SAVED_AT), "--eval-every", "100", "--sample", "0"]
for name, value in {**example.SMALL, "steps": STEPS}.items():
    FLAGS += [f"--{name}", str(value)]


def launch(ranks: int, folder: Path, what: str, *flags: Any) -> Any:
    folder.mkdir(exist_ok=True)
    return mpirun(ranks, what, folder, battery=REHEARSAL, flags=[str(f) for f in flags],
                  timeout_s=150)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return example.write_text(tmp_path_factory.mktemp("text") / "words.txt")


@pytest.fixture(scope="module")
def unbroken(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happens to, with checkpoints in the middle and at the end."""
    folder = tmp_path_factory.mktemp("unbroken")
    run = launch(4, folder, "run", *FLAGS, "--data", text, "--mesh", "dp=2,tp=2", "--out",
                 folder / "out")
    assert run.status == 0, run.text
    losses = losses_of(folder / "out")
    assert len(run.results) == 4 and losses[-1] < losses[0] - 0.5
    return folder / "out"


# --- on another mesh --------------------------------------------------------------------------
@pytest.mark.parametrize("ranks, mesh", [(3, "tp=3"), (4, "dp=4"), (4, "pp=2,dp=2"), (1, "")])
def test_a_run_goes_on_where_it_is_resumed(unbroken: Path, tmp_path: Path, ranks: int, mesh: str
                                           ) -> None:
    """From the middle, on meshes that the checkpoint was not written on: the same losses."""
    out = copied(unbroken, tmp_path / "out")
    flags = ["--out", str(out), "--resume", str(SAVED_AT), "--mesh", mesh, "--microbatches", "2"]
    if ranks == 1:
        assert example.modules()[0].main(flags) == 0
    else:
        run = launch(ranks, tmp_path / "ranks", "run", *flags)
        assert run.status == 0 and f"step {SAVED_AT} of {STEPS}" in run.text, run.text
    losses = losses_of(out)
    assert len(losses) == STEPS and losses[:SAVED_AT] == losses_of(unbroken)[:SAVED_AT]
    np.testing.assert_allclose(losses, losses_of(unbroken), rtol=1e-5)
    compare(unbroken, out, exact=False)


def test_what_stages_have_written_one_process_goes_on_with(
        unbroken: Path, text: Path, tmp_path: Path) -> None:
    """Stages of one rank each: their weights are plain tensors, each of one rank alone."""
    out = tmp_path / "out"
    flags = [*FLAGS, "--data", text, "--mesh", "pp=2", "--microbatches", "3", "--out", out]
    run = launch(2, tmp_path / "ranks", "run", *flags)
    assert run.status == 0, run.text
    out = copied(out, tmp_path / "copy")
    assert example.modules()[0].main(["--out", str(out), "--resume", "--mesh", ""]) == 0
    np.testing.assert_allclose(losses_of(out), losses_of(unbroken), rtol=1e-5)
    compare(unbroken, out, exact=False)


def copied(run: Path, out: Path) -> Path:
    """The run's folder without what came after SAVED_AT."""
    step = f"step-{SAVED_AT:08d}"
    (out / step).mkdir(parents=True)
    for file in (run / step).iterdir():
        (out / step / file.name).write_bytes(file.read_bytes())
    return out


def compare(one: Path, other: Path, exact: bool) -> None:
    """The states at the end."""
    a, b = (ts.checkpoints.History(out).load() for out in (one, other))
    assert a.step == b.step == STEPS and a.random == b.random
    assert set(a.tensors) == set(b.tensors)
    for path, x in a.tensors.items():
        if exact:
            assert x.array.tobytes() == b.tensors[path].array.tobytes(), path
        elif path.startswith("params."):
            np.testing.assert_allclose(x.numpy(), b.tensors[path].numpy(), atol=2e-4, err_msg=path)


# --- after a kill -----------------------------------------------------------------------------
def processes_of(folder: Path) -> list[str]:
    """Command lines of running processes that name a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if entry.name.isdigit() and state != "Z" and str(folder).encode() in command:
            found.append(command.replace(b"\0", b" ").decode())
    return found


@pytest.mark.row("CORE-21")
def test_a_rank_is_killed_and_the_run_goes_on_as_if_it_had_not_been(
        unbroken: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = launch(4, tmp_path / "a", "kill", 2, SAVED_AT + 2, *FLAGS, "--data", text, "--mesh",
                 "dp=2,tp=2", "--out", out)
    print(f"all stopped after {run.seconds:.1f} s with status {run.status}")
    assert run.status != 0 and run.seconds < 60 and not run.results, run.text
    assert run.text.count("was killed") == 1, run.text
    said = next(line for line in run.text.splitlines() if "was killed" in line)
    assert "tessera: rank 2 of 4 (pid " in said and " after share() at " in said, said
    assert "train.py:" in said and "stop = ts.dist.share(" in said, said
    assert "in step() over dp*tp at" in run.text, run.text
    assert "checkpoints that were complete are whole" in run.text
    deadline = time.monotonic() + 30
    while processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(tmp_path) == []
    assert not (out / "result.json").exists()

    run = launch(4, tmp_path / "b", "run", "--out", out, "--resume")
    assert run.status == 0 and f"step {SAVED_AT} of {STEPS}" in run.text, run.text
    assert losses_of(out) == losses_of(unbroken), "the same mesh: bit by bit"
    compare(unbroken, out, exact=True)


# --- an error of one rank ---------------------------------------------------------------------
def test_an_exception_of_one_rank_is_said_with_its_line(text: Path, tmp_path: Path) -> None:
    run = launch(2, tmp_path, "fail", 1, 2, *FLAGS, "--data", text, "--out", tmp_path / "out")
    print(f"all stopped after {run.seconds:.1f} s with status {run.status}")
    assert run.status == 1 and run.seconds < 60 and not run.results, run.text
    assert "rank 1 of 2 failed; stopping all ranks" in run.text
    assert "RuntimeError: broken on purpose" in run.text
    assert 'raise RuntimeError("broken on purpose")  # the line that is to be shown' in run.text


def test_a_full_disk_of_one_rank_is_said_once_and_loses_nothing(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = launch(2, tmp_path / "ranks", "full", 1, SAVED_AT + 1, *FLAGS, "--data", text, "--mesh",
                 "tp=2", "--out", out)
    print(f"all stopped after {run.seconds:.1f} s with status {run.status}")
    assert run.status == 1 and run.seconds < 60 and not run.results, run.text
    assert run.text.count("error: ") == 1, run.text
    assert "is not written: on rank 1: [Errno 28] No space left on device" in run.text
    assert ts.checkpoints.History(out).load().step == SAVED_AT
    assert list((out / f"step-{STEPS:08d}").iterdir()) == []


@pytest.mark.row("DBG-22")
def test_an_overflow_of_one_rank_is_said_with_its_op_and_line(text: Path, tmp_path: Path) -> None:
    run = launch(3, tmp_path, "overflow", 2, 1, *FLAGS, "--heads", "2", "--data", text, "--mesh",
                 "tp=3", "--numerics", "raise", "--out", tmp_path / "out")
    print(f"all stopped after {run.seconds:.1f} s with status {run.status}")
    assert run.status == 1 and run.seconds < 60 and not run.results, run.text
    assert "rank 2 of 3 has left by sys.exit(1); stopping all ranks" in run.text
    assert run.text.count("error: [E_NAN_INF]") == 1, run.text
    assert re.search("matmul: (nan|inf) in ", run.text), run.text  # as the batch has it
    assert "transformer.py:" in run.text, run.text


def test_this_machine_lists_processes() -> None:
    """What finds stray processes finds this one."""
    assert processes_of(Path(os.fsdecode(Path("/proc/self/cmdline").read_bytes().split(b"\0")[0])))
