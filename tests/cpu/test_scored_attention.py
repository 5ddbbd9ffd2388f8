"""Attention with windows, caps, segments and lengths: the op on a CPU and the kernels of a lowered
graph under the interpreter, forward and backward, against f64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from attention_cases import attention64, dropout_factors, result_and_cotangents, seen_keys, sizes64
from derivatives import assert_derivatives
from tessera.errors import ArgumentError, DTypeError, ShapeError
from tessera.graph import tree
from tessera.graph.cuda import CudaProgram
from tolerance import assert_close

SHAPES = {  # queries, keys, width of values
    "heads": ((2, 2, 150, 16), (2, 2, 150, 16), 32),
    "groups": ((2, 4, 70, 16), (2, 2, 70, 16), 16),
    "blocks": ((2, 1, 600, 8), (2, 1, 600, 8), 8),  # of queries, each with the keys that it sees
    "past": ((2, 2, 40, 16), (2, 1, 170, 16), 16),
    "more queries than keys": ((2, 1, 40, 16), (2, 1, 24, 16), 16),
}
RULES: dict[str, dict[str, Any]] = {
    "window": {"window": 37, "causal": True},
    "window of both sides": {"window": 37},
    "own key alone": {"window": 1},
    "cap": {"soft_cap": 1.5},
    "cap and window": {"soft_cap": 1.5, "window": 20, "causal": True},
    "segments": {"segments": "each"},
    "segments of all": {"segments": "all", "causal": True, "window": 9},
    "lengths": {"lengths": "each"},
    "one length": {"lengths": "all", "causal": True, "soft_cap": 3.0},
    "segments and lengths": {"segments": "each", "lengths": "each", "causal": True},
}


def given(name: str, S: int, T: int, rng) -> dict[str, Any]:
    """The arguments of a rule as arrays: segments of two sequences, one of a number that comes
    again; lengths of which one is nothing."""
    made = dict(RULES[name])
    if "segments" in made:
        ids = np.sort(rng.integers(0, 5, (2, S)), 1)
        ids[0, -3:] = ids[0, 0]
        made["segments"] = ids if made["segments"] == "each" else ids[0]
    if "lengths" in made:
        each = made["lengths"] == "each"
        made["lengths"] = np.array([0, 2 * T // 3]) if each else np.array(T // 2)
    return made


def expected(wide, rule: dict[str, Any], mask=None, factor=1.0) -> tuple[list, list]:
    """(what is to come out, how large its terms are)"""
    (B, _, S, _), T = wide[0].shape, wide[1].shape[-2]
    seen = seen_keys(B, S, T, *(rule.get(n) for n in ("window", "segments", "lengths")))
    seen = seen if mask is None else seen & mask
    args = *wide, rule.get("causal", False), seen, factor
    return attention64(*args, rule.get("soft_cap", 0.0)), sizes64(*args)


def operands(name, dtype, rng):
    q, k, E = SHAPES[name]
    shapes = (q, k, (*k[:-1], E), (*q[:-1], E))
    return [ts.tensor(rng.standard_normal(s).astype(np.float32), dtype) for s in shapes]


CASES = [(name, rule) for name in SHAPES for rule in RULES
         if name in ("heads", "groups", "blocks") or "segments" not in RULES[rule]]


@pytest.mark.parametrize("name, rule", CASES, ids=lambda x: x)
def test_against_f64(name, rule, rng):
    dtype = "bf16" if name in ("heads", "past") else "f32"
    xs = operands(name, dtype, rng)
    kwargs = given(rule, xs[0].shape[-2], xs[1].shape[-2], rng)
    want, sizes = expected([np.asarray(ts.cast(x, "f64")) for x in xs], kwargs)
    made = CudaProgram(ts.jit(result_and_cotangents(**kwargs)).graph(*xs), "sm_90a")
    kinds = [g.kind for g in made.plan.groups]
    own = not ("more" in name and {"causal", "window"} & set(kwargs))  # as without a rule
    assert kinds.count("attention") == own and "gemm" not in kinds
    n = xs[1].shape[-2] + xs[0].shape[-1]
    for got, w, size in zip(made.run([x.array for x in xs]), want, sizes, strict=True):
        assert_close(np.asarray(got, np.float64), w, dtype, n=n, scale=size)
    here = result_and_cotangents(**kwargs)(*xs)  # and on the CPU
    for got, w, size in zip(here, want, sizes, strict=True):
        assert_close(np.asarray(ts.cast(got, "f64")), w, dtype, n=n, scale=size)


@pytest.mark.parametrize("rule", ["window", "cap and window", "window of both sides", "one length",
                                  "lengths"])
@pytest.mark.parametrize("S", [1, 5])
def test_few_queries_over_keys_in_parts(rule, S, rng):
    """As in decoding: keys outside of a window are in no part, parts are those of a sequence."""
    q, k = ts.tensor(rng.standard_normal((2, 8, S, 32)), "bf16"), ts.tensor(
        rng.standard_normal((2, 2, 700, 32)), "bf16")
    kwargs = given(rule, S, 700, rng)
    f = lambda q, k: ts.attention(q, k, k, **kwargs)  # noqa: E731
    made = CudaProgram(ts.jit(f).graph(q, k), "sm_90a")
    kinds = [g.kind for g in made.plan.groups]
    few = S == 1 or "lengths" not in kwargs
    # few keys are one part; the parts of one query are weighed by their cluster
    parts = 0 if not few else 1 if "window" in kwargs or S == 1 else 2
    assert kinds.count("attention") == (not few) and kinds.count("launch") == parts
    wide = [np.asarray(ts.cast(x, "f64")) for x in (q, k, k)]
    want, sizes = expected([*wide, np.zeros_like(wide[0])], kwargs)
    got = made.run([q.array, k.array])[0]
    assert_close(np.asarray(got, np.float64), want[0], "bf16", n=732, scale=sizes[0])


@pytest.mark.parametrize("rule", ["cap and window", "segments and lengths"])
@pytest.mark.parametrize("masked, p", [(True, 0.0), (False, 0.3)], ids=["mask", "dropout"])
@pytest.mark.parametrize("name", ["groups", "blocks"])
def test_beside_a_mask_and_dropout(name, rule, masked, p, rng):
    xs = operands(name, "f32", rng)
    S, T = xs[0].shape[-2], xs[1].shape[-2]
    kwargs = given(rule, S, T, rng)
    key = ts.tensor(np.array([3, 4], np.uint32))
    mask = rng.random((2, 1, 1, T)) < 0.7 if masked else None
    scores = (*xs[0].shape[:-1], T)
    factor = dropout_factors(np.array([3, 4], np.uint32), scores, kwargs.get("causal", False), p
                             ) if p else 1.0
    want, sizes = expected([np.asarray(x.array, np.float64) for x in xs], kwargs, mask, factor)
    extra = {"mask": ts.tensor(mask)} if masked else {"dropout": p, "key": key}
    f = result_and_cotangents(**kwargs, **extra)
    for found in (CudaProgram(ts.jit(f).graph(*xs), "sm_90a").run([x.array for x in xs]),
                  [x.array for x in f(*xs)]):
        for got, w, size in zip(found, want, sizes, strict=True):
            assert_close(np.asarray(got, np.float64), w, "f32", n=T + xs[0].shape[-1], scale=size)


@pytest.mark.parametrize("rule", ["window", "cap and window", "segments and lengths"])
def test_derivatives(rule, rng):
    q, k, v = (rng.standard_normal((2, 2, 9, 3)) for _ in "qkv")
    kwargs = given(rule, 9, 9, rng)
    kwargs |= {"window": 3} if "window" in kwargs else {}
    assert_derivatives(lambda q, k, v: ts.attention(q, k, v, **kwargs), rng, q, k, v)


def test_under_vmap_each_has_its_own_segments(rng):
    q = ts.tensor(rng.standard_normal((3, 2, 20, 4)).astype(np.float32))
    ids = ts.tensor(np.sort(rng.integers(0, 4, (3, 20)), 1))
    each = lambda q, s: ts.attention(q, q, q, segments=s)  # noqa: E731
    got = ts.vmap(each)(q, ids)
    for i in range(3):
        assert_close(got.numpy()[i], each(q[i], ids[i]).numpy(), n=20)


def test_a_window_reads_its_own_keys_alone():
    """Of 8192 keys, blocks of 512 queries read 512 and the window in front of them."""
    q = ts.zeros((1, 1, 8192, 4))
    graph = ts.jit(lambda q: ts.attention(q, q, q, causal=True, window=128)).graph(q)
    from tessera.graph.expand import expand_by

    widths = {n.outputs[0].aval.shape[-1] for n in expand_by(graph, lambda n: n.op.expand).nodes
              if n.op.name == "matmul"}
    assert max(widths) == 512 + 127


@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rolling", [False, True], ids=["", "rolling"])
def test_over_a_cache(rolling, causal, S, rng):
    """Eager, under jit, and by the kernels of few queries; the window is counted from the cache's
    last entry."""
    kind = ts.KVCache["B", "H", "S_max", "D", ts.bf16]
    cache = (kind @ ts.rolling_window if rolling else kind)(1, 1, 300, 16)
    cache = cache.append(*rng.standard_normal((2, 1, 1, 280, 16)).astype(np.float32))
    if rolling:
        cache = cache.append(*rng.standard_normal((2, 1, 1, 40, 16)).astype(np.float32))
    q = ts.tensor(rng.standard_normal((1, 2, S, 16)), "bf16")
    kwargs = {"window": 9, "soft_cap": 1.5, "causal": causal}
    f = lambda q, c: ts.flash_attention(q, c, **kwargs)  # noqa: E731
    wide = [np.asarray(ts.cast(x, "f64")) for x in (q, cache.K, cache.V, q)]
    want = expected(wide, kwargs)[0][0].transpose(0, 2, 1, 3).reshape(1, S, -1)
    made = CudaProgram(ts.jit(f).graph(q, cache), "sm_90a")
    assert ("call decode_" in str(made.plan)) == (not rolling)
    lowered = made.run([x.array for x in (q, *tree.flatten(cache)[0])])[0]
    for y in (np.asarray(f(q, cache).array), ts.jit(f)(q, cache).array, lowered):
        assert_close(np.asarray(y, np.float64), want, "bf16", n=64)


def test_segments_over_a_cache_are_refused():
    cache = ts.KVCache["B", "H", "S_max", "D", ts.f32](1, 1, 8, 4).append(*ts.ones((2, 1, 1, 3, 4)))
    with pytest.raises(ArgumentError, match="segments, lengths and score over a cache"):
        ts.flash_attention(ts.ones((1, 1, 1, 4)), cache, segments=np.zeros(3, int))
    with pytest.raises(ArgumentError, match="window=0"):
        ts.flash_attention(ts.ones((1, 1, 1, 4)), cache, window=0)


@pytest.mark.parametrize("kwargs, error, text", [
    ({"window": 0}, ArgumentError, "window=0 is no number of keys"),
    ({"window": 2.5}, ArgumentError, "window=2.5"),
    ({"soft_cap": -1.0}, ArgumentError, "soft_cap=-1.0"),
    ({"segments": np.zeros(4)}, DTypeError, "segments are integers, got f64"),
    ({"segments": np.zeros(3, int)}, ShapeError, r"segments \[3\]"),
    ({"lengths": np.zeros((2, 4), int)}, ShapeError, r"lengths \[2, 4\]"),
], ids=str)
def test_what_does_not_fit_is_refused_at_the_users_line(kwargs, error, text):
    q = ts.zeros((2, 1, 4, 8))
    with pytest.raises(error, match=text):
        ts.attention(q, q, q, **kwargs)


def test_segments_number_the_places_of_one_sequence():
    q, k = ts.zeros((2, 1, 4, 8)), ts.zeros((2, 1, 6, 8))
    with pytest.raises(ShapeError, match="segments of 4 queries and 6 keys"):
        ts.attention(q, k, k, segments=np.zeros(4, int))
