"""ZeRO: what a rank holds and what is sent at each stage; the weights are those without it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from mesh import training
from mesh.launch import needs_mpi, results_of_all
from mesh.training import ADAM, COLUMNS, held_bytes, make_step, mesh_of, problem, start, train
from tessera.graph import tree
from tolerance import assert_close

PROGRAMS = Path(training.__file__)
# Beside what is added up on all ranks. Short ones go together; each weight is gathered once.
OPS = {1: {"all_gather": 1}, 2: {"reduce_scatter": 1, "all_gather": 1},
       3: {"reduce_scatter": 1, "all_gather": 1}}


def whole_bytes(*names: str) -> int:
    return sum(problem()[k].nbytes for k in names)


@pytest.mark.row("DIST-41")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_bytes_and_collectives_of_a_stage(stage):
    params, batch = start(mesh_of(dp=4))
    optimizer = ts.dist.zero(ts.optim.AdamW(**ADAM), stage)
    params = optimizer.shard(params)
    state = optimizer.init(params)
    step = make_step(optimizer)
    params, state = train(step, params, state, batch)
    print(f"stage {stage}\n{step.plan}")
    assert Counter(c.op for c in step.plan if c.op != "all_reduce") == OPS[stage]
    everywhere = sum(c.bytes for c in step.plan if c.op == "all_reduce")
    small = 1.5 * (whole_bytes("gain") + 2 * 4)  # it stays whole; the norm and the loss
    assert everywhere <= (small if stage > 1 else 1.5 * whole_bytes("w1", "b", "w2") + small)

    split, whole = whole_bytes("w1", "b", "w2"), whole_bytes("gain")
    shares = [held_bytes((state["m"], state["v"]), rank) for rank in range(4)]
    assert sum(shares) == 2 * (split + 4 * whole)
    assert max(shares) <= 2 * (split * 1.25 / 4 + whole)
    of_params = sum(held_bytes(params, rank) for rank in range(4))
    assert of_params == (split + 4 * whole if stage == 3 else 4 * (split + whole))


@pytest.mark.row("DIST-41")
@pytest.mark.parametrize("program", ["zero_1", "zero_2", "zero_3"])
def test_simulated_ranks_hold_their_parts_alone(program):
    texts = [text.split() for text in ts.dist.simulate(getattr(training, program), 4)]
    assert len({digest for digest, *_ in texts}) == 1
    split = whole_bytes("w1", "b", "w2")
    states = [int(state) - 8 for *_, state in texts]  # without the step, an int64
    assert sum(states) == 2 * (split + 4 * whole_bytes("gain"))


def test_what_is_split_and_what_stays_whole(rng):
    mesh = mesh_of(dp=4, tp=2)
    shapes = {"plain": (5, 3), "columns": (9, 8), "short": (3, 6), "tiny": (3,), "scalar": ()}
    params = {k: ts.dist.distribute(ts.param(rng.normal(size=s)), COLUMNS if k == "columns" else
                                    None, mesh=mesh) for k, s in shapes.items()}
    state = ts.dist.zero(ts.optim.AdamW(), 1).init(params)
    found = {k: m.layout.describe() for k, m in state["m"].items()}
    assert found == {"plain": "(dp, -)", "columns": "(dp, tp)", "short": "(-, dp)", "tiny": "(-)",
                     "scalar": "()"}
    assert state["m"]["plain"].parts[0].shape == (2, 3)  # 5 rows on 4 ranks: 2, 1, 1, 1
    assert state["m"]["plain"].parts[7].shape == (1, 3)
    assert state["v"]["columns"].layout == state["m"]["columns"].layout


def test_masters_are_split_and_the_gathered_type_is_the_narrow_one(rng):
    mesh = mesh_of(dp=4)
    values = rng.normal(size=(6, 5))
    plain = {"w": ts.param(values, "bf16")}
    params = {"w": ts.dist.distribute(plain["w"], None, mesh=mesh)}
    inner = ts.optim.AdamW(**ADAM)
    optimizer = ts.dist.zero(inner, 1)
    state, reference = optimizer.init(params), inner.init(plain)
    assert state["master"]["w"].layout.describe() == "(dp, -)"
    update = ts.jit(optimizer.update)
    for _ in range(3):
        g = {"w": ts.tensor(rng.normal(size=(6, 5)), "f32")}
        params, state = update(params, g, state, 0.1)
        plain, reference = inner.update(plain, g, reference, 0.1)
    assert (params["w"].numpy() == plain["w"].numpy()).all()
    assert [(c.op, c.dtype) for c in update.plan] == [("all_gather", "bf16")]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_any_optimizer_with_init_and_update(rng, stage):
    class Plain:
        """p - lr g, and the sum of all gradients as its state."""

        def init(self, params):
            assert params[0].layout.describe() == "(dp, -)"  # no rank makes a whole state
            return {"sum": tree.map_tree(lambda p: p * 0.0, params)}

        def update(self, params, grads, state, lr):
            return (tree.map_tree(lambda p, g: p - lr * g, params, grads),
                    {"sum": tree.map_tree(lambda s, g: s + g, state["sum"], grads)})

    mesh = mesh_of(dp=3)
    values, g = rng.normal(size=(2, 4, 5)).astype(np.float32)
    optimizer = ts.dist.zero(Plain(), stage)
    params = optimizer.shard([ts.dist.distribute(ts.param(values), None, mesh=mesh)])
    state = optimizer.init(params)
    assert state["sum"][0].layout.describe() == "(dp, -)"
    for update in (optimizer.update, ts.jit(optimizer.update)):
        (p,), made = update(params, [ts.tensor(g)], state, 0.5)
        assert p.layout == params[0].layout and made["sum"][0].layout == state["sum"][0].layout
        assert_close(p.numpy(), values - 0.5 * g, "f32", n=2)
        assert (made["sum"][0].numpy() == g).all()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_that_an_optimizer_makes_in_any_way_are_split(rng, stage):
    class Factored:
        """Moments of gradients, one made like its parameter, and one of an axis from nothing."""

        def init(self, params):
            return [(ts.zeros_like(p), ts.full_like(p, 2.0), ts.zeros(p.shape[0])) for p in params]

        def update(self, params, grads, state, lr):
            new = [(m + g, n * 0.5 + g * g, r + ts.mean(g * g, axis=1))
                   for (m, n, r), g in zip(state, grads, strict=True)]
            return [p - lr * m / ts.sqrt(n * r[:, None] / ts.mean(r) + 1.0)
                    for p, (m, n, r) in zip(params, new, strict=True)], new

    def run(place, optimizer, params):
        @ts.jit
        def step(params, state, x):
            grads = ts.grad(lambda p: ts.mean(ts.tanh(x @ p[0]) ** 2))(params)
            return optimizer.update(params, grads, state, 0.5)

        state = optimizer.init(params)
        for _ in range(2):
            params, state = step(params, state, place(x))
        return params[0].numpy(), state[0]

    mesh, x = mesh_of(dp=4), rng.normal(size=(10, 6)).astype(np.float32)
    w = ts.param(rng.normal(size=(6, 5)).astype(np.float32))
    meant, _ = run(ts.tensor, Factored(), [w])
    optimizer, rows = ts.dist.zero(Factored(), stage), ts.ShardSpec(("row",), ("dp",))
    found, state = run(lambda x: ts.dist.distribute(x, rows, mesh=mesh), optimizer,
                       optimizer.shard([ts.dist.distribute(w, None, mesh=mesh)]))
    assert [t.layout.describe() for t in state] == ["(dp, -)", "(dp, -)", "(dp)"]
    assert_close(found, meant, "f32", n=64)


def test_a_state_is_made_without_a_message():
    """A model has hundreds of tensors, on whose parameters ranks have agreed."""
    mesh = mesh_of(tp=2)

    def program():
        params = [ts.dist.tensor((4, 3), COLUMNS, mesh, init=1.0, param=True)]
        if ts.dist.rank() == 0:  # a message would meet the barrier of the other rank
            ts.optim.AdamW().init(params)
        ts.dist.barrier()

    ts.dist.simulate(program, mesh)


@pytest.mark.parametrize("make", [ts.zeros_like, ts.ones_like, lambda x: ts.full_like(x, 3)])
@pytest.mark.parametrize("where", [lambda f: f, ts.jit])
def test_what_is_made_like_a_tensor_lies_as_it_does(make, where):
    x = ts.dist.tensor((5, 3), ts.ShardSpec(("row",), ("dp",)), mesh_of(dp=4), "bf16")
    y = where(make)(x)
    assert y.layout == x.layout and y.type == x.type
    assert (y.numpy() == make(ts.tensor(x.numpy(), "bf16")).numpy()).all()


def test_errors():
    mesh = mesh_of(dp=2)
    with pytest.raises(ts.ArgumentError, match="stages 1, 2 and 3, got 4"):
        ts.dist.zero(ts.optim.SGD(), 4)
    with pytest.raises(ts.ArgumentError, match="zero wraps an optimizer, got 'adam'"):
        ts.dist.zero("adam", 1)
    optimizer = ts.dist.zero(ts.optim.SGD(momentum=0.9), 1, axis="tp")
    with pytest.raises(ts.ArgumentError, match=r"parameter 'w' is f32\[3\], which lies on no mesh"):
        optimizer.init({"w": ts.ones(3)})
    with pytest.raises(ts.ArgumentError, match=r"parameter 'b' is f32\[3\], which lies on no mesh"):
        optimizer.init({"b": ts.ones(3), "w": ts.dist.distribute(ts.ones(3), None, mesh=mesh)})
    with pytest.raises(ts.ArgumentError, match="a distributed tensor needs a mesh"):
        optimizer.shard({"w": ts.ones(3)})
    with pytest.raises(ts.AxisError, match="has no axis 'tp'"):
        optimizer.init({"w": ts.dist.distribute(ts.ones(3), None, mesh=mesh)})


@needs_mpi
@pytest.mark.row("DIST-41")
@pytest.mark.parametrize("program", ["zero_2", "zero_3"])
def test_mpi_trains_to_the_bits_of_the_simulation(program):
    found = results_of_all(PROGRAMS, training.COMPARED, 4)[program]
    assert found == dict(enumerate(ts.dist.simulate(getattr(training, program), 4)))
