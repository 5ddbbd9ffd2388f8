"""Optimizers on distributed tensors: states lie as parameters do, steps change no layout, and the
weights are those of one process with the whole batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from mesh import training
from mesh.launch import needs_mpi, results_of_all
from mesh.training import ADAM, COLUMNS, INNER, make_step, mesh_of, start, train
from tessera.graph import tree
from tolerance import assert_close

PROGRAMS = Path(training.__file__)
GRID = {"w1": COLUMNS, "b": COLUMNS, "w2": INNER}


@pytest.mark.row("DIST-26")
def test_data_parallel_training_equals_the_large_batch():
    params, batch = start(mesh_of(dp=4))
    optimizer = ts.optim.AdamW(**ADAM)
    step = make_step(optimizer)
    train(step, params, optimizer.init(params), batch)
    assert {c.op for c in step.plan} == {"all_reduce"} and len(step.plan) <= 2
    digests = ts.dist.simulate(training.data_parallel, 4)
    assert len(set(digests)) == 1


@pytest.mark.row("DIST-27", "DIST-21")
def test_column_and_row_parallel_layers_equal_the_dense_ones():
    mesh = mesh_of(dp=2, tp=3)
    params, batch = start(mesh, GRID)
    optimizer = ts.optim.AdamW(**ADAM)
    state = optimizer.init(params)
    for k, p in params.items():
        assert state["m"][k].layout == state["v"][k].layout == p.layout
    _, state = train(make_step(optimizer), params, state, batch)
    assert state["m"]["w1"].parts[0].shape == (13, 8) and int(state["step"].numpy()) == 5
    digests = [text.split()[0] for text in ts.dist.simulate(training.tensor_parallel, 6)]
    assert len(set(digests)) == 1


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("optimizer", [
    ts.optim.AdamW(**ADAM), ts.optim.SGD(momentum=0.9, weight_decay=0.2)], ids=["adamw", "sgd"])
def test_narrow_parameters_have_masters_that_lie_as_they_do(rng, optimizer, jit):
    mesh = mesh_of(dp=2, tp=2)
    values = {"a": rng.normal(size=(5, 7)), "b": rng.normal(size=(7,))}
    plain = {k: ts.param(v, "bf16") for k, v in values.items()}
    dist = {"a": ts.dist.distribute(plain["a"], COLUMNS, mesh=mesh),
            "b": ts.dist.distribute(plain["b"], None, mesh=mesh)}
    update = ts.jit(optimizer.update) if jit else optimizer.update
    states = [optimizer.init(plain), optimizer.init(dist)]
    assert states[1]["master"]["a"].layout == dist["a"].layout
    assert states[1]["master"]["a"].type == ts.as_type("f32")
    for _ in range(3):
        grads = {k: rng.normal(size=v.shape).astype(np.float32) for k, v in values.items()}
        plain, states[0] = update(plain, {k: ts.tensor(g) for k, g in grads.items()}, states[0],
                                  0.1)
        dist, states[1] = update(dist, {k: ts.tensor(g) for k, g in grads.items()}, states[1], 0.1)
    for k, p in plain.items():
        assert dist[k].type == p.type and dist[k].is_param
        assert_close(states[1]["master"][k].numpy(), states[0]["master"][k].numpy(), "f32")
        assert (dist[k].numpy() == p.numpy()).all()


@pytest.mark.parametrize("jit", [False, True])
def test_gradients_in_another_layout_change_no_layout(rng, jit):
    mesh = mesh_of(dp=3)
    values, g = rng.normal(size=(2, 6, 4)).astype(np.float32)
    optimizer = ts.optim.SGD(momentum=0.9)
    params = [ts.dist.distribute(ts.param(values), None, mesh=mesh)]
    state = optimizer.init(params)
    update = ts.jit(optimizer.update) if jit else optimizer.update
    grads = [ts.dist.distribute(g, training.ROWS, mesh=mesh)]
    (p,), made = update(params, grads, state, 0.5)
    assert p.layout == params[0].layout == made["m"]["0"].layout
    assert_close(p.numpy(), values - 0.5 * g, "f32", n=2)


def test_the_norm_of_parts_is_that_of_the_whole(rng):
    mesh = mesh_of(dp=2, tp=3)
    whole = {"a": rng.normal(size=(7, 8)), "b": rng.normal(size=(5,)), "c": rng.normal(size=())}
    specs = {"a": ts.ShardSpec(("row", "col"), ("dp", "tp")), "b": ts.ShardSpec(("row",), ("tp",)),
             "c": None}
    grads = {k: ts.dist.distribute(g.astype(np.float32), specs[k], mesh=mesh)
             for k, g in whole.items()}
    norm = np.sqrt(sum((g**2).sum() for g in whole.values()))
    clipped, got = ts.optim.clip_by_global_norm(grads, norm / 3)
    assert_close(got.numpy(), norm, "f32", n=60)
    for k, g in clipped.items():
        assert g.layout == grads[k].layout
        assert_close(g.numpy(), whole[k] / 3, "f32", n=60)


def test_states_are_saved_and_come_back_in_their_layouts(tmp_path):
    params, batch = start(mesh_of(dp=2, tp=2), GRID)
    optimizer = ts.optim.AdamW(**ADAM)
    step = make_step(optimizer)
    params, state, *_ = step(params, optimizer.init(params), *batch)
    ts.checkpoints.save(tmp_path, {"params": params, "state": state}, step=1)
    both = {"params": params, "state": state}
    saved = tree.map_tree(lambda x, like: ts.dist.distribute(x, like.layout),
                          ts.checkpoints.load(tmp_path).tree(both), both)
    mine = tree.flatten(both)[0]
    for x, y in zip(mine, tree.flatten(saved)[0], strict=True):
        assert (x.layout, x.type, x.is_param) == (y.layout, y.type, y.is_param)
        assert (x.numpy() == y.numpy()).all()
    two = [step(p, s, *batch)[2] for p, s in ((params, state), saved.values())]
    assert float(two[0]) == float(two[1]) and step.specializations == 1


@needs_mpi
@pytest.mark.row("DIST-26", "DIST-27")
@pytest.mark.parametrize("program", ["data_parallel", "tensor_parallel"])
def test_mpi_trains_to_the_bits_of_the_simulation(program):
    found = results_of_all(PROGRAMS, training.COMPARED, 4)[program]
    assert found == dict(enumerate(ts.dist.simulate(getattr(training, program), 4)))
