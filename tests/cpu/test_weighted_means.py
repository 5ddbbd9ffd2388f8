"""Sums of what a softmax weights: in one pass with the softmax's own sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from lowered_functions import normal
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.kernels.generate_kernels import source_of
from tolerance import assert_close

TARGET = "sm_90a"


def gradient(x: Any, dy: Any) -> Any:
    return ts.vjp(ts.softmax, x)[1](dy)


@pytest.mark.parametrize("shape", [(3, 40), (2, 9000), (2, 5, 33)])
def test_the_gradient_of_a_softmax(shape: tuple, rng: np.random.Generator) -> None:
    """Two passes of statistics: the maximum, then both sums."""
    x, dy = 4 * normal(rng, *shape), normal(rng, *shape)
    program = CudaProgram(ts.jit(gradient).graph(x, dy), TARGET)
    (group,) = program.plan.groups
    if shape[-1] == 9000:
        assert source_of(group).text.count("for n in range") == 1 + 2 + 1
    (got,) = program.run([x, dy])
    p, g = np.exp(np.asarray(x, np.float64)), np.asarray(dy, np.float64)
    p /= p.sum(-1, keepdims=True)
    assert_close(got, p * (g - (p * g).sum(-1, keepdims=True)), "f32", n=shape[-1])


@pytest.mark.parametrize("keepdims", [False, True])
def test_a_mean_by_weights(keepdims: bool, rng: np.random.Generator) -> None:
    x, v = normal(rng, 7, 50), normal(rng, 7, 50)

    def fn(x: Any, v: Any) -> Any:
        return ts.sum(v * ts.softmax(x), axis=-1, keepdims=keepdims)

    program = CudaProgram(ts.jit(fn).graph(x, v), TARGET)
    (got,) = program.run([x, v])
    p = np.exp(np.asarray(x, np.float64))
    want = (p / p.sum(-1, keepdims=True) * np.asarray(v)).sum(-1, keepdims=keepdims)
    assert np.shape(got) == want.shape
    assert_close(got, want, "f32", n=50)
    assert [s.op for s in program.plan.groups[0].steps][-1] == "div"


@pytest.mark.parametrize("fn", [
    lambda x, v: ts.sum(v * (x / ts.sum(x, axis=-1, keepdims=True)), axis=-1),    # no powers
    lambda x, v: ts.sum(v * (ts.exp(x) / ts.sum(x, axis=-1, keepdims=True)), axis=-1),
    lambda x, v: ts.sum(v[:1] * ts.softmax(x), axis=0),                            # along columns
])
def test_other_sums_stay(fn: Any, rng: np.random.Generator) -> None:
    x, v = abs(normal(rng, 7, 50)) + 1, normal(rng, 7, 50)
    program = CudaProgram(ts.jit(fn).graph(x, v), TARGET)
    assert [s.op for g in program.plan.groups for s in g.steps][-1] == "reduce_sum"
    (got,) = program.run([x, v])
    assert_close(got, np.asarray(fn(x, v), np.float64), "f32", n=50)


def test_large_powers_are_divided_before_they_are_weighted() -> None:
    """exp(80) * 1e5 is no f32, and a weight times 1e5 is one."""
    x, v = ts.full((2, 50), 80.0), ts.full((2, 50), 1e5)

    def fn(x: Any, v: Any) -> Any:
        e = ts.exp(x)
        return ts.sum(v * (e / ts.sum(e, axis=-1, keepdims=True)), axis=-1)

    (got,) = CudaProgram(ts.jit(fn).graph(x, v), TARGET).run([x, v])
    assert_close(got, np.full(2, 1e5), "f32", n=50)
