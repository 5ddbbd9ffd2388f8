"""Matmuls with one row, one column or one term have no kernel of matmuls."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

import tessera as ts
from lowered_functions import lowered
from tolerance import assert_close

SHAPES = {
    "a column": ((300, 40), (40, 1)),
    "a row": ((1, 300), (300, 40)),
    "one number": ((1, 300), (300, 1)),
    "one term": ((30, 1), (1, 40)),
    "columns of many": ((5, 20, 30), (5, 30, 1)),
    "rows of many": ((5, 1, 30), (5, 30, 20)),
    "one row for all": ((1, 30), (5, 30, 20)),
    "one matrix for all": ((5, 7, 30), (30, 1)),
    "terms of many": ((5, 20, 1), (5, 1, 30)),
}
LAID = {"nn": (False, False), "tn": (True, False), "nt": (False, True), "tt": (True, True)}


def given(shape: tuple[int, ...], turned: bool, dtype: str, rng: np.random.Generator) -> ts.Tensor:
    shape = (*shape[:-2], *shape[:-3:-1]) if turned else shape
    return ts.tensor(rng.standard_normal(shape), dtype)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("laid", LAID)
@pytest.mark.parametrize("name", SHAPES)
def test_they_are_sums_and_products(name, laid, dtype, rng):
    turned = LAID[laid]
    a, b = (given(s, t, dtype, rng) for s, t in zip(SHAPES[name], turned, strict=True))

    def fn(a, b):
        return (a.mT if turned[0] else a) @ (b.mT if turned[1] else b)

    made = lowered(fn, a, b)
    copies = set() if name == "one matrix for all" else {"move"}  # rows of a stack are merged
    assert not ({"gemm"} | copies) & {g.kind for g in made.plan.groups}
    (got,) = made.run([a.array, b.array])
    x, y = (np.asarray(v.array, np.float64) for v in (a, b))
    x, y = (np.swapaxes(v, -1, -2) if t else v for v, t in zip((x, y), turned, strict=True))
    assert got.shape == (x @ y).shape
    assert_close(got, x @ y, dtype, n=x.shape[-1], scale=np.abs(x) @ np.abs(y))


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_products_of_16_bits_are_those_of_f32(dtype, rng):
    a, b = (ts.tensor(rng.standard_normal(s), dtype) for s in ((70, 1), (1, 24)))
    made = lowered(lambda a, b: ts.cast(a @ b, "f32") + 1.0, a, b)
    assert [g.kind for g in made.plan.groups if g.kind != "view"] == ["loop"]
    (got,) = made.run([a.array, b.array])
    want = ts.jit(lambda a, b: ts.cast(a @ b, "f32") + 1.0)(a, b)
    np.testing.assert_array_equal(got, want.array)


def test_scores_of_rows_and_their_gradient_need_no_matmul(rng):
    h, a, b = (ts.tensor(rng.standard_normal(s), "f32") for s in ((5000, 64), (64,), (64,)))

    def fn(h, a, b):
        return ts.grad(lambda h: ts.sum(ts.sin(h @ a) * (h @ b)))(h)

    groups = lowered(fn, h, a, b).plan.groups
    assert {g.kind for g in groups} == {"loop", "rows"}
    assert sum(prod(y.shape) > 5000 for g in groups for y in g.writes) == 1  # the result
    (got,) = lowered(fn, h, a, b).run([h.array, a.array, b.array])
    x, u, v = (np.asarray(t.array, np.float64) for t in (h, a, b))
    want = (np.cos(x @ u) * (x @ v))[:, None] * u + np.sin(x @ u)[:, None] * v
    assert_close(got, want, "f32", n=64, scale=64.0)


def test_what_is_made_of_a_row_and_a_column_is_added_where_a_matmul_ends(rng):
    """Through the reshape between them, too: a value of each row beside other results."""
    x, w, a, v = (ts.tensor(rng.standard_normal(s), "f32")
                  for s in ((40, 50, 32), (32, 64), (64, 24), (64, 1)))

    def fn(x, w, a, v):
        h = ts.tanh(x @ w)
        return ts.sum(ts.sin(h @ a)) + ts.sum(ts.cos((h @ v)[..., 0]))

    step = ts.grad(fn, argnums=1)
    made = lowered(step, x, w, a, v)
    assert not any(g.kind == "loop" and prod(g.writes[0].shape) == 2000 * 64
                   for g in made.plan.groups)
    (got,) = made.run([t.array for t in (x, w, a, v)])
    x, w, a, v = (np.asarray(t.array, np.float64) for t in (x, w, a, v))
    h = np.tanh(x @ w)
    dh = np.cos(h @ a) @ a.T - np.sin(h @ v) @ v.T
    want = np.einsum("bti,bto->io", x, dh * (1 - h * h))
    assert_close(got, want, "f32", n=2000, scale=2000.0)
