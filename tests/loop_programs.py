"""Loops whose end is data, for the tests of every target."""

from __future__ import annotations

from typing import Any

import tessera as ts
from tessera import Tensor


def newton(x: Tensor) -> Any:
    """The square root, until nothing changes by more than 1e-6."""
    def goes_on(c: Any) -> Tensor:
        y, before, n = c
        return (ts.max(ts.abs(y - before)) > 1e-6) & (n < 50)

    return ts.while_loop(goes_on, lambda c: (0.5 * (c[0] + x / c[0]), c[0], c[2] + 1),
                         (x, x + 1.0, ts.tensor(0, "int32")))


def nested(x: Tensor, w: Tensor) -> Any:
    """Loops in loops of the other sort, and a loop in one of its own."""
    def inner(c: Tensor) -> Tensor:
        return ts.while_loop(lambda c: ts.sum(ts.abs(c)) < 30.0, lambda c: c * 1.5 + 0.1, c)

    rows = ts.scan(lambda c, _: (inner(c) * 0.1 @ w, c), x, None, length=3)
    outer = ts.while_loop(lambda c: ts.sum(ts.abs(c)) < 200.0, lambda c: inner(0.1 * c) + ts.scan(
        lambda h, _: (h @ w + c, None), c, None, length=2)[0], x)
    return *rows, outer
