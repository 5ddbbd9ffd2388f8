"""The function of tests/mesh/one_function.py, the same object, on its four paths: one process has
a GPU for it, two ranks have one each."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_harness import require_gpu
from mesh import one_function
from mesh.launch import mpirun, needs_mpi
from tessera.runtime.device import device_count

require_gpu()


@pytest.mark.row("CORE-09")
@pytest.mark.parametrize(("path", "args", "where"), [
    ("numpy", (), "cpu"), ("gpu", (), "cuda:0"), ("file", ("cpu",), "cpu"),
    ("file", ("cuda",), "cuda:0")])
def test_in_one_process(path: str, args: tuple[str, ...], where: str) -> None:
    assert one_function.run(path, *args) == f"{path} on {where}: equal to NumPy"


@needs_mpi
@pytest.mark.skipif(device_count() < 2, reason="needs two GPUs")
@pytest.mark.row("CORE-09")
def test_on_two_gpus(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    run = mpirun(2, "run", tmp_path, battery=Path(one_function.__file__), fresh=True,
                 TESSERA_DEVICE="cuda")
    assert run.status == 0, run.text
    assert set(run.results.values()) == {"ranks on 2 x cuda: equal to NumPy"}
