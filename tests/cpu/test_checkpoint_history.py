"""Checkpoints of a run: those that are kept, found again, and survive kills."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tessera as ts
from cpu.test_checkpoint import DAMAGES, data_file, some_tensors
from tessera.checkpoints import History, load, save
from tessera.checkpoints.layout import MANIFEST
from tessera.checkpoints.locking import LOCK, claim_of


# --- a run's history --------------------------------------------------------------------------
def test_the_last_checkpoints_are_kept(tmp_path):
    history = History(tmp_path / "run", keep=3)
    for step in range(0, 60, 10):
        history.save(step, {"x": ts.tensor([float(step)])})
    assert history.steps() == [30, 40, 50]
    assert history.load().step == 50 and history.load(30).tensors["x"].tolist() == [30.0]
    with pytest.raises(ts.ArgumentError, match="at least 2"):
        History(tmp_path, keep=1)


@pytest.mark.parametrize("name", ["truncated", "changed", "missing", "manifest changed"])
def test_a_damaged_newest_checkpoint_names_the_older_one(tmp_path, rng, name):
    history = History(tmp_path / "run", keep=3, how="--resume {step}")
    for step in (1, 2, 3):
        history.save(step, some_tensors(rng))
    for step in (3, 2):
        file = data_file(history.path(step)) if name != "manifest changed" else None
        if file is None:
            text = (history.path(step) / MANIFEST).read_text()
            (history.path(step) / MANIFEST).write_text(text.replace("f32", "f64"))
        else:
            DAMAGES[name][0](history.path(step))
        with pytest.raises(ts.CheckpointError, match="step-00000003 is damaged") as caught:
            history.load()
        whole = {3: 2, 2: 1}[step]
        assert caught.value.hint == f"the checkpoint of step {whole} is whole: --resume {whole}"
    assert history.load(1).step == 1


def test_nothing_whole_is_said_and_unfinished_ones_are_not_offered(tmp_path, rng):
    history = History(tmp_path / "run")
    with pytest.raises(ts.CheckpointError, match="no checkpoint in"):
        history.load()
    history.save(1, some_tensors(rng))
    history.path(2).mkdir()  # killed before its manifest was there
    assert history.load().step == 1
    with pytest.raises(ts.CheckpointError, match="no checkpoint of step 2") as caught:
        history.load(2)
    assert caught.value.hint.endswith("step 1")
    data_file(history.path(1)).unlink()
    with pytest.raises(ts.CheckpointError, match="is missing") as caught:
        history.load()
    assert caught.value.hint == "no other checkpoint of this run is whole"


def test_a_folder_that_goes_while_it_is_looked_at_has_no_steps(tmp_path, monkeypatch):
    """A rank that fails removes the empty folder that it made."""
    history = History(tmp_path / "run")
    history.folder.mkdir()
    listed = os.listdir

    def late(path):
        os.rmdir(path)
        return listed(path)

    monkeypatch.setattr(os, "listdir", late)
    assert history.steps() == []


def test_going_on_from_an_earlier_step_leaves_one_line_of_history(tmp_path):
    history = History(tmp_path / "run", keep=3)
    for step in (10, 20, 30):
        history.save(step, {"x": ts.tensor([float(step)])})
    with history.claim():
        history.load(10)
        history.save(15, {"x": ts.tensor([15.0])})
    assert history.steps() == [10, 15]


@pytest.mark.parametrize("claim", ["none", "after loading", "loaded a later one"])
def test_later_checkpoints_go_only_when_the_claim_went_back_from_them(tmp_path, claim):
    """Another process may have written them since this one has read."""
    history = History(tmp_path / "run", keep=3)
    history.save(10, {"x": ts.tensor([10.0])})
    history.load()
    for step in (20, 30):
        history.save(step, {"x": ts.tensor([float(step)])})
    with contextlib.ExitStack() as held:
        if claim != "none":
            held.enter_context(history.claim())
        if claim == "loaded a later one":
            history.load(20)
        with pytest.raises(ts.CheckpointError, match="of step 30, which saving step 15") as caught:
            history.save(15, {"x": ts.tensor([15.0])})
    assert "claim the folder, then load" in caught.value.hint
    assert history.steps() == [10, 20, 30] and os.listdir(tmp_path) == ["run"]


def holder(folder: Path, code: str) -> subprocess.Popen:
    """Another process that holds a folder until its input ends."""
    child = subprocess.Popen(
        [sys.executable, "-c", f"import sys, tessera as ts\n{code}", str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(Path(ts.__file__).parents[1])})
    assert child.stdout is not None and child.stdout.readline() == "holds\n"
    return child


CLAIMS = """
with ts.checkpoints.History(sys.argv[1]).claim():
    print("holds", flush=True)
    sys.stdin.read()
