"""Distributed tensors on GPUs, under mpirun: the local programs, and what they exchange. On four
GPUs where there are as many."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gpu_harness import mesh_ranks, require_gpu
from mesh.launch import mpirun, needs_mpi, started_as_by
from mesh.test_pipeline import check, reference
from tessera.runtime.device import device_count

require_gpu()
PROGRAMS = Path(__file__).with_name("mesh_programs.py")
needs_two = pytest.mark.skipif(device_count() < 2, reason="needs two GPUs")


def run(program: str, folder: Path, ranks: int = 0, **env: str) -> list[dict]:
    ranks = ranks or mesh_ranks()
    made = mpirun(ranks, program, folder, battery=PROGRAMS, fresh=True, **env)
    assert made.status == 0, made.text
    print(made.text)
    return [json.loads(made.results[r]) for r in range(ranks)]


@needs_mpi
@needs_two
def test_layouts_change_and_sums_are_made_through_nccl(tmp_path):
    for r, said in enumerate(run("layouts", tmp_path)):
        assert said["place"] == f"cuda:{r}" and said["backend"] == "nccl"
        assert "through NCCL" in said["plan"] and "kernels" in said["graph"], said


@needs_mpi
def test_ranks_that_share_a_gpu_go_through_the_host(tmp_path):
    for said in run("layouts", tmp_path, CUDA_VISIBLE_DEVICES="0"):
        assert said["place"] == "cuda:0" and said["backend"] == "mpi"
        assert "through the host" in said["plan"]


@needs_mpi
@needs_two
def test_matmuls_run_in_parts_beside_their_collective(tmp_path):
    for said in run("cut", tmp_path):
        assert all(" beside its matmul through NCCL" in plan for plan in said.values()), said


@needs_mpi
@needs_two
def test_sequences_go_side_by_side_and_are_not_transposed(tmp_path):
    for said in run("runs", tmp_path):
        assert "move" not in said["kinds"] and said["kinds"].count("exchange") == 2, said
        assert "through the host" not in said["plan"]


@needs_mpi
@needs_two
@pytest.mark.row("DIST-38")
def test_gradients_are_reduced_beside_the_backward_pass(tmp_path, note):
    for said in run("overlap", tmp_path):
        note(**said)
        assert said["sent"] > 1 and said["apart"] and said["same"], said
        assert said["ahead us"] > 0, said  # of the first, before the last matmul ends


@needs_two
def test_torchrun_s_variables_are_enough(tmp_path):
    made = started_as_by("torchrun", mesh_ranks(), "layouts", tmp_path, battery=PROGRAMS,
                         fresh=True)
    assert made.status == 0, made.text
    for r in range(mesh_ranks()):
        said = json.loads(made.results[r])
        assert said["place"] == f"cuda:{r}" and said["backend"] == "nccl"


@needs_mpi
@needs_two
def test_a_communicator_is_split(tmp_path):
    n = mesh_ranks()
    assert run("split", tmp_path) == [{"sums": [float(n)] * 4, "known": True}] * n


@needs_mpi
@needs_two
@pytest.mark.parametrize("program", ["losses", "zeros", "stages"])
def test_losses_are_those_of_one_gpu(tmp_path, note, program):
    first, *rest = run(program, tmp_path)
    alone, *others = first.values()
    for axes, made in first.items():
        note(**{f"{axes} ms": made["step ms"]})
        for rank, other in enumerate(rest, 1):
            there = other[axes]["losses"]
            apart = [(step, a, b) for step, (a, b) in enumerate(
                zip(made["losses"], there, strict=True)) if a != b]
            assert not apart or axes.startswith("{}"), (
                f"{axes}: from step {apart[0][0]} on rank {rank} has {apart[0][2]} for "
                f"{apart[0][1]}, and {len(apart)} steps of {len(there)} differ")
    for made in others:
        np.testing.assert_allclose(made["losses"], alone["losses"], rtol=1e-5)


@needs_mpi
@needs_two
def test_experts_learn_as_on_one_gpu(tmp_path):
    for said in run("experts", tmp_path):
        assert "all_to_all" in said["plan"] and "through the host" not in said["plan"]
        assert said["together"][-1] < 0.9 * said["together"][0]
        np.testing.assert_allclose(said["together"], said["alone"], rtol=1e-5)


@needs_mpi
@needs_two
def test_rings_of_long_sequences(tmp_path, note):
    for said in run("rings", tmp_path):
        note(**said["errors"])
        assert "permute over sp" in said["plan"] and "through the host" not in said["plan"]
        for kind, errors in said["errors"].items():
            assert max(errors) < (1e-5 if kind.startswith("f32") else 2e-2), (kind, errors)


@needs_mpi
@needs_two
def test_stages_send_to_each_other_both_ways(tmp_path):
    meant = reference()
    for rank, found in enumerate(run("pipelined", tmp_path, 2)):
        names = {n for n in meant if n == "loss" or int(n[0]) % 2 == rank}
        for made in found.values():
            check({n: np.array(v, np.float32) for n, v in made.items()}, meant, names)


@needs_mpi
def test_stages_that_share_a_gpu_send_through_the_host(tmp_path):
    meant = reference()
    for rank, found in enumerate(run("pipelined", tmp_path, 2, CUDA_VISIBLE_DEVICES="0")):
        names = {n for n in meant if n == "loss" or int(n[0]) % 2 == rank}
        check({n: np.array(v, np.float32) for n, v in found["1f1b"].items()}, meant, names)
