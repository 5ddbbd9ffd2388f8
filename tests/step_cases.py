"""Steps of a training loop, on a GPU and on a mesh of one: what tests of them share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart
from mesh.test_gpu_programs import gpus as gpus
from tessera.graph.placed_leaves import FEW
from tessera.graph.prepared_call import PreparedCall
from tessera.mesh import placement
from tessera.tensor import Tensor
from tessera.tile.launch.memory_turns import InTurn

Place = Callable[[np.ndarray], Tensor]


def on_gpu(x: np.ndarray) -> Tensor:
    return ts.tensor(x).to("cuda")


def on_mesh(x: np.ndarray) -> Tensor:
    mesh = ts.dist.mesh(["cuda:0"], axes="dp")
    return ts.dist.distribute(ts.tensor(x), ts.ShardSpec(replicate=True), mesh=mesh)


@pytest.fixture(params=[on_gpu, on_mesh])
def place(request: Any, gpus: Any, monkeypatch: Any) -> Iterator[Place]:
    monkeypatch.setattr(placement, "REAL", {"single"})
    yield request.param
    gc.collect()  # memory goes while there is a driver to give it back to


@pytest.fixture
def long_way(monkeypatch: Any) -> list[str]:
    """Counts the calls of prepared functions that look at each leaf."""
    ask, seen = PreparedCall.tensors, list[str]()
    monkeypatch.setattr(PreparedCall, "tensors",
                        lambda s, leaves: seen.append(s.traced.graph.name) or ask(s, leaves))
    return seen


def weights(place: Place, count: int = FEW) -> dict[str, Tensor]:
    return {f"w{i}": place(np.full(4, i, np.float32)) for i in range(count)}


def step(p: Any, x: Any) -> Any:
    loss = ts.sum(x)
    return loss, {k: v * 0.5 + x for k, v in p.items()}


def long_step(p: Any, x: Any) -> Any:
    """One that is launched as a graph."""
    y = x
    for _ in range(3):
        y = ts.sort(y) + ts.sum(y)
    return ts.sum(y) + ts.sum(p["w9"]), step(p, x)[1]


def after(steps: int, first: float = 0.0, x: float = 1.0) -> float:
    """An element of w0 after so many steps of this x."""
    for _ in range(steps):
        first = first * 0.5 + x
    return first


def ones(place: Place) -> Tensor:
    return place(np.ones(4, np.float32))


def in_turn(p: Any) -> list[bool]:
    """Of each tensor, whether it has its memory in turn with others."""
    return [(v._storage if v.layout is None else v._held).__class__ is InTurn for v in p.values()]


def stepped(f: Any, p: Any, place: Place, steps: int) -> Any:
    for _ in range(steps):
        _, p = f(p, ones(place))
    return p