"""


def test_a_folder_has_one_writer_and_the_next_is_told_who(tmp_path):
    """Claims, saves of the history and of the folder itself; after a kill the folder is free."""
    history, x = History(tmp_path / "run"), {"x": ts.tensor([1.0])}
    child = holder(tmp_path / "run", CLAIMS)
    for act in (lambda: history.claim().__enter__(), lambda: history.save(1, x),
                lambda: save(tmp_path / "run", x)):
        with pytest.raises(ts.CheckpointError) as caught:
            act()
        assert caught.value.message == (
            f"another process (pid {child.pid} on {socket.gethostname()}) writes to "
            f"{tmp_path / 'run'}")
    assert history.steps() == [] and os.listdir(tmp_path / "run") == [LOCK]
    child.kill()
    child.communicate()
    with history.claim():
        with pytest.raises(ts.CheckpointError, match="this process writes to .*run already"):
            History(tmp_path / "run").claim().__enter__()
        history.save(1, x)
        save(tmp_path / "run", x)  # this process holds it
    assert LOCK not in os.listdir(tmp_path / "run") and history.steps() == [1]


def test_a_second_thread_that_saves_is_refused(tmp_path):
    history, x = History(tmp_path / "run"), {"x": ts.tensor([1.0])}
    with history.claim():
        claim = claim_of(history.folder)
        with claim.busy, pytest.raises(ts.CheckpointError, match="another thread of this process"):
            history.save(1, x)
        history.save(1, x)


def test_a_claim_for_nothing_leaves_nothing(tmp_path):
    with History(tmp_path / "run").claim():
        assert (tmp_path / "run").is_dir()
    assert os.listdir(tmp_path) == []
    (tmp_path / "run").mkdir()
    with History(tmp_path / "run").claim():
        pass
    assert os.listdir(tmp_path / "run") == []


def test_a_forked_child_does_not_hold_what_its_parent_does(tmp_path):
    """It neither keeps the lock when the parent has died nor releases it before."""
    code = """
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12's, of a fork beside threads
claim = ts.checkpoints.History(sys.argv[1]).claim()
claim.__enter__()
begun, begins = os.pipe()
if os.fork() == 0:
    claim.__exit__(None, None, None)
    os.write(begins, b"!")
    sys.stdout = None
    sys.stdin.read()
    os._exit(0)
os.read(begun, 1)
print("holds", flush=True)
import time
time.sleep(60)
"""
    child = holder(tmp_path / "run", code)
    with pytest.raises(ts.CheckpointError, match=f"pid {child.pid} "):
        History(tmp_path / "run").claim().__enter__()
    child.kill()
    child.wait()
    with History(tmp_path / "run").claim():  # the other one still lives
        pass
    child.stdin.close()
    child.stdout.close()


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def refuses(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)
    with pytest.warns(UserWarning, match="has no locks .*may lose a checkpoint"):
        save(tmp_path / "c", {"x": ts.tensor([1.0])})
    assert load(tmp_path / "c").tensors["x"].tolist() == [1.0]


WRITER = """
import sys
import tessera as ts
path, step = sys.argv[1], int(sys.argv[2])
trees = {"w": ts.full((50_000,), float(step))}
print("ready", flush=True)
for line in sys.stdin:
    try:
        ts.checkpoints.save(f"{path}/{line.strip()}", trees, step=step)
        print("saved", flush=True)
    except ts.CheckpointError as error:
        print(error.message, flush=True)
"""


def test_of_two_that_save_at_once_nothing_is_lost(tmp_path):
    """Both are told to begin at the same moment, a little apart from trial to trial. The one
    that is refused has been told by whom, and what lies there is one of theirs, whole."""
    trials, few = 200, 200 if os.environ.get("TESSERA_SLOW") else 12  # more while they do not meet
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(step)], text=True,
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                env=os.environ | {"PYTHONPATH": str(Path(ts.__file__).parents[1])})
               for step in (1, 2)]
    assert [w.stdout.readline() for w in writers] == ["ready\n"] * 2
    outcomes: dict[str, int] = {"both": 0, "one": 0}
    for trial in range(trials):
        if trial >= few and outcomes["one"]:
            break
        path = tmp_path / f"{trial}"
        save(path, {"w": ts.zeros((3,))}, step=9)
        for writer in writers:
            writer.stdin.write(f"{trial}\n")
            writer.stdin.flush()
            time.sleep(0.0003 * (trial % 7))
        told = [w.stdout.readline().strip() for w in writers]
        refused = [t for t in told if t != "saved"]
        pids = {f"another process (pid {w.pid} on {socket.gethostname()}) writes to {path}"
                for w in writers}
        assert len(refused) < 2 and set(refused) <= pids, told
        outcomes["one" if refused else "both"] += 1
        saved = load(path)
        won = [step for step, t in zip((1, 2), told, strict=True) if t == "saved"]
        assert saved.step in won
        assert saved.tensors["w"].tolist() == [float(saved.step)] * 50_000
        assert len(os.listdir(path)) == 2, "files of a save that was refused are left"
        shutil.rmtree(path)
    for writer in writers:
        writer.communicate()
    assert outcomes["one"], "they never met"


# --- kills ------------------------------------------------------------------------------------
SAVER = """
import sys
import numpy as np
import tessera as ts
history = ts.checkpoints.History(sys.argv[1])
step = history.load().step if history.steps() else 0
print("from", step, flush=True)
while True:
    step += 1
    trees = {"a": ts.tensor(np.full(40_000, step)), "b": ts.tensor(np.full(3, step))}
    history.save(step, trees, meta={"step": step})
    print("saved", step, flush=True)
"""


def test_a_kill_at_any_moment_loses_nothing_that_was_saved(tmp_path, rng):
    run, last = tmp_path / "run", 0
    for _ in range(6):
        child = subprocess.Popen([sys.executable, "-c", SAVER, str(run)], stdout=subprocess.PIPE,
                                 text=True, cwd=Path(ts.__file__).parents[1])
        assert child.stdout is not None
        began = int(child.stdout.readline().split()[1])
        time.sleep(rng.uniform(0.0, 0.15))
        child.send_signal(signal.SIGKILL)
        said = [int(line.split()[1]) for line in child.stdout.read().splitlines()
                if line.startswith("saved ") and line[6:].isdigit()]
        child.wait()
        child.stdout.close()
        assert began >= last, "the next process began before what the last one had saved"
        history = History(run)
        last = max([began, *said])
        if not history.steps():
            continue
        saved = history.load()
        assert saved.step >= last
        assert saved.meta["step"] == saved.step
        for x in saved.tensors.values():
            assert (x.numpy() == saved.step).all(), "parts of two states"
        last = saved.step
    assert last > 0, "no save was ever finished"
    shutil.rmtree(run)
