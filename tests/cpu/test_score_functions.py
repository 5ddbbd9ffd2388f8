"""Functions of scores that users give to attention: on a CPU, and as part of the kernels under the
interpreter, forward and backward, against f64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import tessera as ts
from attention_cases import attention64, result_and_cotangents, sizes64
from derivatives import assert_derivatives
from tessera.errors import ArgumentError
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.passes.score_code import score_code
from tessera.graph.ops.score_function import ScoreFunction
from tolerance import assert_close

H, S, T = 4, 90, 130


def alibi(s, b, h, i, j):
    return s - ts.exp2(-8.0 * (h + 1) / H) * ts.abs(i - j)


def linear(s, b, h, i, j):
    """Kernels add a number for each key, and what depends on queries to the logs of sums."""
    return (s + ts.exp2(-2.0 * h - 4) * (j - i)) - (0.03 * i - 0.1 * b) / 2.0


def of_blocks(s, b, h, i, j):
    return ts.where(i // 64 == j // 64, s + 0.1 * b, -math.inf)


def nothing(s, b, h, i, j):
    """The first queries see no key."""
    return ts.where(i - (T - S) < 10, -math.inf, s)


def by_place(fn: Any) -> np.ndarray:
    """What a function adds to scores, [2, H, S, T]."""
    b, h, i, j = np.ogrid[:2, :H, T - S:T, :T]
    return {alibi: lambda: -np.exp2(-2.0 * (h + 1)) * abs(i - j) + 0 * b,
            linear: lambda: np.exp2(-2.0 * h - 4) * (j - i) - 0.015 * i + 0.05 * b,
            of_blocks: lambda: np.where(i // 64 == j // 64, 0.1 * b + 0.0 * h, -np.inf),
            nothing: lambda: np.where(i - (T - S) < 10, -np.inf, 0.0 * (b + h + j))}[fn]()


def operands(dtype, rng):
    shapes = (2, H, S, 16), (2, 2, T, 16), (2, 2, T, 24), (2, H, S, 24)
    return [ts.tensor(rng.standard_normal(s).astype(np.float32), dtype) for s in shapes]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("fn", [alibi, linear, of_blocks, nothing], ids=lambda f: f.__name__)
def test_what_depends_on_places(fn, causal, dtype, rng):
    xs = operands(dtype, rng)
    wide = [np.asarray(ts.cast(x, "f64")) for x in xs]
    args = *wide, causal, by_place(fn)
    want, sizes = attention64(*args)[:4], sizes64(*wide, causal)
    if fn in (of_blocks, nothing):  # as a mask of bools the sizes count what is seen
        sizes = sizes64(*wide, causal, np.isfinite(by_place(fn)))
    f = result_and_cotangents(score=fn, causal=causal)
    made = CudaProgram(ts.jit(f).graph(*xs), "sm_90a")
    assert [g.kind for g in made.plan.groups].count("attention") == 1
    for found in (made.run([x.array for x in xs]), [ts.cast(y, "f64").array for y in f(*xs)]):
        for got, w, size in zip(found, want, sizes, strict=True):
            assert_close(np.asarray(got, np.float64), w, dtype, n=T + 16, scale=size)


@pytest.mark.parametrize("fn", [alibi, of_blocks], ids=lambda f: f.__name__)
@pytest.mark.parametrize("few", [1, 5])
def test_few_queries_over_keys_in_parts(few, fn, rng):
    """The last of the queries, as in decoding: by the kernels that split keys."""
    q, k, v, g = operands("bf16", rng)
    k, v = (ts.concatenate([ts.zeros_like(x[:, :, :1])] * 270 + [x], axis=2) for x in (k, v))
    last = q[:, :, -few:]
    f = lambda q, k, v: ts.attention(q, k, v, score=fn, causal=True)  # noqa: E731
    made = CudaProgram(ts.jit(f).graph(last, k, v), "sm_90a")
    assert "call decode_" in str(made.plan)
    got = made.run([x.array for x in (last, k, v)])[0]
    assert_close(np.asarray(got, np.float64), np.asarray(ts.cast(f(*(ts.cast(
        x, "f64") for x in (last, k, v))), "f64")), "bf16", n=T)


def squared(s, b, h, i, j):
    return ts.tanh(s) * 2.0 + 0.3 * s * s


def doubled(s, b, h, i, j):
    return -2.0 * s + 1.5


@pytest.mark.parametrize("kwargs", [{}, {"soft_cap": 1.5}, {"window": 30, "causal": True}, "mask"],
                         ids=str)
@pytest.mark.parametrize("score", [squared, doubled], ids=lambda f: f.__name__)
def test_slopes(kwargs, score, rng):
    """Functions that are no sum: the kernels against a composition of ops."""
    xs = operands("f32", rng)
    mask = rng.random((2, 1, 1, T)) < 0.7
    kwargs = {"mask": ts.tensor(mask)} if kwargs == "mask" else kwargs
    seen = np.ones((S, T), bool)
    rows, columns = np.ogrid[T - S:T, :T]
    if "window" in kwargs:
        seen = (columns <= rows) & (columns > rows - 30)
    seen = seen & mask if "mask" in kwargs else seen

    def plain(q, k, v):
        s = ts.einsum("bhgid,bhjd->bhgij", ts.reshape(q, (2, 2, 2, S, 16)), k) * 0.25
        s = 1.5 * ts.tanh(s / 1.5) if "soft_cap" in kwargs else s
        s = ts.where(np.broadcast_to(seen, (2, 1, S, T))[:, :, None], score(s, 0, 0, 0, 0),
                     -math.inf)
        y = ts.einsum("bhgij,bhje->bhgie", ts.softmax(s), v)
        return ts.reshape(y, (2, 4, S, 24))

    y, pull = ts.vjp(plain, *(ts.cast(x, "f64") for x in xs[:3]))
    want = [np.asarray(x.array) for x in (y, *pull(ts.cast(xs[3], "f64")))]
    f = result_and_cotangents(score=score, **kwargs)
    made = CudaProgram(ts.jit(f).graph(*xs), "sm_90a")
    for found in (made.run([x.array for x in xs]), [y.array for y in f(*xs)]):
        for got, w in zip(found, want, strict=True):
            assert np.abs(np.asarray(got) - w).max() < 2e-5 * np.abs(w).max()


def test_derivatives(rng):
    q, k, v = (rng.standard_normal((2, 2, 7, 3)) for _ in "qkv")
    assert_derivatives(lambda q, k, v: ts.attention(q, k, v, score=squared), rng, q, k, v)


def test_two_functions_of_one_text_are_one_and_two_of_two_are_not():
    """Their graphs decide, not the line on which a lambda stands."""
    made = [ScoreFunction(lambda s, b, h, i, j, x=x: s * x) for x in (2.0, 3.0, 2.0)]
    assert made[0] == made[2] != made[1] and len(set(made)) == 2
    codes = [score_code(f, 4) for f in made]
    assert codes[0] == codes[2] and codes[0].name != codes[1].name

    def f(q):
        return [ts.attention(q, q, q, score=lambda s, b, h, i, j, x=x: s * x) for x in (2.0, 3.0)]

    q = ts.tensor(np.random.default_rng(0).standard_normal((1, 2, 5, 4)).astype(np.float32))
    a, b = CudaProgram(ts.jit(f).graph(q), "sm_90a").run([q.array])
    for got, want in zip((a, b), f(q), strict=True):
        assert_close(got, want.numpy(), n=8)


def test_the_code_of_a_function():
    code = score_code(ScoreFunction(lambda s, b, h, i, j: ts.tanh(s / 2.0) - 0.5 * ts.abs(i - j)),
                      8)
    value, _ = code.text.split("\n\n")
    assert value.splitlines()[1:] == [
        "    v1 = s * 0.5", "    v2 = tanh(v1)", "    v3 = i - j", "    v4 = tile.abs(v3)",
        "    v5 = (tile.abs((fi - fj)))", "    v6 = 0.5 * v5", "    v7 = v2 - v6",
        "    return v7"], code.text


@pytest.mark.parametrize("fn, terms", [
    (lambda s, b, h, i, j: s - 0.5 * (i - j), (1.0, -0.5, 0.5, 0.0)),
    (lambda s, b, h, i, j: (s * 3.0 + i) / 2.0 - 1.0, (1.5, 0.5, 0.0, -1.0)),
    (lambda s, b, h, i, j: s - ts.abs(i - j), None), (lambda s, b, h, i, j: s * j, None),
    (lambda s, b, h, i, j: s + i // 2, None),
], ids=["distance", "of queries", "abs", "product", "whole part"])
def test_what_is_linear(fn, terms):
    code = score_code(ScoreFunction(fn), 8)
    assert (code.terms(0, 0) if code.linear else None) == terms


def test_under_vmap(rng):
    q = ts.tensor(rng.standard_normal((3, 2, 5, 4)).astype(np.float32))
    got = ts.vmap(lambda q: ts.attention(q, q, q, score=alibi))(q)
    for i in range(3):
        assert_close(got.numpy()[i], ts.attention(q[i], q[i], q[i], score=alibi).numpy(), n=8)
    with pytest.raises(ArgumentError, match="reads its sequence's number, under vmap"):
        ts.vmap(lambda q: ts.attention(q, q, q, score=of_blocks))(q)


@pytest.mark.parametrize("fn, text", [
    (lambda s, b, h, i, j: ts.ones((3,)) * s, r"gives f32 \[3\] for scores f32 \[\]"),
    (lambda s, b, h, i, j: i > j, "a score function gives bool_"),
    (lambda s, b, h, i, j: s + OUTSIDE, "reads a tensor from outside"),
], ids=["a vector", "a bool", "a tensor"])
def test_what_is_no_function_of_a_score_is_refused(fn, text):
    q = ts.zeros((1, 2, 4, 8))
    with pytest.raises(ArgumentError, match=text):
        ts.attention(q, q, q, score=fn)


OUTSIDE = ts.tensor(np.float32(2.0))
