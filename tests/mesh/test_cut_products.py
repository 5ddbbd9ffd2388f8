"""Matmuls in parts, beside the collective of their operand or result."""

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
from tessera.graph.cuda.program.collective_steps import CollectiveStep
from tessera.graph.cuda.program.run import CudaProgram
from tessera.graph.op import ENGINES
from tessera.graph.schedule.ir import ByteRange
from tessera.mesh.sharding import cut_products, sharded_graph
from tessera.mesh.sharding.localize import localize
from tolerance import assert_close

PRODUCTS = {  # how operands lie, where the result is wanted, its collective, steps that send
    "gather": ("rows", "columns", None, "all_gather", 1),
    "reduce": ("columns", "rows", "whole", "all_reduce", 4),
    "scatter rows": ("columns", "rows", "rows", "reduce_scatter", 4),
    "scatter columns": ("columns", "rows", "columns", "reduce_scatter", 4)}


@pytest.fixture
def worth_it(monkeypatch: Any, shares: tuple[int, ...]) -> None:
    """Matmuls and collectives of any size are cut, in these parts."""
    monkeypatch.setattr(cut_products, "ROWS", 1)
    monkeypatch.setattr(cut_products, "PARTS", (shares,))
    monkeypatch.setattr(cut_products, "LEAST_GAIN", 0.1)
    monkeypatch.setattr(cut_products, "_product_us", lambda step, mesh: 1000.0)
    monkeypatch.setattr(cut_products, "_move_us", lambda move, mesh, parts: 1000.0 / parts)
    monkeypatch.setattr(cut_products, "halves_us",
                        lambda move, mesh, wide, narrow, parts: 1000.0 / parts)


@pytest.mark.parametrize("late", ["", "collectives"])
@pytest.mark.parametrize(("kind", "shares"), [("f32", (1, 1, 2, 4)),
                                              ("bf16 @accum(f32)", (1, 1, 1, 1)),
                                              ("f16", (1, 2, 4, 1))])
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", PRODUCTS)
def test_parts_give_what_the_whole_gives(gpus, nccl, rng, worth_it, name, n, kind, shares,
                                          late):
    left, right, out, collective, sends = PRODUCTS[name]
    X, W = values(rng, (16 * n, 384), (384, 16 * n))
    exact = [ts.tensor(a, kind).numpy().astype("f8") for a in (X, W)]

    def program(mesh):
        gpus.driver.late = late
        f = ts.jit(lambda x, w: x @ w if out is None else ts.shard(x @ w, SPLIT[out]))
        x, w = placed(mesh, X, left, kind), placed(mesh, W, right, kind)
        made = [f(x, w).numpy() for _ in range(3)]  # step by step, recorded, and as a graph
        local = f._last.program.local(ts.dist.rank()).program
        return made, str(f.plan), local

    for made, plan, local in on_ranks(n, program):
        for y in made:
            assert_close(y, exact[0] @ exact[1], kind.split()[0], 384)
        parts = f"{n} parts" if collective == "all_gather" else "4 parts" if (
            len(set(shares)) == 1) else f"4 parts ({':'.join(map(str, shares))})"
        halves = collective == "all_reduce" and (  # and rounded between them
            kind == "f16" or kind != "f32" and n > 2)
        first = "reduce_scatter" if halves else collective
        assert plan.startswith(f"{first} over x: ") and f"in {parts} beside" in plan
        steps = [k for k, s in enumerate(local.steps) if isinstance(s, CollectiveStep)]
        assert len(steps) == sends * (2 if halves else 1)


@pytest.mark.parametrize(("n", "late", "shares"), [(2, "collectives", (1, 1)), (3, "", (1, 1))])
def test_copy_engines_gather_in_windows(gpus, nccl, rng, worth_it, n, shares, late, monkeypatch):
    """The own rows are where others come to, in front of it; without windows it is as ever."""
    X, W = values(rng, (16 * n, 384), (384, 16 * n))
    monkeypatch.setattr(sharded_graph, "LEAST_WINDOW_BYTES", 1)
    nccl.library.has_engines = True

    def program(mesh, twice):
        gpus.driver.late = late
        f = ts.jit(lambda x, w: x @ w if not twice else (x @ w) * 2.0 + ts.exp(x) @ w)
        x, w = placed(mesh, X, "rows"), placed(mesh, W, "columns")
        made = [f(x, w).numpy() for _ in range(3)]
        local = f._last.program.local(ts.dist.rank()).program
        steps = [s for s in local.steps if isinstance(s, CollectiveStep)]
        return made, [s.callee.node.attrs.get("blocks") for s in steps if s.callee.node.op.name ==
                      "mesh_rank_blocks"], str(local.plan)

    for twice in (False, True):
        for without in (set(), {1}):
            nccl.library.without = without
            for made, blocks, plan in on_ranks(n, lambda mesh, t=twice: program(mesh, t)):
                for y in made:
                    assert_close(y, (2 * X + np.exp(X) if twice else X) @ W, "f32", 768)
                assert blocks == [32 if without else ENGINES] * (1 + twice)
                assert ("NCCL, between the ranks' GPUs, by copy engines" in plan) == (not without)


