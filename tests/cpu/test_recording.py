"""Calls as files, made again to the byte; ties have one answer, so that they can be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tessera as ts

ROOT = Path(__file__).resolve().parents[2]


def step_and_arguments(rng):
    """A training step that draws, rounds at random and updates in bf16; donated arguments."""
    optimizer = ts.optim.AdamW()

    @ts.jit(donate=("params", "state"))
    def step(params, state, x, lr):
        def loss(p):
            h = ts.dropout(ts.tanh(x @ ts.cast(p["w"], "f32")), 0.25)
            return ts.mean(ts.square(h))

        value, grads = ts.value_and_grad(loss)(params)
        params, state = optimizer.update(params, grads, state, lr)
        return params, state, value

    kind = ts.as_type("bf16") @ ts.stochastic_round
    params = {"w": ts.param(rng.standard_normal((6, 4)), kind)}
    return step, (params, optimizer.init(params), ts.tensor(rng.standard_normal((8, 6)), "f32"),
                  0.01)


@pytest.mark.row("DEP-04")
def test_a_recorded_call_is_made_again_to_the_byte(rng, tmp_path):
    step, args = step_and_arguments(rng)
    ts.random.seed(11)
    ts.random.normal((3,))
    made = ts.debug.record(step, tmp_path / "step.tsf", *args)
    after = ts.random.get_state()
    run = ts.debug.replay(tmp_path / "step.tsf")
    assert run.same and run.differing == () and run.where == ("cpu", "cpu")
    assert ts.random.get_state() == after  # looking at it draws nothing
    assert run.results["0.w"].numpy().tobytes() == made[0]["w"].numpy().tobytes()
    assert run.results["2"].item() == made[2].item()
    assert set(run.inputs) >= {"params.w", "x", "lr"} and run.inputs["lr"].item() == 0.01
    assert str(run) == "step on cpu, recorded on cpu: every byte as recorded"
    code = ("import tessera as ts\nrun = ts.debug.replay('step.tsf')\n"
            "assert run.same, str(run)\nprint(run)")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": str(ROOT),
                                          "TESSERA_NUM_THREADS": "1"})
    assert done.returncode == 0 and "every byte as recorded" in done.stdout, done.stderr


def test_what_comes_out_otherwise_is_named(rng, tmp_path, monkeypatch):
    f = ts.jit(lambda x: {"sum": ts.sum(x), "twice": x * 2.0})
    ts.debug.record(f, tmp_path / "f.tsf", ts.tensor(rng.standard_normal(5), "f32"))
    assert ts.debug.replay(tmp_path / "f.tsf").same
    real = ts.LoadedFunction.on_leaves

    def other(self, leaves):
        return {**real(self, leaves), "twice": leaves[0] * 2.5}

    monkeypatch.setattr(ts.LoadedFunction, "on_leaves", other)
    run = ts.debug.replay(tmp_path / "f.tsf")
    assert not run.same and run.differing == ("twice",) and str(run).endswith("differ: twice")


def test_what_cannot_be_recorded_or_replayed(tmp_path):
    mesh = ts.dist.mesh(axes="dp", shape=2)
    with pytest.raises(ts.ArgumentError, match="distributed arguments: a record is of one device"):
        ts.debug.record(lambda x: ts.sum(x), tmp_path / "f.tsf", ts.dist.tensor((4,), None, mesh))
    ts.export(lambda x: x + 1.0, tmp_path / "f.tsf", ts.ones(3))
    with pytest.raises(ts.ArgumentError, match="holds a function and no call of it"):
        ts.debug.replay(tmp_path / "f.tsf")


@pytest.mark.row("DEP-04")
@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
def test_ties_go_to_the_lowest_index(run, rng):
    x = rng.integers(0, 3, (40, 70)).astype(np.float32)
    t = ts.tensor(x)
    for axis in (0, 1):
        assert (run(lambda t, a=axis: ts.argmax(t, axis=a))(t).numpy() == x.argmax(axis)).all()
        assert (run(lambda t, a=axis: ts.argmin(t, axis=a))(t).numpy() == x.argmin(axis)).all()
    order = np.argsort(-x, axis=-1, kind="stable")[:, :9]
    values, places = run(lambda t: ts.top_k(t, 9))(t)
    assert (places.numpy() == order).all()
    assert (values.numpy() == np.take_along_axis(x, order, -1)).all()
    assert (run(lambda t: ts.argsort(t, axis=-1))(t).numpy() == np.argsort(
        x, axis=-1, kind="stable")).all()
