"""Sums beside matmuls that take longer are sent by few of NCCL's blocks, on meshes of GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from fake_nccl import nccl as nccl
from lowering_cases import apart as apart
from mesh.test_gpu_overlap import layers
from mesh.test_gpu_programs import gpus as gpus
from mesh.test_gpu_programs import on_ranks, placed, values
from mesh.test_whole_waves import there
from mesh.test_windows import small as small
from tessera.graph.cuda.passes import place_blocks
from tessera.graph.cuda.passes.library_ops import PRODUCT, call_products
from tessera.kernels.cards import known_cards, planning_for
from tessera.kernels.tuned_tables import tables_of
from tessera.mesh.sharding import few_blocks, partitioned_steps
from tessera.mesh.sharding.few_blocks import FEW
from tessera.mesh.sharding.partitioned_steps import PartitionedOp, Together
from tessera.runtime.target import parse_target
from tolerance import assert_close


def blocks_of(rows: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of the sums of gradients of eight layers, in buckets of two; 0: as many as NCCL likes."""
    monkeypatch.setattr(partitioned_steps, "GPU_BUCKET_BYTES", 14 << 20)
    args = ([there((1024, 4096), "whole"), there((4096, 1024), "whole")] * 4,
            there((rows, 1024), "rows"))
    made = ts.jit(ts.grad(layers, argnums=0)).traced(*args).program.made
    moves = [s.moves[0] if isinstance(s, Together) else s for s in made.steps
             if not isinstance(s, PartitionedOp)]
    return [m.blocks for m in moves if m.hop.kind == "all_reduce"]


def test_what_has_time_goes_by_few_and_the_last_by_many(monkeypatch):
    """A message of 16 MiB takes 44 us by the model of the planner, the matmuls of a layer beside it
    800 of 2^15 rows, and 50 of 2^11."""
    long = blocks_of(1 << 15, monkeypatch)
    assert set(long[:-1]) == {FEW} and long[-1] == 0 and len(long) > 2, long
    assert set(blocks_of(1 << 11, monkeypatch)) == {0}


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_they_go_through_windows_of_a_communicator_of_their_own(gpus, nccl, rng, small, kind,
                                                                monkeypatch):
    monkeypatch.setattr(partitioned_steps, "GPU_BUCKET_BYTES", 8 * 8)
    monkeypatch.setattr(few_blocks, "SLOWER", 0.0)
    asked, opened = set[int](), list[int]()
    monkeypatch.setattr(nccl, "of_blocks", lambda by, count: asked.add(count) or by)
    plain = nccl.open_window
    monkeypatch.setattr(nccl, "open_window", lambda by, memory: (opened.append(1),
                                                                 plain(by, memory))[1])
    X, *W = values(rng, (8, 8), *[(8, 8)] * 4)

    def update(ws: Any, x: Any) -> Any:
        return [w - 0.1 * g for w, g in zip(ws, ts.grad(layers, argnums=0)(ws, x), strict=True)]

    want = ts.jit(update)([ts.tensor(w, kind) for w in W], ts.tensor(X, kind))

    def program(mesh: Any) -> tuple[list[np.ndarray], str]:
        f = ts.jit(update)
        ws, x = [placed(mesh, w, "whole", kind) for w in W], placed(mesh, X, "rows", kind)
        for _ in range(3):
            made = f(ws, x)
        return [ts.cast(w, "f32").numpy() for w in made], str(f.plan)

    for made, plan in on_ranks(2, program):
        assert plan.count(f"through NCCL, in windows by {FEW} blocks, ") == 3, plan  # of 4
        for a, b in zip(made, want, strict=True):
            assert_close(a, ts.cast(b, "f32").numpy(), kind, 48)
    assert asked == {FEW} and len(opened) == 2 * 2  # of the usual one and that one, by rank


def test_what_was_measured_holds_beside_a_message_in_as_many_waves():
    """128 blocks of 64 x 128 are one wave of 132 multiprocessors, and of 128 as well; of 125 they
    are two, and the estimate sums in parts."""
    target = parse_target("sm_90a")
    chip = target.generation.warpgroup_matmul
    x = ts.Tensor[1 << 14, 1024, "bf16 @accum(f32)"]
    graph = call_products(ts.jit(lambda x, y: ts.transpose(x) @ y).graph(x, x), chip)
    product = next(n for n in graph.nodes if n.op is PRODUCT)
    tables = tables_of("NVIDIA H200", 132)
    assert tables is not None
    with planning_for(next(c for c in known_cards(target) if c.tuned is tables)):
        alone, by_few, by_many = (place_blocks.blocks_of(product, graph, chip, left)[0]
                                  for left in (None, FEW, 7))
    assert alone == by_few and (alone.rows, alone.columns, alone.parts) == (64, 128, 1)
    assert alone.tuned and not by_many.tuned and by_many.parts > 1