@pytest.mark.parametrize("engines", [False, True])
def test_own_rows_come_to_their_place_when_messages_have_left_it(engines):
    """NCCL's kernels come one after another; the copy in front of copy engines does not."""
    mesh = ts.dist.mesh(DEVICES[:4], axes="x")
    x, w = (ts.dist.stand_in((8192, n), SPLIT[how], mesh, "bf16 @accum(f32)")
            for n, how in ((8192, "rows"), (28672, "columns")))
    made = ts.jit(lambda x, w: (x @ w, ts.exp(x) @ w)).traced(x, w).program.made
    plan = CudaProgram(localize(made, 0, engines=engines), "sm_90a").plan
    first, second = (s for s in plan.steps if s.kind == "exchange")
    own = next(s for s in plan.steps if s.kind == "gemm")  # reads and writes elsewhere
    place = {s.writes[0].name: ByteRange("temporaries", 0, 1) for s in (first, second)}
    made = overlapped([first, own, second, own], [0, 2], (),
                      lambda name: place.get(name, ByteRange(name, 0, 1 << 40)))
    assert made.awaited == ({2: 0, 4: 1} if engines else {4: 1})


def test_beside_copy_engines_matmuls_have_the_whole_chip():
    mesh = ts.dist.mesh(DEVICES[:4], axes="x")
    left, right, out, _, _ = PRODUCTS["gather"]
    made = program_of(left, right, out, 8192, mesh)
    plan = CudaProgram(localize(made.made, 0, engines=True), "sm_90a").plan
    own, _ = (s.schedule for s in plan.steps if s.kind == "gemm")
    assert "SPARE" not in dict(own.extra) and "left to NCCL" not in str(plan)


def test_what_does_not_pay_stays_whole(gpus, nccl, rng):
    X, W = values(rng, (1024, 64), (64, 256))

    def program(mesh):
        f = ts.jit(lambda x, w: ts.shard(x @ w, SPLIT["whole"]))
        f(placed(mesh, X, "columns"), placed(mesh, W, "rows"))
        return str(f.plan)

    assert "parts" not in on_ranks(2, program)[0]


def program_of(left: str, right: str, out: str | None, rows: int, mesh: Any) -> Any:
    def there(shape: tuple, how: str) -> Any:
        kind = ts.Tensor[(*shape, "bf16 @accum(f32)")]
        return ts.dist.stand_ins(kind, lambda *_: SPLIT[how], mesh)

    f = ts.jit(lambda x, w: x @ w if out is None else ts.shard(x @ w, SPLIT[out]))
    return f.traced(there((rows, 8192), left), there((8192, 28672), right)).program


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", ["gather", "reduce", "scatter rows"])
def test_large_ones_are_cut_on_gpus_and_on_no_hosts(name, n):
    """In parts that were within 3 % of the quickest on four GPUs."""
    left, right, out, _, _ = PRODUCTS[name]
    gpus, hosts = ts.dist.mesh(DEVICES[:n], axes="x"), ts.dist.mesh(axes="x", shape=(n,))
    plan = str(program_of(left, right, out, 8192, gpus).plan)
    parts = {"gather": "4 parts", "reduce": "4 parts (1:2:2:3)", "scatter rows": "4 parts"}
    if n == 4:
        assert f" in {parts[name]} beside its matmul" in plan
    else:  # two ranks send a quarter of the bytes, in bf16: scattered sums are sooner whole
        assert ("beside its matmul" in plan) == (name != "scatter rows")
    assert "parts" not in str(program_of(left, right, out, 8192, hosts).plan)
    assert "parts" not in str(program_of(left, right, out, 64 * n, gpus).plan)


