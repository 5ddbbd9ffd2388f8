"""Both derivatives of a function of f64 tensors against central differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import tessera as ts

STEP, LIMIT = 1e-6, 1e-6


def t64(a: Any) -> ts.Tensor:
    return ts.tensor(np.asarray(a, np.float64), ts.f64)


def assert_derivatives(fn: Callable, rng: np.random.Generator, *arrays: np.ndarray) -> None:
    """J t by ts.jvp equals a central difference, and <g, J t> = <J' g, t> for ts.vjp."""
    xs = [ts.tensor(np.asarray(a, np.float64)) for a in arrays]
    tangents = [rng.standard_normal(x.shape) for x in xs]
    y, t = ts.jvp(fn, tuple(xs), tuple(map(ts.tensor, tangents)))
    ahead, behind = (
        fn(*[ts.tensor(x.numpy() + s * d) for x, d in zip(xs, tangents, strict=True)]).numpy()
        for s in (STEP, -STEP)
    )
    want = (ahead - behind) / (2 * STEP)
    np.testing.assert_allclose(t.numpy(), want, rtol=LIMIT,
                               atol=LIMIT * max(1.0, np.max(np.abs(want), initial=0.0)))
    g = rng.standard_normal(y.shape)
    pulled = ts.vjp(fn, *xs)[1](ts.tensor(g))
    pulled = pulled if isinstance(pulled, tuple) else (pulled,)
    reverse = sum(float(np.vdot(p.numpy(), d)) for p, d in zip(pulled, tangents, strict=True))
    forward = float(np.vdot(g, t.numpy()))
    assert abs(reverse - forward) <= LIMIT * max(1.0, abs(forward))
