"""Attention with windows, caps, segments and lengths on a GPU, and its gradient, against f64."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from attention_cases import attention64, numbers, seen_keys
from hopper_lowering import distance
from tessera import bf16

RULES = {
    "window": {"window": 200, "causal": True}, "near": {"window": 70}, "cap": {"soft_cap": 2.0},
    "causal cap": {"soft_cap": 2.0, "causal": True}, "segments": {"segments": True},
    "causal segments": {"segments": True, "causal": True}, "lengths": {"lengths": True},
    "all": {"window": 130, "causal": True, "soft_cap": 2.0, "segments": True, "lengths": True},
}


def rows_of(rule, B, S, T, rng):
    """The rule with arrays in it."""
    made = dict(rule)
    if "segments" in rule:
        made["segments"] = np.cumsum(rng.random((B, S)) < 5 / S, axis=1)
    if "lengths" in rule:
        made["lengths"] = rng.integers(0, T + 1, B)
    return made


def wanted(wide, rule):
    """The result and the cotangents in f64."""
    (B, _, S, _), T = wide[0].shape, wide[1].shape[-2]
    seen = seen_keys(B, S, T, *(rule.get(n) for n in ("window", "segments", "lengths")))
    return attention64(*wide, rule.get("causal", False), seen, cap=rule.get("soft_cap", 0.0))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 128])
def test_a_function_of_scores(rng, D, causal):
    """A slope of distances for each head, and a square: the gradient has the function's slope."""
    S, H, added = 700, 2, np.arange(700)[None, :] - np.arange(700)[:, None]
    arrays = [numbers(rng, bf16, 1, H, S, D) for _ in "qkvg"]

    def score(s, b, h, i, j):
        return ts.tanh(s) + 0.01 * (h + 1) * ts.minimum(j - i, 0)

    @ts.jit
    def both(q, k, v, g):
        y, pull = ts.vjp(lambda *x: ts.attention(*x, score=score, causal=causal), q, k, v)
        return y, *pull(ts.cast(g, "f32"))

    found = both(*(ts.tensor(x, "bf16").to("cuda") for x in arrays))
    mask = 0.01 * np.arange(1, H + 1)[:, None, None] * np.minimum(added, 0)
    want = attention64(*(x.astype(np.float64) for x in arrays), causal, mask[None], cap=1.0)
    for x, w in zip(found, want[:4], strict=True):
        assert distance(x.numpy(), w) < 1e-2


@pytest.mark.row("SAFE-08")
@pytest.mark.parametrize("rule", [{"lengths": np.array([0, 200])}, {"scale": 1e4}],
                         ids=["no keys", "large scores"])
def test_no_keys_to_see_and_scores_of_any_size_are_finite(rng, rule):
    """Queries that see no key have zeros as their result and as their cotangents."""
    arrays = [numbers(rng, bf16, 2, 2, 256, 64) for _ in "qkvg"]

    @ts.jit
    def both(q, k, v, g):
        y, pull = ts.vjp(lambda *x: ts.attention(*x, **rule), q, k, v)
        return y, *pull(ts.cast(g, "f32"))

    found = [x.numpy().astype(np.float64)
             for x in both(*(ts.tensor(x, "bf16").to("cuda") for x in arrays))]
    assert all(np.isfinite(x).all() for x in found)
    if "lengths" in rule:
        assert not any(x[0].any() for x in found)
        want = wanted([x.astype(np.float64) for x in arrays], rule)
        assert all(distance(x[1], w[1]) < 1e-2 for x, w in zip(found, want, strict=False))


@pytest.mark.parametrize("D, S, heads", [(64, 1000, (2, 2)), (128, 777, (4, 2)), (64, 4200, (1, 1)),
                                         (256, 300, (2, 1))], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_gradients_of_functions(rng, rule, D, S, heads):
    given = rows_of(RULES[rule], 2, S, S, rng)
    arrays = [numbers(rng, bf16, 2, h, S, D) for h in (heads[0], heads[1], heads[1], heads[0])]
    xs = [ts.tensor(x, "bf16").to("cuda") for x in arrays]

    @ts.jit
    def both(q, k, v, g):
        y, pull = ts.vjp(lambda *x: ts.attention(*x, **given), q, k, v)
        return y, *pull(ts.cast(g, "f32"))

    found, again = both(*xs), both(*xs)
    alone = ts.jit(lambda q, k, v: ts.attention(q, k, v, **given))(*xs[:3])
    want = wanted([x.astype(np.float64) for x in arrays], given)
    assert distance(alone.numpy(), want[0]) < 6e-3
    for x, y, w in zip(found, again, want, strict=True):
        assert distance(x.numpy(), w) < 1e-2 and np.array_equal(x.numpy(), y.numpy())


@pytest.mark.parametrize("S", [1, 4])
@pytest.mark.parametrize("rule", ["window", "near", "causal cap", "lengths"])
def test_few_queries(rng, rule, S):
    """As in decoding: few keys of a window, many in parts."""
    given = rows_of(RULES[rule], 2, S, 3000, rng)
    q, k, v = numbers(rng, bf16, 2, 8, S, 128), *(numbers(rng, bf16, 2, 2, 3000, 128) for _ in "kv")
    xs = [ts.tensor(x, "bf16").to("cuda") for x in (q, k, v)]
    y = ts.jit(lambda q, k, v: ts.attention(q, k, v, **given))(*xs)
    want = wanted([x.astype(np.float64) for x in (q, k, v, q)], given)[0]
    assert distance(y.numpy(), want) < 6e-3
