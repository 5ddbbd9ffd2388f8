"""The log of the sum of exp of a query's scores beside attention's result, and its derivative: on a
CPU, by the kernels of a lowered graph under the interpreter, and from the library; against f64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import tessera as ts
from attention_cases import seen_keys
from derivatives import assert_derivatives
from tessera import stdlib
from tessera.errors import ArgumentError
from tessera.graph.cuda import CudaProgram
from tolerance import assert_close

SHAPES = {  # queries, keys, width of values
    "heads": ((2, 2, 150, 16), (2, 2, 150, 16), 32),
    "groups": ((2, 4, 37, 16), (2, 2, 70, 16), 16),
    "blocks": ((2, 1, 600, 8), (2, 1, 600, 8), 8),
    "no batch": ((3, 33, 16), (3, 33, 16), 16),
    "more queries than keys": ((2, 1, 40, 16), (2, 1, 24, 16), 16),
}
RULES: dict[str, dict[str, Any]] = {
    "full": {}, "causal": {"causal": True}, "capped": {"soft_cap": 1.5, "window": 20},
    "masked": {"mask": True}, "lengths": {"lengths": [0, 11]},
}
CASES = [(s, r) for s in SHAPES for r in RULES if not (s == "no batch" and r == "lengths")]


def expected(q, k, v, g, h, rule: dict[str, Any], mask=None) -> list[np.ndarray]:
    """y, lse and the cotangents of q, k and v, and how large the terms of each are."""
    group, scale, cap = q.shape[-3] // k.shape[-3], 1 / math.sqrt(q.shape[-1]), rule.get("soft_cap")
    keys, values = (np.repeat(x, group, -3) for x in (k, v))
    s, slope = q @ keys.swapaxes(-1, -2) * scale, 1.0
    if cap:
        s, slope = cap * np.tanh(s / cap), 1 - np.tanh(s / cap) ** 2
    seen = seen_keys(len(q), *s.shape[-2:], rule.get("window"), None, rule.get("lengths"))
    seen = seen if q.ndim == 4 else seen[0]
    if rule.get("causal"):
        seen = seen & np.tril(np.ones(s.shape[-2:], bool), s.shape[-1] - s.shape[-2])
    s = np.where(seen if mask is None else seen & mask, s, -np.inf)
    with np.errstate(divide="ignore"):
        top = np.where(np.isfinite(s.max(-1)), s.max(-1), 0)
        lse = top + np.log(np.exp(s - top[..., None]).sum(-1))
    p = np.exp(s - np.where(np.isfinite(lse), lse, 0)[..., None])
    dp = g @ values.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True) + h[..., None]) * slope * scale

    def over(x: np.ndarray) -> np.ndarray:
        return x.reshape(*k.shape[:-2], group, *x.shape[-2:]).sum(-3)

    return [p @ values, lse, ds @ keys, over(ds.swapaxes(-1, -2) @ q), over(p.swapaxes(-1, -2) @ g)]


def operands(name: str, dtype: str, rng) -> list:
    q, k, E = SHAPES[name]
    shapes = (q, k, (*k[:-1], E), (*q[:-1], E), q[:-1])
    return [ts.tensor(rng.standard_normal(s).astype(np.float32), "f32" if i == 4 else dtype)
            for i, s in enumerate(shapes)]


def both(**rule: Any) -> Any:
    """Both results, and the cotangents of q, k and v."""
    def f(q, k, v, g, h):
        made, pull = ts.vjp(lambda *xs: ts.attention(*xs, **rule, return_lse=True), q, k, v)
        return *made, *pull((g, h))

    return f


def rule_of(name: str, xs: list, rng) -> tuple[dict[str, Any], np.ndarray | None]:
    rule, mask = dict(RULES[name]), None
    if "mask" in rule:
        mask = rule["mask"] = rng.random((*xs[0].shape[:-1], xs[1].shape[-2])) < 0.4
        mask[..., 3, :] = False  # a query that sees nothing
    return rule, mask


def check(found, want, dtype: str, n: int) -> None:
    for got, w in zip(found, want, strict=True):
        got = np.asarray(ts.cast(got, "f64") if isinstance(got, ts.Tensor) else got, np.float64)
        none = np.isneginf(w)
        assert (np.isneginf(got) == none).all()
        assert_close(got[~none], w[~none], dtype, n=n, scale=np.sqrt(np.mean(w[~none] ** 2)) + 1e-3)


@pytest.mark.parametrize("name, rule", CASES, ids=lambda x: x)
def test_against_f64(name, rule, rng):
    dtype = "bf16" if name == "groups" else "f32"
    xs = operands(name, dtype, rng)
    kwargs, mask = rule_of(rule, xs, rng)
    want = expected(*(np.asarray(ts.cast(x, "f64")) for x in xs), kwargs, mask)
    n = 4 * (xs[1].shape[-2] + xs[0].shape[-1])
    check(both(**kwargs)(*xs), want, dtype, n)
    check(ts.jit(both(**kwargs))(*xs), want, dtype, n)
    made = CudaProgram(ts.jit(both(**kwargs)).graph(*xs), "sm_90a")
    kinds = [g.kind for g in made.plan.groups]
    assert "gemm" not in kinds and kinds.count("attention") + kinds.count("launch") == 3
    check(made.run([x.array for x in xs]), want, dtype, n)


@pytest.mark.parametrize("rule", ["full", "causal"])
def test_without_a_gradient_it_is_one_kernel_and_a_factor(rule, rng):
    xs = operands("heads", "bf16", rng)[:3]
    f = lambda *xs: ts.attention(*xs, **RULES[rule], return_lse=True)  # noqa: E731
    made = CudaProgram(ts.jit(f).graph(*xs), "sm_90a")
    assert [g.kind for g in made.plan.groups] == ["attention", "loop"]


@pytest.mark.parametrize("S, T", [(1, 700), (1, 40), (5, 300)])
def test_few_queries(S, T, rng):
    """Keys in parts, and in one."""
    q = ts.tensor(rng.standard_normal((2, 8, S, 32)), "bf16")
    k = ts.tensor(rng.standard_normal((2, 2, T, 32)), "bf16")
    f = lambda q, k: ts.attention(q, k, k, causal=True, return_lse=True)  # noqa: E731
    made = CudaProgram(ts.jit(f).graph(q, k), "sm_90a")
    # a cluster weighs its parts itself
    assert [g.kind for g in made.plan.groups] == ["launch"] * (1 if T == 700 else 2)
    a, b = (np.asarray(ts.cast(x, "f64")) for x in (q, k))
    want = expected(a, b, b, a, a[..., 0], {"causal": True})[:2]
    check(made.run([q.array, k.array]), want, "bf16", T + 32)
    assert_close(made.run([q.array, k.array])[1], want[1], "f32", n=T + 32)  # is not rounded
    check(stdlib.flash_attention_2(q.array, k.array, k.array, causal=True, return_lse=True), want,
          "bf16", T + 32)


@pytest.mark.parametrize("lengths", [[0, 200], [150, 3]])
def test_few_queries_of_sequences_without_keys(lengths, rng):
    q = ts.tensor(rng.standard_normal((2, 4, 1, 32)), "bf16")
    k = ts.tensor(rng.standard_normal((2, 4, 200, 32)), "bf16")
    f = lambda q, k: ts.attention(q, k, k, lengths=lengths, return_lse=True)  # noqa: E731
    a, b = (np.asarray(ts.cast(x, "f64")) for x in (q, k))
    want = expected(a, b, b, a, a[..., 0], {"lengths": lengths})[:2]
    check(CudaProgram(ts.jit(f).graph(q, k), "sm_90a").run([q.array, k.array]), want, "bf16", 232)


@pytest.mark.parametrize("S, T", [(70, 70), (20, 90)])
@pytest.mark.parametrize("window", [None, 9])
def test_of_the_library(S, T, window, rng):
    q = rng.standard_normal((1, 4, S, 32)).astype(np.float32)
    k = rng.standard_normal((1, 2, T, 32)).astype(np.float32)
    got = stdlib.flash_attention_2(q, k, k, causal=True, window=window, return_lse=True)
    a, b = q.astype(np.float64), k.astype(np.float64)
    want = expected(a, b, b, a, a[..., 0], {"causal": True, "window": window})[:2]
    check(got, want, "f32", T + 32)


def test_of_the_library_in_a_graph(rng):
    """A node, with the derivative of the op."""
    q, k = (ts.tensor(rng.standard_normal((1, 2, n, 16)).astype(np.float32)) for n in (9, 12))

    def loss(of: Any) -> Any:
        def f(q, k):
            y, lse = of(q, k, k, causal=True, return_lse=True)
            return ts.sum(ts.sin(y)) + ts.sum(ts.cos(lse))

        return ts.jit(ts.value_and_grad(f, argnums=(0, 1)))(q, k)

    (a, da), (b, db) = loss(stdlib.flash_attention_2), loss(ts.attention)
    for x, y in zip((a, *da), (b, *db), strict=True):
        assert_close(x.numpy(), y.numpy(), "f32", n=64, scale=np.abs(y.numpy()).max())


@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
def test_parts_add_up(run, rng):
    """What the sums are for: attention over two halves of the keys is that over all."""
    q, k, v = (ts.tensor(rng.standard_normal((1, 2, n, 8)).astype(np.float32)) for n in (5, 12, 12))

    def whole(q, k, v):
        (y1, l1), (y2, l2) = (ts.attention(q, k[:, :, at], v[:, :, at], return_lse=True)
                              for at in (slice(0, 7), slice(7, 12)))
        l = ts.logsumexp(ts.stack([l1, l2]), axis=0)  # noqa: E741
        return (y1 * ts.expand_dims(ts.exp(l1 - l), -1) + y2 * ts.expand_dims(ts.exp(l2 - l), -1))

    assert_close(run(whole)(q, k, v).numpy(), ts.attention(q, k, v).numpy(), "f32", n=32)
    got = run(ts.grad(lambda *xs: ts.sum(ts.sin(whole(*xs))), argnums=(0, 1, 2)))(q, k, v)
    want = ts.grad(lambda *xs: ts.sum(ts.sin(ts.attention(*xs))), argnums=(0, 1, 2))(q, k, v)
    for a, b in zip(got, want, strict=True):
        assert_close(a.numpy(), b.numpy(), "f32", n=64, scale=np.abs(b.numpy()).max())


@pytest.mark.parametrize("which", ["lse alone", "both"])
def test_derivatives(which, rng):
    xs = [rng.standard_normal((1, 2, n, 3)) for n in (3, 4, 4)]

    def f(q, k, v):
        y, lse = ts.attention(q, k, v, causal=True, soft_cap=2.0, return_lse=True)
        return ts.sum(ts.cos(lse)) + (ts.sum(ts.sin(y)) if which == "both" else 0.0)

    assert_derivatives(f, rng, *xs)


def test_vmap_and_a_type_of_16_bits(rng):
    q = ts.tensor(rng.standard_normal((3, 1, 2, 4, 8)), "bf16")
    y, lse = ts.vmap(lambda q: ts.attention(q, q, q, return_lse=True))(q)
    assert y.dtype is ts.bf16 and lse.dtype is ts.f32 and lse.shape == (3, 1, 2, 4)
    one = ts.attention(q[1], q[1], q[1], return_lse=True)[1]
    assert (lse[1].numpy() == one.numpy()).all()


def test_what_has_none(rng):
    q = ts.zeros((1, 2, 4, 8))
    with pytest.raises(ArgumentError, match="return_lse beside dropout"):
        ts.attention(q, q, q, dropout=0.1, return_lse=True)
    with pytest.raises(ArgumentError, match="return_lse over a cache"):
        ts.flash_attention(q, ts.kv_cache((1, 2, 8, 8)).append(q, q), return_lse=True)
