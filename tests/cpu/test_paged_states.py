"""Optimizers whose state lies in pages on the host: where pages are, and that the values are those
of a state that stays. On a GPU made of host memory; tests/gpu/test_movement.py has its bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart
from tessera import OptimizerState, checkpointable, fp32_master, paged
from tessera.checkpoints import load, save
from tessera.graph import tree

COUNT, WIDTH = 5, 128
PAGE = 4 * WIDTH * WIDTH
OPTIMIZERS = [(ts.optim.AdamW(), "f32"), (ts.optim.AdamW(), "bf16"), (ts.optim.Muon(), "f32"),
              (ts.optim.SGD(momentum=0.9), "bf16"), (ts.optim.Adafactor(), "f32")]


def problem(rng: np.random.Generator, dtype: str = "f32", device: str = "cuda") -> tuple:
    """(parameters, gradients): some of them pages, one too short for it."""
    shapes = {**{f"w{i}": (WIDTH, WIDTH) for i in range(COUNT)}, "b": (WIDTH,)}
    params, grads = ({k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}
                     for _ in range(2))
    return (ts.to({k: ts.param(a, dtype) for k, a in params.items()}, device),
            ts.to({k: ts.tensor(a) for k, a in grads.items()}, device))


def train(optimizer: Any, params: Any, grads: Any, jit: bool, steps: int = 3) -> tuple:
    def step(params, state, grads):
        return optimizer.update(params, grads, state, 0.1)

    step = ts.jit(donate=("params", "state"))(step) if jit else step
    state = optimizer.init(params)
    for _ in range(steps):
        params, state = step(params, state, grads)
    return params, state


def bits(x: Any) -> list[bytes]:
    return [t.array.tobytes() for t in tree.flatten(x)[0]]


def on_device(state: Any) -> int:
    return sum(x.nbytes for x in tree.flatten(state)[0] if not x.offloaded)


@pytest.mark.row("STATE-12")
@pytest.mark.usefixtures("gpu", "apart")
@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("pages", [0, 3, 100])
def test_no_more_than_the_limit_stays(pages, jit, rng):
    params, grads = problem(rng)
    short = 2 * 4 * WIDTH + 8
    optimizer = ts.optim.paged(ts.optim.AdamW(), resident_bytes=pages * PAGE + short)
    state = optimizer.init(params)
    assert on_device(state) == min(pages, 2 * COUNT) * PAGE + short
    params, state = train(optimizer, params, grads, jit)
    assert on_device(state) == min(pages, 2 * COUNT) * PAGE + short
    assert not any(p.offloaded for p in params.values())


@pytest.mark.row("STATE-12")
@pytest.mark.usefixtures("gpu", "apart")
@pytest.mark.parametrize(("inner", "dtype"), OPTIMIZERS)
def test_values_are_those_of_a_state_that_stays(inner, dtype, rng):
    params, grads = problem(rng, dtype)
    copies = [ts.map_tree(lambda p: p.copy(), params) for _ in range(3)]
    for p in (x for c in copies for x in c.values()):
        p.is_param = True
    want = train(inner, copies[0], grads, True)
    for jit, given in zip((True, False), copies[1:], strict=True):
        found = train(ts.optim.paged(inner, 2 * PAGE), given, grads, jit)
        assert bits(found) == bits(want)
        pages = [x.nbytes >= PAGE // 2 for x in tree.flatten(want[1])[0]]  # Adafactor's are short
        assert any(x.offloaded for x in tree.flatten(found[1])[0]) == (sum(pages) > 2)


@pytest.mark.usefixtures("gpu", "apart")
def test_a_step_brings_each_page_and_sends_it_back(rng):
    params, grads = problem(rng)
    optimizer = ts.optim.paged(ts.optim.AdamW())
    step = ts.jit(lambda p, s, g: optimizer.update(p, g, s, 0.1))
    state = optimizer.init(params)
    for _ in range(2):
        params, state = step(params, state, grads)
    verbs = [m.verb for m in ts.plan(step)]
    assert verbs.count("fetch") == verbs.count("offload") == 2 * COUNT
    assert step._last_traced().executable.program.plan.temporary_bytes < 5 * PAGE


def test_on_the_host_it_changes_nothing(rng):
    params, grads = problem(rng, device="cpu")
    want = train(ts.optim.AdamW(), params, grads, False)
    assert bits(train(ts.optim.paged(ts.optim.AdamW()), params, grads, False)) == bits(want)


@pytest.mark.row("STATE-12")
@pytest.mark.usefixtures("gpu", "apart")
def test_the_type_of_a_paged_state(rng, tmp_path):
    params, grads = problem(rng, "bf16")
    kind = OptimizerState[params] @ fp32_master @ paged @ checkpointable
    assert repr(kind).endswith("@fp32_master @paged @checkpointable")
    optimizer = ts.optim.paged(ts.optim.AdamW(), 2 * PAGE)
    state = kind(optimizer)
    assert set(state["master"]) == set(params) and on_device(state) <= 2 * PAGE
    params, state = optimizer.update(params, grads, state, 0.1)
    kind.save(tmp_path / "c", params, state)
    again, found, _ = kind.load(tmp_path / "c", optimizer)
    assert bits((again, found)) == bits((params, state))
    assert on_device(found) == on_device(state)
    with pytest.raises(ts.ArgumentError, match="is given AdamW, which leaves all of a state on"):
        kind(ts.optim.AdamW())


@pytest.mark.usefixtures("gpu", "apart")
def test_a_paged_state_loads_where_it_lay_and_where_it_did_not(rng, tmp_path):
    params, grads = problem(rng)
    plain, optimizer = ts.optim.AdamW(), ts.optim.paged(ts.optim.AdamW())
    params, state = train(optimizer, params, grads, True)
    save(tmp_path / "c", state)
    for like in (optimizer.init(params), plain.init(params)):
        found = load(tmp_path / "c").tree(like)
        assert bits(found) == bits(state) and on_device(found) == on_device(like)


def test_mistakes(rng):
    for given in (ts.optim.AdamW, 3, None):
        with pytest.raises(ts.ArgumentError, match="paged wraps an optimizer, got"):
            ts.optim.paged(given)
    for limit in (-1, 0.5, True, "1GB"):
        with pytest.raises(ts.ArgumentError, match="resident_bytes is a number of bytes, got"):
            ts.optim.paged(ts.optim.AdamW(), limit)
    mesh = ts.dist.mesh(axes="dp", shape=2)
    params = {"w": ts.dist.tensor((4, 4), None, mesh, param=True)}
    with pytest.raises(ts.ArgumentError, match="the parameters lie on a mesh"):
        ts.optim.paged(ts.optim.AdamW()).init(params)
