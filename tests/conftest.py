"""The seeds of a run: each test has its own, made from its name and the run's.

The run's seed is 0, so every run gives the same verdict. `--seed random` draws another, which is
printed at the top; `--seed N` replays it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import secrets
import signal
import sys
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

import tessera as ts
from tessera import config as tessera_config
from tessera.tile.cuda.compile_processes import SERIAL_MATHS

# No deadline: the first example compiles, and the machine may be shared. The examples follow from
# --seed, so no database of failures is kept: a failure is replayed by the seed it prints.
settings.register_profile(
    "tessera",
    deadline=None,
    database=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)

# Hypothesis draws numbers that stand in the modules which are imported: so what a seed gives would
# follow from every line of the package, and from the other files of a run. To read them took each
# process 5 s.
providers._get_local_constants = lambda: providers._local_constants


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", default="0", help="of the random inputs: a number, or 'random'")


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its seed
def pytest_configure(config: pytest.Config) -> None:
    given = getattr(config, "workerinput", {}).get("seed", config.option.seed)
    config.option.seed = _run_seed(str(given))
    # Hundreds of processes are started, up to 72 at once: they share the byte code.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # A shell ignores Ctrl-C for what it runs in the background, nohup that the terminal closes, and
    # programs inherit that.
    for ignored, default in ((signal.SIGINT, signal.default_int_handler),
                             (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(ignored) is signal.SIG_IGN:
            signal.signal(ignored, default)
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(config.option.seed)
    settings.load_profile("tessera")
    # A BLAS that runs its own threads spins while it waits for them: beside other test processes
    # that took half of the time of some files. It reads these when a worker imports NumPy.
    if config.getoption("numprocesses", None):
        for name, value in SERIAL_MATHS.items():
            os.environ.setdefault(name, value)
    # Memory that nothing should read is NaN in every graph that a test compiles.
    os.environ.setdefault("TESSERA_POISON", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Workers of xdist read `--seed random` themselves: they are told what it has become."""
    node.workerinput["seed"] = str(node.config.option.seed)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """20,000 tests are a heap that the garbage collector would go through again and again: it looks
    at what is made from here on."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)
        gc.enable()


# Files that take 30 to 100 s of a core (2026-11-27), begun first: a process that gets one at the
# end is the only one at work. Workers are given files in the order in which they are collected.
LONGEST_FILES = ("mesh/test_sharded_ops.py", "golden/test_decode_compiled.py",
                 "mesh/test_train.py", "golden/test_fft_compiled.py",
                 "golden/test_library_compiled.py", "golden/test_hopper_kernels.py",
                 "cpu/test_train.py", "mesh/test_resume.py", "cpu/test_docs.py",
                 "mesh/test_tcp.py", "cpu/test_fft_kernels.py",
                 "cpu/test_loops.py", "mesh/test_checkpoints.py",
                 "golden/test_scored_attention_compiled.py", "golden/test_ptx_instructions.py",
                 "cpu/test_sentinels_device.py", "golden/test_mma_kernels.py",
                 "cpu/test_cuda_coverage.py", "cpu/test_steady_steps.py",
                 "conformance/test_system_rows.py", "mesh/test_mpi.py", "mesh/test_gpu_training.py",
                 "mesh/test_pipeline.py", "golden/test_graph_kernels.py",
                 "cpu/test_compiled_is_eager.py", "golden/test_tile_kernels.py",
                 "cpu/test_bench.py", "mesh/test_train_flags.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        rank = {file: i for i, file in enumerate(LONGEST_FILES)}
        items.sort(key=lambda item: rank.get("/".join(item.path.parts[-2:]), len(rank)))


def _run_seed(text: str) -> int:
    if text == "random":
        return secrets.randbelow(2**31)
    if not text.isdecimal():
        raise pytest.UsageError(f"--seed takes a whole number or 'random', got {text!r}")
    return int(text)


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.seed} (replay: --seed {config.option.seed})"


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Again at the end when something failed: `pytest -q` prints no header."""
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(pytest_report_header(config))


def seed_words(request: pytest.FixtureRequest) -> tuple[int, int]:
    """The run's seed, and this test's name as a number: the same alone and among others."""
    return int(request.config.option.seed), zlib.crc32(request.node.nodeid.encode())


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator of this test's seed."""
    run, name = seed_words(request)
    print(f"rng of this test: rerun with --seed {run}")  # pytest shows it when the test fails
    return np.random.default_rng([run, name])


@pytest.fixture(autouse=True, scope="module")
def young_heap() -> None:
    """What files before keep, in the end more than a million objects, is not gone through again at
    each collection, which would take more than a second. Of what they freed glibc keeps the pages:
    a long transform in the interpreter left 7 GB with a worker to its end."""
    gc.collect()
    gc.freeze()
    if _resident_bytes() > 1 << 30 and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def _resident_bytes() -> int:
    """Of this process, where Linux says it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True, scope="module")
def own_flags() -> None:
    """Bad values that files before have counted, and nobody read, are not found by this one."""
    ts.debug.flags()


@pytest.fixture(autouse=True)
def random_state(request: pytest.FixtureRequest) -> None:
    """What draws without a generator does not depend on the tests that ran before."""
    run, name = seed_words(request)
    random.seed(run << 32 | name)
    np.random.seed([run, name])
    ts.random.seed(run << 32 | name)


@pytest.fixture
def fresh_config(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Settings as in a new process without TESSERA_* variables; returns a monkeypatch for them."""
    for setting in tessera_config.SETTINGS.values():
        monkeypatch.delenv(setting.env, raising=False)
    tessera_config.reset()
    yield monkeypatch
    tessera_config.reset()


@pytest.fixture
def no_findings(fresh_config: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test's sentinels find is its own: nothing was counted before, and nothing is left."""
    ts.debug.flags()
    yield
    ts.debug.flags()


@pytest.fixture
def own_cache(tmp_path: Path) -> Iterator[None]:
    """Everything is compiled: no machine code of another test or run is found."""
    with tessera_config.scope(cache_dir=tmp_path):
        yield


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, whatever this one has."""
    from tessera.errors import UnsupportedTargetError
    from tessera.runtime import device

    def driver() -> Any:
        raise UnsupportedTargetError("no GPU driver of CUDA 12 or later here: hidden by a test",
                                     hint="python -m tessera doctor")

    monkeypatch.setattr(device, "driver", driver)
    monkeypatch.setattr(device, "_devices", {})
