"""Plans of programs whose collectives run beside arithmetic, and of kernels of a GPU."""

from __future__ import annotations

import pytest

import tessera as ts
from tessera.planning.fabric import fabric

S = ts.ShardSpec
WHOLE, ROWS, COLUMNS = S(replicate=True), S(("row",), ("tp",)), S(("col",), ("tp",))
N, PART = 8192, 1024  # sums of bf16 that fill a bucket, and columns of a product beside them
GPUS = ts.dist.mesh([f"cuda:{r}" for r in range(4)], axes="tp", topology="8xh200")
HOSTS = ts.dist.mesh(axes="tp", shape=4, topology="8xh200")


def operands(mesh):
    """Of a product whose sum is over ranks, and of one that each rank has alone."""
    def of(spec, columns=N):
        return ts.dist.stand_in((N, columns), spec, mesh, "bf16 @accum(f32)")

    return of(COLUMNS), of(ROWS), of(WHOLE), of(WHOLE, PART)


def parts_of(plan) -> dict[str, float]:
    return {p.name: p.us for p in plan.parts}


def sum_us() -> float:
    return fabric("8xh200").time("all_reduce", 2 * N * N, GPUS, "tp").us


def beside_us(plan) -> float:
    """Of the product that needs no sum, which is written in bf16."""
    return 1e6 * 2 * N * N * PART / (plan.device.peak(ts.bf16) * plan.device.matmul_efficiency)


def test_what_nothing_reads_meanwhile_runs_beside_a_product():
    def f(a, b, c, d):
        return ts.shard(a @ b, WHOLE), c @ d

    plan = ts.dist.plan_report(f, *operands(GPUS))
    waits = sum_us() - beside_us(plan)
    assert 0 < waits < 0.9 * sum_us()
    assert parts_of(plan)["exchanges"] == pytest.approx(waits, rel=0.03)  # a loop rounds c @ d
    assert "collectives run beside arithmetic" in str(plan)


def test_terms_are_written_in_the_type_in_which_they_are_sent():
    """No loop rounds them."""
    plan = ts.dist.plan_report(lambda a, b: ts.shard(a @ b, WHOLE), *operands(HOSTS)[:2])
    assert parts_of(plan)["loops"] == 0
    assert parts_of(plan)["exchanges"] == pytest.approx(sum_us())


def test_what_is_read_at_once_is_waited_for():
    def f(a, b, c, d):
        return ts.shard(a @ b, WHOLE) @ d

    plan = ts.dist.plan_report(f, *operands(GPUS))
    halves = [fabric("8xh200").time(op, 2 * N * N, GPUS, "tp").us
              for op in ("reduce_scatter", "all_gather")]  # the terms are sent wide without windows
    assert parts_of(plan)["exchanges"] == pytest.approx(sum(halves))


def test_on_hosts_one_waits_for_the_other():
    def f(a, b, c, d):
        return ts.shard(a @ b, WHOLE), c @ d

    plan = ts.dist.plan_report(f, *operands(HOSTS))
    assert parts_of(plan)["exchanges"] == pytest.approx(sum_us())
    assert "a collective waits for all before it" in str(plan)


def test_messages_of_one_kind_that_stand_together_are_one():
    """Gathers of many small parameters wait for one step of the ring, not for one each."""
    mesh = ts.dist.mesh([f"cuda:{r}" for r in range(4)], axes="dp", topology="8xh200")
    w = ts.dist.stand_in((64, 64), S(("row",), ("dp",)), mesh)
    ws = [w] * 8

    def f(*ws):
        return [ts.shard(w, WHOLE) for w in ws]

    plan = ts.dist.plan_report(f, *ws)
    one = fabric("8xh200").time("all_gather", 8 * 64 * 64 * 4, mesh, "dp").us
    assert len(plan.exchanges) == 1 and plan.exchanges[0].count == 8
    assert plan.step_us == pytest.approx(one) and plan.exchange_us > 5 * one


def test_attention_of_gpus_is_a_kernel():
    """Its scores are never in memory, and it multiplies in the type of its operands."""
    def f(q, k, v):
        return ts.grad(lambda *x: ts.sum(ts.cast(ts.attention(*x, causal=True), "f32")),
                       argnums=(0, 1, 2))(q, k, v)

    shape, heads = (2, 8, 1024, 64), S((1,), ("tp",))
    moved = {}
    for mesh in (GPUS, HOSTS):
        q = ts.dist.stand_in(shape, heads, mesh, "bf16 @accum(f32)")
        plan = ts.dist.plan_report(f, q, q, q)
        moved[mesh] = sum(w.bytes for w in plan.works if w.matmuls)
        if mesh is GPUS:
            (work,) = (w for w in plan.works if w.matmuls)
            assert work.name == "attention_vjp"
            assert [t.name for t, _ in work.matmuls] == ["bf16"]
            part = 2 * 2 * 1024 * 64  # of four operands in bf16 and three gradients in f32
            assert work.bytes == part * (4 * 2 + 3 * 4)
    assert moved[HOSTS] > 4 * moved[GPUS]
