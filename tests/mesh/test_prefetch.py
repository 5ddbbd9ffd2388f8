"""Parameters of ts.dist.fsdp are on their way while others are used, and kept for their next use,
on meshes of GPUs."""

from __future__ import annotations

import re

import numpy as np
import pytest

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from fake_nccl import nccl as nccl
from lowering_cases import apart as apart
from mesh.test_gpu_programs import DEVICES, on_ranks, placed, values
from mesh.test_gpu_programs import gpus as gpus
from tessera.mesh.sharding import collective_order
from tolerance import assert_close

BF16 = "bf16 @accum(f32)"


def loss(ws, x):
    for w in ws:
        x = ts.cast(ts.gelu(ts.cast(x, BF16) @ ts.cast(w, BF16)), "f32")
    return ts.mean(ts.square(x))


def order(program: str) -> list[str]:
    """"g3", "m3": when the weight of layer 3 is gathered and multiplied, forward."""
    casts = dict(re.findall(
        r"(%\d+)\([^)]*\): bf16 @accum\(f32\)\[64, 64\] = cast\((%\d+)\(x", program))
    layer = {cast: int(w[1:]) for cast, w in casts.items()}
    found = re.findall(r"(all_gather) over x\((%\d+)|(matmul)\(%\d+\([^)]*\), (%\d+)", program)
    names = [(a or b, w or v) for a, w, b, v in found]
    return [f"{what[0] if what != 'all_gather' else 'g'}{layer[v]}" for what, v in names
            if v in layer]


@pytest.mark.parametrize("bucket, want", [
    (1, "g0 g1 m0 g2 m1 g3 m2 m3"),  # one is used while the next comes
    (64 * 64 * 2 * 2, "g0 g1 g2 g3 m0 m1 m2 m3"),  # two of them, while two come
    (1 << 20, "g0 g1 g2 g3 m0 m1 m2 m3")])  # all in one
def test_a_bucket_is_gathered_while_the_one_before_is_used(monkeypatch, bucket, want):
    monkeypatch.setattr(collective_order, "BUCKET_BYTES", bucket)
    found = {}
    for devices in (DEVICES[:2], None):
        mesh = ts.dist.mesh(devices, axes="x", shape=(2,))
        ws = ts.dist.fsdp([ts.zeros((64, 64)) for _ in range(4)], axis="x", mesh=mesh)
        x = ts.dist.stand_ins(ts.Tensor[1024, 64, ts.f32],
                              lambda *_: ts.ShardSpec(("row",), ("x",)), mesh)
        f = ts.jit(loss)
        found[devices is None] = order(str(f.traced(ws, x).program))
    assert " ".join(found[False]) == want
    assert found[True] == "g0 g1 g2 g3 m0 m1 m2 m3".split()  # between hosts all are short


