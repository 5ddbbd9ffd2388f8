"""What all ranks have is added behind a sum of ranks, where nothing else waits with that sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from fake_nccl import nccl as nccl
from lowering_cases import apart as apart
from mesh.test_gpu_programs import DEVICES, SPLIT, on_ranks, placed
from mesh.test_gpu_programs import gpus as gpus
from tessera.graph.cuda.overlap import overlapped
from tessera.graph.cuda.run import CudaProgram
from tessera.mesh.sharding.localize import localize
from tessera.mesh.sharding.partitioned_steps import LayoutHop
from tolerance import assert_close

BF16 = "bf16 @accum(f32)"


def tied(table: Any, w: Any, tokens: Any) -> Any:
    """A table that is both ends of a model: its last gradient is rounded when it is whole, that of
    the lookup is added to it."""
    h = ts.gelu(ts.embedding(table, tokens) @ w)
    return ts.mean(ts.square(ts.cast(ts.cast(h, BF16) @ ts.transpose(ts.cast(table, BF16)), "f32")))


def step(table: Any, w: Any, tokens: Any) -> Any:
    grads = ts.grad(tied, argnums=(0, 1))(table, w, tokens)
    return [p - 0.1 * g for p, g in zip((table, w), grads, strict=True)]


@pytest.mark.parametrize("n", [2, 4])
def test_a_table_at_both_ends_has_the_gradient_of_one_gpu(gpus, nccl, rng, n):
    T, W = (rng.standard_normal(s).astype(np.float32) for s in ((24, 16), (16, 16)))
    tokens = rng.integers(0, 24, (4 * n, 8))
    want = ts.jit(step)(ts.tensor(T), ts.tensor(W), ts.tensor(tokens))

    def program(mesh):
        f = ts.jit(step)
        args = placed(mesh, T, "whole"), placed(mesh, W, "whole"), placed(
            mesh, tokens, "rows", "int64")
        made = [[g.numpy() for g in f(*args)] for _ in range(3)]
        assert not hops_of(f._last.program, "term")
        return made

    for made in on_ranks(n, program):
        for found in made:
            for a, b in zip(found, want, strict=True):
                assert_close(a, b.numpy(), "f32", 512)


def hops_of(program: Any, kind: str) -> list[LayoutHop]:
    return [s for s in program.made.steps if isinstance(s, LayoutHop) and s.hop.kind == kind]


def traced(f: Any, *given: tuple[Any, str, str]) -> Any:
    mesh = ts.dist.mesh(DEVICES, axes="x")
    return ts.jit(f).traced(*(ts.dist.stand_in(shape, SPLIT[how], mesh, kind)
                              for shape, how, kind in given)).program


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_waits_for_the_first_sum_before_it_needs_it(rank):
    """Ranks that were to add nothing had no use for it, so what came next was written there."""
    program = traced(step, ((1 << 16, 1024), "whole", "f32"), ((1024, 1024), "whole", "f32"),
                     ((64, 1024), "rows", "int64"))
    made = CudaProgram(localize(program.made, rank), "sm_90a", (0, 1))
    sent = [k for k, s in enumerate(made.plan.steps) if s.kind == "exchange"]
    waits = overlapped(made.plan.steps, sent, (), made.plan.region).awaited
    assert min(waits) > max(sent), waits
    last = max(waits)  # what reads both of the table's comes last
    assert waits[last] == len(sent) - 1 and made.plan.steps[last].writes[0].shape == (1 << 16, 1024)


def test_sums_that_join_others_wait():
    """x w + y v + b: one message, and b is a term of it, or added behind; never two messages."""
    def f(x, w, y, v, b):
        return ts.shard(x @ w + b + y @ v, SPLIT["whole"])

    program = traced(f, ((64, 64), "columns", "f32"), ((64, 32), "rows", "f32"),
                     ((64, 64), "columns", "f32"), ((64, 32), "rows", "f32"),
                     ((64, 32), "whole", "f32"))
    assert [c.op for c in program.plan] == ["all_reduce"]
    assert hops_of(program, "term")


def test_a_term_that_others_read_stays_one():
    def f(x, w, b):
        y = x @ w + b
        return ts.shard(y, SPLIT["whole"]), ts.shard(y * 2.0, SPLIT["rows"])

    program = traced(f, ((64, 64), "columns", "f32"), ((64, 32), "rows", "f32"),
                     ((64, 32), "whole", "f32"))
    x, w, b = (np.random.default_rng(3).standard_normal(s) for s in ((64, 64), (64, 32), (64, 32)))
    mesh = ts.dist.mesh(axes="x", shape=4)
    made = ts.jit(f)(*(ts.dist.distribute(ts.tensor(a, "f32"), SPLIT[s], mesh=mesh)
                       for a, s in ((x, "columns"), (w, "rows"), (b, "whole"))))
    for y, scale in zip(made, (1, 2), strict=True):
        assert_close(y.numpy(), scale * (x @ w + b), "f32", 64)
    assert program.plan
