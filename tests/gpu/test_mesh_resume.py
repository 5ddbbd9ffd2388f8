"""The training example resumed on other meshes of GPUs, on the host, and from there on GPUs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_harness import mesh_ranks, require_gpu
from mesh import example
from mesh.launch import mpirun, needs_mpi
from tessera.runtime.device import device_count

require_gpu()
pytestmark = [needs_mpi, pytest.mark.skipif(device_count() < 2, reason="needs two GPUs")]
REHEARSAL = Path(example.__file__).with_name("rehearsal.py")
N, STEPS, SAVED_AT = mesh_ranks(), 10, 5
FLAGS = (f"--d 64 --layers 2 --heads 4 --T 64 --B 8 --steps {STEPS} --warmup 4 --lr 0.01 "
         f"--sample 0 --eval-every 100 --checkpoint-every {SAVED_AT}").split()


def train(out: Path, ranks: int, *flags: Any) -> list[float]:
    """The losses of a run, or of one that goes on."""
    if ranks == 1:
        assert example.modules()[0].main([*map(str, flags), "--out", str(out)]) == 0
    else:
        folder = out.with_name(f"{out.name} ranks")
        folder.mkdir()
        made = mpirun(ranks, "run", folder, battery=REHEARSAL, fresh=True,
                      flags=[*map(str, flags), "--out", str(out)])
        assert made.status == 0, made.text
    return example.losses_of(out)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return example.write_text(tmp_path_factory.mktemp("text") / "words.txt")


@pytest.fixture(scope="module")
def on_gpus(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run of data parallel GPUs, and its losses."""
    out = tmp_path_factory.mktemp("on gpus") / "out"
    return out, train(out, N, *FLAGS, "--data", text, "--target", "cuda", "--mesh", f"dp={N}")


@pytest.mark.parametrize("mesh, target, ranks", [
    (f"tp={N}", "cuda", N), ("pp=2" if N == 2 else "pp=2,dp=2", "cuda", N), ("", "cpu", 1)])
def test_a_run_goes_on_where_it_is_resumed(on_gpus, tmp_path, mesh, target, ranks):
    before, losses = on_gpus
    shutil.copytree(before, tmp_path / "out")
    found = train(tmp_path / "out", ranks, "--resume", SAVED_AT, "--mesh", mesh, "--target", target,
                  "--microbatches", 2)
    assert len(found) == STEPS and found[:SAVED_AT] == losses[:SAVED_AT]
    np.testing.assert_allclose(found, losses, rtol=1e-5)


def test_what_a_host_has_begun_goes_on_on_gpus(on_gpus, text, tmp_path):
    losses = train(tmp_path / "out", 1, *FLAGS, "--data", text)
    np.testing.assert_allclose(on_gpus[1], losses, rtol=1e-5)
    found = train(tmp_path / "out", N, "--resume", SAVED_AT, "--mesh", f"dp={N}",
                  "--target", "cuda")
    np.testing.assert_allclose(found, losses, rtol=1e-5)
