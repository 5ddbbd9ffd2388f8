"""What tests on a GPU share: a lost context ends the worker, figures are written down."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


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
