"""Tensors that a function captures are read at each call: what is written into them is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart
from tolerance import assert_close

TYPES = ["f32", "f64", "bf16", "f16", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "int8", "int32", "int4",
         "f32 @accum(f32)", "bf16 @saturate", 'int8 @scaled("amax")']
USES: dict[str, Callable[[Any, Any], Any]] = {
    "product": lambda x, w: x @ w,
    "elementwise": lambda x, w: x * w + 1.0,
    "of it alone": lambda x, w: x + ts.sum(ts.exp(ts.cast(w, "f32") * 0.5)) * 2.0,
    "a view of it": lambda x, w: x + w.T[0],
    "cast": lambda x, w: x + ts.cast(w, "f64"),
    "a constant": lambda x, w: ts.where(w > 0.0, x, ts.zeros((4, 4)) + 3.0),
    "gradient": lambda x, w: ts.grad(lambda y: ts.sum((y * w) ** 2))(x),
    "vmap": lambda x, w: ts.vmap(lambda row: row * w[0] + ts.max(w))(x),
    "scan": lambda x, w: ts.scan(lambda c, row: (ts.cast_like(c + row * w[1], c), c),
                                 ts.zeros(4), x)[1],
    "cond": lambda x, w: ts.cond(ts.sum(x) > -1e9, lambda y: ts.cast_like(y * w, y),
                               lambda y: y, x),
}


@pytest.mark.parametrize("numeric", TYPES)
@pytest.mark.parametrize("use", USES)
def test_what_is_written_is_seen(use: str, numeric: str, rng: np.random.Generator) -> None:
    x = ts.tensor(rng.integers(-3, 4, (4, 4)).astype(np.float32))
    values = rng.integers(-2, 3, (4, 4)).astype(np.float32)
    x[0, 0], values[0, 0] = -1.0, 0.0  # here every use gives another value after each write
    w = ts.param(values, numeric)
    f = ts.jit(lambda x: USES[use](x, w))
    seen = []
    for _ in range(3):
        want = USES[use](x, w)
        seen.append(want.numpy().astype(np.float64))
        assert_close(f(x).numpy(), want.numpy(), want.dtype, 8, scale=8.0)
        values = np.where(values == 2, np.float32(-2), values + 1)
        w[...] = values
    assert not np.array_equal(seen[0], seen[1]), "the case shows nothing"


@pytest.mark.parametrize("numeric", ["f32", "bf16", "int8"])
def test_what_is_written_is_seen_on_a_gpu(numeric: str, gpu: Any, apart: Any,
                                          rng: np.random.Generator) -> None:
    x = ts.tensor(rng.integers(-3, 4, (4, 4)).astype(np.float32))
    w = ts.param(rng.integers(-2, 3, (4, 4)).astype(np.float32), numeric)
    f = ts.jit(lambda x: x * ts.exp(ts.cast(w, "f32")) + w, target="cuda")
    for _ in range(2):
        wide = ts.cast(w, "f32")
        assert_close(f(x).array, (x * ts.exp(wide) + wide).array, "f32", 4, scale=8.0)
        w[...] = rng.integers(-2, 3, (4, 4)).astype(np.float32)


def test_a_numpy_array_is_read_at_each_call() -> None:
    table = np.arange(4.0, dtype=np.float32)
    f = ts.jit(lambda x: x + ts.exp(ts.cast(table, "f64")))
    for _ in range(2):
        np.testing.assert_allclose(f(ts.zeros(4)).numpy(), np.exp(table.astype(np.float64)))
        table += 1.0


def test_what_nobody_can_change_is_computed_once() -> None:
    """Tensors that are made inside: fills, ranges, and what follows from them alone."""
    f = ts.jit(lambda x: x + ts.exp(ts.arange(4, dtype="f32") * ts.full((4,), 0.5)))
    f(ts.zeros(4))
    calls = [u for u in f.inspect_ir("schedule").splitlines() if "call" in u]
    assert len(calls) == 1 and "add" in calls[0]
    np.testing.assert_allclose(f(ts.zeros(4)).numpy(), np.exp(np.arange(4) * 0.5), rtol=1e-6)
