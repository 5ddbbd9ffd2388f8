"""Bytes that the launches of a step move: passes that join or follow ops must not add to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera.graph.cuda import CudaProgram, prepare
from tessera.graph.cuda.launch_plan import plan_of
from tessera.graph.schedule import boundaries

Loss = Callable[..., Any]


def zeros(*shape: int, dtype: str = "f32") -> ts.Tensor:
    return ts.tensor(np.zeros(shape, np.float32), dtype)


def bottleneck() -> tuple[Loss, list[ts.Tensor]]:
    """Convolutions with batch statistics and SiLU, a residual."""

    def loss(w: Any, v: Any, g: Any, b: Any, h: Any, c: Any, x: Any) -> Any:
        y = ts.silu(ts.batch_norm(ts.conv2d(x, w, padding=1), g, b))
        y = ts.silu(ts.batch_norm(ts.conv2d(y, v), h, c) + x)
        return ts.mean(ts.cast(y, "f32") ** 2)

    return loss, [zeros(256, 64, 3, 3, dtype="bf16"), zeros(64, 256, 1, 1, dtype="bf16"),
                  zeros(256), zeros(256), zeros(64), zeros(64),
                  zeros(16, 64, 32, 32, dtype="bf16")]


def gated() -> tuple[Loss, list[ts.Tensor]]:
    """A causal convolution whose halves gate each other."""

    def loss(w: Any, v: Any, x: Any) -> Any:
        for d in (1, 2):
            y = ts.conv1d(ts.pad(x, ((0, 0), (0, 0), (d, 0))), w, dilation=d)
            a, g = ts.split(y, 2, 1)
            x = x + ts.conv1d(ts.tanh(a) * ts.sigmoid(g), v)
        return ts.mean(ts.cast(x, "f32") ** 2)

    return loss, [zeros(256, 128, 2, dtype="bf16"), zeros(128, 128, 1, dtype="bf16"),
                  zeros(8, 128, 2048, dtype="bf16")]


def states() -> tuple[Loss, list[ts.Tensor]]:
    """Small matrices, a series of them."""

    def loss(a: Any, x: Any) -> Any:
        for _ in range(2):
            x = a @ x @ a.T
        return ts.sum(x)

    return loss, [zeros(4, 4, dtype="f64"), zeros(32768, 4, 4, dtype="f64")]


def moved(model: Callable[[], tuple[Loss, list[ts.Tensor]]]) -> int:
    loss, given = model()
    step = ts.jit(ts.value_and_grad(loss, argnums=tuple(range(len(given)))))
    return sum(x.work.bytes for x in plan_of(CudaProgram(step.graph(*given), "sm_90a")).launches)


@pytest.mark.parametrize("model", [bottleneck, gated, states])
def test_following_elements_moves_no_more(model, monkeypatch):
    found = moved(model)
    monkeypatch.setattr(prepare, "PIPELINE", [
        p for p in prepare.PIPELINE if p is not prepare.compute_moves])
    assert found <= 1.01 * moved(model)


def rounded_layers(p: Any, x: Any) -> Any:
    """Activations that are clipped and rounded to 8 bits, with gradients straight through."""
    for w, bound in p:
        y = ts.clip(x, -bound, bound)
        q = ts.clip(ts.round(y / bound * 127), -127, 127) * (bound / 127)
        x = ts.relu(ts.cast(ts.cast(y + ts.stop_gradient(q - y), "bf16") @ w, "f32"))
    return ts.mean(x * x)


def test_conditions_that_are_read_together_are_made_again(monkeypatch, rng):
    """A clip, a rounding and what follows have seven bools for each element, of a product of two
    bytes: each of them alone is no more than that."""
    p = [(zeros(1024, 1024, dtype="bf16"), zeros(1)) for _ in range(3)]
    step = ts.jit(ts.value_and_grad(rounded_layers))
    plan = CudaProgram(step.graph(p, zeros(8192, 1024)), "sm_90a").plan
    between = [o for g in plan.groups for o in g.writes if o.shape == (8192, 1024)]
    assert sum(o.type.dtype.kind == "bool" for o in between) <= 2
    monkeypatch.setattr(boundaries, "LEAST_BYTES", 0)
    p = [(ts.tensor(rng.standard_normal((24, 24)), "bf16"), ts.tensor(
        np.float32([1.5]))) for _ in range(3)]
    x = ts.tensor(2 * rng.standard_normal((40, 24)).astype(np.float32))
    made = CudaProgram(step.graph(p, x), "sm_90a")
    got = made.run([*(v.array for some in p for v in some), x.array])
    loss, grads = step(p, x)
    wanted = [loss, *(v for some in grads for v in some)]
    for a, b in zip(got, wanted, strict=True):
        b = np.asarray(b.array, np.float64)
        np.testing.assert_allclose(np.asarray(a, np.float64), b, atol=1e-2 * np.abs(b).max())
