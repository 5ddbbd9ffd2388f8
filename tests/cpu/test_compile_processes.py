"""Kernels compiled in processes beside the program: the same code, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from models.training import model, step_of, tensors
from tessera import CompileError, Tensor, config, f32
from tessera.graph import pause_collection
from tessera.graph.cuda.kernels import generate_kernels
from tessera.graph.cuda.levels import program_of, request_of
from tessera.graph.cuda.program import compile_program
from tessera.graph.pause_collection import collection_paused
from tessera.tile.cuda import compile_processes
from tessera.tile.launch import compile_images as module
from tessera.tile.launch import machine_code
from tessera.tile.launch.compile_images import WantedImage, compile_images
from tessera.tile.launch.compile_progress import CompileProgress

# Without `if __name__ == "__main__"`: what compiles does not run this.
SCRIPT = """\
import hashlib, os, sys
import tessera as ts
from tessera import Tensor, f32
from tessera.graph.pause_collection import collection_paused
from tessera.graph.cuda.levels import program_of, request_of
from tessera.tile.cuda import compile_processes
from tessera.tile.launch.compile_images import WantedImage, compile_images
print("once")
graph = ts.jit(lambda x, y: (ts.exp(x) * y, ts.sum(x, axis=0), x.T)).graph(
    Tensor[64, 96, f32], Tensor[64, 96, f32])
program, loaded = program_of(graph), {}
wanted = [WantedImage(l.kernel.function(), request_of(l, program.target), loaded)
          for l in program.launches]
made = compile_images(wanted)
code = sorted(i.ptx for i in loaded.values())  # machine code has times in it
pool = compile_processes._running
print(made, len(wanted), "numba" in sys.modules, pool and pool.pid, hashlib.sha256(
    "".join(code).encode()).hexdigest(), flush=True)
"""


def alive(group: int) -> bool:
    """Whether a process of a group runs; those that ended may stay listed."""
    states = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, of = stat.read_text().rpartition(")")[2].split()[:3]
            states += [state] * (int(of) == group)
    return any(state not in "ZX" for state in states)


def gone(group: int, within_s: float = 10.0) -> bool:
    end = time.monotonic() + within_s
    while alive(group) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(group)


def environment(cache: Path, processes: int) -> dict[str, str]:
    return {**os.environ, "TESSERA_CACHE_DIR": str(cache),
            "TESSERA_COMPILE_PROCESSES": str(processes), "TESSERA_COMPILE_PROGRESS": "0"}


def run(folder: Path, processes: int, text: str = SCRIPT) -> list[str]:
    script = folder / "script.py"
    script.write_text(text)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True,
                          timeout=120, env=environment(folder / "cache", processes))
    assert not done.returncode and not done.stderr, done.stderr
    first, line = done.stdout.splitlines()
    assert first == "once"
    return line.split()


def test_processes_make_the_same_code_and_the_next_program_finds_it(tmp_path):
    made, wanted, numba, pid, code = run(tmp_path, 2)
    assert made == wanted == "3" and numba == "False"
    assert gone(int(pid))
    assert run(tmp_path, 2) == ["0", "3", "False", "None", code]
    shutil.rmtree(tmp_path / "cache" / "images")
    assert run(tmp_path, 1) == ["3", "3", "True", "None", code]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_a_program_that_is_ended(tmp_path, how):
    text = "from tessera.tile.cuda import compile_processes as c, build\nimport time\n" \
        "c.start(); print(c._running.pid, c._running._folder, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", text], env=environment(tmp_path, 2), text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as program:
        assert program.stdout is not None
        group, folder = program.stdout.readline().split()
        assert alive(int(group)) and Path(folder).is_dir()
        program.send_signal(how)
        program.wait(10)
    assert gone(int(group)) and not Path(folder).exists()


def test_they_are_no_ranks_and_have_no_gpu(monkeypatch):
    ranks = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID", "RANK",
             "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    for name in ranks:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MY_SETTING", "kept")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    given = compile_processes.environment_of_compilers()
    assert given["MY_SETTING"] == "kept" and given["CUDA_VISIBLE_DEVICES"] == ""
    assert not given.keys() & {*ranks}
    assert not [n for n in given if n.startswith(("OMPI", "PMI", "MPI"))]


# --- in this process ------------------------------------------------------------------------------
@pytest.fixture(scope="module", autouse=True)
def ended():
    yield
    compile_processes.close()


@pytest.fixture
def pool(tmp_path):
    """Two processes, those of the test before if they live, and an empty cache."""
    with config.scope(cache_dir=tmp_path, compile_processes=2):
        with compile_processes.processes() as made:
            pass
        yield made


def wanted_of(*extents: int) -> list[WantedImage]:
    """A kernel for each."""
    found = []
    for n in extents:
        program = program_of(ts.jit(lambda x: ts.exp(x) * 2.0).graph(Tensor[n, f32]))
        (launch,) = program.launches
        found.append(WantedImage(launch.shared.function(), request_of(launch, program.target), {},
                                 launch.group.where))
    return found


def test_what_a_process_refuses_is_this_ones_error(pool, monkeypatch):
    """At the user's line, as if there were no processes; the next build is as good as any."""
    emit = machine_code.emit_request

    def broken(function, request):
        made = emit(function, request)
        if function is bad.function:
            text = made.emitted.source.replace("    return", "    nothing()\n    return")
            assert "def " in text
            return replace(made, emitted=replace(made.emitted, source=text + "    nothing()\n"))
        return made

    good, bad, other = wanted_of(100, 200, 300)
    monkeypatch.setattr(machine_code, "emit_request", broken)
    with pytest.raises(CompileError, match="nothing") as caught:
        compile_images([good, bad, other])
    assert caught.value.__cause__ is not None  # what Numba said
    where = caught.value.where
    assert where is not None and where.file == __file__ and "ts.exp(x) * 2.0" in where.text
    assert good.loaded and not bad.loaded and compile_processes._running is pool
    monkeypatch.undo()
    assert compile_images([good, bad, other]) == 1 and bad.loaded and other.loaded


