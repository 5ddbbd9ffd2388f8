"""Attention against fp64 softmax attention: masks, grouped heads, blocks, types, gradients."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from attention_cases import attended64
from derivatives import assert_derivatives
from tessera.errors import ArgumentError, DTypeError, ShapeError
from tessera.graph.ops import attention_blocks as module
from tolerance import assert_close

RUNS = pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])


def draw(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def tensors(*arrays):
    return [ts.tensor(a) for a in arrays]


@RUNS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lead, S, T", [
    ((2, 3), 7, 7), ((2, 3), 5, 9), ((1, 2), 1, 6), ((4,), 6, 6), ((), 6, 8), ((2, 2), 9, 4),
])
def test_equals_fp64(run, causal, lead, S, T, rng):
    q, k, v = draw(rng, *lead, S, 8), draw(rng, *lead, T, 8), draw(rng, *lead, T, 5)
    got = run(lambda *a: ts.attention(*a, causal=causal))(*tensors(q, k, v)).numpy()
    assert got.shape == (*lead, S, 5)
    assert_close(got, attended64(q, k, v, causal)[0], n=8 * T)


@RUNS
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("masked", [None, "heads", "one"])
def test_grouped_heads(run, kv_heads, masked, rng):
    q, k, v = draw(rng, 2, 6, 5, 4), draw(rng, 2, kv_heads, 7, 4), draw(rng, 2, kv_heads, 7, 4)
    shape = {"heads": (2, 6, 5, 7), "one": (5, 7)}.get(masked)
    mask = None if shape is None else rng.random(shape) < 0.6
    fn = run(lambda *a: ts.attention(*a, causal=True, mask=mask))
    got = fn(*tensors(q, k, v)).numpy()
    assert_close(got, attended64(q, k, v, True, mask=mask)[0], n=28)


@RUNS
@pytest.mark.parametrize("shape", [(5, 6), (1, 6), (5, 1), (2, 1, 5, 6), (3, 1, 1), (6,)])
def test_masks_broadcast(run, shape, rng):
    q, k, v = draw(rng, 2, 3, 5, 4), draw(rng, 2, 3, 6, 4), draw(rng, 2, 3, 6, 4)
    seen = rng.random(shape) < 0.5
    added = (rng.standard_normal(shape) * 3).astype(np.float32)
    for mask in (seen, added):
        fn = run(lambda a, b, c, m: ts.attention(a, b, c, mask=m))
        got = fn(*tensors(q, k, v, mask)).numpy()
        assert_close(got, attended64(q, k, v, mask=mask)[0], n=24)


@RUNS
def test_rows_that_see_nothing_give_zero(run, rng):
    q, k, v = tensors(draw(rng, 1, 2, 3, 4), draw(rng, 1, 2, 3, 4), draw(rng, 1, 2, 3, 4))
    mask = np.array([[True, True, False], [False, False, False], [True, False, True]])
    for m in (mask, np.where(mask, 0, -np.inf).astype(np.float32)):
        y, pull = ts.vjp(run(lambda *a, m=m: ts.attention(*a, mask=m)), q, k, v)
        assert np.all(y.numpy()[..., 1, :] == 0) and np.all(np.isfinite(y.numpy()))
        gq, gk, gv = pull(ts.ones_like(y))
        assert all(np.isfinite(g.numpy()).all() for g in (gq, gk, gv))
        assert np.all(gq.numpy()[..., 1, :] == 0) and np.any(gv.numpy())


def test_many_queries_go_in_blocks(monkeypatch, rng):
    """The same result, and no score matrix of all queries in the graph."""
    q, k, v = draw(rng, 1, 2, 11, 4), draw(rng, 1, 1, 13, 4), draw(rng, 1, 1, 13, 4)
    mask = rng.random((11, 13)) < 0.8
    want = {c: attended64(q, k, v, c, mask=mask)[0] for c in (False, True)}
    monkeypatch.setattr(module, "BLOCK_ROWS", 4)
    for causal in (False, True):
        f = ts.jit(lambda *a, c=causal: ts.attention(*a, causal=c, mask=mask))
        assert_close(f(*tensors(q, k, v)).numpy(), want[causal], n=52)
        assert "11, 13]" not in "\n".join(
            line for line in f.inspect_ir("graph").splitlines() if "f32" in line)
    small = [x.astype(np.float64) for x in (q, k, v)]
    assert_derivatives(lambda *a: ts.attention(*a, causal=True), rng, *small)


def test_scores_of_any_size_stay_finite(rng):
    q, k, v = draw(rng, 1, 1, 4, 8) * 1e4, draw(rng, 1, 1, 4, 8) * 1e4, draw(rng, 1, 1, 4, 8)
    y, pull = ts.vjp(lambda *a: ts.attention(*a, causal=True), *tensors(q, k, v))
    assert np.isfinite(y.numpy()).all()
    assert all(np.isfinite(g.numpy()).all() for g in pull(y))


@pytest.mark.parametrize("kw", [{}, {"causal": True}, {"causal": True, "scale": 0.3}])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_derivatives(kw, kv_heads, rng):
    xs = [rng.standard_normal((2, h, 3, 4)) for h in (4, kv_heads, kv_heads)]
    assert_derivatives(lambda *a: ts.attention(*a, **kw), rng, *xs)


@pytest.mark.parametrize("name", ["bf16", "f16", "fp8_e4m3"])
def test_rounds_once(name, rng):
    """The result is the fp64 result rounded, not a chain of roundings."""
    types = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "fp8_e4m3": ml_dtypes.float8_e4m3fn}
    q, k, v = (draw(rng, 1, 2, 16, 8).astype(types[name]) for _ in range(3))
    y = ts.flash_attention(*tensors(q, k, v))
    assert y.dtype.name == name
    want = attended64(*(x.astype(np.float64) for x in (q, k, v)), causal=True)[0]
    exact = want.astype(np.float32).astype(types[name]).astype(np.float64)
    got = y.numpy().astype(np.float64)
    assert np.mean(got != exact) < 0.01  # f32 sums may cross a rounding boundary


def test_dropout_keeps_the_mean_and_follows_its_key(rng):
    q, k, v = tensors(draw(rng, 1, 1, 64, 4), draw(rng, 1, 1, 64, 4), np.ones((1, 1, 64, 4), "f4"))
    key = ts.next_key()
    a, b = (ts.attention(q, k, v, dropout=0.5, key=key).numpy() for _ in range(2))
    np.testing.assert_array_equal(a, b)
    assert abs(a.mean() - 1) < 0.15 and a.std() > 0.01


def test_flash_attention_is_causal_by_default(rng):
    q, k, v = (draw(rng, 2, 5, 8) for _ in range(3))
    xs = tensors(q, k, v)
    want = attended64(q, k, v, True)[0]
    for kw in [{}, {"causal": True}, {"is_causal": True}]:
        assert_close(ts.flash_attention(*xs, **kw).numpy(), want, n=40)
    open_ = attended64(q, k, v, False)[0]
    for kw in [{"causal": False}, {"is_causal": False}, {"causal": False, "is_causal": False}]:
        assert_close(ts.flash_attention(*xs, **kw).numpy(), open_, n=40)


@pytest.mark.parametrize("bad, error, match", [
    (lambda x: ts.flash_attention(x, object()), ArgumentError, "queries and a object"),
    (lambda x: ts.flash_attention(x, x, x, causal=True, is_causal=False), ArgumentError,
     "contradict"),
    (lambda x: ts.attention(x, x, x[:1]), ShapeError, "keys and values differ"),
    (lambda x: ts.attention(x, x[..., :2], x[..., :2]), ShapeError, "last axis"),
    (lambda x: ts.attention(x, x[:, :2], x[:, :2]), ShapeError, "multiple of the key heads"),
    (lambda x: ts.attention(x[0], x[0, :1], x[0, :1]), ShapeError, "4 axes"),
    (lambda x: ts.attention(x, x[0], x[0]), ShapeError, "2, 3 or 4 axes"),
    (lambda x: ts.attention(x, x, x, mask=ts.tensor([1, 2, 3])), DTypeError, "bools"),
    (lambda x: ts.attention(x, x, x, mask=ts.zeros((7, 7))), ShapeError, "mask"),
    (lambda x: ts.attention(*[ts.cast(x, "int32")] * 3), DTypeError, "needs floats"),
])
def test_errors(bad, error, match):
    with pytest.raises(error, match=match):
        bad(ts.zeros((2, 3, 4, 4)))


def test_symbolic_lengths():
    f = ts.jit(lambda q, k, v: ts.attention(q, k, v, causal=True))
    kind = ts.Tensor["B", 4, "S", 16, ts.bf16]
    assert str(f.infer(kind, kind, kind)) == "Tensor['B', 4, 'S', 16, bf16]"
