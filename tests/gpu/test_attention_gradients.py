"""Attention and its gradient on a GPU against f64: every width of heads, on memory full of NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest

import tessera as ts
from attention_cases import attention64, dropout_factors, sizes64
from tolerance import assert_close

# query heads, key heads, queries, keys, causal
FORMS = {"causal": (2, 2, 192, 192, True), "full, ragged": (2, 2, 97, 97, False),
         "causal, ragged": (3, 3, 130, 130, True), "groups": (4, 2, 100, 100, True),
         "cross": (2, 1, 70, 155, False), "a past": (2, 2, 40, 165, True),
         "queries that see nothing": (4, 2, 165, 40, True)}


def _heads(x, count):
    B, T, d = x.shape
    return ts.transpose(ts.reshape(x, (B, T, count, d // count)), (0, 2, 1, 3))


def _joined(y):
    B, H, T, D = y.shape
    return ts.reshape(ts.transpose(y, (0, 2, 1, 3)), (B, T, H * D))


def _in_plain_ops(q, k, v, causal):
    k, v = (ts.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    s, (S, T) = ts.cast(q @ k.mT, "f32") / math.sqrt(q.shape[-1]), (q.shape[-2], k.shape[-2])
    seen = ts.arange(T) <= ts.arange(S)[:, None] + (T - S)
    s = ts.where(seen, s, -math.inf) if causal else s
    return ts.cast(ts.softmax(s, axis=-1), v.type) @ v


def _attend(form, attend=ts.attention):
    """Heads are cut out of [B, T, H D] and joined again, as a model has them."""
    H, Hk, _, _, causal = FORMS[form]

    def f(q, k, v, g):
        y, pull = ts.vjp(lambda *xs: _joined(attend(
            *(_heads(x, n) for x, n in zip(xs, (H, Hk, Hk), strict=True)), causal=causal)), q, k, v)
        return y, *pull(g)

    return f


def _check(got, want, size, dtype, n):
    """Each element, by the size of its terms, and the whole by its norm.

    Products of 16-bit types round their operands, the weights among them: each term by itself, so
    the length of the sums is in their size alone; sums of f32 are rounded n times. Of the norm's
    relative error one rounding to bf16 makes 2^-8 / sqrt(3), and four follow each other.
    """
    narrow = dtype == "bf16"
    assert_close(got, want, dtype, n=2 if narrow else n, scale=size)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < (1.5 * 2**-8 if narrow else 2**-23 * n), error


def _split(x, count):
    B, T, d = x.shape
    return x.reshape(B, T, count, d // count).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("D", [32, 64, 80, 96, 128, 192, 256])
def test_attention_and_its_gradient(D, dtype, rng):
    _test_all_forms(D, dtype, rng, ts.attention)


def test_attention_in_plain_ops_and_its_gradient(rng):
    """Scores in memory would be products. A softmax of nothing is NaN, which has no oracle."""
    _test_all_forms(64, "bf16", rng, _in_plain_ops,
                    {f: kind for f, kind in FORMS.items() if f != "queries that see nothing"})


def _test_all_forms(D, dtype, rng, attend, forms=FORMS):
    """One function with all forms: their kernels are compiled side by side."""
    given, counts = {}, {}
    for form, (H, Hk, S, T, _) in forms.items():
        counts[form] = (H, Hk, Hk, H)
        given[form] = [ts.tensor(rng.standard_normal((2, n, c * D)).astype(np.float32), dtype)
                       for n, c in zip((S, T, T, S), counts[form], strict=True)]
    f = ts.jit(lambda given: {form: _attend(form, attend)(*xs) for form, xs in given.items()},
               target="cuda")
    with ts.config.scope(poison=True):
        made = f(given)
        kinds = {line.split()[1] for line in f.inspect_ir("schedule").splitlines()
                 if " over [" in line}
    assert not {"move", "gemm"} & kinds
    for form, got in made.items():
        wide = [_split(np.asarray(ts.cast(x, "f64")), n)
                for x, n in zip(given[form], counts[form], strict=True)]
        want, sizes = (f(*wide, FORMS[form][-1]) for f in (attention64, sizes64))
        heads = (counts[form][0], *counts[form][:3])
        for y, w, size, n in zip(got, want, sizes, heads, strict=True):
            y = _split(np.asarray(ts.cast(y, "f64")), n)
            _check(y, w, size, dtype, wide[1].shape[-2] + D)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("D, T", [(64, 1024), (64, 555), (80, 300), (128, 700), (192, 400)])
def test_a_bias_in_front_of_heads(D, T, dtype, rng):
    """Its gradient is summed by the kernels, of what they store, twice alike: see
    tests/cpu/test_result_sums.py."""
    B, H = 4, 2
    x, b, g = (ts.tensor(rng.standard_normal(s).astype(np.float32)) for s in (
        (B, T, 3 * H * D), (3 * H * D,), (B, T, H * D)))

    def f(x, b, g):
        def attend(x, b):
            q, k, v = (ts.cast(_heads(t, H), dtype) for t in ts.split(x + b, 3, axis=-1))
            return ts.cast(_joined(ts.attention(q, k, v, causal=True)), "f32")

        y, pull = ts.vjp(attend, x, b)
        return y, *pull(g)

    both = ts.jit(f, target="cuda")
    with ts.config.scope(poison=True):
        _, dx, db = (t.numpy() for t in both(x, b, g))
        assert not {"strips", "columns"} & {
            line.split()[1] for line in both.inspect_ir("schedule").splitlines()
            if f"over [{B}, {T}, " in line}
        again = both(x, b, g)[2].numpy()
    stored = dx.astype(np.float64).reshape(B * T, -1)
    assert_close(db, stored.sum(0), "f32", n=B * T, scale=np.sqrt((stored**2).sum(0)))
    assert np.array_equal(db, again)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("D, S, T", [(64, 100, 150), (192, 100, 150), (64, 136, 152),
                                     (128, 520, 640)])
def test_masked_attention_and_its_gradient(D, S, T, dtype, rng):
    """Keys that are not seen, a mask of each row and key, and one that is added and has a
    cotangent. TMA brings a matrix whose rows are multiples of 16 bytes."""
    shapes = ((2, 4, S, D), (2, 2, T, D), (2, 2, T, D), (2, 4, S, D))
    xs = [ts.tensor(rng.standard_normal(s).astype(np.float32), dtype) for s in shapes]
    masks = {"keys": rng.random((2, 1, 1, T)) < 0.8, "rows": rng.random((1, 4, S, T)) < 0.7,
             "added": rng.standard_normal((1, 4, S, T)).astype(np.float32)}
    masks["rows"][..., 7, :] = False  # a query that sees nothing

    def one(q, k, v, g, mask):
        own = (q, k, v, mask) if mask.dtype.kind == "float" else (q, k, v)
        y, pull = ts.vjp(lambda q, k, v, m=mask: ts.attention(q, k, v, mask=m, causal=True), *own)
        return y, *pull(g)

    f = ts.jit(lambda xs, masks: {n: one(*xs, m) for n, m in masks.items()}, target="cuda")
    with ts.config.scope(poison=True):
        made = f(xs, {n: ts.tensor(m) for n, m in masks.items()})
    wide = [np.asarray(ts.cast(x, "f64")) for x in xs]
    for name, mask in masks.items():
        own = mask if mask.dtype == bool else mask.astype(np.float64)
        full = np.broadcast_to(own, (2, 4, S, T))
        want, sizes = (f(*wide, True, full) for f in (attention64, sizes64))
        if name == "added":
            want[4] = want[4].sum(0, keepdims=True)
            sizes[4] = np.sqrt((sizes[4]**2).sum(0, keepdims=True))
        for y, w, size in zip(made[name], want, sizes, strict=True):
            _check(np.asarray(ts.cast(y, "f64")), w, size, dtype, T + D)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("D, S, T", [(64, 100, 152), (128, 640, 640), (192, 70, 91)])
def test_dropout_and_its_gradient(D, S, T, dtype, rng):
    """The key says which weights are dropped; heads in groups, queries in blocks of 512."""
    shapes = ((2, 4, S, D), (2, 2, T, D), (2, 2, T, D), (2, 4, S, D))
    xs = [ts.tensor(rng.standard_normal(s).astype(np.float32), dtype) for s in shapes]
    key = ts.random.key(int(rng.integers(2**40)))

    def both(q, k, v, g, key):
        y, pull = ts.vjp(lambda *a: ts.attention(*a, causal=True, dropout=0.3, key=key), q, k, v)
        return y, *pull(g)

    with ts.config.scope(poison=True):
        made = ts.jit(both, target="cuda")(*xs, key)
    wide = [np.asarray(ts.cast(x, "f64")) for x in xs]
    factor = dropout_factors(key.numpy(), (2, 4, S, T), True, 0.3)
    want, sizes = (f(*wide, True, None, factor) for f in (attention64, sizes64))
    for y, w, size in zip(made, want, sizes, strict=True):
        _check(np.asarray(ts.cast(y, "f64")), w, size, dtype, T + D)


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_with_keys_of_its_own_runs_twice_alike(causal, rng):
    x = ts.tensor(rng.standard_normal((2, 4, 256, 64)).astype(np.float32), "bf16")

    def f(x):
        key = ts.random.next_key()
        y, pull = ts.vjp(lambda *a: ts.attention(*a, causal=causal, dropout=0.3, key=key), x, x, x)
        return y, *pull(x), *pull(x)

    y, *made = ts.jit(f, target="cuda")(x)
    for a, b in zip(made[:3], made[3:], strict=True):
        assert np.array_equal(a.numpy(), b.numpy())
