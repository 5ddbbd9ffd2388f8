"""Attention with a mask, dropout, or both: the op, its derivatives, and the kernels of a lowered
graph under the interpreter, against f64 with the draws that the key stands for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from attention_cases import attention64, dropout_factors, sizes64
from hopper_lowering import distance
from tessera.errors import ArgumentError
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.levels import program_of
from tessera.graph.cuda.passes import attention_masks
from tolerance import assert_close

SHAPES = {  # queries, keys, width of values
    "heads": ((2, 3, 40, 32), (2, 3, 40, 32), 32),
    "groups": ((2, 4, 37, 16), (2, 2, 70, 16), 16),  # rows of words begin anywhere
    "three axes": ((3, 33, 16), (3, 21, 16), 24),
    "two blocks": ((1, 2, 600, 8), (1, 1, 640, 8), 8),  # of queries, each with a key of its own
    "warpgroups": ((2, 4, 72, 16), (2, 2, 136, 16), 16),
    "two of warpgroups": ((1, 2, 600, 16), (1, 1, 672, 16), 16),
    "odd": ((2, 2, 67, 16), (2, 2, 75, 16), 16),  # lines of masks begin anywhere
}
MASKS = {  # the mask's extents for [B, H, S, T] or [N, S, T]
    "of keys": lambda s: (*(s[:1] if len(s) == 4 else ()), *(1,) * (len(s) - 2), s[-1]),
    "of all": lambda s: s,
    "of heads": lambda s: (1, *s[1:]) if len(s) == 4 else (1, *s[-2:]),
    "of queries": lambda s: (*(1,) * (len(s) - 2), s[-2], 1),
    "one number": lambda s: (1,) * len(s),
    "one": lambda s: s[-2:],
    "a number": lambda s: (*s[:1], *(1,) * (len(s) - 1)),
}
P = 0.3


def both(causal: bool, p: float) -> Any:
    """The result, and the cotangents of q, k, v, and of a mask of floats."""
    def f(q, k, v, g, key, mask=None):
        floats = mask is not None and mask.dtype.kind == "float"
        xs = (q, k, v, mask) if floats else (q, k, v)
        y, pull = ts.vjp(lambda q, k, v, mask=mask: ts.attention(
            q, k, v, causal=causal, mask=mask, dropout=p, key=key), *xs)
        return y, *pull(g)

    return f


def _mask(kind, floats, scores, rng):
    """None, or an array; some queries see nothing of bools."""
    if kind is None:
        return None
    extents = MASKS[kind](scores)
    mask = rng.standard_normal(extents).astype(np.float32) if floats else rng.random(extents) < 0.7
    if not floats and mask.shape[-1] > 1 and mask.shape[-2] > 1:
        mask[..., :1, :] = False
    return mask


def _case(name, kind, floats, dtype, causal, p, rng):
    """(operands, the key, the mask if any; what is expected, and how large its terms are)"""
    q, k, E = SHAPES[name]
    shapes = (q, k, (*k[:-1], E), (*q[:-1], E))
    xs = [ts.tensor(rng.standard_normal(s).astype(np.float32), dtype) for s in shapes]
    key, scores = ts.random.key(int(rng.integers(2**40))), (*q[:-1], k[-2])
    mask = _mask(kind, floats, scores, rng)
    full = None if mask is None else np.broadcast_to(
        mask.astype(np.float64) if floats else mask, scores)
    factor = dropout_factors(key.numpy(), scores, causal, p)
    wide = [np.asarray(ts.cast(x, "f64")) for x in xs]
    want, sizes = (f(*wide, causal, full, factor) for f in (attention64, sizes64))
    if len(want) == 5:
        lead = (1,) * (len(scores) - mask.ndim) + mask.shape
        along = tuple(i for i, n in enumerate(lead) if n != scores[i])
        want[4] = want[4].sum(along).reshape(mask.shape)
        sizes[4] = np.sqrt((sizes[4]**2).sum(along)).reshape(mask.shape)
    given = [*xs, key] + ([] if mask is None else [ts.tensor(mask)])
    return given, list(zip(want, sizes, strict=True))


@pytest.mark.parametrize("name, kind, floats, causal, p", [
    *(("heads", kind, floats, False, 0.0) for kind in MASKS for floats in (False, True)),
    *(("groups", kind, floats, True, 0.0) for kind in MASKS for floats in (False, True)),
    *(("three axes", kind, floats, kind == "of all", p) for kind in ("of all", "one")
      for floats in (False, True) for p in (0.0, P)),
    *((name, None, False, causal, P) for name in ("heads", "groups", "three axes", "two blocks")
      for causal in (False, True)),
    *(("heads", kind, floats, True, P) for kind in ("of keys", "of all")
      for floats in (False, True)),
    *(("groups", "of all", floats, False, P) for floats in (False, True)),
    *(("two blocks", "one", floats, True, P) for floats in (False, True))])
def test_against_f64(name, kind, floats, causal, p, rng):
    given, want = _case(name, kind, floats, "f32", causal, p, rng)
    f = both(causal, p)
    made = program_of(ts.jit(f).graph(*given), "sm_90a")
    kinds = [g.kind for g in made.plan.groups]
    assert kinds.count("launch") == 3 + floats and "gemm" not in kinds
    terms = 2 * (given[1].shape[-2] + given[0].shape[-1])
    for got, (w, size) in zip(made.run([x.array for x in given]), want, strict=True):
        assert_close(got, w, "f32", n=terms, scale=size)
    for got, (w, size) in zip(f(*given), want, strict=True):  # and on the CPU
        assert_close(got.array, w, "f32", n=terms, scale=size)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("kind, floats, p", [("of all", False, 0.0), ("of all", True, 0.0),
                                             (None, False, P), ("of keys", False, P)])
def test_narrow_types_are_on_tensor_cores(kind, floats, p, dtype, rng):
    """A mask whose cotangent nobody asks for costs no scores in memory."""
    given, want = _case("heads", kind, floats, dtype, True, p, rng)
    f = ts.jit(lambda *a: both(True, p)(*a)[:4])
    made = program_of(f.graph(*given), "sm_90a")
    assert [g.kind for g in made.plan.groups].count("launch") == 3
    forms = {form for m in f.schedule(*given, target="sm_90a").matmuls for form in m.how.all}
    assert forms and forms <= {"wgmma", "mma"}
    for got, (w, size) in zip(made.run([x.array for x in given]), want[:4], strict=True):
        # terms are rounded one by one: the length of the sums is in their size alone
        assert_close(np.asarray(got, np.float64), w, dtype, n=2, scale=size)


@pytest.mark.parametrize("name, kind, floats, causal, p", [
    *(("warpgroups", kind, floats, floats, 0.0) for kind in ("of keys", "of heads", "of all", "one")
      for floats in (False, True)),
    ("odd", "of keys", False, False, 0.0), ("odd", "of keys", True, True, P),
    ("warpgroups", "of all", True, False, P), ("warpgroups", None, False, False, P),
    ("two of warpgroups", None, False, True, P), ("two of warpgroups", "of keys", False, False, P)])
def test_the_fastest_kernels_take_them(name, kind, floats, causal, p, rng):
    """Masks of keys and of each score, and dropout, of operands of 16 bits."""
    given, want = _case(name, kind, floats, "bf16", causal, p, rng)
    made = program_of(ts.jit(both(causal, p)).graph(*given), "sm_90a")
    kinds = [g.kind for g in made.plan.groups]
    assert kinds.count("attention") == 1 and kinds.count("launch") == 2 + (kind is not None
                                                                           and floats)
    for got, (w, size) in zip(made.run([x.array for x in given]), want, strict=True):
        assert distance(got, w) < 1e-2
        assert_close(np.asarray(got, np.float64), w, "bf16", n=4, scale=size)


def test_a_gpu_keeps_no_scores(rng):
    """Neither weights nor draws lie in memory."""
    given, want = _case("two blocks", None, False, "bf16", True, P, rng)
    made = program_of(ts.jit(both(True, P)).graph(*given), "sm_90a")
    S, T = given[0].shape[-2], given[1].shape[-2]
    assert all(len(x.shape) < 2 or x.shape[-1] < 512 or x.shape[-2] < 512
               for g in made.plan.groups for x in (*g.reads, *g.writes)), (S, T)
    for got, (w, _) in zip(made.run([x.array for x in given]), want, strict=True):
        assert distance(got, w) < 6e-3


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.0, -0.25, -8.0])
def test_scales_that_turn_scores_round(scale, causal, rng):
    """The largest product is not the largest score then, and -inf of one not -inf of the other."""
    q, k, g = rng.standard_normal((3, 2, 40, 16))

    def f(q, k, g):
        y, pull = ts.vjp(lambda q, k: ts.attention(q, k, k, causal=causal, scale=scale), q, k)
        return y, *pull(g)

    given = [ts.tensor(x.astype(np.float32)) for x in (q, k, g)]
    made = program_of(ts.jit(f).graph(*given), "sm_90a").run([x.array for x in given])
    turned = q * scale * np.sqrt(16)  # attention64 divides by the root
    want, sizes = (list(f(turned, k, k, g, causal)) for f in (attention64, sizes64))
    want[1], sizes[1] = want[1] * scale * np.sqrt(16), sizes[1] * abs(scale) * np.sqrt(16)
    want[2:], sizes[2:] = [want[2] + want[3]], [np.hypot(sizes[2], sizes[3])]
    for got, w, size in zip(made, want, sizes, strict=True):
        assert_close(got, w, "f32", n=2 * (40 + 16), scale=size)


def test_many_queries_in_blocks(rng):
    """More queries than a block has, on the CPU: the mask's cotangent is put together."""
    q, g = (rng.standard_normal((1, 2, 600, 4)) for _ in range(2))
    mask = rng.standard_normal((1, 1, 600, 600))
    full = np.broadcast_to(mask, (1, 2, 600, 600))
    want, sizes = (f(q, q, q, g, True, full) for f in (attention64, sizes64))
    want[4], sizes[4] = want[4].sum(1), np.sqrt((sizes[4]**2).sum(1))
    given = [ts.tensor(x) for x in (q, q, q, g)]
    made = ts.jit(both(True, 0.0))(*given, ts.random.key(1), ts.tensor(mask))
    for got, w, size in zip(made, want, sizes, strict=True):
        assert_close(got.array, w.reshape(got.shape), "f64", n=600, scale=size.reshape(got.shape))


