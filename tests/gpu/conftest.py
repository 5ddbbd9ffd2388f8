"""What tests on a GPU share: a lost context ends the worker, memory is given back, what is timed
runs alone on the card, figures are written down."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from failed_names import pytest_runtest_logreport  # noqa: F401 - a hook

# Several workers share a GPU: JAX would take three quarters of its memory at the first array.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
MOST_KEPT = 2 << 30  # bytes that a worker's pools may keep between tests


@contextmanager
def _locked(name: str, how: int) -> Iterator[None]:
    with open(Path(tempfile.gettempdir()) / f"tessera-tests-{os.getuid()}-{name}", "w") as file:
        fcntl.flock(file, how)
        yield


@pytest.fixture(autouse=True)
def share_of_the_card(request):
    """Workers share the card; a test marked `alone`, which takes times, waits for the others, and
    those that come behind it wait at the gate."""
    alone = request.node.get_closest_marker("alone")
    gate = _locked("gate", fcntl.LOCK_EX)
    with gate:
        card = _locked("card", fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        card.__enter__()
    try:
        yield
    finally:
        card.__exit__(None, None, None)


@pytest.fixture(autouse=True)
def memory_is_given_back():
    """What a test with large arrays has freed is for the other workers too."""
    yield
    from tessera.runtime.device import device, has_gpu
    from tessera.runtime.memory_pools import holders, trim

    if has_gpu():
        with device().current():
            held = holders(device())
        if sum(held.get(who, 0) for who in ("tessera's pool", "CuPy", "torch")) > MOST_KEPT:
            trim(device())


@pytest.fixture(autouse=True)
def context_survives():
    """After a fault that loses the context a worker of pytest-xdist ends; a new one goes on."""
    from tessera.runtime import libcuda
    from tessera.runtime.device import driver, error_name, has_gpu

    if not has_gpu():
        pytest.skip("no GPU on this machine")
    yield
    status = driver().cuCtxSynchronize()[0]
    if status in (libcuda.INVALID_CONTEXT, libcuda.NOT_INITIALIZED):
        return  # nothing ran on the GPU yet
    if status != 0 and "PYTEST_XDIST_WORKER" in os.environ:
        print(f"the context is lost: {error_name(driver(), status)}", flush=True)
        os._exit(1)
    assert status == libcuda.SUCCESS


@pytest.fixture
def note(request):
    """note(name=figure, ...): printed, and appended to $OUT/runtime_smoke.jsonl."""
    def write(**figures):
        print(request.node.name, figures)
        if folder := os.environ.get("OUT"):
            with open(Path(folder) / "runtime_smoke.jsonl", "a") as file:
                file.write(json.dumps({"test": request.node.name, **figures}) + "\n")
    return write


def pytest_terminal_summary(terminalreporter):
    """Of the walk over the registry: how many of each mode's samples and ops ran and agreed."""
    for mode in ("forward", "vjp", "jvp", "vmap"):
        kinds = {kind: [r.nodeid.partition(f"[{mode}-")[2][:-1]
                        for r in terminalreporter.stats.get(kind, ())
                        if f"test_registry_walk.py::test_an_op_computes_what_it_means[{mode}-"
                        in r.nodeid] for kind in ("passed", "failed", "skipped", "error")}
        every = [n for found in kinds.values() for n in found]
        wrong = {n.rpartition("-")[0] for k, found in kinds.items() if k != "passed" for n in found}
        ops = {n.rpartition("-")[0] for n in every}
        if every:
            terminalreporter.write_line(
                f"{mode}: {len(kinds['passed'])} of {len(every)} samples, {len(ops - wrong)} of "
                f"{len(ops)} ops{'; without ' if wrong else ''}{', '.join(sorted(wrong))}")
