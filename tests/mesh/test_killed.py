"""A rank that is killed can say nothing: the watcher of its machine says which, once, and leaves
nothing behind."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from mesh.launch import ALLOW, BATTERY, MPIRUN, ROOT, Run, mpirun, needs_mpi
from mesh.processes import processes_of_run
from tessera.mesh.ranks import status_page, watcher
from tessera.mesh.ranks.watcher import COMPUTES, LEFT, SAID, WAITS, Rank

CALL = "all_reduce(f32[4], op=sum) over all ranks at "
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are watched on Linux")


def told(run: Run) -> list[str]:
    """The first line and those below it, once."""
    print(f"all stopped after {run.seconds:.1f} s with status {run.status}")
    assert run.status != 0 and run.seconds < 60, run.text
    assert run.text.count("tessera: ") == run.text.count("was killed") == 1, run.text
    lines = run.text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("tessera: "))
    return lines[first:first + 4]


# --- what is said -----------------------------------------------------------------------------
@needs_mpi
def test_a_rank_that_is_killed_in_a_collective(tmp_path: Path) -> None:
    first, *others, hint = told(mpirun(3, "killed_as_it_waits", tmp_path, fresh=True))
    assert first.startswith("tessera: rank 1 of 3 (pid ") and f" in {CALL}" in first, first
    assert "battery.py:" in first and "ts.dist.all_reduce(ts.ones((4,)))" in first
    assert len(others) == 2 and f"  rank 0: in {CALL}" in others[0], others
    assert f"  rank 2: after {CALL}" in others[1], others
    assert hint.startswith("  hint: ") and "out of memory" in hint and "are whole" in hint


@needs_mpi
def test_a_child_of_the_rank_that_lives_on_hides_nothing(tmp_path: Path) -> None:
    run = mpirun(3, "killed_with_a_child", tmp_path, fresh=True, TESSERA_COMM_TIMEOUT="20")
    assert f"after {CALL}" in told(run)[0], run.text


@needs_mpi
def test_the_terminal_learns_it_where_ranks_write_to_files(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    run = mpirun(3, "killed", tmp_path, fresh=True, TESSERA_RANK_LOGS=str(logs))
    assert told(run)[0] in (logs / "rank-0.log").read_text()


@needs_mpi
def test_nothing_is_said_when_mpirun_is_asked_to_stop(tmp_path: Path) -> None:
    """It passes the signal on to all ranks: none of them is the cause."""
    mark = uuid.uuid4().hex
    env = {**os.environ, **ALLOW, "PYTHONPATH": str(ROOT), "RUN_OF_TEST": mark}
    command = [str(MPIRUN), "-n", "3", sys.executable, str(BATTERY), "stay", str(tmp_path)]
    with subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT) as process:
        wait_for(lambda: any("watcher.py" in p for p in processes_of_run(mark)))
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        text = process.communicate(timeout=100)[0]
    assert process.returncode != 0 and "killed" not in text, text
    wait_for(lambda: not processes_of_run(mark))


@needs_mpi
def test_ranks_run_where_they_cannot_be_watched(tmp_path: Path) -> None:
    run = mpirun(2, "unwatched", tmp_path, fresh=True)
    assert run.status == 0 and set(run.results.values()) == {"done"}, run.text
    assert "when a rank is killed nothing will say which: [Errno 2]" in run.text


# --- what is left -----------------------------------------------------------------------------
def wait_for(condition, limit_s: float = 20) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@needs_mpi
@pytest.mark.parametrize("program", ["watchers", "fail", "killed"])
def test_nothing_is_left_behind(program: str, tmp_path: Path) -> None:
    mark, temporary, results = uuid.uuid4().hex, tmp_path / "t", tmp_path / "results"
    for folder in (temporary, results):
        folder.mkdir()
    run = mpirun(3, program, results, fresh=True, RUN_OF_TEST=mark, TMPDIR=str(temporary))
    assert (run.status == 0) == (program == "watchers"), run.text
    assert set(run.results.values()) == ({"1"} if program == "watchers" else set()), run.text
    begin = time.monotonic()
    wait_for(lambda: not processes_of_run(mark))
    print(f"{program}: the last process ended {time.monotonic() - begin:.2f} s after mpirun")
    assert not [f for f in temporary.rglob("*") if "tessera" in f.name]


# --- who is the cause -------------------------------------------------------------------------
def rank(number: int, state: int = WAITS, call: str = "", what: str = "", pid: int = 0,
         size: int = 4) -> Rank:
    page = mmap.mmap(-1, watcher.PAGE_BYTES)
    page[watcher.STATE] = state
    for start, text in ((watcher.CALL, call), (watcher.WHAT, what)):
        page[start:start + len(text)] = text.encode()
    return Rank(number, size, pid, page, None)  # type: ignore[arg-type]


@pytest.fixture
def ended():
    """Processes that a signal has ended and nobody has waited for, and one that lives."""
    made = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    made[0].send_signal(signal.SIGTERM)
    made[1].kill()
    for process in made[:2]:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield [process.pid for process in made]
    for process in made:
        process.kill()
        process.wait()


def test_a_rank_is_the_cause_when_the_others_were_not_sent_the_same(ended: list[int]) -> None:
    by_term, by_kill, alive = ended
    gone = rank(0, pid=by_term, size=2)
    assert gone.wait_status() == signal.SIGTERM and rank(0, pid=alive).wait_status() == 0
    assert not watcher.is_the_cause(gone, [rank(1, pid=by_term)], signal.SIGTERM)
    assert not watcher.is_the_cause(gone, [rank(1, pid=by_term)], None)
    assert watcher.is_the_cause(gone, [rank(1, pid=alive)], signal.SIGTERM)
    # mpirun kills the others faster than we look; this process got to know of this one first.
    assert watcher.is_the_cause(gone, [rank(1, pid=by_kill)], signal.SIGKILL)


def test_of_several_machines_the_one_speaks_on_which_ranks_live(ended: list[int]) -> None:
    _, by_kill, alive = ended
    gone = rank(0, pid=by_kill, size=4)
    assert not watcher.is_the_cause(gone, [rank(1, pid=by_kill)], signal.SIGKILL)
    assert not watcher.is_the_cause(gone, [], signal.SIGKILL)
    assert watcher.is_the_cause(gone, [rank(1, pid=by_kill), rank(3, pid=alive)], signal.SIGKILL)


def test_ranks_are_listed_by_where_they_are() -> None:
    at = [rank(n, WAITS, "step() at a.py:3", "step() at a.py:3") for n in (5, 1, 2, 3)]
    more = [rank(4, LEFT, "x", "x"), rank(7, COMPUTES), rank(8, WAITS, "f() at a.py:4", "B0")]
    text = watcher.describe(rank(6, COMPUTES, "step() at a.py:3", "x", 99, 9), [*at, *more], 9)
    assert text.splitlines() == [
        f"tessera: rank 6 of 9 (pid 99 on {os.uname().nodename}) was killed by signal 9 (Killed) "
        "after step() at a.py:3",
        "  ranks 1-3, 5: in step() at a.py:3",
        "  rank 7: before its first collective",
        "  rank 8: in B0, after f() at a.py:4",
        "  hint: most often the machine was out of memory (dmesg tells), else a scheduler or a "
        "user did it; checkpoints that were complete are whole"]
    many = [rank(n, WAITS, f"f{n}", f"f{n}") for n in range(9)]
    assert "  and 3 more places\n" in watcher.describe(rank(9), many, 9)


def test_ranks_that_wait_on_their_gpu_are_not_late() -> None:
    found = [rank(0), rank(1, COMPUTES), rank(2, COMPUTES), rank(3, SAID), rank(4, LEFT)]
    text = b"all_reduce over 'dp'"
    found[1].page[watcher.GPU:watcher.GPU + len(text)] = text
    assert watcher._late(found) == "0 2 4"
    assert found[1].place() == "on its GPU in all_reduce over 'dp'"


@pytest.mark.parametrize("status, words", [
    (signal.SIGSEGV, ["was killed by signal 11 (Segmentation fault)", "native code"]),
    (4 << 8, ["has left Python with status 4, by no exception and no sys.exit"]),
    (None, ["was killed, or has left by os._exit", "out of memory"])])
def test_how_it_ended_is_said_as_far_as_it_is_known(status: int | None, words: list[str]) -> None:
    text = watcher.describe(rank(0), [], status)
    assert all(w in text for w in [*words, "checkpoints that were complete are whole"]), text


def test_what_a_rank_writes_is_what_the_watcher_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = rank(0, COMPUTES)
    monkeypatch.setattr(status_page, "_page", seen.page)
    status_page.note("long " * 200)
    status_page.enter("f\u00fcr")
    assert seen.text(watcher.CALL) == ("long " * 200)[:watcher.TEXT_BYTES - 1]
    assert (seen.text(watcher.WHAT), seen.state) == ("f\u00fcr", WAITS)
    status_page.note("short")
    status_page.resume()
    assert (seen.text(watcher.CALL), seen.state) == ("short", COMPUTES)
    status_page.stop_all()
    status_page._leave()
    assert seen.state == SAID, "an exit does not make it a good end"
