"""Keys of a split, and draws that follow weights: their frequencies against the probabilities."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from frequencies import likely
from tessera.errors import ArgumentError, DTypeError, ShapeError, UnknownNameError

MANY = 40_000


def test_split_keys_differ_and_repeat(rng: np.random.Generator) -> None:
    seed = int(rng.integers(2**40))
    keys = ts.random.split(ts.random.key(seed), 50).numpy()
    assert keys.shape == (50, 2) and len({tuple(k) for k in keys.tolist()}) == 50
    np.testing.assert_array_equal(keys, ts.jit(lambda k: ts.random.split(k, 50))(
        ts.random.key(seed)))
    a, b = ts.random.split(ts.random.key(seed))
    x, y = (ts.random.normal((MANY,), key=k).numpy() for k in (a, b))
    assert abs(np.corrcoef(x, y)[0, 1]) < 6 / np.sqrt(MANY)
    base = ts.random.normal((MANY,), key=ts.random.key(seed)).numpy()
    assert abs(np.corrcoef(x, base)[0, 1]) < 6 / np.sqrt(MANY)


def test_categorical_follows_its_logits(rng: np.random.Generator) -> None:
    logits = rng.standard_normal((2, 5)).astype(np.float32) * 2
    logits[1, 2] = -np.inf
    key = ts.random.key(int(rng.integers(2**32)))
    draws = ts.random.categorical(logits, (MANY, 2), key=key)
    assert draws.type == "int64" and draws.shape == (MANY, 2)
    for row in range(2):
        p = np.exp(logits[row].astype(np.float64))
        counts = np.bincount(draws.numpy()[:, row], minlength=5)
        assert likely(counts[p > 0], p[p > 0]) and not counts[p == 0].any()
    flat = np.zeros(1000, np.float32)
    assert likely(np.bincount(ts.random.categorical(flat, MANY, key=key), minlength=1000) + 0.0,
                  np.ones(1000))
    assert ts.random.categorical(logits.T, axis=0, key=key).shape == (2,)
    np.testing.assert_array_equal(
        draws, ts.jit(lambda x: ts.random.categorical(x, (MANY, 2), key=key))(logits))


@pytest.mark.parametrize("replace", [True, False])
def test_choice_of_equal_elements(replace: bool, rng: np.random.Generator) -> None:
    keys = ts.random.split(ts.random.key(int(rng.integers(2**32))), 60)
    draws = np.concatenate([ts.random.choice(7, 5, replace=replace, key=k) for k in keys])
    assert likely(np.bincount(draws, minlength=7), np.ones(7))
    if not replace:
        assert all(len(set(row)) == 5 for row in draws.reshape(60, 5).tolist())


def test_choice_with_weights(rng: np.random.Generator) -> None:
    key = ts.random.key(int(rng.integers(2**32)))
    p = np.array([0.1, 0.0, 0.6, 0.3])
    draws = ts.random.choice(ts.tensor([10, 20, 30, 40]), (MANY,), p=p, key=key).numpy()
    counts = np.array([(draws == v).sum() for v in (10, 20, 30, 40)])
    assert counts[1] == 0 and likely(counts[p > 0], p[p > 0])
    x = rng.standard_normal((3, 4))
    picked = ts.random.choice(x, (2, 2), axis=1, key=key)
    assert picked.shape == (3, 2, 2)
    once = ts.random.choice(4, 3, replace=False, p=p, key=key).numpy()
    assert sorted(once.tolist()) == [0, 2, 3]


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("p, words", [
    ([0.5, -0.25, 0.75], r"p\[1\] = -0.25 is no probability"), ([np.nan, 0.5, 0.5], "nan is no"),
    ([0.5, 0.25, 0.125], "adds up to 0.875, not to 1"), ([0.0, 0.0, 0.0], "adds up to 0")])
def test_what_is_no_probability_is_an_error(replace: bool, p: list, words: str) -> None:
    key, compiled = ts.random.key(0), ts.jit(lambda p: ts.random.choice(3, 2, replace, p, key=key))
    for call in (lambda: compiled(ts.tensor(p)), lambda: ts.random.choice(3, 2, replace, p)):
        with pytest.raises(ArgumentError, match=words):
            call()
    third = ts.full((3,), 1 / 3, "bf16")  # their sum is 1.00195
    assert compiled(third).shape == ts.random.choice(3, 2, replace, third).shape == (2,)


def test_pairs_without_replacement_follow_the_weights(rng: np.random.Generator) -> None:
    """P(first, second) = p_i p_j / (1 - p_i), as of one draw after the other."""
    p = np.array([0.2, 0.5, 0.3])
    keys = ts.random.split(ts.random.key(int(rng.integers(2**32))), 1200)
    seen = np.zeros((3, 3))
    for k in keys:
        i, j = ts.random.choice(3, 2, replace=False, p=p.astype(np.float32), key=k).tolist()
        seen[i, j] += 1
    want = p[:, None] * p / (1 - p[:, None])
    off = ~np.eye(3, dtype=bool)
    assert likely(seen[off], want[off])


def test_errors() -> None:
    key = ts.random.key(0)
    for call, kind, words in (
        (lambda: ts.random.normal(2, 3), ArgumentError, r"ts.random.normal\(\(2, 3\)\)"),
        (lambda: ts.random.uniform(2, 3, 4), ArgumentError, r"ts.random.uniform\(\(2, 3, 4\)\)"),
        (lambda: ts.random.normal(2, 3, 0.5), ArgumentError, r"normal\(\(2, 3\), 0.5\)"),
        (lambda: ts.random.split(3), DTypeError, "a key is uint32"),
        (lambda: ts.random.split(key, 0), ArgumentError, "num=0"),
        (lambda: ts.random.choice(3, 4, replace=False), ArgumentError, "4 different elements of 3"),
        (lambda: ts.random.choice(3, p=[0.5, 0.5]), ShapeError, "for 3 elements"),
        (lambda: ts.random.categorical(ts.ones((2, 3)), (4,)), ShapeError, "the last extents"),
        (lambda: ts.random.normall, UnknownNameError, "did you mean 'normal'"),
        (lambda: ts.random.randn, UnknownNameError, r"ts.random.normal\(shape\)"),
        (lambda: ts.optim.Adam, UnknownNameError, r"AdamW\(b2=0.999, weight_decay=0.0\)"),
    ):
        with pytest.raises(kind, match=words):
            call()
    assert ts.random.normal(3).shape == (3,) and ts.random.normal((2, 3), 0, 1).shape == (2, 3)
    assert ts.random.normal(4, 0.5, 2).shape == (4,)
