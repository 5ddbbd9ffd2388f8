"""ts.alpa_shard: what it chooses costs no more than other choices, fits, and runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from tessera import Tensor
from tessera.planning.alpa import _Prices, _Problem, candidates
from tessera.planning.search import Cost, search

S = ts.ShardSpec


def grid(**axes: int):
    return ts.dist.mesh(axes=tuple(axes), shape=tuple(axes.values()), topology="8xh200")


MESH = grid(dp=2, tp=4)


def toy(params, x):
    """Two layers: a step of gradient descent."""
    def loss(p):
        return ts.mean(ts.square(ts.relu(x @ p["w1"]) @ p["w2"]))

    value, grads = ts.value_and_grad(loss)(params)
    return {k: params[k] - 0.1 * grads[k] for k in params}, value


TOY = {"w1": Tensor[64, 256, ts.f32], "w2": Tensor[256, 64, ts.f32]}
TOY_X = ts.dist.stand_in((128, 64), S(("row",), ("dp",)), MESH)


def price(spec1: ts.ShardSpec, spec2: ts.ShardSpec) -> tuple[float, float]:
    """(microseconds of exchanges, bytes of a rank) of layouts, by a plan of its own."""
    owner = ts.alpa_shard(toy, MESH, "1 GB")
    problem = _Problem(owner, (TOY, TOY_X), {})
    exchange, _, held = _Prices(problem).of(dict(zip(
        dict.fromkeys(problem.group.values()), (spec1, spec2), strict=True)))
    return exchange, held


@pytest.mark.row("DIST-43")
def test_chosen_layouts_exchange_no_more_than_any_uniform_choice():
    """Uniform: one spec for both matrices. Without a limit, and with one that only some meet."""
    uniform = [s for s in candidates((64, 256), MESH) if s in candidates((256, 64), MESH)]
    prices = [price(s, s) for s in uniform]
    assert len(uniform) > 6 and len({p[0] for p in prices}) > 3
    for limit in (float("inf"), *np.quantile([b for _, b in prices], [0.25, 0.75])):
        chosen = ts.alpa_shard(toy, MESH, limit).choose(TOY, TOY_X)
        assert set(chosen.specs) == {"params.w1", "params.w2"}
        assert all(isinstance(s, ts.ShardSpec) for s in chosen.specs.values())
        assert chosen.bytes <= limit
        assert chosen.exchange_us <= min(us for us, held in prices if held <= limit)
        assert (chosen.exchange_us, chosen.bytes) == pytest.approx(price(*chosen.specs.values()))


@pytest.mark.row("DIST-43")
def test_the_memory_limit_is_kept_and_costs_time():
    free = ts.alpa_shard(toy, MESH, "1 GB").choose(TOY, TOY_X)
    tight = ts.alpa_shard(toy, MESH, free.bytes * 0.6).choose(TOY, TOY_X)
    assert tight.bytes <= free.bytes * 0.6 and tight.exchange_us >= free.exchange_us
    with pytest.raises(ts.OutOfMemoryError) as info:
        ts.alpa_shard(toy, MESH, 1000).choose(TOY, TOY_X)
    assert "fits into 1 kB a rank; the least found needs" in str(info.value)
    least = int(str(info.value).partition("memory_limit=")[2].split()[0])
    assert ts.alpa_shard(toy, MESH, least).choose(TOY, TOY_X).bytes <= least
    with pytest.raises(ts.OutOfMemoryError):
        ts.alpa_shard(toy, MESH, least - 1).choose(TOY, TOY_X)


@pytest.mark.row("DIST-43")
def test_what_is_chosen_runs_and_gives_the_same(rng):
    mesh = grid(dp=2, tp=2)
    params = {k: ts.tensor(rng.normal(size=t.shape).astype(np.float32)) * 0.1
              for k, t in {"w1": Tensor[16, 32, ts.f32], "w2": Tensor[32, 16, ts.f32]}.items()}
    x = ts.tensor(rng.normal(size=(8, 16)).astype(np.float32))
    want, loss = ts.jit(toy)(params, x)
    g = ts.alpa_shard(toy, mesh, "6 kB")
    split = ts.dist.distribute(x, S(("row",), ("dp",)), mesh=mesh)
    got, found = g(params, split)
    specs = g.layouts(params, split)
    assert any(s.partition for s in specs.values())
    np.testing.assert_allclose(float(found), float(loss), rtol=1e-5)
    for name in params:
        np.testing.assert_allclose(got[name].numpy(), want[name].numpy(), rtol=1e-4, atol=1e-6)
        assert got[name].layout == specs[f"params.{name}"].resolve(mesh, 2)
    g(got, split)
    assert len(g._chosen) == 1  # how parameters lie is no new problem


def test_what_a_rank_holds_by_hand():
    """A weight of 16 KiB and a gradient; the new weight is written over the old. Split over 8 ranks
    both are an eighth, for the gradient is sliced where the weight is."""
    def update(params, g):
        return {"w": params["w"] - 0.1 * g}

    types = {"w": Tensor[64, 64, ts.f32]}, Tensor[64, 64, ts.f32]
    assert ts.alpa_shard(update, MESH, "1 GB").choose(*types).bytes == 2 * 64 * 64 * 4
    limit = 64 * 64 * 4 * (1 + 3 / 8)
    tight = ts.alpa_shard(update, MESH, limit).choose(*types)
    assert tight.bytes <= limit and tight.specs["params.w"].partition


def test_layers_that_repeat_lie_alike_and_state_as_its_parameter():
    def step(params, state, x):
        def loss(p):
            h = x
            for layer in p["layers"]:
                h = ts.relu(h @ layer["w"])
            return ts.mean(h)

        grads = ts.grad(loss)(params)
        state = [{"w": s["w"] * 0.9 + g["w"]} for s, g in zip(state, grads["layers"], strict=True)]
        return {"layers": [{"w": p["w"] - s["w"]} for p, s in
                           zip(params["layers"], state, strict=True)]}, state

    w = Tensor[32, 32, ts.f32]
    params, state = {"layers": [{"w": w}] * 3}, [{"w": w}] * 3
    g = ts.alpa_shard(step, MESH, "20 kB")
    specs = g.layouts(params, state, ts.dist.stand_in((16, 32), None, MESH))
    assert set(specs) == {f"params.layers.{i}.w" for i in range(3)}
    assert len(set(specs.values())) == 1


@pytest.mark.parametrize("make, words", [
    (lambda: ts.alpa_shard(toy, MESH, "lots"), "memory_limit='lots'"),
    (lambda: ts.alpa_shard(toy, MESH, -1), "memory_limit=-1"),
    (lambda: ts.alpa_shard(toy, MESH, "3 XB"), "'3 XB'"),
    (lambda: ts.alpa_shard(toy, MESH, objective="tim"), "did you mean 'time'"),
    (lambda: ts.alpa_shard(toy, ts.dist.mesh(axes="dp", shape=9), fabric="8xh200"), "joins 8"),
])
def test_alpa_shard_says_what_is_wrong(make, words):
    with pytest.raises(ts.ArgumentError) as info:
        make()
    assert words in str(info.value)


# --- the search, by itself -----------------------------------------------------------------------
@given(st.integers(0, 2**32 - 1), st.integers(2, 4))
def test_a_small_search_is_exact(seed, names):
    draw = np.random.default_rng(seed)
    table, held = draw.random((4,) * names), draw.random((4,) * names)
    choices = {str(i): list(range(4)) for i in range(names)}

    def cost(a):
        at = tuple(a.values())
        return Cost(float(table[at]), float(held[at]))

    found = search(choices, cost, 0.5)
    fits = table[held <= 0.5]
    assert (found is None) == (fits.size == 0)
    if found is not None:
        assert found.cost.seconds == fits.min() and found.tried == 4**names


def test_a_large_search_finds_the_least_of_a_sum_and_no_worse_than_uniform(rng):
    own = rng.random((12, 7))
    choices = {str(i): list(range(7)) for i in range(12)}
    calls = []

    def cost(a):
        calls.append(a)
        return Cost(sum(own[int(n), c] for n, c in a.items()), 1.0)

    found = search(choices, cost)
    assert found.cost.seconds == pytest.approx(own.min(axis=1).sum())
    assert len(calls) == found.tried < 1500 < 7**12

    def coupled(a):  # neighbours that differ cost; being 3 costs less
        values = list(a.values())
        return Cost(sum(x != y for x, y in zip(values, values[1:], strict=False))
                    + sum(v != 3 for v in values) * 0.01, 1.0)

    assert search(choices, coupled).cost.seconds == 0.0


def test_a_large_search_looks_at_every_uniform_choice():
    """All at 5 costs nothing, and every step on the way there costs more than staying."""
    choices = {str(i): list(range(7)) for i in range(12)}

    def cost(a):
        values = list(a.values())
        return Cost(0.0 if set(values) == {5} else 1.0 + sum(v != 0 for v in values), 1.0)

    found = search(choices, cost)
    assert found.cost.seconds == 0.0 and set(found.assignment.values()) == {5}
