"""Matmuls of 16 bits whose operands' rows are no multiples of 16 bytes."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from lowered_functions import both_ways, lowered
from tessera.graph.cuda.passes import library_ops
from tolerance import assert_close

SHAPES = {"k": (72, 90, 64), "m": (90, 64, 72), "n": (64, 72, 90), "all": (70, 90, 50)}  # M, K, N


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("laid", ["nn", "tn", "nt", "tt"])
@pytest.mark.parametrize("name", SHAPES)
def test_they_are_multiplied_with_zeros_behind_them(name, laid, dtype, rng, monkeypatch):
    monkeypatch.setattr(library_ops, "WORTH", 0.0)
    M, K, N = SHAPES[name]
    a, b = (ts.tensor(rng.standard_normal(s[::-1] if way == "t" else s), dtype)
            for s, way in zip(((M, K), (K, N)), laid, strict=True))

    def fn(a, b):
        x, y = (v.T if way == "t" else v for v, way in zip((a, b), laid, strict=True))
        return ts.cast(x @ y, "f32") + 1.0

    made = lowered(fn, a, b)
    rows = [o.shape[-1] for g in made.plan.groups if g.kind == "gemm" for o in g.reads[:2]]
    assert len(rows) == 2 and not any(n % 8 for n in rows)
    (got,) = made.run([a.array, b.array])
    x, y = (np.asarray(v.array, np.float64) for v in (a, b))
    x, y = (v.T if way == "t" else v for v, way in zip((x, y), laid, strict=True))
    assert_close(got, x @ y + 1.0, dtype, n=K, scale=np.abs(x) @ np.abs(y) + 1.0)


def test_nothing_is_padded_where_a_copy_takes_longer(rng):
    a, b = (ts.tensor(rng.standard_normal(s), "bf16") for s in ((64, 90), (90, 64)))
    assert [g.kind for g in lowered(lambda a, b: a @ b, a, b).plan.groups] == ["gemm"]


def test_large_ones_pay_and_their_gradients_share_the_zeros():
    """Of a vocabulary whose words are no multiple of eight."""
    x, w, ids = ts.zeros((4096, 1024), "bf16"), ts.zeros((1024, 30522), "bf16"), ts.zeros(
        (4096,), "int32")

    def loss(x, w, ids):
        return ts.cross_entropy(ts.cast(x @ w, "f32"), ids)

    plan = lowered(ts.grad(loss, argnums=(0, 1)), x, w, ids).plan
    rows = [o.shape[-1] for g in plan.groups if g.kind == "gemm" for o in g.reads[:2]]
    assert len(rows) == 6 and not any(n % 8 for n in rows)
    largest = [g for g in plan.groups if g.kind != "gemm" and any(
        np.prod(o.shape) >= 4096 * 30522 for o in g.writes)]
    assert len(largest) == 1  # the gradient of the scores, with zeros behind its rows


def test_rows_that_are_joined_get_their_zeros_there(rng, monkeypatch):
    monkeypatch.setattr(library_ops, "LAUNCH_US", 0.0)
    h, v, w = (ts.tensor(rng.standard_normal(s), "bf16") for s in ((500, 64), (500, 26), (90, 64)))

    def fn(h, v, w):
        return ts.cast(ts.concatenate([ts.relu(h), v], 1) @ w, "f32")

    monkeypatch.setattr(library_ops, "BYTE_US", 1e-9)
    copies = [g for g in lowered(fn, h, v, w).plan.groups if 96 in [o.shape[-1] for o in g.writes]]
    assert len(copies) == 1
    got, want = both_ways(fn, h, v, w)
    assert_close(got[0], np.asarray(want[0], np.float64), "bf16", n=90, scale=60.0)
