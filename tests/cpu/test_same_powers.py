"""Powers of rows that are held, made once for what is summed and what is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from lowered_functions import lowered
from tessera.graph.cuda.kernels.generate_kernels import source_of
from tolerance import assert_close


def loss_and_gradient(x: Any, label: Any) -> Any:
    value, pull = ts.vjp(lambda x: ts.cross_entropy(ts.cast(x, "f32"), label), x)
    return value, pull(ts.ones(()))


def log_softmax_gradient(x: Any, dy: Any) -> Any:
    return ts.vjp(ts.log_softmax, x)[1](dy)


def powers(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


@pytest.mark.parametrize("columns", [64, 1024])
def test_powers_of_a_loss_are_those_of_its_gradient(columns: int, rng: np.random.Generator
                                                    ) -> None:
    x = ts.cast(ts.tensor((4 * rng.standard_normal((8, columns))).astype(np.float32)), "bf16")
    label = ts.tensor(rng.integers(0, columns, 8).astype(np.int32))
    program = lowered(loss_and_gradient, x, label)
    assert source_of(program.plan.groups[0]).text.count("tile.exp") == 1
    _, gradient = program.run([x, label])
    p = powers(np.asarray(x, np.float64))
    want = (p - (np.arange(columns) == np.asarray(label)[:, None])) / 8
    assert_close(np.asarray(gradient, np.float64), want, "bf16", n=columns, scale=p + want)


def test_powers_of_log_softmax_are_those_of_its_gradient(rng: np.random.Generator) -> None:
    x, dy = (ts.tensor(rng.standard_normal((5, 300)).astype(np.float32)) for _ in range(2))
    program = lowered(log_softmax_gradient, x, dy)
    assert source_of(program.plan.groups[0]).text.count("tile.exp") == 1
    (got,) = program.run([x, dy])
    p, d = powers(np.asarray(x, np.float64)), np.asarray(dy, np.float64)
    want = d - p * d.sum(1, keepdims=True)
    assert_close(np.asarray(got, np.float64), want, "f32", n=300, scale=np.abs(d) + p * np.abs(
        d).sum(1, keepdims=True))


def test_powers_of_something_else_are_their_own() -> None:
    def other(x: Any) -> Any:
        less = x - ts.max(x, axis=-1, keepdims=True)
        return ts.exp(less - ts.log(ts.sum(ts.exp(2.0 * less), axis=-1, keepdims=True)))

    (group,) = lowered(other, ts.Tensor[64, 256, "f32"]).plan.groups
    assert source_of(group).text.count("tile.exp") == 2
