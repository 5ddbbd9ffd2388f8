"""Attention with dropout: the op and its derivatives, and kernels that draw in place, against f64
with the draws that the key stands for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from attention_cases import attention64, dropout_factors, sizes64
from emulator import compare
from hopper_lowering import Known, distance, program, run
from tessera import bf16
from tessera.errors import ArgumentError
from tessera.graph.cuda.levels import program_of
from tessera.graph.cuda.masked_attention_kernels import smallest_kept
from tessera.kernels.dropout_attention import (
    dropout_attention,
    dropout_attention_keys,
    dropout_attention_queries,
)
from tolerance import assert_close

SHAPES = {  # queries, keys, width of values
    "heads": ((2, 3, 40, 16), (2, 3, 40, 16), 16),
    "groups": ((2, 4, 37, 16), (2, 2, 70, 16), 16),  # rows of words begin anywhere
    "three axes": ((3, 33, 16), (3, 21, 16), 24),
    "two blocks": ((1, 2, 600, 8), (1, 1, 640, 8), 8),  # of queries, each with a key of its own
}
P = 0.3


def both(causal: bool, p: float = P) -> Any:
    """The result, and the cotangents of q, k, v, and of a mask of floats."""
    def f(q, k, v, g, key, mask=None):
        floats = mask is not None and mask.dtype.kind == "float"
        xs = (q, k, v, mask) if floats else (q, k, v)
        y, pull = ts.vjp(lambda q, k, v, mask=mask: ts.attention(
            q, k, v, causal=causal, mask=mask, dropout=p, key=key), *xs)
        return y, *pull(g)

    return f


def _case(name, mask, dtype, causal, rng):
    """(operands, the key, the mask if any; what is expected; how large its terms are)"""
    q, k, E = SHAPES[name]
    shapes = (q, k, (*k[:-1], E), (*q[:-1], E))
    xs = [ts.tensor(rng.standard_normal(s).astype(np.float32), dtype) for s in shapes]
    key = ts.random.key(int(rng.integers(2**40)))
    extents = (*(1,) * (len(q) - 2), q[-2], k[-2])
    own = {"none": None, "bools": rng.random(extents) < 0.8,
           "floats": rng.standard_normal(extents).astype(np.float32)}[mask]
    scores = (*q[:-1], k[-2])
    full = None if own is None else np.broadcast_to(
        own.astype(np.float64) if mask == "floats" else own, scores)
    wide = [np.asarray(ts.cast(x, "f64")) for x in xs]
    factor = dropout_factors(key.numpy(), scores, causal, P)
    want, sizes = (f(*wide, causal, full, factor) for f in (attention64, sizes64))
    if mask == "floats":
        lead = tuple(range(len(q) - 2))
        want[4] = want[4].sum(lead, keepdims=True)
        sizes[4] = np.sqrt((sizes[4] ** 2).sum(lead, keepdims=True))
    given = [*xs, key] + ([] if own is None else [ts.tensor(own)])
    return given, want, sizes


@pytest.mark.parametrize("mask", ["none", "bools", "floats"])
@pytest.mark.parametrize("name, causal", [("heads", True), ("groups", False), ("groups", True),
                                          ("three axes", False), ("two blocks", True)])
def test_against_f64(name, causal, mask, rng):
    given, want, sizes = _case(name, mask, "f32", causal, rng)
    made = program_of(ts.jit(both(causal)).graph(*given), "sm_90a")
    assert [g.kind for g in made.plan.groups].count("launch") == 3 + (mask == "floats")
    terms = 2 * (given[1].shape[-2] + given[0].shape[-1])
    for got, w, size in zip(made.run([x.array for x in given]), want, sizes, strict=True):
        assert_close(got, w, "f32", n=terms, scale=size)
    for got, w, size in zip(both(causal)(*given), want, sizes, strict=True):  # and on the CPU
        assert_close(got.array, w, "f32", n=terms, scale=size)


def test_a_gpu_keeps_no_scores(rng):
    """Neither weights nor draws lie in memory, and all products are in tensor cores."""
    given, want, _ = _case("two blocks", "none", "bf16", True, rng)
    f = ts.jit(both(True))
    made = program_of(f.graph(*given), "sm_90a")
    S, T = given[0].shape[-2], given[1].shape[-2]
    assert all(len(x.shape) < 2 or x.shape[-1] < 512 or x.shape[-2] < 512
               for g in made.plan.groups for x in (*g.reads, *g.writes)), (S, T)
    forms = {form for m in f.schedule(*given, target="sm_90a").matmuls for form in m.how.all}
    assert forms and forms <= {"wgmma", "mma"}
    for got, w in zip(made.run([x.array for x in given]), want, strict=True):
        assert distance(got, w) < 6e-3


@pytest.mark.parametrize("group, causal", [(1, True), (2, False)])
def test_by_warpgroups(group, causal, rng):
    H, S, T, D, p = 2, 100, 132, 64, 0.75
    q, g = (rng.standard_normal((H, S, D)).astype(bf16.numpy) for _ in "qg")
    k, v = (rng.standard_normal((H // group, T, D)).astype(bf16.numpy) for _ in "kv")
    words = rng.integers(0, 2**32, (1, 2), np.uint32)
    wide = [np.asarray(x, np.float64) for x in (q, k, v, g)]
    factor = dropout_factors(words[0], (H, S, T), causal, p)
    y, dq, dk, dv = attention64(*wide, causal, None, factor)
    mask, scale = np.ones((1, 1, 1), bool), D ** -0.5
    common = {"heads": H, "group": group, "causal": causal, "block": S, "runs": True,
              "least": smallest_kept(p), "grown": 1 / (1 - p)}
    out, lse = np.full((H, S, D), np.nan, np.float32), np.full((H, S), np.nan, np.float32)
    delta = (y * wide[3]).sum(-1).astype(np.float32)
    made = [np.full(x.shape, np.nan, np.float32) for x in (dk, dv, dq)]
    facts = Known(divisible=frozenset("DE"), aligned=frozenset("QKVG"))
    for kernel, grid, args in (
            (dropout_attention, (2, H), (q, k, v, mask, words, out, lse, scale)),
            (dropout_attention_keys, (3, H // group),
             (q, k, v, mask, words, g, lse, delta, *made[:2], scale)),
            (dropout_attention_queries, (2, H),
             (q, k, v, mask, words, g, lse, delta, made[2], scale))):
        lowered = program(kernel, *args, facts=facts, **common)
        assert lowered.pipeline.overlap
        run(kernel, lowered, grid, *args, **common)
    for got, want in zip((out, *made), (y, dk, dv, dq), strict=True):
        assert distance(got, want) < 6e-3


@pytest.mark.parametrize("runs", [False, True])
def test_emulated(runs, rng):
    """The emitted code, words of both forms of draws among it."""
    S, T, D = 36, 40, 16
    q, k, v = (rng.standard_normal((2, n, D)).astype(np.float32) for n in (S, T, T))
    words, mask = rng.integers(0, 2**32, (1, 2), np.uint32), rng.random((2, 1, T)) < 0.8
    out, lse = np.zeros((2, S, D), np.float32), np.zeros((2, S), np.float32)
    compare(dropout_attention, q, k, v, mask, words, out, lse, 0.25, heads=2, BM=32, BN=32,
            causal=True, per_head=1, columns=True, block=S, runs=runs, least=smallest_kept(0.5),
            grown=2.0, lanes=64)


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


def test_second_derivatives(rng):
    q, key = ts.tensor(rng.standard_normal((1, 2, 4, 3))), ts.random.key(11)
    f = lambda q: ts.attention(q, q, q, dropout=0.4, key=key)  # noqa: E731
    assert ts.gradcheck(f, (q,)) and ts.gradcheck(ts.grad(lambda q: ts.sum(f(q) ** 2)), (q,))


@pytest.mark.parametrize("p", [1.0, 1.5, -0.1])
def test_probabilities(p, rng):
    q = ts.ones((2, 3, 4))
    with pytest.raises(ArgumentError, match=f"dropout needs 0 <= p < 1, got {p}"):
        ts.attention(q, q, q, dropout=p)
