"""Sums and products of bf16 numbers that are rounded to bf16, two by an instruction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from emulator import compare
from tessera import Tensor, bf16, f32, tile


@ts.kernel
def chain(A: Tensor["R", 64, bf16], B: Tensor["R", 64, bf16], W: Tensor[64, bf16],
          Y: Tensor["R", 64, bf16]):
    m = tile.group_id(0) * 16
    a, b = tile.load(A[m:m+16, :]), tile.cast(tile.load(B[m:m+16, :]), f32)
    w = tile.cast(tile.load(W[0:64]), f32)[None, :]
    p = tile.cast(tile.cast(a, f32) * w, bf16)
    q = tile.cast(tile.cast(p, f32) - b, bf16)
    r = tile.cast(-tile.maximum(tile.cast(q, f32), b), bf16)
    s = tile.cast(tile.where(b > 0.0, tile.cast(r, f32), w) * 1.5, bf16)
    Y[m:m+16, :] = tile.cast(tile.cast(s, f32) + b, bf16)


@ts.kernel
def unlike(A: Tensor["R", 64, bf16], X: Tensor["R", 64, f32], Y: Tensor["R", 64, bf16]):
    """No pairs: an operand of f32, a number that is no bf16, and one element in a thread."""
    m = tile.group_id(0) * 16
    a = tile.cast(tile.load(A[m:m+16, :]), f32)
    p = tile.cast(a * 0.7, bf16)
    Y[m:m+16, :] = tile.cast(tile.cast(p, f32) + tile.load(X[m:m+16, :]), bf16)


def drawn(rng: Any, *shape: int, dtype: str = "bf16") -> ts.Tensor:
    """Numbers of all sizes whose products are normal, zeros of both signs and infinities."""
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-50, 50, shape)
    chosen = rng.integers(0, 40, shape)
    for i, special in enumerate((0.0, -0.0, np.inf, 1.0, -2.0)):
        x[chosen == i] = special
    return ts.tensor(x.astype(np.float32), dtype)


def test_pairs_give_the_bits_of_f32_rounded(rng):
    a, b = drawn(rng, 64, 64), drawn(rng, 64, 64)
    w = ts.tensor(np.float32(2.0) ** rng.integers(-9, 9, 64) * 1.25, "bf16")
    b.array[np.isinf(b.array.astype(np.float32))] = 1  # no difference of infinities
    made = compare(chain, a, b, w, ts.zeros((64, 64), dtype="bf16"), groups=4, lanes=128,
                   target="sm_90a", exact=True)
    assert {"mul_bf16x2", "sub_bf16x2", "add_bf16x2"} <= set(made.counts)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_what_is_no_sum_of_bf16_is_computed_in_f32(target, rng):
    made = compare(unlike, drawn(rng, 64, 64), drawn(rng, 64, 64, dtype="f32"),
                   ts.zeros((64, 64), dtype="bf16"), groups=4, lanes=128, target=target, exact=True)
    assert not {"mul_bf16x2", "add_bf16x2"} & set(made.counts)


@pytest.mark.parametrize("op", [np.add, np.subtract, np.multiply])
def test_rounding_twice_is_rounding_once(op, rng):
    """Of 2^20 pairs; the first of them differ in size so that bits are cut off twice."""
    x, y = (np.float32(rng.integers(-255, 256, 1 << 20)) * np.float32(2) ** rng.integers(
        -40, 40, 1 << 20).astype(np.float32) for _ in range(2))
    x, y = (v.astype(ts.bf16.numpy) for v in (x, y))
    once = op(x.astype(np.float64), y.astype(np.float64))
    twice = op(x.astype(np.float32), y.astype(np.float32)).astype(ts.bf16.numpy)
    np.testing.assert_array_equal(rounded(once), twice.astype(np.float64))


def rounded(x: np.ndarray) -> np.ndarray:
    """To 8 bits, ties to even, by the exponent of each."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(mantissa * 256), exponent - 8)
