"""Threads, determinism, launch cost and the disk cache of compiled CPU loops."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from counting import python_calls
from tessera import config
from tessera.graph.cpu import (
    LoopInput,
    LoopOp,
    LoopOutput,
    LoopProgram,
    compile_loops,
    disk,
    interpret,
    pool,
    shared_launch,
)
from tessera.graph.cpu import kernel as kernels
from tessera.graph.cpu.machine_code import obtain
from tessera.graph.cpu.shared_launch import sharing
from tessera.runtime.cache import CacheWarning

ADD = LoopProgram(
    (LoopInput("f32"),) * 2, (LoopOp("map", (0, 1), "f32", "{0} + {1}"),), (LoopOutput(2, "f32"),)
)
NORMALISE = LoopProgram(
    (LoopInput("f32"),),
    (LoopOp("reduce_max", (0,), "f32"), LoopOp("map", (0, 1), "f32", "exp({0} - {1})"),
     LoopOp("reduce_sum", (2,), "f32"), LoopOp("map", (2, 3), "f32", "{0} / {1}")),
    (LoopOutput(4, "f32"), LoopOutput(4, "f32", "column_sum"), LoopOutput(3, "f32", "row")),
)


@pytest.mark.parametrize("shape", [(3000, 257), (40, 5000), (7, 100003)])
def test_results_do_not_depend_on_the_number_of_threads(shape, rng: np.random.Generator) -> None:
    x = rng.normal(size=shape).astype(np.float32)
    results = []
    for threads in (1, 2, 3):
        with config.scope(num_threads=threads):
            results += [compile_loops(NORMALISE)(x) for _ in range(5)]
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
    want = interpret(NORMALISE, [x])
    np.testing.assert_allclose(results[0][0], want[0], rtol=2e-5)
    np.testing.assert_allclose(results[0][1], want[1], rtol=2e-5)


def test_a_worker_that_does_not_come_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Told of a launch, it wakes when that is over: what it was told is gone."""
    x = rng.normal(size=(4000, 512)).astype(np.float32)
    want = compile_loops(NORMALISE)(x)
    late: list = []
    monkeypatch.setattr(pool, "POOL", pool.Pool())
    (worker,) = pool.POOL.helpers(1)
    monkeypatch.setattr(worker, "_tell", late.append)
    with config.scope(num_threads=2):
        got = compile_loops(NORMALISE)(x)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    (serve,) = late
    got[0][:] = 7
    assert worker.words[pool.STATE] == pool.IDLE
    serve()
    assert worker.words[pool.STATE] == pool.ASLEEP
    assert (got[0] == 7).all()


def test_a_worker_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here each of two units waits for the other's thread, so that both have to come, one from
    either end. The worker looks for launches as long as it takes: one that goes to sleep between
    being told and the launch leaves that to the launching thread alone, as it should."""
    monkeypatch.setattr(pool, "POOL", pool.Pool())
    meet = obtain(kernels.unit_source("    units = word(layout, 0)\n", """\
        claim(call, 3)
        looks = 0
        while look_again(call, 3) < 2 and looks < 10000000000:
            looks += 1
        if looks == 10000000000:
            claim(call, 4)