@pytest.mark.parametrize("name", ["gather", "reduce", "scatter rows"])
def test_parts_are_read_and_written_where_they_lie(monkeypatch, name):
    """No copies, and collectives have a matmul beside them as long as there is one to come."""
    left, right, out, _, _ = PRODUCTS[name]
    monkeypatch.setattr(cut_products, "PARTS", ((1, 1, 1, 1),))
    monkeypatch.setattr(cut_products, "LEAST_GAIN", 0.1)
    made = program_of(left, right, out, 8192, ts.dist.mesh(DEVICES[:2], axes="x"))
    plan = CudaProgram(localize(made.made, 1, wide=True), "sm_90a").plan
    kinds = [s.kind for s in plan.steps]
    assert "move" not in kinds and kinds.count("gemm") == (2 if name == "gather" else 4)
    tiles = [dict(s.schedule.extra).get("TILES") for s in plan.steps if s.kind == "gemm"]
    assert tiles == (["dynamic", None] if name == "gather" else [None, *["dynamic"] * 3])
    sent = [k for k, kind in enumerate(kinds) if kind == "exchange"]
    awaited = overlapped(plan.steps, sent, (), plan.region).awaited
    late = {"gather": 0, "reduce": 5, "scatter rows": 1}[name]  # behind the last matmul or two
    for number, k in enumerate(sent[:len(sent) - late]):
        until = min(step for step, last in awaited.items() if last >= number)
        assert "gemm" in kinds[k + 1:until], (number, kinds, awaited)


@pytest.mark.parametrize("shares", [(1, 1, 1, 1), (1, 1, 2, 4), (1, 3, 4)])
@pytest.mark.parametrize("name", ["reduce", "scatter rows"])
def test_matmuls_wait_for_no_collective(monkeypatch, name, shares):
    """What is sent of a part stays where it is until the next part's is, or its sums are read."""
    left, right, out, _, _ = PRODUCTS[name]
    monkeypatch.setattr(cut_products, "PARTS", (shares,))
    monkeypatch.setattr(cut_products, "LEAST_GAIN", 0.1)
    made = program_of(left, right, out, 8192, ts.dist.mesh(DEVICES[:4], axes="x"))
    plan = CudaProgram(localize(made.made, 1, wide=True), "sm_90a").plan
    sent = [k for k, s in enumerate(plan.steps) if s.kind == "exchange"]
    awaited = overlapped(plan.steps, sent, (), plan.region).awaited
    products = [k for k, s in enumerate(plan.steps) if s.kind == "gemm"]
    assert len(products) == len(shares) and awaited.keys().isdisjoint(products)


@pytest.mark.parametrize("name", ["gather", "reduce", "scatter rows"])
def test_matmuls_leave_multiprocessors_to_a_collective_that_takes_as_long(name):
    left, right, out, _, _ = PRODUCTS[name]
    made = program_of(left, right, out, 8192, ts.dist.mesh(DEVICES[:4], axes="x"))
    plan = CudaProgram(localize(made.made, 0, wide=True), "sm_90a").plan
    spare = [dict(s.schedule.extra).get("SPARE") for s in plan.steps if s.kind == "gemm"]
    assert spare == ([32, None] if name == "gather" else [None] + [32] * (len(spare) - 1))
    assert "32 multiprocessors are left to NCCL" in str(plan)


@pytest.mark.parametrize(("shares", "sent", "us"), [
    ((1,), [700.0], 1700.0),
    ((1, 1, 1, 1), [100.0] * 4, 1325.0),  # matmuls without a gap, then the last message
    ((1, 1, 1, 1), [500.0] * 4, 2250.0),  # messages without a gap, behind the first matmul
    ((1, 3), [300.0, 900.0], 2125.0)])  # the second is not made when the first is sent
def test_the_model_of_parts(shares, sent, us):
    """Beside a message a matmul takes 1.3 times as long: 325 and 975 us of 1000."""
    assert cut_products.in_parts_us(shares, 1000.0, sent) == pytest.approx(us, abs=1)


def test_long_ones_take_the_whole_chip():
    """A short message beside a long product."""
    mesh = ts.dist.mesh(DEVICES[:4], axes="x")

    def f(g, x, w):
        return ts.sum(g), x @ w

    g, x, w = (ts.dist.stand_in((n, n), SPLIT[how], mesh, "bf16 @accum(f32)")
               for n, how in ((512, "rows"), (8192, "rows"), (8192, "whole")))
    made = ts.jit(f).traced(g, x, w).program
    steps = CudaProgram(localize(made.made, 0, wide=True), "sm_90a").plan.steps
    assert [dict(s.schedule.extra) for s in steps if s.kind == "gemm"] == [{"TILES": "dynamic"}]


def test_blocks_of_matmuls_are_chosen_for_what_a_collective_leaves():
    """Own rows have 100 multiprocessors and take tiles one by one, so no block waits for another;
    those of others have all 132."""
    mesh = ts.dist.mesh(DEVICES[:4], axes="x")
    left, right, out, _, _ = PRODUCTS["gather"]
    made = program_of(left, right, out, 8192, mesh)
    plan = CudaProgram(localize(made.made, 0), "sm_90a").plan
    blocks = [(s.schedule.m, s.schedule.n, s.schedule.cluster) for s in plan.steps
              if s.kind == "gemm"]
    assert blocks == [(128, 256, 2), (128, 224, 2)]
    assert dict(next(s for s in plan.steps if s.kind == "gemm").schedule.extra)["SPARE"] == 32
