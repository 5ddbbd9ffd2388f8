"""Loops compiled in a process beside this one, as ranks do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import tessera as ts
from tessera.graph.cpu import compile_apart, machine_code
from tolerance import assert_close

SOURCE = "def loops(layout, call, scratch):\n    pass\n"
PROGRAM = f"""\
import sys
from tessera.graph.cpu import compile_apart, machine_code
machine_code.obtain({SOURCE!r})
running = compile_apart._running
print("llvmlite" in sys.modules, running and running.process.pid)
"""


@pytest.fixture(autouse=True)
def ended():
    yield
    compile_apart.close()


@pytest.mark.parametrize("told, loads", [
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "False"),
    ({}, "True")])
def test_a_rank_with_others_on_its_machine_loads_no_compiler(told, loads, tmp_path):
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True,
                         env={**os.environ, **told, "TESSERA_CACHE_DIR": str(tmp_path)})
    loaded, process = run.stdout.split()
    assert loaded == loads and (process == "None") == (loads == "True"), run.stderr
    if process != "None":
        with pytest.raises(ProcessLookupError):  # it ended with the program
            os.kill(int(process), 0)


def test_one_process_compiles_what_comes_and_its_code_runs(monkeypatch, rng, own_cache):
    monkeypatch.setattr(machine_code, "launched_here", lambda: 4)
    x = rng.standard_normal((64, 65)).astype("f")
    processes = set()
    for k in (2.0, 3.0):
        scale = rng.uniform(1, 2)
        got = ts.jit(lambda x, k=k, scale=scale: ts.sum(ts.exp(x * scale) + k, axis=1))(x)
        assert_close(got, np.sum(np.exp(x.astype("d") * scale) + k, 1), "f32", n=65)
        processes.add(compile_apart._running.process.pid)
    (process,) = processes
    assert os.getsid(process) == process  # Ctrl-C is not for it


def test_what_it_refuses_is_an_error_and_it_goes_on():
    with pytest.raises(ts.CompileError, match="'no_such' is|no_such"):
        compile_apart.compile_apart(SOURCE.replace("pass", "no_such(1)"), "wrong")
    assert compile_apart.compile_apart(SOURCE, "nothing")[1].startswith(b"\x7fELF")


def test_one_that_is_killed_is_an_error_and_the_next_call_starts_another():
    compile_apart.compile_apart(SOURCE, "nothing")
    os.kill(compile_apart._running.process.pid, signal.SIGKILL)
    with pytest.raises(ts.CompileError, match="ended with status -9"):
        compile_apart.compile_apart(SOURCE, "nothing")
    assert compile_apart.compile_apart(SOURCE, "nothing")[1].startswith(b"\x7fELF")


def test_it_ends_when_nothing_came_for_a_while(monkeypatch):
    monkeypatch.setattr(compile_apart, "IDLE_S", 0.05)
    compile_apart.compile_apart(SOURCE, "nothing")
    running = compile_apart._running
    running.idle.join(10)
    assert compile_apart._running is None and running.process.returncode == 0
