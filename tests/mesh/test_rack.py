"""The training example on as many ranks as a rack has GPUs, on whatever cores there are.

Those of 72 ranks take minutes: TESSERA_SLOW=1 runs them.
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from mesh import example
from mesh.launch import mpirun, needs_mpi

REHEARSAL = Path(__file__).with_name("rehearsal.py")
STEPS = 5
SLOW = pytest.mark.skipif(not os.environ.get("TESSERA_SLOW"), reason="minutes: TESSERA_SLOW=1")
MOST_MB = 190  # of a rank: 147 to 163 (dp=8,tp=9, nothing in the cache, 2026-11-28)
NO_COMPILER_MB = 50  # between ranks: one that has loaded Numba and LLVM has 120 and more on top
FLAGS = ["--steps", str(STEPS), "--sample", "0"]
SMALL = [f"--{name}={value}" for name, value in {**example.SMALL, "steps": STEPS}.items()]
MESHES = [
    pytest.param("dp=2,tp=3", SMALL, id="6 ranks"),
    pytest.param("dp=1,tp=3,pp=2", [*SMALL, "--microbatches=2"], id="6 ranks, stages"),
    pytest.param("dp=8,tp=9", [], marks=SLOW, id="72 ranks"),
    pytest.param("dp=4,tp=9,pp=2", [], marks=SLOW, id="72 ranks, stages"),
]


@functools.cache
def alone(*flags: str) -> list[float]:
    """The losses of one process."""
    with tempfile.TemporaryDirectory() as folder:
        assert example.modules()[0].main([*FLAGS, *flags, "--out", f"{folder}/out"]) == 0
        return example.losses_of(Path(folder, "out"))


@needs_mpi
@pytest.mark.row("DIST-45", "CORE-21")
@pytest.mark.parametrize("mesh, flags", MESHES)
def test_every_rank_trains_and_ends_well(mesh: str, flags: list[str], tmp_path: Path) -> None:
    axes = {name: int(size) for name, size in (part.split("=") for part in mesh.split(","))}
    ranks = int(np.prod(list(axes.values())))
    (tmp_path / "ranks").mkdir()
    # new processes: what memory each takes is measured. Few ranks compile all there is.
    cold = {"TESSERA_CACHE_DIR": str(tmp_path / "cache")} if ranks < 9 else {}
    run = mpirun(ranks, "run", tmp_path / "ranks", battery=REHEARSAL, timeout_s=400, fresh=True,
                 flags=[*FLAGS, *flags, "--mesh", mesh, "--out", str(tmp_path / "out")],
                 **cold)
    assert run.status == 0, run.text
    peaks = sorted(int(text) for text in run.results.values())
    losses = example.losses_of(tmp_path / "out")
    print(f"{mesh}: {run.seconds:.0f} s; peak memory of a rank {peaks[0]} to {peaks[-1]} MB; "
          f"losses {losses[0]:.4f} to {losses[-1]:.4f}")
    assert len(peaks) == ranks and run.seconds < 240
    assert peaks[-1] < MOST_MB and peaks[-1] - peaks[0] < NO_COMPILER_MB
    assert len(losses) == STEPS and losses[-1] < losses[0]
    np.testing.assert_allclose(losses, alone(*flags), rtol=1e-5)
