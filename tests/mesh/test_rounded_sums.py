"""Sums of ranks that are rounded before they are whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from fake_nccl import nccl as nccl
from lowering_cases import apart as apart
from mesh.test_gpu_programs import DEVICES, SPLIT, on_ranks, placed, values
from mesh.test_gpu_programs import gpus as gpus
from tessera.mesh.sharding import rounded_sums

KIND = "bf16 @accum(f32)"
HALVES = ["reduce_scatter", "all_gather"]


@pytest.fixture
def worth_it(monkeypatch: Any) -> None:
    monkeypatch.setattr(rounded_sums, "LEAST_GAIN", 0.0)


def ops_of(f: Any) -> list[str]:
    return [c.op for c in f.plan]


@pytest.mark.parametrize(("n", "kind"), [(2, "f16"), (4, "f16"), (4, KIND)])
def test_the_bits_are_those_of_the_whole_sum(gpus, nccl, rng, monkeypatch, n, kind):
    X, W = values(rng, (8 * n, 32), (32, 24))

    def program(mesh):
        made = []
        for gain, ops in ((0.0, HALVES), (1e9, ["all_reduce"])):
            monkeypatch.setattr(rounded_sums, "LEAST_GAIN", gain)
            f = ts.jit(lambda x, w: ts.shard(x @ w, SPLIT["whole"]))
            x, w = placed(mesh, X, "columns", kind), placed(mesh, W, "rows", kind)
            made += [f(x, w).local.numpy() for _ in range(3)]  # step by step, recorded, a graph
            assert ops_of(f) == ops
        return made

    for made in on_ranks(n, program):
        for y in made:
            np.testing.assert_array_equal(y, made[-1])


def plan_of(f: Any, shape: tuple[int, int], mesh: Any, kind: str = KIND) -> list[str]:
    x = ts.dist.stand_in(shape, SPLIT["columns"], mesh, kind)
    w = ts.dist.stand_in((shape[1], 64), SPLIT["rows"], mesh, kind)
    return [c.op for c in ts.jit(f).traced(x, w).program.plan]


def test_what_is_not_narrower_or_does_not_divide_stays_one_message(worth_it):
    mesh = ts.dist.mesh(DEVICES[:4], axes="x")

    def whole(x, w):
        return ts.shard(x @ w, SPLIT["whole"])

    assert plan_of(whole, (64, 128), mesh) == plan_of(whole, (64, 128), mesh, "f16") == HALVES
    assert plan_of(whole, (63, 128), mesh) == ["all_reduce"]
    assert plan_of(whole, (64, 128), ts.dist.mesh(DEVICES[:2], axes="x")) == ["all_reduce"]
    assert plan_of(whole, (64, 128), mesh, "f32") == ["all_reduce"]
    assert plan_of(whole, (64, 128), ts.dist.mesh(axes="x", shape=4)) == ["all_reduce"]


def test_small_sums_stay_one_message():
    """A second message takes longer than its bytes."""
    mesh = ts.dist.mesh(DEVICES[:4], axes="x")

    def whole(x, w):
        return ts.shard(x @ w, SPLIT["whole"])

    assert plan_of(whole, (64, 128), mesh) == ["all_reduce"]
    assert plan_of(whole, (1 << 20, 128), mesh) == HALVES