def test_a_process_that_dies_costs_time_alone(pool):
    (done,) = wanted_of(100)
    assert compile_images([done]) == 1  # they are up now
    os.killpg(pool.pid, signal.SIGKILL)
    assert gone(pool.pid)
    wanted = wanted_of(200, 300)
    assert compile_images(wanted) == 2 and all(w.loaded for w in wanted)


def test_one_process_is_this_one(pool):
    """Also while others run."""
    with config.scope(compile_processes=1), compile_processes.processes() as made:
        assert made is None
    with compile_processes.processes(begin=False) as made:
        assert made is pool


def test_a_child_of_a_fork_has_none_of_them(pool):
    child = os.fork()
    if not child:
        os._exit(0 if compile_processes._running is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert compile_processes._running is pool


def test_they_end_when_nothing_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_processes, "IDLE_S", 0.05)
    compile_processes.close()
    with config.scope(cache_dir=tmp_path, compile_processes=2):
        compile_processes.start()
        assert compile_processes._running is not None
        pid = compile_processes._running.pid
        assert gone(pid) and compile_processes._running is None


def test_an_interrupted_build_ends_them(pool, monkeypatch):
    def interrupted(self, timeout_s):
        raise KeyboardInterrupt

    monkeypatch.setattr(module._Build, "_take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compile_images(wanted_of(100, 200))
    assert compile_processes._running is None and gone(pool.pid)
    monkeypatch.undo()
    assert compile_images(wanted := wanted_of(100, 200)) == 2 and all(w.loaded for w in wanted)


@pytest.mark.parametrize("processes", [1, 2])
def test_what_another_program_compiles_is_left_to_it(tmp_path, monkeypatch, processes):
    """Nothing is made twice, and nobody waits for it before its own work is done."""
    with config.scope(cache_dir=tmp_path, compile_processes=processes):
        _left_to_another(monkeypatch)


def _left_to_another(monkeypatch):
    theirs, ours = wanted_of(100, 200)
    name = theirs.request.key(theirs.function)
    order = []
    with machine_code.IMAGES.claimed(name) as mine:
        assert mine

        def wait(function, request, loaded):
            order.append((function is theirs.function, bool(ours.loaded)))

        monkeypatch.setattr(machine_code, "image_for", wait)
        compile_images([theirs, ours])
    assert order == [(True, True)]


# --- progress -------------------------------------------------------------------------------------
class Terminal:
    def __init__(self, terminal: bool):
        self.terminal, self.text = terminal, ""

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def told(monkeypatch, terminal: bool, seconds: list[float]) -> tuple[str, str]:
    """What is written when a kernel is done after each of these times, and when all is over."""
    monkeypatch.setattr(sys, "stderr", Terminal(terminal))
    with CompileProgress(4, 3) as progress:
        begun = progress._begun
        for s in seconds:
            progress._begun = begun - s
            progress.step(1)
        shown = sys.stderr.text
    return shown, sys.stderr.text[len(shown):]


def line(done: int, seconds: int) -> str:
    return f"tessera: compiling kernels in 4 processes: {done} of 3, {seconds} s"


def test_progress_is_one_line_of_a_terminal(monkeypatch):
    shown, after = told(monkeypatch, True, [1, 5, 6])
    assert shown == f"\r{line(2, 5)}\r{line(3, 6)}"
    assert after.startswith("\r") and not after.strip() and after.endswith("\r")
    assert told(monkeypatch, True, [1, 1.5]) == ("", "")


def test_progress_is_few_lines_of_a_log(monkeypatch):
    shown, after = told(monkeypatch, False, [1, 5, 6, 16])
    assert shown.splitlines() == [line(2, 5), line(4, 16)] and not after
    assert told(monkeypatch, False, [1, 1.5]) == ("", "")


def test_progress_may_be_off(monkeypatch):
    with config.scope(compile_progress=False):
        assert told(monkeypatch, True, [5]) == told(monkeypatch, False, [5]) == ("", "")


def test_ranks_but_the_first_tell_nothing(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setattr(sys, "stderr", Terminal(False))
    with CompileProgress(4, 3) as progress:
        progress._begun -= 5
        progress.step(3)
    assert not sys.stderr.text


# --- a program's first call -----------------------------------------------------------------------
def test_a_first_call_compiles_before_it_launches(gpu, driver, monkeypatch):
    """All kernels at once; the launches find them, and so does a program like it."""
    asked = []
    build = module.compile_images
    def counted(wanted):
        wanted = list(wanted)
        asked.append((len(wanted), build(wanted), len(driver.launches)))
        return asked[-1][1]

    monkeypatch.setattr(compile_program, "compile_images", counted)
    x = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)

    def f(x):
        return ts.sum(ts.exp(x), axis=0), ts.transpose(x)

    a = ts.tensor(x).to("cuda")
    first = ts.jit(f)
    for _ in range(2):
        got, _ = first(a)
        np.testing.assert_allclose(got.numpy(), np.exp(x).sum(0), rtol=1e-5)
    compiled = len(gpu.requests)
    assert asked == [(3, 3, 0)] and compiled == 3
    ts.jit(f)(a)
    assert len(asked) == 2 and asked[1][1] == 0 and len(gpu.requests) == compiled


@pytest.mark.parametrize("name", ["gpt", "autoencoder"])
def test_a_first_call_compiles_nothing_while_it_launches(gpu, monkeypatch, name):
    """Kernels of one form serve several extents, of which some are multiples of 16."""
    compiled, build = [], module.compile_images

    def counted(wanted):
        count = build(wanted)
        compiled.append((count, len(gpu.requests)))
        return count

    monkeypatch.setattr(compile_program, "compile_images", counted)
    m, rng = model(name), np.random.default_rng(1)
    p, batch = (ts.to(tensors(x), "cuda") for x in (m.parameters(rng), m.batch(rng)))
    step_of(m)(p, batch)
    assert compiled == [(len(gpu.requests), len(gpu.requests))]


def test_collection_goes_on_where_it_did():
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():  # of another function, or thread
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), collection_paused():
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_was_made_meanwhile_counts_as_old(monkeypatch):
    """Few are not worth it, and what the user has frozen stays so."""
    def made(count):
        with collection_paused():
            held = [[] for _ in range(count)]
        return held, any(x is held for x in gc.get_objects(generation=2))

    monkeypatch.setattr(pause_collection, "MUCH", 2000)
    gc.unfreeze()  # what conftest.py has frozen
    gc.collect(0)
    assert not made(10)[1] and made(4000)[1]
    gc.freeze()
    count = gc.get_freeze_count()
    assert not made(4000)[1] and gc.get_freeze_count() > count // 2


def name_of(launch, target) -> str:
    """Of its entry on the disk, when its arrays begin at whole accesses."""
    function = launch.shared.function()
    tensors = frozenset(p.value.name for p in function.params if p.role != "dim")
    return replace(request_of(launch, target), aligned=tensors).key(function)


def test_kernels_of_one_form_have_one_name_on_the_disk(monkeypatch):
    """In other programs, with other names and lines, and as often as a model has layers."""
    def names(f, *types) -> tuple[int, set[str]]:
        monkeypatch.setattr(generate_kernels, "_kernels", {})  # a new process
        program = program_of(ts.jit(f).graph(*types))
        return len(program.launches), {name_of(launch, program.target)
                                       for launch in program.launches}

    def layers(n: int):
        def f(x, w):
            for _ in range(n):
                x = ts.softmax(x @ w, axis=-1)
            return x
        return f

    def other(w, x):
        more = ts.cumsum(w, axis=0)
        return more, ts.softmax(x @ w, axis=-1)

    x, w = Tensor[64, 128, f32], Tensor[128, 128, f32]
    assert names(layers(2), x, w) == (4, both := names(layers(1), x, w)[1])
    assert len(both) == 2 and names(layers(5), x, w) == (10, both)
    assert both < names(other, w, x)[1]
