"""Mixture of experts: against a loop over experts, on a mesh and without one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from mesh import longcontext
from mesh.launch import needs_mpi, results_of_all
from mesh.training import ROWS, mesh_of
from tolerance import assert_close

PROGRAMS = Path(longcontext.__file__)
T, D, F, E = 24, 6, 10, 4
EP = ts.ShardSpec(("row",), ("ep",))


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _softmax(s: np.ndarray) -> np.ndarray:
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def loop(x, router, w1, w2, top_k, capacity, groups):
    """One token after the other: what it gets, and where there is no room any more, nothing."""
    gates = _softmax(x @ router)
    y = np.zeros_like(x)
    for tokens in np.split(np.arange(len(x)), groups):
        room = np.full(router.shape[1], capacity)
        order = np.argsort(-gates[tokens], axis=-1, kind="stable")[:, :top_k]
        for k in range(top_k):
            for t, e in zip(tokens, order[:, k], strict=True):
                if room[e] > 0:
                    chosen = gates[t, order[t - tokens[0]]]
                    weight = gates[t, e] / (chosen.sum() if top_k > 1 else 1)
                    y[t] += weight * (gelu(x[t] @ w1[e]) @ w2[e])
                room[e] -= 1
    return y


def operands(rng: np.random.Generator, tokens: int = T, experts: int = E) -> list[np.ndarray]:
    shapes = (tokens, D), (D, experts), (experts, D, F), (experts, F, D)
    return [rng.normal(size=s).astype(np.float32) for s in shapes]


def on_mesh(arrays: list, mesh: ts.dist.Mesh, tokens=EP) -> list:
    return [ts.dist.distribute(a, spec, mesh=mesh)
            for a, spec in zip(arrays, (tokens, None, EP, EP), strict=True)]


def layer(x, router, w1, w2, **options):
    return ts.moe(x, router, (w1, w2), **options)


@pytest.mark.row("DIST-29")
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("top_k, factor", [(1, 1.0), (1, None), (2, 0.5), (2, 1.25), (3, None)])
def test_a_layer_equals_the_loop_over_experts(rng, top_k, factor, jit):
    arrays = operands(rng)
    capacity = T if factor is None else int(np.ceil(factor * top_k * T / 4 / E))
    want = loop(*(a.astype(np.float64) for a in arrays), top_k, capacity, groups=4)

    def f(*xs, groups=None):
        return layer(*xs, top_k=top_k, capacity_factor=factor, groups=groups)

    run = ts.jit(f) if jit else f
    assert_close(run(*arrays, groups=4).numpy(), want, "f32", n=F * D)
    y = run(*on_mesh(arrays, mesh_of(ep=4)))
    assert y.layout.describe() == "(ep, -)"
    assert_close(y.numpy(), want, "f32", n=F * D)
    if jit:
        moves = [c for c in run.plan if c.op == "all_to_all"]
        assert [c.axes for c in moves] == [("ep",)] * 2 and len(run.plan) == 2
        per_group = min(T // 4, capacity) * E * D * 4
        assert [c.bytes for c in moves] == [per_group * 3 // 4] * 2


def test_what_finds_no_room_is_zero(rng):
    x, router, w1, w2 = operands(rng)
    router = np.zeros_like(router)  # equal gates: all tokens go to expert 0
    y = layer(x, router, w1, w2, capacity_factor=1.0).numpy()
    assert (y[T // E:] == 0).all() and (y[:T // E] != 0).any(axis=-1).all()


@pytest.mark.row("DIST-29")
@pytest.mark.parametrize("top_k, factor", [(1, 1.0), (2, 1.25)])
def test_gradients_and_the_balance_loss(rng, top_k, factor):
    arrays = operands(rng)

    def loss(*xs, groups=None):
        y, balance = layer(*xs, top_k=top_k, capacity_factor=factor, groups=groups, balance=True)
        return ts.mean(y**2) + 0.1 * balance

    slopes = ts.jit(ts.grad(loss, argnums=(0, 1, 2, 3)))
    xs = on_mesh(arrays, mesh_of(ep=4))
    whole = ts.grad(lambda *xs: loss(*xs, groups=4), argnums=(0, 1, 2, 3))(*map(ts.tensor, arrays))
    for g, w, x in zip(slopes(*xs), whole, xs, strict=True):
        assert g.layout == x.layout
        assert_close(g.numpy(), w.numpy(), "f32", n=T * F)
    assert Counter(c.op for c in slopes.plan)["all_to_all"] == 4
    wide = [a.astype(np.float64) for a in arrays]
    exact = ts.grad(lambda *xs: loss(*xs, groups=4), argnums=(0, 1, 2, 3))(*map(ts.tensor, wide))
    for i, g in enumerate(whole):  # against differences in f64: no gate is close to another
        v = rng.normal(size=arrays[i].shape)
        ends = [loss(*(a + h * v if j == i else a for j, a in enumerate(wide)), groups=4).item()
                for h in (1e-6, -1e-6)]
        slope, terms = (ends[0] - ends[1]) / 2e-6, g.numpy() * v
        assert_close((exact[i].numpy() * v).sum(), slope, "f32", n=T * F, scale=1.0)
        # In f32 the terms are rounded, and their sum may cancel.
        assert_close(terms.sum(), slope, "f32", n=T * F, scale=max(1.0, np.abs(terms).sum()))


def test_the_balance_loss_is_that_of_the_switch_paper(rng):
    x, router, w1, w2 = operands(rng, tokens=22)
    gates = _softmax((x @ router).astype(np.float64))
    f = np.bincount(gates.argmax(-1), minlength=E) / 22
    for groups in (1, 4):  # 22 tokens in 4 groups: two rows of zeros behind them
        _, loss = layer(x, router, w1, w2, groups=groups, balance=True)
        assert_close(loss.numpy(), E * (f * gates.mean(0)).sum(), "f32", n=22)


@pytest.mark.row("DIST-29")
def test_data_parallel_groups_and_uneven_experts(rng):
    arrays = operands(rng, experts=5)
    mesh = mesh_of(dp=3, ep=2)
    want = loop(*(a.astype(np.float64) for a in arrays), 2, 3, groups=6)
    both = ts.ShardSpec(("row",), (("dp", "ep"),))
    f = ts.jit(lambda *xs: layer(*xs, top_k=2, capacity_factor=1.5, data="dp"))
    for tokens in (both, ROWS):
        y = f(*on_mesh(arrays, mesh, tokens))
        assert_close(y.numpy(), want, "f32", n=F * D)
    assert [(c.op, c.axes) for c in f.plan] == [("all_to_all", ("ep",))] * 2
    assert [w.parts[0].shape[0] for w in on_mesh(arrays, mesh, both)[2:]] == [3, 3]


def test_tokens_that_do_not_divide(rng):
    x, router, w1, w2 = operands(rng, tokens=22)
    y = layer(*on_mesh([x, router, w1, w2], mesh_of(ep=4)), capacity_factor=None)
    want = loop(*(a.astype(np.float64) for a in (x, router, w1, w2)), 1, 22, groups=1)
    assert_close(y.numpy(), want, "f32", n=F * D)


def test_experts_of_any_kind_and_leading_extents(rng):
    x, router, w1, _ = operands(rng)
    bias = rng.normal(size=(E, D)).astype(np.float32)
    scale = rng.normal(size=(E, D)).astype(np.float32)
    tree = {"scale": scale, "bias": [bias]}
    y = ts.moe(x.reshape(2, 3, 4, D), router, tree, capacity_factor=None,
               expert=lambda p, t: t * p["scale"] + p["bias"][0]).numpy()
    e, gates = (x @ router).argmax(-1), _softmax(x @ router)
    want = gates.max(-1)[:, None] * (x * scale[e] + bias[e])
    assert y.shape == (2, 3, 4, D)
    assert_close(y.reshape(T, D), want, "f32", n=D)


def test_narrow_tokens_travel_narrow(rng):
    arrays = [ts.tensor(a, "bf16") for a in operands(rng)]
    f = ts.jit(layer)
    y = f(*on_mesh(arrays, mesh_of(ep=4)))
    assert y.type == ts.as_type("bf16") and {c.dtype for c in f.plan} == {"bf16"}
    same = ts.moe(*arrays[:2], tuple(arrays[2:]), groups=4)
    assert (y.numpy() == same.numpy()).all()


def test_slots_add_what_comes_together_and_leave_out_what_has_none():
    v = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    slots = np.array([[0, 3], [1, 0], [4, 9]])
    from tessera.mesh.parallel.token_slots import fill_slots, read_slots

    y = fill_slots(ts.tensor(v), ts.tensor(slots), 4).numpy()
    assert y.tolist() == [[0 + 6, 1 + 7], [4, 5], [0, 0], [2, 3]]
    back = read_slots(ts.tensor(y), ts.tensor(slots)).numpy()
    assert back.tolist() == [[[6, 8], [2, 3]], [[4, 5], [6, 8]], [[0, 0], [0, 0]]]


@pytest.mark.parametrize("change, error, words", [
    ({"top_k": 5}, ts.ArgumentError, "top_k=5 of 4 experts"),
    ({"capacity_factor": 0}, ts.ArgumentError, "capacity_factor must be positive, got 0"),
    ({"groups": 0}, ts.ArgumentError, "at least 1, got 0"),
    ({"axis": "tp"}, ts.AxisError, "has no axis 'tp'"),
    ({"data": "ep"}, ts.ArgumentError, "name an axis twice"),
    ({"expert": lambda p, x: ts.sum(x)}, ts.ShapeError, "an expert gives"),
])
def test_errors(rng, change, error, words):
    with pytest.raises(error, match=words):
        layer(*on_mesh(operands(rng), mesh_of(ep=2)), **change)


def test_errors_of_shapes(rng):
    x, router, w1, w2 = operands(rng)
    with pytest.raises(ts.ShapeError, match=r"experts\[1\] is \[3, 10, 6\]; its first extent must"):
        layer(x, router, w1, w2[:3])
    with pytest.raises(ts.ShapeError, match=r"a router \[D, E\], got \[24, 6\] and \[4, 6\]"):
        layer(x, router.T, w1, w2)
    with pytest.raises(ts.ArgumentError, match="two weights.*or a tree of tensors with a function"):
        ts.moe(x, router, w1)


@pytest.mark.row("DIST-29")
def test_simulated_ranks_have_the_tokens_of_one_process():
    assert len(set(ts.dist.simulate(longcontext.experts, 4))) == 1


@needs_mpi
@pytest.mark.row("DIST-29")
def test_mpi_gives_the_bits_of_the_simulation():
    found = results_of_all(PROGRAMS, longcontext.COMPARED, 4)["experts"]
    assert found == dict(enumerate(ts.dist.simulate(longcontext.experts, 4)))


@pytest.mark.parametrize("tokens", [T, 21])
@pytest.mark.parametrize("mesh", [False, True])
def test_an_expert_that_divides_by_the_norm_of_a_row_sees_no_empty_slot(rng, mesh, tokens):
    """Nor rows that fill the last group: of zeros its gradient would be NaN, and reported."""
    x, router, w, c = (rng.normal(size=s).astype(np.float32)
                       for s in ((tokens, D), (D, E), (E, D, F), (tokens, F)))

    def loss(w, x):
        y = ts.moe(x, router, w, groups=4, capacity_factor=None,
                   expert=lambda w, t: (t / ts.sqrt(ts.sum(t * t, axis=-1, keepdims=True))) @ w)
        return ts.sum(y * c)

    gates = _softmax(x.astype(np.float64) @ router)
    meant = np.zeros(w.shape)
    for t, e in enumerate(gates.argmax(-1)):
        meant[e] += gates[t, e] * np.outer(x[t] / np.linalg.norm(x[t]), c[t])
    on = mesh_of(ep=4)
    given = [ts.dist.distribute(a, EP, mesh=on) for a in (w, x)] if mesh else [w, x]
    for slope in (ts.grad(loss), ts.jit(ts.grad(loss))):
        with ts.debug.numerics("raise"):
            assert_close(slope(*given).numpy(), meant, "f32", n=T * D)
