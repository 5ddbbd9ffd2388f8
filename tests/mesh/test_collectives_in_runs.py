"""Collectives along an inner dimension: what stands in front of it goes side by side, and nothing
is transposed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from fake_nccl import nccl as nccl
from lowering_cases import apart as apart
from mesh.test_gpu_programs import DEVICES, on_ranks, values
from mesh.test_gpu_programs import gpus as gpus
from tessera.graph.cuda.program.run import CudaProgram
from tessera.mesh.collectives import exchange_ops
from tessera.mesh.sharding.localize import localize
from tolerance import assert_close

KIND = "bf16 @accum(f32)"
INNER = ts.ShardSpec((1,), ("x",))  # sequences of [B, T, d]
ALONG = {2: INNER, 3: ts.ShardSpec((2,), ("x",))}  # by how many dimensions stand there
COLUMNS, ROWS = ts.ShardSpec(("col",), ("x",)), ts.ShardSpec(("row",), ("x",))
WHOLE = ts.ShardSpec(replicate=True)


def layer(x: Any, up: Any, down: Any, shard: Any = ts.shard) -> Any:
    """Parts of sequences, whole ones between the two matmuls, parts again."""
    return shard(x + ts.gelu(shard(x, WHOLE) @ up) @ down, INNER)


def loss(x: Any, up: Any, down: Any, **how: Any) -> Any:
    return ts.sum(ts.square(layer(x, up, down, **how)))


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("run_bytes", [1, 1 << 20], ids=["runs", "transposed"])
def test_parts_of_sequences_have_the_values_of_one_gpu(gpus, nccl, rng, monkeypatch, n, run_bytes):
    monkeypatch.setattr(exchange_ops, "RUN_BYTES", run_bytes)
    X, U, D = values(rng, (3, 2 * n, 8), (8, 4 * n), (4 * n, 8))
    want = ts.value_and_grad(lambda *xs: loss(*xs, shard=lambda x, spec: x), argnums=(0, 1, 2))(
        *map(ts.tensor, (X, U, D)))

    def program(mesh):
        x, up, down = (ts.dist.distribute(ts.tensor(a), s, mesh=mesh)
                       for a, s in ((X, INNER), (U, COLUMNS), (D, ROWS)))
        step = ts.jit(ts.value_and_grad(loss, argnums=(0, 1, 2)))
        made = []
        for _ in range(3):  # step by step, recorded, as a graph
            value, grads = step(x, up, down)
            made.append([value.numpy(), *(g.numpy() for g in grads)])
        return made

    for made in on_ranks(n, program):
        for found in made:
            for a, b in zip(found, (want[0], *want[1]), strict=True):
                assert_close(a, b.numpy(), "f32", 64)
    kinds = {what for _, what, _ in nccl.calls}
    assert {"all_gather", "reduce_scatter"} <= kinds, kinds


@pytest.mark.parametrize("dims", [2, 3])
def test_what_is_gathered_lies_as_on_hosts(gpus, nccl, rng, monkeypatch, dims):
    """Of one dimension in front of it and of two, to the bit."""
    monkeypatch.setattr(exchange_ops, "RUN_BYTES", 1)
    (X,) = values(rng, (2, 3, 8, 4)[-dims - 1:])

    def program(mesh):
        x = ts.dist.distribute(ts.tensor(X), ALONG[dims], mesh=mesh)
        whole = ts.jit(lambda x: ts.shard(x * 2.0, WHOLE))
        return [whole(x).local.numpy() for _ in range(3)]

    for made in on_ranks(4, program):
        for y in made:
            np.testing.assert_array_equal(y, 2 * X)


def plan_of(shape: tuple[int, ...]) -> Any:
    mesh, d = ts.dist.mesh(DEVICES, axes="x"), shape[-1]
    x, up, down = (ts.dist.stand_in(s, spec, mesh, KIND) for s, spec in (
        (shape, INNER), ((d, 4 * d), COLUMNS), ((4 * d, d), ROWS)))
    made = ts.jit(layer).traced(x, up, down).program.made
    return CudaProgram(localize(made, 0), "sm_90a").plan


def test_nothing_is_transposed_and_roundings_stay_with_what_reads_them():
    kinds = [(s.kind, "add" in [x.op for x in s.steps]) for s in plan_of((2, 4096, 1024)).steps]
    assert kinds == [("exchange", False), ("gemm", False), ("loop", False), ("gemm", False),
                     ("exchange", False), ("loop", True), ("loop", True)]  # one of each sequence


@pytest.mark.parametrize("shape", [(2, 64, 1024), (32, 4096, 1024)], ids=["short", "many"])
def test_short_runs_and_many_are_transposed(shape):
    assert "move" in [s.kind for s in plan_of(shape).steps]


def test_a_part_is_sent_from_where_it_lies_to_where_it_belongs():
    plan = plan_of((2, 4096, 1024))
    gather, scatter = (s for s in plan.steps if s.kind == "exchange")
    for operands in (gather.reads, gather.writes, scatter.reads):
        first, second = operands
        assert plan.base(first.name) == plan.base(second.name) and first.layout is second.layout
        assert (first.offset, second.offset) == (0, np.prod(first.shape))
