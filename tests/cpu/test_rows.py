"""Rows combined by integers in a compiled loop: the bits of NumPy, one row after another."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from tessera import config
from tessera.graph.cpu import rows as compiled_rows
from tessera.graph.ops.gather import add_rows


def one_after_another(out: np.ndarray, ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
    wide = np.zeros(out.shape)
    for i, row in zip(ids, rows, strict=True):
        out[i] += row
        wide[i] += row
    often = np.bincount(ids % len(out), minlength=len(out)) > 128
    if out.dtype == np.float32:
        out[often] = wide[often]
    return out


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("T, D, V", [(900, 70, 40), (900, 2, 3), (300, 33, 1), (0, 5, 4)])
def test_sums(T, D, V, kind, monkeypatch, rng):
    monkeypatch.setattr(compiled_rows, "LEAST", 0)
    rows, ids = rng.standard_normal((T, D)).astype(kind), rng.integers(-V, V, T)
    out = np.zeros((V, D), kind)
    add_rows(out, ids, rows)
    assert (out == one_after_another(np.zeros((V, D), kind), ids, rows)).all()


@pytest.mark.parametrize("A, D", [(4, 1), (70, 1), (4, 6)])
def test_sums_behind_other_axes(A, D, monkeypatch, rng):
    """Rows of one element are added side by side, by several threads where there are many."""
    monkeypatch.setattr(compiled_rows, "LEAST", 0)
    monkeypatch.setattr(compiled_rows, "PARTED", 0)
    rows, ids = rng.standard_normal((A, 700, D)).astype(np.float32), rng.integers(-9, 9, 700)
    ids[:300] = 2  # many of one
    out = np.zeros((A, 9, D), np.float32)
    add_rows(out, ids, rows)
    want = [one_after_another(np.zeros((9, D), np.float32), ids, part) for part in rows]
    assert (out == np.stack(want)).all()
    u = rng.standard_normal((3, 2, 40, 5)).astype(np.float32)
    got = np.asarray(ts.vjp(lambda x: ts.take(x, ids[:40], axis=2), np.zeros((3, 2, 9, 5),
                                                                          np.float32))[1](u))
    want = [one_after_another(np.zeros((9, 5), np.float32), ids[:40], part)
            for part in u.reshape(6, 40, 5)]
    assert (got.reshape(6, 9, 5) == np.stack(want)).all()


def test_threads_take_columns(monkeypatch, rng):
    """Several threads give the bits of one; rows may lie apart."""
    monkeypatch.setattr(compiled_rows, "PARTED", 0)
    rows, ids = rng.standard_normal((700, 300)).astype(np.float32), rng.integers(0, 9, 700)
    found = []
    for threads in (1, 4):
        monkeypatch.setattr(config, "num_threads", threads)
        out = np.zeros((9, 170), np.float32)
        add_rows(out, ids, rows[:, 60:230])
        found.append(out)
    assert (found[0] == found[1]).all()
    want = one_after_another(np.zeros((9, 170), np.float32), ids, rows[:, 60:230])
    assert (found[0] == want).all()


@pytest.mark.parametrize("name, extremum", [("segment_max", np.maximum), ("segment_min",
                                                                          np.minimum)])
def test_extrema(name, extremum, monkeypatch, rng):
    monkeypatch.setattr(compiled_rows, "LEAST", 0)
    x, ids = rng.standard_normal((200, 6)).astype(np.float32), rng.integers(-7, 7, 200)
    x[3, 2], ids[:2] = np.nan, (0, -1)
    ids[ids % 7 == 5] = 1  # nothing is left for segment 5
    got = np.asarray(getattr(ts, name)(x, ids, 7))
    want = np.full((7, 6), -np.inf if name == "segment_max" else np.inf, np.float32)
    extremum.at(want, ids, x)
    assert np.array_equal(got, want, equal_nan=True)
    assert np.isnan(got).any() and np.isinf(got[5]).all()


def test_the_loop_is_taken_for_many_rows(monkeypatch, rng):
    """By a graph, too: its gradient of a table's rows."""
    used = []
    combine = compiled_rows.combine
    monkeypatch.setattr(compiled_rows, "combine", lambda *a: (used.append(a[0]), combine(*a)))
    table, ids = rng.standard_normal((50, 64)).astype(np.float32), rng.integers(0, 50, 600)
    grad = ts.jit(ts.grad(lambda t: ts.sum(ts.take(t, ids) ** 2)))(table)
    want = one_after_another(np.zeros((50, 64), np.float32), ids, 2 * table[ids])
    np.testing.assert_allclose(np.asarray(grad), want, rtol=1e-6)
    assert used == ["sum"]