"""))
    words = np.array([2], np.int64)
    share = sharing(meet, words, 2)
    monkeypatch.setattr(shared_launch, "LOOKING_NS", 60_000_000_000)
    monkeypatch.setattr(pool.Worker, "serve", pool.Worker.serve)  # put back behind the test
    shared_launch._compiled.__wrapped__()
    (worker,), gone = pool.POOL.helpers(1), threading.Event()
    try:
        for _ in range(50):
            call = bytes(5 * 8)
            share(call)
            # each took one, and asked for another
            assert np.frombuffer(call, np.int64).tolist() == [2 + (2 << 32), 2, 1, 2, 0]
    finally:
        worker.put(gone.set)
        assert gone.wait(10)


def test_a_job_of_python_recalls_a_worker_that_looks_at_its_mailbox() -> None:
    (worker,) = pool.Pool().helpers(1)
    seen = threading.Event()
    for _ in range(20):
        worker.wake()
        worker.put(seen.set)
        assert seen.wait(10)
        seen.clear()


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for cores")
def test_a_worker_keeps_off_the_core_of_the_thread_that_tells_it(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = os.sched_getaffinity(0)
    (worker,) = pool.Pool().helpers(1)

    def told_on(core: int) -> set[int]:
        """The cores of a worker that is told of work by a thread that is on this one."""
        monkeypatch.setattr(pool, "_core", lambda: core)
        done = threading.Event()
        worker.put(done.set)
        assert done.wait(10) and worker.thread is not None
        return os.sched_getaffinity(worker.thread.native_id)

    for core in sorted(cores)[:2]:
        assert told_on(core) == (cores - {core} or cores)
    alone, seen = max(cores), []

    def pinned() -> None:
        """It may be on one core only: the worker shares that."""
        os.sched_setaffinity(0, {alone})
        seen.append((pool._find_core()(), told_on(-2), told_on(alone)))

    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join(10)
    assert seen == [(alone, {alone}, {alone})]


def test_launches_from_many_python_threads(rng: np.random.Generator) -> None:
    x = rng.normal(size=(2000, 300)).astype(np.float32)
    want = compile_loops(NORMALISE)(x)
    wrong = []

    def work() -> None:
        for _ in range(20):
            got = compile_loops(NORMALISE)(x)
            if any((a != b).any() for a, b in zip(got, want, strict=True)):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not wrong and not any(t.is_alive() for t in threads)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_starts_its_own_workers() -> None:
    text = (
        "import os, numpy as np, warnings; from tessera.graph.cpu import *\n"
        "from tessera import config; config.set(num_threads=2)\n"
        "p = LoopProgram((LoopInput('f32'),), (LoopOp('map', (0,), 'f32', 'exp({0})'),),"
        " (LoopOutput(1, 'f32'),))\n"
        "x = np.ones(1 << 20, np.float32); k = compile_loops(p); k(x)\n"
        "pid = os.fork()\n"
        "y = k(x)[0]\n"
        "if pid == 0: os._exit(0 if np.allclose(y, np.e) else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    got = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text], capture_output=True, text=True, timeout=180
    )
    assert got.stdout.strip() == "0", got.stderr


def test_a_launch_runs_little_python(rng: np.random.Generator) -> None:
    a, b = rng.random((2, 64)).astype(np.float32)
    out = np.empty(64, np.float32)
    launch = compile_loops(ADD).bind((64,), [(1,), (1,)], [(1,)])
    calls = python_calls(lambda: launch((a, b), (out,)))
    print(f"launch of a 3-array kernel: {calls} calls of Python")
    np.testing.assert_array_equal(out, a + b)
    assert calls <= 5


def test_data_addresses_are_read_from_the_array_object() -> None:
    """The ABI fact `data` relies on: the data pointer follows the object header."""
    import ctypes

    x = np.arange(10.0)[3:]
    word = ctypes.c_void_p.from_address(id(x) + object.__basicsize__).value
    assert word == x.ctypes.data


# ---- disk cache -------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path):
    with config.scope(cache_dir=tmp_path / "cache"):
        yield tmp_path / "cache"


def fresh() -> kernels.LoopKernel:
    """A kernel with nothing in memory."""
    return kernels.LoopKernel(ADD)


def entries(cache: Path) -> list[Path]:
    return list((cache / "loops").iterdir())


def test_second_process_loads_from_disk_without_numba(cache: Path) -> None:
    text = (
        "import sys, time, numpy as np; from tessera.graph.cpu import *\n"
        "p = LoopProgram((LoopInput('f32'),), (LoopOp('map', (0,), 'f32', 'exp({0}) + 3.0'),),"
        " (LoopOutput(1, 'f32'),))\n"
        "k = compile_loops(p); t = time.perf_counter(); y = k(np.zeros(3, np.float32))[0]\n"
        "print('numba' in sys.modules, y[0], round(1e3 * (time.perf_counter() - t), 1))\n"
    )
    environment = dict(os.environ, TESSERA_CACHE_DIR=str(cache))
    lines = [
        subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True,
                       env=environment).stdout.split()
        for _ in range(2)
    ]
    print("first and second process, ms:", lines[0][2], lines[1][2])
    assert lines[0][:2] == ["True", "4.0"] and lines[1][:2] == ["False", "4.0"]


def test_folder_and_entries_are_private(cache: Path) -> None:
    fresh()(np.ones(3, np.float32), np.ones(3, np.float32))
    assert (cache / "loops").stat().st_mode & 0o777 == 0o700
    (entry,) = entries(cache)
    assert entry.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "magic"])
def test_a_damaged_entry_is_compiled_again(cache: Path, damage: str) -> None:
    ones = np.ones(5, np.float32)
    fresh()(ones, ones)
    (entry,) = entries(cache)
    sound = entry.read_bytes()
    bad = {"flip": sound[:-9] + bytes([sound[-9] ^ 1]) + sound[-8:], "cut": sound[:200],
           "empty": b"", "magic": b"x" + sound[1:]}[damage]
    entry.write_bytes(bad)
    assert disk.LOOPS.read(entry.name) is None and not entry.exists()
    entry.write_bytes(bad)
    np.testing.assert_array_equal(fresh()(ones, ones)[0], ones + ones)
    assert disk.LOOPS.read(entry.name) is not None


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o722])
def test_a_folder_others_can_write_is_not_used(cache: Path, mode: int) -> None:
    ones = np.ones(3, np.float32)
    disk.folder().chmod(mode)
    with pytest.warns(CacheWarning, match="writable by others"):
        np.testing.assert_array_equal(fresh()(ones, ones)[0], ones + ones)
    assert entries(cache) == []


def test_the_entry_name_depends_on_the_source_and_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    name = disk.entry_name("a")
    assert name != disk.entry_name("b")
    monkeypatch.setattr(disk, "environment", lambda: "another cpu")
    assert name != disk.entry_name("a")
