"""Updated parts of parameters are gathered beside the backward pass, on meshes of GPUs."""

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
from tessera.graph.cuda.passes.overlap import overlapped
from tessera.graph.cuda.program.run import CudaProgram
from tessera.mesh.sharding import partitioned_steps
from tessera.mesh.sharding.localize import localize
from tolerance import assert_close

LETTERS = {"mesh_scattered_sums": "s", "mesh_rank_blocks": "g"}


def loss(params: Any, x: Any) -> Any:
    for w, b in params:
        x = ts.gelu(x @ w + b)
    return ts.mean(ts.square(x))


def step_of(optimizer: Any, clip: float = 0.0) -> Any:
    @ts.jit
    def step(params: Any, state: Any, x: Any) -> Any:
        grads = ts.grad(loss, argnums=0)(params, x)
        if clip:
            grads, _ = ts.optim.clip_by_global_norm(grads, clip)
        return optimizer.update(params, grads, state, 0.1)

    return step


@pytest.fixture
def ran(gpus, nccl, rng, monkeypatch):
    """Three steps of four layers, each a bucket, on one rank and on two, and the order of what
    the program of a rank does: s a sum, g a gather, m a matmul, u an update."""
    X, *W = values(rng, (6, 8), *[(8, 8)] * 4)
    B = values(rng, *[(8,)] * 4)
    monkeypatch.setattr(partitioned_steps, "GPU_BUCKET_BYTES", 8 * 8 * 4 + 8 * 4)

    def trained(optimizer: Any, clip: float, params: Any, x: Any) -> tuple[Any, Any]:
        step, state = step_of(optimizer, clip), optimizer.init(params)
        for _ in range(3):
            params, state = step(params, state, x)
        return [p.numpy() for pair in params for p in pair], step

    def run(clip: float = 0.0, late: str = "collectives") -> str:
        want, _ = trained(ts.optim.AdamW(), clip, [
            (ts.param(w), ts.param(b)) for w, b in zip(W, B, strict=True)], ts.tensor(X))

        def program(mesh):
            gpus.driver.late = late
            params = [tuple(ts.dist.distribute(ts.param(p), SPLIT["whole"], mesh=mesh)
                            for p in pair) for pair in zip(W, B, strict=True)]
            made, step = trained(ts.dist.zero(ts.optim.AdamW(), 2, "x"), clip, params,
                                 placed(mesh, X, "rows"))
            plan = step._last.program.local(ts.dist.rank()).program.plan
            return made, "".join(map(letter, plan.steps))

        orders = []
        for made, order in on_ranks(2, program):
            orders.append(order)
            for a, b in zip(made, want, strict=True):
                assert_close(a, b, "f32", 48)
        assert len(set(orders)) == 1
        return orders[0]

    return run


def letter(step: Any) -> str:
    if step.kind == "exchange":
        return LETTERS.get(step.attr("calls").node.op.name, "")
    return "m" if step.kind == "gemm" else "u" * ("sqrt" in str(step))


@pytest.mark.parametrize("late", ["", "collectives"])
def test_gathers_come_behind_the_bucket_that_follows(ran, late):
    order = ran(late=late)
    assert order.lstrip("m") == "smmsuugmmsuugmsuuguug", order


def test_no_matmul_waits_for_what_was_sent_last(monkeypatch):
    """Memory that a sum reads stays until a message behind other matmuls, though the gather of the
    bucket before is sent at once: who is given it would wait for the sum."""
    monkeypatch.setattr(partitioned_steps, "GPU_BUCKET_BYTES", 1 << 24)
    mesh = ts.dist.mesh(DEVICES[:2], axes="x")

    def there(how: str, *shape: int) -> Any:
        return ts.dist.stand_ins(ts.Tensor[(*shape, ts.f32)], lambda *_: SPLIT[how], mesh)

    params, parts = ([(there(how, 2048, 2048), there(how, 2048))] * 6 for how in ("whole", "rows"))
    step = step_of(ts.dist.zero(ts.optim.AdamW(), 2, "x"))
    made = step.traced(params, ts.optim.AdamW().init(parts), there("rows", 4096, 2048)).program.made
    plan = CudaProgram(localize(made, 0), "sm_90a").plan
    sent = [k for k, s in enumerate(plan.steps) if s.kind == "exchange"]
    matmuls = [k for k, s in enumerate(plan.steps) if s.kind == "gemm"]
    found = overlapped(plan.steps, sent, (), plan.region)
    assert found is not None
    waits = {k: sent[n] for k, n in found.awaited.items() if k < matmuls[-1]}
    assert waits and all(any(n < m < k for m in matmuls) for k, n in waits.items()), waits


def test_what_is_made_of_the_last_bucket_is_updated_last(gpus, nccl, rng, monkeypatch):
    """A table that is both ends of a model: the last matmul's part of its gradient is there first,
    that of the lookup last; so w is updated before it."""
    T, W = values(rng, (8, 8), (8, 8))
    tokens = rng.integers(0, 8, (16,))
    monkeypatch.setattr(partitioned_steps, "GPU_BUCKET_BYTES", 8 * 8 * 4)
    kind, optimizer = "bf16 @accum(f32)", ts.dist.zero(ts.optim.AdamW(), 2, "x")

    def tied(params, tokens):
        h = ts.gelu(ts.embedding(params["table"], tokens) @ params["w"])
        y = ts.cast(h, kind) @ ts.transpose(ts.cast(params["table"], kind))
        return ts.mean(ts.square(ts.cast(y, "f32")))

    def program(mesh):
        params = {k: ts.dist.distribute(ts.param(p), SPLIT["whole"], mesh=mesh)
                  for k, p in (("table", T), ("w", W))}
        step = ts.jit(lambda params, state, x: optimizer.update(
            params, ts.grad(tied)(params, x), state, 0.1))
        step(params, optimizer.init(params),
             ts.dist.distribute(ts.tensor(tokens), SPLIT["rows"], mesh=mesh))
        plan = step._last.program.local(ts.dist.rank()).program.plan
        return "".join(map(letter, plan.steps))

    for order in on_ranks(2, program):
        assert order.lstrip("m") == "smmssugug", order


