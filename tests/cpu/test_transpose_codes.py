"""Codes of 8 bits that matmuls read in both orders: their loops write them transposed as well."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera.graph import tree
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.kernels import strips
from tessera.graph.cuda.kernels.strips import STRIP_TURNED
from tessera.graph.schedule.ir import ScheduledGroup
from tolerance import assert_close

SCALING = ts.DelayedScaling(amax_history_len=2)
B, T = 4, 260  # a strip ends inside of the last


def drawn(rng: np.random.Generator, *shape: int, size: float = 1.0) -> ts.Tensor:
    return ts.tensor((rng.standard_normal(shape) * size).astype(np.float32))


def loss(p: dict, h: dict, x: Any, g: Any) -> Any:
    """x: [B, T, I]   g: [B, T, O]"""
    y, z = (SCALING.matmul(x, p[name], h[name]) for name in ("up", "gate"))
    y = ts.gelu(ts.cast(y + p["bias"], "bf16")) * ts.cast(z, "bf16")
    return ts.sum(SCALING.matmul(y, p["down"], h["down"]) ** 2 * g)


def lowered(rng: np.random.Generator) -> tuple[Any, list]:
    """The loss with its gradients and the largest numbers, compiled, and arguments of it."""
    p = {"up": drawn(rng, 1024, 48, size=0.1), "gate": drawn(rng, 1024, 48, size=0.1),
         "bias": drawn(rng, 48), "down": drawn(rng, 48, 64, size=0.1)}
    h = {name: SCALING.init(x=4.0, w=0.4, cotangent=1e-2) for name in ("up", "gate", "down")}
    fn = ts.jit(lambda p, h, x, g: ts.value_and_grad(loss, argnums=(0, 1))(p, h, x, g))
    return fn, [p, h, drawn(rng, B, T, 1024), ts.abs(drawn(rng, B, T, 64, size=1e-3))]


def turned(group: ScheduledGroup) -> list[str]:
    return [s.name for s in group.steps if s.op == STRIP_TURNED.name]


def test_kernels_compute_the_same(rng):
    fn, xs = lowered(rng)
    want = tree.flatten(fn(*xs))[0]
    got = CudaProgram(fn.graph(*xs), "sm_90a").run([np.asarray(t) for t in tree.flatten(xs)[0]])
    for y, exact in zip(got, want, strict=True):
        assert_close(y, exact, "f32", n=B * T, scale=np.abs(np.asarray(exact)).max())


def test_loops_write_both_orders_and_find_the_largest_number(rng):
    """Of x, by two scales, two large weights, the activation and three cotangents, of one of which
    the loop holds whole rows; a small weight is copied. Arguments are read once."""
    fn, xs = lowered(rng)
    groups = CudaProgram(fn.graph(*xs), "sm_90a").plan.groups
    writers = [g for g in groups if turned(g)]
    assert sum(len(turned(g)) for g in writers) == 8
    assert min(len(g.steps) for g in writers) > 1
    assert [g.space for g in writers if g.schedule.n == g.space[-1]] == [(B, T, 64)]
    assert {g.kind for g in writers} == {"strips"}
    assert [g.space for g in groups if g.kind == "move" and len(g.space) == 2] == [(64, 48)]
    weights = [g for g in writers if g.space == (1024, 48)]
    assert len(weights) == 2 and weights[0].batch == weights[1].batch != ""
    large = [r.name for g in groups for r in g.reads if r.shape in ((B, T, 1024), (1024, 48))
             and r.type.dtype.name == "f32"]
    assert len(large) == len(set(large))


def test_rows_without_room_are_turned_in_a_pass_of_their_own(monkeypatch, rng):
    monkeypatch.setattr(strips, "WIDE", 32)
    fn, xs = lowered(rng)
    groups = CudaProgram(fn.graph(*xs), "sm_90a").plan.groups
    alone = [g for g in groups if turned(g) and len(g.steps) == 1]
    assert [(g.space, g.reads[0].type.dtype.bits) for g in alone] == [((B, T, 64), 8)]


@pytest.mark.parametrize("target", ["sm_89", "sm_80"])
def test_other_chips_take_codes_as_they_lie(target, rng):
    fn, xs = lowered(rng)
    assert not any(map(turned, CudaProgram(fn.graph(*xs), target).plan.groups))


def test_a_norm_keeps_the_codes_of_its_rows_until_a_strip_ends(rng):
    """Both ways through it: its result and the cotangent that its gradient makes."""
    def loss(p, h, x, g):
        y = SCALING.matmul(x, p["up"], h["up"])
        y = ts.layernorm(ts.cast(y, "bf16"), p["bias"], p["bias"])
        return ts.sum(SCALING.matmul(ts.cast(y, "bf16"), p["down"], h["down"]) ** 2 * g)

    xs = lowered(rng)[1]
    xs[0] = {**xs[0], "up": drawn(rng, 48, 64, size=0.1), "down": drawn(rng, 64, 64, size=0.1),
             "bias": drawn(rng, 64)}
    xs[2] = drawn(rng, B, T, 48)
    fn = ts.jit(lambda p, h, x, g: ts.value_and_grad(loss, argnums=(0, 1))(p, h, x, g))
    want = tree.flatten(fn(*xs))[0]
    program = CudaProgram(fn.graph(*xs), "sm_90a")
    for y, exact in zip(program.run([np.asarray(t) for t in tree.flatten(xs)[0]]), want,
                        strict=True):
        assert_close(y, exact, "bf16", n=B * T, scale=np.abs(np.asarray(exact)).max())
    whole = [g for g in program.plan.groups if turned(g) and g.schedule.n == g.space[-1]]
    assert sorted(g.attr("rows") for g in whole) == [32, 32, 128]


def test_scales_of_now_are_found_before_the_codes(rng):
    """No loop can write both, and none copies what both read."""
    scaling = ts.CurrentScaling()
    fn = ts.jit(lambda w, x: ts.value_and_grad(lambda w: ts.sum(scaling.matmul(x, w) ** 2))(w))
    xs = [drawn(rng, 1024, 48, size=0.1), drawn(rng, B, T, 1024)]
    program = CudaProgram(fn.graph(*xs), "sm_90a")
    for y, exact in zip(program.run([np.asarray(x) for x in xs]), fn(*xs), strict=True):
        assert_close(y, exact, "f32", n=B * T, scale=np.abs(np.asarray(exact)).max())
    writes = [(y.shape, y.type.dtype.name) for g in program.plan.groups for y in g.writes]
    assert ((B, T, 1024), "f32") not in writes
    assert writes.count(((1024, 48), "f32")) == 1  # the gradient
