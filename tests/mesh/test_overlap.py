"""ts.overlap: the hint reaches the plan, collectives begin early, values stay the same."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from mesh.training import COLUMNS, ROWS, mesh_of
from tessera.mesh.sharding import collective_order
from tessera.mesh.sharding.partitioned_steps import LayoutHop

HINT = "  [overlap "


def layers(rng, count=4, width=12, batch=64):
    weights = [ts.param(rng.normal(size=(width, width)) / 4) for _ in range(count)]
    return weights, rng.normal(size=(batch, width)).astype(np.float32)


def loss(weights, x):
    for w in weights:
        x = ts.tanh(x @ w)
    return ts.mean(x**2)


def hinted(comm):
    @ts.jit
    def step(weights, x):
        with ts.overlap(comm):
            return ts.grad(loss)(weights, x)

    return step


def place(step, what):
    """Where in the program of the last call moves of a kind begin, and its length."""
    steps = step.traced(*step.last).program.made.steps
    return [i for i, s in enumerate(steps) if isinstance(s, LayoutHop) and s.hop.kind == what], \
        len(steps)


def test_gradient_reductions_begin_before_the_backward_pass_ends(rng):
    weights, x = layers(rng)
    mesh = mesh_of(dp=4)
    xs = [ts.dist.distribute(w, None, mesh=mesh) for w in weights], \
        ts.dist.distribute(x, ROWS, mesh=mesh)
    plain, early = ts.jit(ts.grad(loss)), hinted("dp")
    for g, w in zip(early(*xs), plain(*xs), strict=True):
        assert (g.numpy() == w.numpy()).all() and g.layout == w.layout
    assert [c.op for c in plain.plan] == ["all_reduce"] and plain.plan[0].beside is None
    assert [c.op for c in early.plan] == ["all_reduce"] * 4
    beside = [c.beside for c in early.plan]
    print(early.plan)
    assert beside[0] > beside[1] > beside[2] > beside[3] >= 0 and beside[0] > 10
    assert f"beside {beside[0]} ops" in str(early.plan)
    early.last = xs
    at, length = place(early, "all_reduce")
    assert at[0] < length // 2 + 10 and at == sorted(at)


def test_the_hint_is_in_the_graph_and_its_gradients(rng):
    weights, x = layers(rng, count=2)
    step = hinted("dp_all_reduce")
    step(weights, x)
    lines = [line for line in step.inspect_ir("graph").splitlines() if " = " in line]
    assert all(f"{HINT}dp_all_reduce]" in line for line in lines if "#" in line)
    assert sum("matmul" in line and HINT in line for line in lines) >= 4  # both passes
    assert HINT not in ts.jit(ts.grad(loss)).inspect_ir("graph", weights, x)


@pytest.mark.row("DIST-42")
def test_gathers_of_fsdp_begin_one_layer_early(rng, monkeypatch):
    monkeypatch.setattr(collective_order, "SHORT_BYTES", 0)  # short ones go together
    weights, x = layers(rng)
    mesh = mesh_of(dp=4)
    params = ts.dist.fsdp(weights, mesh=mesh)
    rows = ts.dist.distribute(x, ROWS, mesh=mesh)
    plain, early = ts.jit(ts.grad(loss)), hinted("all_gather")
    for g, w in zip(early(params, rows), plain(params, rows), strict=True):
        assert (g.numpy() == w.numpy()).all()
    gathers = [c for c in early.plan if c.op == "all_gather"]
    assert gathers[0].beside == 0 and all(c.beside for c in gathers[1:])
    assert {c.beside for c in early.plan if c.op == "reduce_scatter"} == {None}
    assert len(early.plan) == len(plain.plan) and early.plan.bytes == plain.plan.bytes


@pytest.mark.parametrize("comm, axes, kinds", [
    ("dp", {"dp"}, {}), ("tp", {"tp"}, {}), ("tp_all_reduce", {"tp"}, {"all_reduce"}),
    ("all_reduce", {"dp", "tp"}, {"all_reduce"}), (("dp", "tp"), {"dp", "tp"}, {}),
    ((), {"dp", "tp"}, {}), ("dp_all_gather", {"dp"}, {"all_gather"})])
def test_which_collectives_a_hint_means(rng, comm, axes, kinds):
    mesh = mesh_of(dp=2, tp=2)
    w1, w2, x = (rng.normal(size=s).astype(np.float32) for s in ((6, 8), (8, 6), (32, 6)))
    args = [ts.dist.distribute(a, s, mesh=mesh) for a, s in (
        (w1, COLUMNS), (w2, ts.ShardSpec(("row",), ("tp",))), (x, ROWS))]

    @ts.jit
    def step(w1, w2, x):
        with ts.overlap(comm):
            f = ts.grad(lambda w1, w2: ts.mean(ts.tanh(ts.tanh(x @ w1) @ w2)), argnums=(0, 1))
            return f(w1, w2)

    step(*args)
    assert {a for c in step.plan for a in c.axes} == {"dp", "tp"}
    for c in step.plan:
        assert (c.beside is not None) == (c.axes[0] in axes and (not kinds or c.op in kinds))


def test_a_block_around_a_call_traces_anew(rng):
    weights, x = layers(rng, count=1)
    step = ts.jit(ts.grad(loss))
    step(weights, x)
    with ts.overlap("dp"):
        step(weights, x)
        assert HINT in step.inspect_ir("graph")
    step(weights, x)
    assert step.specializations == 2 and HINT not in step.inspect_ir("graph")


def test_an_axis_that_is_not_there():
    with mesh_of(dp=2), pytest.raises(ts.ArgumentError, match="has no axis 'pp'"):
        ts.overlap("pp_all_reduce")


def test_gradients_that_are_cast_are_reduced_together(rng):
    """A cast behind each reduction does not end the wait of the others for each other."""
    mesh = ts.dist.mesh(axes="dp", shape=2)
    X, *W = (rng.standard_normal(s).astype(np.float32) for s in ((256, 8), *[(8, 8)] * 3))

    def loss(ws, x):
        for w in ws:
            x = ts.gelu(ts.cast(ts.cast(x, "bf16") @ ts.cast(w, "bf16"), "f32"))
        return ts.mean(ts.square(x))

    step = ts.jit(lambda ws, x: [w - 0.1 * g for w, g in zip(
        ws, ts.grad(loss, argnums=0)(ws, x), strict=True)])
    spread = [ts.dist.distribute(w, ts.ShardSpec(replicate=True), mesh=mesh) for w in W]
    x = ts.dist.distribute(X, ts.ShardSpec(("row",), ("dp",)), mesh=mesh)
    made, want = step(spread, x), step([ts.tensor(w) for w in W], ts.tensor(X))
    step(spread, x)
    assert [c.op for c in step.plan] == ["all_reduce"] and "and 2 more" in step.plan[0].why
    for a, b in zip(made, want, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=2e-2, atol=2e-3)
