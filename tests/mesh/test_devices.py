"""Meshes of GPUs where there are none, and meshes that are too large: refused before anything is
computed."""

from __future__ import annotations

import tracemalloc
import warnings
from pathlib import Path

import pytest

import tessera as ts
from mesh import faults
from mesh.launch import mpirun, needs_mpi
from tessera.debug.planning import parse_mesh

HINT = "ts.dist.mesh(axes=..., shape=...) computes on hosts"


def test_alone_a_mesh_of_gpus_is_played_on_the_host_and_says_so_once():
    mesh = ts.dist.mesh(["cuda:0", "cuda:1", "cuda:2"], axes="warned")
    with pytest.warns(UserWarning, match=r"mesh\(warned=3\) names GPUs; .* 3 ranks on the host"):
        x = ts.dist.tensor((4,), None, mesh, init=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (x + x).tolist() == [2.0] * 4
    ts.dist.simulate(lambda: ts.dist.tensor((4,), None, mesh), mesh)


@pytest.mark.parametrize("compute", [
    lambda mesh: ts.dist.tensor((4,), None, mesh),
    lambda mesh: ts.dist.distribute([1.0, 2.0], ts.ShardSpec(replicate=True), mesh=mesh),
    lambda mesh: ts.dist.from_local([1.0, 2.0], None, mesh),
    lambda mesh: ts.pmap(lambda x: x + 1, mesh=mesh)(ts.ones((2, 2))),
    lambda mesh: ts.pipeline([lambda p, x: x], 1, axis="devices", mesh=mesh)([ts.ones(1)],
                                                                            ts.ones((2, 2)))])
def test_a_mesh_of_gpus_is_refused_where_there_is_none(compute, no_gpu):
    with pytest.raises(ts.UnsupportedTargetError, match=r"names GPUs \(cuda:0\)") as info:
        compute(ts.dist.mesh(["cuda:0"]))
    assert HINT in info.value.hint and info.value.where.file == __file__
    compute(ts.dist.mesh(["cpu:0"]))


@pytest.mark.parametrize("name", ["gpu0", "cpu:x", "host"])
def test_a_device_of_another_spelling_is_no_host(name):
    """A mesh is plain data, so it is told when something is to lie there."""
    mesh = ts.dist.mesh([name])
    with pytest.raises(ts.UnsupportedTargetError, match=f"names '{name}', which is no device") as e:
        ts.dist.tensor((4,), None, mesh)
    assert '"cuda:0", "cuda:1"' in e.value.hint and HINT in e.value.hint


@needs_mpi
def test_under_mpirun_it_is_refused_and_collectives_are_not(tmp_path):
    run = mpirun(2, "on_gpus", tmp_path, battery=Path(faults.__file__), CUDA_VISIBLE_DEVICES="")
    assert run.status == 0, run.text
    for text in run.results.values():
        assert "mesh(dp=2) names GPUs (cuda:0, cuda:1)" in text and HINT in text
        assert text.endswith("[2.0, 2.0]")


@pytest.mark.parametrize("make", [
    lambda: ts.dist.mesh(axes=("dp",), shape=(99_999_999,)),
    lambda: ts.dist.mesh(axes=("dp", "tp"), shape=(10**9, 10**9)),
    lambda: parse_mesh("dp=99999999"),
    lambda: ts.dist.simulate(ts.dist.barrier, 99_999_999),
    lambda: ts.dist.tensor((4,), None, ts.dist.mesh(axes=("dp",), shape=(100_000,)))])
def test_too_many_ranks_are_refused_before_memory_is_taken(make):
    ts.ones(1)
    tracemalloc.start()
    try:
        with pytest.raises(ts.ArgumentError, match="the most is 131072|plays 4096 at most"):
            make()
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()
