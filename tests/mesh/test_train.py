"""The training example on meshes: the same losses as alone, on every transport."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from mesh import example
from mesh.launch import mpirun, needs_mpi, started_as_by

CASES = [(name, ranks) for ranks, runs in example.RUNS.items() for name in runs]


def check(found: list[float], name: str, ranks: int) -> None:
    meant = example.alone(name, ranks)
    assert len(found) in (example.FEWER, example.STEPS) and meant[-1] < meant[0] - 0.5
    np.testing.assert_allclose(found, meant[:len(found)], rtol=1e-5, err_msg=name)


@pytest.mark.row("DIST-26", "DIST-27", "DIST-28", "DIST-41")
@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_losses_in_one_process(name: str, ranks: int) -> None:
    check(example.losses(**example.settings(name, ranks)), name, ranks)


@pytest.mark.parametrize(("name", "ranks"), [("dp=2,tp=2", 4), ("dp=2,pp=2", 4), ("dp=4 zero 3", 4),
                                             ("tp=3", 3)])
def test_losses_of_simulated_ranks(name: str, ranks: int) -> None:
    """Every rank a program of its own, as under mpirun; all see the same losses."""
    made = ts.dist.simulate(lambda: example.losses(
        example.FEWER, **example.settings(name, ranks)), ranks)
    assert all(losses == made[0] for losses in made)
    check(made[0], name, ranks)


@pytest.mark.row("CORE-21")
@pytest.mark.parametrize("launcher, ranks", [
    *(pytest.param("mpirun", n, marks=needs_mpi) for n in (2, 3, 4)), ("torchrun", 2), ("srun", 2)])
def test_losses_under_a_launcher(launcher: str, ranks: int, tmp_path: Path) -> None:
    start = mpirun if launcher == "mpirun" else functools.partial(started_as_by, launcher)
    run = start(ranks, "losses", tmp_path, timeout_s=240, battery=Path(example.__file__))
    assert run.status == 0, run.text
    found = [json.loads(run.results[r]) for r in range(ranks)]
    assert all(other == found[0] for other in found)
    for name, losses in found[0].items():
        check(losses, name, ranks)
