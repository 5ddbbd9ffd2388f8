"""`ts.determinism("fast")` on a GPU: how far its maths is off, and sums in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu
from tessera.errors import CompileError
from tolerance import assert_close

require_gpu()
pytestmark = pytest.mark.row("CORE-19")
ULP = 2.0**-24
# op -> (function, NumPy's, (low, high) of x, bound of the error by x and the exact value)
OPS: dict[str, tuple[Any, Any, tuple[float, float], Any]] = {
    "exp": (ts.exp, np.exp, (-20, 20), lambda x, y: (1.4 * np.abs(x) + 6) * ULP * y),
    "sigmoid": (ts.sigmoid, lambda x: 1 / (1 + np.exp(-x)), (-20, 20),
                lambda x, y: (1.4 * np.abs(x) + 8) * ULP * y),
    "log": (ts.log, np.log, (1e-3, 1e3), lambda x, y: 2.0**-22 + 4 * ULP * np.abs(y)),
    "log2": (ts.log2, np.log2, (1e-3, 1e3), lambda x, y: 2.0**-21.5 + 4 * ULP * np.abs(y)),
    "sin": (ts.sin, np.sin, (-np.pi, np.pi), lambda x, y: 2.0**-20.9 + 2 * ULP * np.abs(x)),
    "cos": (ts.cos, np.cos, (-np.pi, np.pi), lambda x, y: 2.0**-20.9 + 2 * ULP * np.abs(x)),
    "tanh": (ts.tanh, np.tanh, (-5, 5), lambda x, y: 2.0**-10.9 * np.abs(y)),
    "sqrt": (ts.sqrt, np.sqrt, (1e-3, 1e3), lambda x, y: 2.0**-22.5 * y),
    "rsqrt": (ts.rsqrt, lambda x: x**-0.5, (1e-3, 1e3), lambda x, y: 2.0**-22.5 * y),
    "div": (lambda x: 3.0 / x, lambda x: 3.0 / x, (1e-3, 1e3), lambda x, y: 4 * ULP * np.abs(y)),
}


@pytest.mark.parametrize("name", OPS)
def test_errors_are_those_that_the_reference_states(name: str, rng: Any) -> None:
    f, oracle, (low, high), bound = OPS[name]
    x = rng.uniform(low, high, 1 << 18).astype(np.float32)
    with ts.determinism("fast"):
        got = ts.jit(f)(ts.tensor(x).cuda()).array.astype(np.float64)
    want = oracle(x.astype(np.float64))
    over = np.abs(got - want) / bound(x.astype(np.float64), np.abs(want) if name in (
        "exp", "sigmoid", "sqrt", "rsqrt") else want)
    print(f"{name}: {over.max():.2f} of the bound, at {x[over.argmax()]}")
    assert over.max() <= 1


@pytest.mark.parametrize("ids", ["even", "one"])
def test_sums_in_any_order(ids: str, rng: Any) -> None:
    T, V, C = 20_000, 3000, 200
    at = rng.integers(0, V, T) if ids == "even" else np.full(T, 7)
    u = rng.standard_normal((T, C)).astype(np.float32)
    want, size = np.zeros((2, V, C))
    np.add.at(want, at, u.astype(np.float64))
    np.add.at(size, at, np.abs(u.astype(np.float64)))
    f = ts.jit(lambda u, i: ts.segment_sum(u, i, V))
    for mode in ("default", "fast", "default"):
        with ts.determinism(mode):
            y = f(ts.tensor(u).cuda(), ts.tensor(at).cuda())
        assert_close(y.array, want, "f32", n=np.bincount(at).max(), scale=np.maximum(size, 1e-3))
    assert f.specializations == 2


def test_strict_refuses_a_kernel_that_ran_before(rng: Any) -> None:
    @ts.kernel
    def adds(X: ts.Tensor["N", ts.f32], Y: ts.Tensor[1, ts.f32]):
        ts.tile.atomic_add(Y, 0, X[ts.tile.linear_id()])

    x, y = ts.ones(256).cuda(), ts.zeros(1).cuda()
    for _ in range(2):
        adds(x, y)
        with ts.determinism("strict"), pytest.raises(CompileError, match="order of the sum"):
            adds(x, y)
    assert y.item() == 512.0