def test_batches_of_masks(rng):
    q, mask = (ts.tensor(rng.standard_normal(s)) for s in ((3, 2, 2, 5, 4), (2, 1, 5, 5)))
    f = lambda q: ts.attention(q, q, q, mask=mask)  # noqa: E731
    rows = ts.stack([f(q[i]) for i in range(3)])
    assert_close(ts.vmap(f)(q).array, rows.array, "f64", n=8)
    once = ts.grad(lambda q, m: ts.sum(ts.attention(q, q, q, mask=m) ** 2), argnums=(0, 1))
    rows = ts.stack([once(q[i], mask)[1] for i in range(3)])
    assert_close(ts.vmap(lambda q: once(q, mask)[1])(q).array, rows.array, "f64", n=64)


def test_rows_of_a_batch_draw_apart(rng):
    """By the expansion: with keys of its own each row draws its own; with a key given, the same."""
    q = ts.tensor(rng.standard_normal((3, 2, 2, 9, 4)).astype(np.float32))
    key = ts.random.key(7)
    f = lambda q: ts.attention(q, q, q, dropout=0.5, key=key)  # noqa: E731
    rows = ts.stack([f(q[i]) for i in range(3)])
    assert_close(ts.vmap(f)(q).array, rows.array, "f32", n=16)
    loss = ts.grad(lambda q: ts.sum(f(q) ** 2))
    rows = ts.stack([loss(q[i]) for i in range(3)])
    assert_close(ts.vmap(loss)(q).array, rows.array, "f32", n=64)
    same = ts.broadcast_to(q[:1], q.shape)
    y = ts.vmap(lambda q: ts.attention(q, q, q, dropout=0.5))(same).numpy()
    assert not np.array_equal(y[0], y[1])


