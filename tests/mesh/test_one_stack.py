"""One file with a kernel, a jitted loss, its gradient, vmap and all_reduce, on every transport."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart
from mesh import one_stack
from mesh.launch import mpirun, needs_mpi

FILE = Path(one_stack.__file__)


@pytest.mark.row("CORE-08")
def test_alone() -> None:
    run = subprocess.run([sys.executable, str(FILE)], capture_output=True, text=True)
    assert run.stdout == "1 ranks, on cpu: results on cpu, equal to NumPy\n", run.stderr


@pytest.mark.row("CORE-08")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_on_simulated_ranks(ranks: int) -> None:
    assert ts.dist.simulate(one_stack.run, ranks) == [
        f"{ranks} ranks, on cpu: results on cpu, equal to NumPy"] * ranks


@needs_mpi
@pytest.mark.row("CORE-08")
def test_under_mpirun(tmp_path: Path) -> None:
    run = mpirun(2, "run", tmp_path, battery=FILE)
    assert run.status == 0, run.text
    assert set(run.results.values()) == {"2 ranks, on cpu: results on cpu, equal to NumPy"}


@pytest.mark.usefixtures("gpu", "apart")
def test_where_tensors_lie_on_a_gpu() -> None:
    """The same file, its kernels lowered for a GPU and run there by the interpreter."""
    with ts.config.scope(device="cuda"):
        assert one_stack.run() == "1 ranks, on cuda:0: results on cuda:0, equal to NumPy"


@pytest.mark.usefixtures("gpu", "apart")
@pytest.mark.parametrize("dtype", ["f32", "bf16 @accum(f32)", "fp8_e4m3", "int32"])
def test_collectives_of_tensors_on_a_gpu(dtype: str, rng: np.random.Generator) -> None:
    """They give the bits of the same on the host, and lie where their operands do."""
    parts = [ts.tensor(rng.integers(-4, 5, (3, 4)).astype(np.float32), dtype) for _ in range(2)]

    def program(on: str) -> list[ts.Tensor]:
        x = parts[ts.dist.rank()].to(on)
        with ts.dist.mesh(axes=("dp",), shape=(2,)):
            return [ts.dist.all_reduce(x, "dp"), ts.dist.all_gather(x, "dp", dim=0),
                    ts.dist.reduce_scatter(x, "dp", dim=1, dtype="f32"),
                    ts.dist.permute(x, "dp", pairs=[(0, 1)])]

    for here, there in zip(*(ts.dist.simulate(program, 2, on) for on in ("cpu", "cuda")),
                           strict=True):
        for want, got in zip(here, there, strict=True):
            assert got.device == "cuda:0" and got.type == want.type
            assert got.buffer.tobytes() == want.buffer.tobytes()
