"""Programs that train on a mesh, for one process, simulated ranks and mpirun.

    mpirun -n 4 python tests/mesh/training.py PROGRAM FOLDER     each rank writes FOLDER/<rank>

Each trains the same two layers, checks the weights against NumPy in f64, and returns a hash of them
with the bytes that a rank holds.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import tessera as ts
from mesh.processes import run_programs
from tessera.graph import tree
from tolerance import assert_close

ROWS = ts.ShardSpec(("row",), ("dp",))
COLUMNS = ts.ShardSpec(("col",), ("tp",))
INNER = ts.ShardSpec(("row",), ("tp",))
STEPS, RATE, LIMIT = 5, 0.05, 0.1
REVERSED = [5, 4, 3, 2, 1, 0]
ADAM = {"b1": 0.8, "b2": 0.9, "eps": 1e-3, "weight_decay": 0.2}


@functools.cache
def problem() -> dict[str, np.ndarray]:
    """Weights and a batch whose extents no mesh here divides."""
    rng = np.random.default_rng(11)
    shapes = {"w1": (13, 22), "b": (22,), "w2": (22, 6), "gain": (3,), "x": (27, 13), "y": (27, 6)}
    return {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def loss_of(params: Mapping, x: ts.Tensor, y: ts.Tensor) -> ts.Tensor:
    h = ts.tanh(x @ params["w1"] + params["b"])
    return ts.mean((h @ params["w2"] * ts.sum(params["gain"]) - y) ** 2)


# --- the oracle ----------------------------------------------------------------------------------
def slopes(p: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> tuple[float, dict]:
    """Loss and gradients of loss_of, by hand."""
    h = np.tanh(x @ p["w1"] + p["b"])
    z, gain = h @ p["w2"], p["gain"].sum()
    r = z * gain - y
    dz = 2 * r * gain / r.size
    dh = dz @ p["w2"].T * (1 - h**2)
    slope = (2 * r * z / r.size).sum()
    return (r**2).mean(), {"w1": x.T @ dh, "b": dh.sum(0), "w2": h.T @ dz,
                           "gain": np.full(3, slope)}


@functools.cache
def expected() -> dict[str, Any]:
    """Weights after STEPS of clipped AdamW (arXiv:1711.05101, algorithm 2) in f64."""
    given = {k: a.astype(np.float64) for k, a in problem().items()}
    x, y = given.pop("x"), given.pop("y")
    m, v = ({k: np.zeros_like(p) for k, p in given.items()} for _ in range(2))
    norms = []
    for t in range(1, STEPS + 1):
        loss, g = slopes(given, x, y)
        norms.append(np.sqrt(sum((a**2).sum() for a in g.values())))
        scale = min(1.0, LIMIT / norms[-1])
        for k, a in g.items():
            a = a * scale
            m[k] = ADAM["b1"] * m[k] + (1 - ADAM["b1"]) * a
            v[k] = ADAM["b2"] * v[k] + (1 - ADAM["b2"]) * a**2
            change = m[k] / (1 - ADAM["b1"]**t) / (
                np.sqrt(v[k] / (1 - ADAM["b2"]**t)) + ADAM["eps"])
            decay = ADAM["weight_decay"] if a.ndim > 1 else 0.0
            given[k] = given[k] - RATE * (change + decay * given[k])
    return {**given, "loss": loss, "norms": norms}


# --- training ------------------------------------------------------------------------------------
def mesh_of(**axes: int) -> ts.dist.Mesh:
    return ts.dist.mesh(axes=tuple(axes), shape=tuple(axes.values()))


def make_step(optimizer: Any) -> Callable:
    @ts.jit
    def step(params, state, x, y):
        loss, grads = ts.value_and_grad(loss_of)(params, x, y)
        grads, norm = ts.optim.clip_by_global_norm(grads, LIMIT)
        params, state = optimizer.update(params, grads, state, RATE)
        return params, state, loss, norm

    return step


def start(mesh: ts.dist.Mesh, layouts: Mapping[str, Any] | None = None) -> tuple:
    """Parameters, repeated or as `layouts` say, and the batch in rows over dp."""
    given, where = dict(problem()), layouts or {}
    batch = [ts.dist.distribute(given.pop(k), ROWS, mesh=mesh) for k in "xy"]
    params = {k: ts.dist.distribute(ts.param(a), where.get(k), mesh=mesh)
              for k, a in given.items()}
    return params, batch


def train(step: Callable, params: Any, state: Any, batch: Any) -> tuple:
    """(params, state) after STEPS, compared with the oracle; the layouts do not change, so the
    step is compiled once."""
    lies = [x.layout for x in tree.flatten((params, state))[0]]
    for norm in expected()["norms"]:
        params, state, loss, got = step(params, state, *batch)
        assert_close(got.numpy(), norm, "f32", n=100)
        assert [x.layout for x in tree.flatten((params, state))[0]] == lies
    assert step.specializations == 1
    assert_close(loss.numpy(), expected()["loss"], "f32", n=100)
    for k, p in params.items():
        assert p.is_param
        assert_close(p.numpy(), expected()[k], "f32", n=100)
    return params, state


def held_bytes(held: Any, rank: int | None = None) -> int:
    """Bytes that a rank holds of a tree of distributed tensors."""
    leaves = tree.flatten(held)[0]
    return sum((x.local if rank is None else x.parts[rank]).nbytes for x in leaves)


def report(params: Any, state: Any) -> str:
    digest = hashlib.sha256(b"".join(p.numpy().tobytes() for p in params.values())).hexdigest()
    return f"{digest} {held_bytes(params)} {held_bytes(state)}"


def data_parallel() -> str:
    """A replicated model on rows of the batch."""
    params, batch = start(mesh_of(dp=ts.dist.world_size()))
    optimizer = ts.optim.AdamW(**ADAM)
    return report(*train(make_step(optimizer), params, optimizer.init(params), batch))


def tensor_parallel() -> str:
    """Columns of the first layer, rows of the second, on rows of the batch."""
    mesh = mesh_of(dp=2, tp=ts.dist.world_size() // 2)
    params, batch = start(mesh, {"w1": COLUMNS, "b": COLUMNS, "w2": INNER})
    optimizer = ts.optim.AdamW(**ADAM)
    return report(*train(make_step(optimizer), params, optimizer.init(params), batch))


def zero(stage: int) -> str:
    params, batch = start(mesh_of(dp=ts.dist.world_size()))
    optimizer = ts.dist.zero(ts.optim.AdamW(**ADAM), stage)
    params = optimizer.shard(params)
    return report(*train(make_step(optimizer), params, optimizer.init(params), batch))


def zero_1() -> str:
    return zero(1)


def zero_2() -> str:
    return zero(2)


def zero_3() -> str:
    return zero(3)


def fsdp() -> str:
    """Fully sharded over dp what tensor parallel ranks have in columns and rows already."""
    mesh = mesh_of(dp=2, tp=ts.dist.world_size() // 2)
    params, batch = start(mesh, {"w1": COLUMNS, "b": COLUMNS, "w2": INNER})
    params = ts.dist.fsdp(params, axis="dp")
    optimizer = ts.optim.AdamW(**ADAM)
    return report(*train(make_step(optimizer), params, optimizer.init(params), batch))


# --- trees of more than parameters ---------------------------------------------------------------
def mixed_tree(mesh: ts.dist.Mesh) -> dict[str, Any]:
    """One parameter on the mesh, the others on none, and what else a model holds."""
    given = {k: ts.param(a) for k, a in problem().items() if k not in "xy"}
    given["w1"] = ts.dist.distribute(given["w1"], None, mesh=mesh)
    return given | {
        "order": ts.tensor(REVERSED), "scale": ts.ones(6), "mask": np.ones(6, bool),
        "times": 2, "half": 0.5, "act": "tanh", "none": None, "f": ts.tanh}


def mixed_loss(p: Mapping, x: ts.Tensor, y: ts.Tensor) -> ts.Tensor:
    """loss_of, through what stands beside the parameters."""
    h = p["f"](x @ p["w1"] + p["b"])
    z = (h @ p["w2"] * ts.sum(p["gain"]) - y)[:, p["order"]] * p["scale"] * p["mask"]
    return ts.mean(z ** 2) * p["times"] * p["half"]


def mixed() -> str:
    """Each way to split such a tree trains it to the weights of the oracle."""
    mesh = mesh_of(dp=ts.dist.world_size() if ts.dist.world_size() > 1 else 4)
    batch = [ts.dist.distribute(problem()[k], ROWS, mesh=mesh) for k in "xy"]
    found = []
    for stage in range(4):
        adam = ts.optim.AdamW(**ADAM)
        optimizer = ts.dist.zero(adam, stage) if stage else adam
        params = mixed_tree(mesh)
        params = optimizer.shard(params) if stage else ts.dist.fsdp(params)
        split = "(dp) regather dp" if stage in (0, 3) else "(-)"
        assert params["b"].layout.describe() == split, params["b"]
        for buffer in ("order", "scale"):
            assert params[buffer].layout.is_replicated and not params[buffer].is_param
        assert [params[k] for k in ("times", "half", "act", "none")] == [2, 0.5, "tanh", None]
        state = optimizer.init(params)
        assert set(state["m"]) == {"w1", "b", "w2", "gain"}

        @ts.jit(donate=("params", "state"))
        def step(params, state, x, y, optimizer=optimizer):
            loss, grads = ts.value_and_grad(mixed_loss)(params, x, y)
            grads, norm = ts.optim.clip_by_global_norm(grads, LIMIT)
            return *optimizer.update(params, grads, state, RATE), norm

        for norm in expected()["norms"]:
            params, state, got = step(params, state, *batch)
            assert_close(got.numpy(), norm, "f32", n=100)
        assert params["b"].layout.describe() == split and params["order"].tolist() == REVERSED
        for k in state["m"]:
            assert_close(params[k].numpy(), expected()[k], "f32", n=100)
            found.append(params[k].numpy().tobytes())
    return hashlib.sha256(b"".join(found)).hexdigest()


# Those whose bits under mpirun are compared with the simulation's, in one run.
COMPARED = "data_parallel,tensor_parallel,zero_2,zero_3,fsdp,mixed"

if __name__ == "__main__":
    run_programs(globals(), sys.argv[1], sys.argv[2])