@pytest.mark.parametrize("masked, p", [(True, 0.0), (False, 0.4), (True, 0.4)])
def test_second_derivatives(masked, p, rng):
    q, mask = (ts.tensor(rng.standard_normal(s)) for s in ((2, 2, 4, 3), (2, 1, 4, 4)))
    key = ts.random.key(11) if p else None
    f = lambda q, m: ts.attention(  # noqa: E731
        q, q, q, mask=m if masked else None, dropout=p, key=key)
    once = ts.grad(lambda q, m: ts.sum(f(q, m) ** 2))
    assert ts.gradcheck(f, (q, mask)) and ts.gradcheck(once, (q, mask))


@pytest.mark.parametrize("p", [1.0, 1.5, -0.1])
def test_probabilities(p, rng):
    q = ts.ones((2, 3, 4))
    with pytest.raises(ArgumentError, match=f"dropout needs 0 <= p < 1, got {p}"):
        ts.attention(q, q, q, dropout=p)


SHARED = {"heads of sequences": (1, 2), "sequences": (3, 1), "all": (1, 1), "none": (3, 2)}


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("extents", [(64, 72), (49, 49)])  # of the fastest kernels, and of others
@pytest.mark.parametrize("name", SHARED)
def test_the_cotangent_of_a_mask_is_summed_over_those_that_share_it(name, extents, rows, rng,
                                                                    monkeypatch):
    """In the kernel, by as many groups as keep a GPU busy: nothing of all scores is written."""
    monkeypatch.setattr(attention_masks, "GROUPS", 3)
    (B, H), (S, T), D = (3, 2), extents, 64
    q, k, v, g = (ts.tensor(rng.standard_normal((B, H, n, D)), "bf16") for n in (S, T, T, S))
    bias = ts.tensor(rng.standard_normal((*SHARED[name], S if rows else 1, T)), "f32")

    def cotangent(bias, q, k, v, g):
        return ts.vjp(lambda b: ts.attention(q, k, v, mask=b), bias)[1](g)

    made = CudaProgram(ts.jit(cotangent).graph(bias, q, k, v, g), "sm_90a")
    (got,) = made.run([x.array for x in (bias, q, k, v, g)])
    x, y, z, c, b = (np.asarray(t.array, np.float64) for t in (q, k, v, g, bias))
    s = x @ y.swapaxes(-1, -2) / D**0.5 + b
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = c @ z.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    want = ds.sum(tuple(a for a in range(4) if b.shape[a] == 1 < ds.shape[a]), keepdims=True)
    assert got.shape == want.shape
    assert np.abs(got - want).max() < 2e-2 * np.abs(want).max()
    if name != "none":
        largest = max(np.prod(o.shape) for g in made.plan.groups for o in g.writes)
        assert largest < B * H * S * T or largest == q.array.size
