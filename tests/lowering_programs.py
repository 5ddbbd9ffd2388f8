"""Random graph functions of elementwise ops, broadcasting, reductions, moves and products."""

from __future__ import annotations

from typing import Any

import numpy as np

import tessera as ts

EXTENTS = (4, 7, 33)
UNARY = (ts.tanh, ts.sin, ts.sigmoid, ts.abs, ts.relu, lambda x: x * 0.5 + 0.25)
BINARY = (ts.add, ts.subtract, ts.multiply, ts.maximum, ts.minimum,
          lambda a, b: ts.where(a > b, a, b * 0.5), lambda a, b: a / (1.0 + ts.abs(b)))
REDUCE = (ts.mean, ts.max, ts.min)


def inputs(rng: Any, dtype: str) -> list[ts.Tensor]:
    """The whole space, and operands that are repeated along some of its axes."""
    shapes = [EXTENTS, EXTENTS[2:], (EXTENTS[1], 1), (EXTENTS[0], 1, EXTENTS[2]), ()]
    return [ts.tensor(rng.standard_normal(s).astype(np.float32), dtype) for s in shapes]


def function(rng: Any, steps: int) -> Any:
    """A function of `inputs` with that many random steps; every choice is made here, once."""
    choices = [(rng.integers(0, 100), rng.integers(0, 1 << 30, 3)) for _ in range(steps)]

    def f(*xs: ts.Tensor) -> list[ts.Tensor]:
        pool = list(xs)
        for kind, picks in choices:
            pool.append(_step(int(kind), [int(p) for p in picks], pool))
        return pool[-3:]

    return f


def _step(kind: int, picks: list[int], pool: list[ts.Tensor]) -> ts.Tensor:
    x = pool[picks[0] % len(pool)]
    whole = [t for t in pool if t.shape == EXTENTS]
    if kind < 30:
        return UNARY[picks[1] % len(UNARY)](x)
    if kind < 60:
        y = pool[picks[1] % len(pool)]
        return BINARY[picks[2] % len(BINARY)](x, y)
    big = whole[picks[0] % len(whole)]
    if kind < 75:
        axis = [(-1,), (0,), (1,), (0, 1), (0, 2), (0, 1, 2)][picks[1] % 6]
        return REDUCE[picks[2] % 3](big, axis=axis, keepdims=True)
    if kind < 85:
        return ts.softmax(big, axis=picks[1] % 3)
    if kind < 92:  # a product that gives the space again
        other = whole[picks[1] % len(whole)]
        return (big @ ts.swapaxes(other, -1, -2)) @ big * (1.0 / 33.0)
    turned = ts.transpose(big, (1, 0, 2))
    return ts.transpose(ts.tanh(turned), (1, 0, 2)) if kind < 96 else ts.flip(big, picks[1] % 3)
