"""Random graph functions: their kernels compute what the graph means."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import tessera as ts
from lowering_programs import function, inputs
from tessera.graph.cuda import CudaProgram

LIMITS = {"f32": 1e-4, "bf16": 0.06}  # of the largest element: a dozen roundings, and sums of 924


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("number", range(12))
def test_a_random_function(dtype, number, rng):
    xs, f = inputs(rng, dtype), function(rng, int(rng.integers(3, 14)))
    compiled = ts.jit(f)
    with ts.config.scope(loop_min_elements=10**9):
        want = compiled(*xs)
    made = CudaProgram(compiled.graph())
    print(made.plan)  # shown when the test fails
    for got, expected in zip(made.run([x.array for x in xs]), want, strict=True):
        a, b = got.astype(np.float64), expected.array.astype(np.float64)
        assert a.shape == b.shape and np.isfinite(b).all()
        assert np.abs(a - b).max() <= LIMITS[dtype] * (1e-3 + np.abs(b).max())


def test_a_wrong_kernel_is_seen(rng, monkeypatch):
    """The comparison is one that can fail."""
    from tessera.graph.cpu.vocabulary import FUNCTIONS
    from tessera.graph.cuda.kernels import spell

    wrong = replace(FUNCTIONS["tanh"], tile="tile.tanh({0}) * 1.001")
    monkeypatch.setitem(FUNCTIONS, "tanh", wrong)
    monkeypatch.setattr(spell, "expression", spell.expression.__wrapped__)  # without what it kept
    x = ts.tensor(rng.standard_normal((4, 7)).astype(np.float32))
    (got,) = CudaProgram(ts.jit(lambda x: ts.tanh(x)).graph(x)).run([x.array])
    assert np.abs(got - np.tanh(x.array)).max() > 1e-4 * np.abs(got).max()
