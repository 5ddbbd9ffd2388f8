"""Casts that round at random, and types of less than a byte, in graphs on a GPU: the CPU's bits."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
import tessera.numerics as tn
from gpu_harness import require_gpu

require_gpu()


def codes(x):
    return tn.to_codes(x.array)


@pytest.mark.row("NUM-20")
@pytest.mark.parametrize("kind", ["bf16", "f16", "fp8_e4m3", "fp8_e5m2 @saturate", "int8", "int32"])
def test_stochastic_casts(kind, rng):
    x = rng.standard_normal(5000) * 2.0 ** rng.integers(-30, 20, 5000)
    x[:8] = 0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -3e38, 448.1
    x, made = ts.tensor(x.astype(np.float32)), []
    for target in ("cpu", "cuda"):
        ts.random.seed(4)
        f = ts.jit(lambda x: ts.cast(x, f"{kind} @stochastic_round"), target=target)
        made.append([codes(f(x)) for _ in range(2)])
    assert np.array_equal(*made) and not np.array_equal(made[0][0], made[0][1])