def test_between_hosts_short_parameters_come_together_and_long_ones_alone(monkeypatch):
    mesh = ts.dist.mesh(axes="x", shape=(2,))
    ws = ts.dist.fsdp([ts.zeros((64, 64)) for _ in range(5)], axis="x", mesh=mesh)
    x = ts.dist.stand_ins(ts.Tensor[1024, 64, ts.f32],
                          lambda *_: ts.ShardSpec(("row",), ("x",)), mesh)

    def made(f) -> str:
        return " ".join(order(str(ts.jit(f).traced(ws, x).program)))

    size = 64 * 64 * 2
    monkeypatch.setattr(collective_order, "SHORT_BUCKET_BYTES", 2 * size)
    assert made(loss) == "g0 g1 m0 m1 g2 g3 m2 m3 g4 m4"
    step = ts.jit(ts.grad(loss, argnums=0)).traced(ws, x).program
    gathers = [c for c in step.plan if c.op == "all_gather"]  # 4 and 3 have come for both passes
    assert [c.bytes // (size // 2) for c in gathers] == [2, 2, 2, 2], step.plan
    monkeypatch.setattr(collective_order, "SHORT_BYTES", size - 1)
    assert made(loss) == "g0 m0 g1 m1 g2 m2 g3 m3 g4 m4"


def test_the_first_two_buckets_are_small(monkeypatch):
    """Nothing runs beside the first, and beside the second what the first brings."""
    monkeypatch.setattr(collective_order, "BEGIN_BYTES", 1)
    mesh = ts.dist.mesh(DEVICES[:2], axes="x")
    ws = ts.dist.fsdp([ts.zeros((64, 64)) for _ in range(5)], axis="x", mesh=mesh)
    x = ts.dist.stand_ins(ts.Tensor[1024, 64, ts.f32],
                          lambda *_: ts.ShardSpec(("row",), ("x",)), mesh)
    made = order(str(ts.jit(loss).traced(ws, x).program))
    assert made == "g0 g1 m0 g2 g3 g4 m1 m2 m3 m4".split()


def test_a_full_bucket_takes_a_bias_along(monkeypatch):
    """Which is read with the weight in front of it."""
    monkeypatch.setattr(collective_order, "BUCKET_BYTES", 1)
    mesh = ts.dist.mesh(DEVICES[:2], axes="x")
    ws = ts.dist.fsdp([(ts.zeros((64, 64)), ts.zeros(64)) for _ in range(3)], axis="x", mesh=mesh)
    x = ts.dist.stand_ins(ts.Tensor[1024, 64, ts.f32],
                          lambda *_: ts.ShardSpec(("row",), ("x",)), mesh)

    def loss(ws, x):
        for w, b in ws:
            x = ts.gelu(x @ w + b)
        return ts.mean(x)

    made = re.findall("(all_gather) over|(matmul)[(]", str(ts.jit(loss).traced(ws, x).program))
    assert "".join(a[:1] or b[:1] for a, b in made) == "aaaamaamm"


def gathers(kept: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """The order of a gradient of three layers whose weights, 8 KiB in bf16, may be kept so far."""
    monkeypatch.setattr(collective_order, "KEPT_BYTES", kept)
    monkeypatch.setattr(collective_order, "BUCKET_BYTES", 1)
    mesh = ts.dist.mesh(DEVICES[:2], axes="x")
    ws = ts.dist.fsdp([ts.zeros((64, 64)) for _ in range(3)], axis="x", mesh=mesh)
    x = ts.dist.stand_ins(ts.Tensor[1024, 64, ts.f32],
                          lambda *_: ts.ShardSpec(("row",), ("x",)), mesh)
    made = order(str(ts.jit(ts.grad(loss, argnums=0)).traced(ws, x).program))
    return " ".join(step for step in made if step[0] == "g")


def test_what_is_needed_again_soonest_is_kept_while_there_is_room(monkeypatch):
    size = 64 * 64 * 2
    assert gathers(0, monkeypatch) == "g0 g1 g2 g2 g1"  # x needs no gradient, so g0 is used once
    assert gathers(size, monkeypatch) == gathers(2 * size - 1, monkeypatch) == "g0 g1 g2 g1"
    assert gathers(2 * size, monkeypatch) == gathers(1 << 30, monkeypatch) == "g0 g1 g2"


@pytest.mark.parametrize("kept", [0, 1 << 30])
@pytest.mark.parametrize("late", ["", "collectives"])
def test_gradients_are_those_of_one_gpu(gpus, nccl, rng, monkeypatch, late, kept):
    monkeypatch.setattr(collective_order, "BUCKET_BYTES", 1)
    monkeypatch.setattr(collective_order, "KEPT_BYTES", kept)
    X, *W = values(rng, (64, 16), *[(16, 16)] * 3)
    want = ts.grad(loss, argnums=0)([ts.tensor(w) for w in W], ts.tensor(X))

    def program(mesh):
        gpus.driver.late = late
        ws = ts.dist.fsdp([ts.tensor(w) for w in W], axis="x", mesh=mesh)
        step = ts.jit(ts.grad(loss, argnums=0))
        x = placed(mesh, X, "rows")
        made = [[g.numpy() for g in step(ws, x)] for _ in range(3)]
        return made, str(step.plan)

    for made, plan in on_ranks(2, program):
        assert "reduce_scatter" in plan and "all_reduce" not in plan
        assert plan.count("all_gather") == (3 if kept else 5)
        for grads in made:
            for g, w in zip(grads, want, strict=True):
                assert_close(g, np.asarray(w.numpy(), "f8"), "bf16", 64, scale=0.1)
