"""One decorated function, its four paths: eager on NumPy, on a GPU, under mpirun, exported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart
from mesh import one_function
from mesh.launch import mpirun, needs_mpi

FILE = Path(one_function.__file__)


@pytest.mark.row("CORE-09")
def test_on_the_host_and_as_a_file() -> None:
    run = subprocess.run([sys.executable, str(FILE)], capture_output=True, text=True)
    assert run.stdout == "numpy on cpu: equal to NumPy\nfile on cpu: equal to NumPy\n", run.stderr


@pytest.mark.usefixtures("gpu", "apart")
@pytest.mark.parametrize(("path", "args"), [("gpu", ()), ("file", ("cuda",))])
def test_on_a_gpu_that_the_interpreter_plays(path: str, args: tuple[str, ...]) -> None:
    assert one_function.run(path, *args) == f"{path} on cuda:0: equal to NumPy"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_on_simulated_ranks(ranks: int) -> None:
    assert ts.dist.simulate(one_function.run, ranks, "ranks") == [
        f"ranks on {ranks} x cpu: equal to NumPy"] * ranks


@needs_mpi
@pytest.mark.row("CORE-09")
def test_under_mpirun(tmp_path: Path) -> None:
    run = mpirun(2, "run", tmp_path, battery=FILE)
    assert run.status == 0, run.text
    assert set(run.results.values()) == {"ranks on 2 x cpu: equal to NumPy"}


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_function, "predict", ts.jit(lambda params, x: ts.softmax(
        x @ params["w"] @ params["head"])))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        one_function.run("numpy")