@pytest.mark.parametrize("tokens", [4096, 1024])  # sums of the table are sent, or rows of x
def test_a_table_whose_second_gradient_comes_last_is_updated_last(monkeypatch, tokens):
    """Though the rounding of its first one could come before all, and though the rows that the
    other is made of are there before the last message."""
    monkeypatch.setattr(partitioned_steps, "GPU_BUCKET_BYTES", 1 << 20)
    mesh, kind = ts.dist.mesh(DEVICES[:2], axes="x"), "bf16 @accum(f32)"

    def tied(params, tokens):
        h = ts.embedding(params["table"], tokens) + params["shift"]
        for w in params["ws"]:
            h = h + ts.cast(ts.gelu(ts.cast(h, kind) @ ts.cast(w, kind)), "f32")
        y = ts.cast(h, kind) @ ts.transpose(ts.cast(params["table"], kind))
        return ts.mean(ts.square(ts.cast(y, "f32")))

    params = ts.dist.fsdp({"table": ts.zeros((4096, 256)), "ws": [ts.zeros((256, 256))] * 8,
                           "shift": ts.zeros(256)}, axis="x", mesh=mesh)
    step = ts.jit(lambda params, state, x: ts.optim.AdamW().update(
        params, ts.grad(tied, argnums=0)(params, x), state, 0.1))
    made = step.traced(params, ts.optim.AdamW().init(params),
                       ts.dist.stand_in((tokens,), SPLIT["rows"], mesh, "int32")).program.made
    plan = CudaProgram(localize(made, 0), "sm_90a").plan
    sent = [k for k, s in enumerate(plan.steps) if s.kind == "exchange"]
    loops = [s.space for s in plan.steps[sent[-2]:] if s.kind == "loop" and s.space[1:] == (256,)]
    rows = [(1024, 256)] * (tokens == 1024)
    assert loops == [*[(128, 256)] * 8, *rows, (2048, 256)], loops


def test_what_needs_all_gradients_stays_behind_them(ran):
    order = ran(clip=0.5)
    assert order.lstrip("m").startswith("smmsmmsms") and "g" not in order[:order.rindex("s")], order


def test_what_computes_with_a_gather_stays_behind_it(gpus, nccl, rng, monkeypatch):
    """Both gathers need the first of two sums alone; the second is made of what the first brings.
    """
    X, W, V = values(rng, (8, 8), (8, 8), (8, 8))
    monkeypatch.setattr(partitioned_steps, "GPU_BUCKET_BYTES", 8 * 8 * 4)

    def f(x, w, v):
        first, second = ts.shard(x @ w, SPLIT["rows"]), ts.shard(x @ v, SPLIT["rows"])
        whole = ts.shard(ts.tanh(first), SPLIT["whole"])
        part = ts.shard(ts.cumsum(whole, axis=0) + 1.0, SPLIT["rows"])
        return ts.shard(ts.tanh(part), SPLIT["whole"]), ts.shard(second * 2.0, SPLIT["whole"])

    def program(mesh):
        args = (placed(mesh, a, how) for a, how in
                ((X, "columns"), (W, "rows"), (V, "rows")))
        return [y.numpy() for y in ts.jit(f)(*args)]

    X, W, V = (a.astype(np.float64) for a in (X, W, V))
    want = np.tanh(np.cumsum(np.tanh(X @ W), 0) + 1.0), X @ V * 2.0
    for made in on_ranks(2, program):
        for a, b in zip(made, want, strict=True):
            assert_close(a, b, "f32", 64)


def test_a_sum_that_a_rank_does_not_read_waits_for_nobody(monkeypatch):
    """Of a table that is both ends of a model the first sum is the term of one rank in the second;
    others are done with it at once, and would give its memory to the next kernel."""
    monkeypatch.setattr(partitioned_steps, "GPU_BUCKET_BYTES", 1 << 21)
    mesh, kind = ts.dist.mesh(DEVICES[:2], axes="x"), "bf16 @accum(f32)"

    def tied(table, ws, tokens):
        h = ts.embedding(table, tokens)
        for w in ws:
            h = h + ts.cast(ts.gelu(ts.cast(h, kind) @ ts.cast(w, kind)), "f32")
        y = ts.cast(h, kind) @ ts.transpose(ts.cast(table, kind))
        return ts.mean(ts.square(ts.cast(y, "f32")))

    def there(how: str, *shape: int, kind: str = "f32") -> Any:
        return ts.dist.stand_in(shape, SPLIT[how], mesh, kind)

    made = ts.jit(ts.grad(tied, argnums=(0, 1))).traced(
        there("whole", 8192, 256), [there("whole", 256, 256)] * 24,
        there("rows", 32768, kind="int32")).program.made
    for rank in range(2):
        plan = CudaProgram(localize(made, rank), "sm_90a").plan
        sent = [k for k, s in enumerate(plan.steps) if s.kind == "exchange"]
        found = overlapped(plan.steps, sent, (), plan.region)
        assert found is not None and len(sent) == 4
        assert min(found.awaited) > sent[1], (rank, found.awaited, sent)
