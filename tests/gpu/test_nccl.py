"""Collectives of arrays on GPUs, under mpirun: values, backends, bandwidth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_harness import mesh_ranks, require_gpu
from mesh.launch import mpirun, needs_mpi
from tessera.runtime.device import device_count

require_gpu()
PROGRAMS = Path(__file__).with_name("nccl_programs.py")
needs_two = pytest.mark.skipif(device_count() < 2, reason="needs two GPUs")


def run(program: str, ranks: int, folder: Path, **env: str) -> list[dict]:
    pytest.importorskip("torch"), pytest.importorskip("cupy")
    made = mpirun(ranks, program, folder, battery=PROGRAMS, fresh=True, **env)
    assert made.status == 0, made.text
    print(made.text)
    return [json.loads(made.results[r]) for r in range(ranks)]


@needs_mpi
@needs_two
@pytest.mark.row("DIST-37", "DIST-46", "RT-07")
def test_gpus_of_their_own_give_the_bits_of_the_host_through_nccl(tmp_path):
    said = run("values", 2, tmp_path)
    assert said == [{"backend": "nccl", "disagreed": True}] * 2


@needs_mpi
@pytest.mark.row("DIST-37", "RT-07")
def test_a_shared_gpu_goes_through_the_host(tmp_path):
    said = run("values", 2, tmp_path, CUDA_VISIBLE_DEVICES="0")
    assert said == [{"backend": "mpi", "disagreed": True}] * 2


@needs_mpi
@needs_two
def test_the_setting_decides(tmp_path):
    assert run("values", 2, tmp_path, TESSERA_COMM="mpi")[0]["backend"] == "mpi"


@needs_mpi
@needs_two
@pytest.mark.row("DIST-46")
def test_each_axis_has_a_communicator(tmp_path):
    ranks = mesh_ranks()
    assert run("axes", ranks, tmp_path) == [{"backend": "nccl"}] * ranks


@needs_mpi
@needs_two
def test_programs_send_from_windows_what_they_send_without_them(tmp_path):
    for said in run("windows", mesh_ranks(), tmp_path):
        kinds = ["all_gather", "all_reduce", "reduce_scatter"] if said["there"] else []
        assert said["with"] == kinds and said["without"] == []


@needs_mpi
@needs_two
@pytest.mark.alone
@pytest.mark.row("TILE-81", "PERF-04", "SYS-07")
def test_all_reduce_speed_is_that_of_nvlink(tmp_path, note):
    said = run("speed", mesh_ranks(), tmp_path)
    note(**said[0])
    assert said[0]["all_reduce GB/s"] > 2 * said[0]["to host GB/s"]
