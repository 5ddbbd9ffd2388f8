"""Rows of the conformance table on derivatives, as the seeds write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera.errors import DTypeError, ShapeError
from tessera.tensor import Tensor
from tolerance import assert_close


def difference(f: Any, x: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """Central differences of a NumPy function of x, in f64."""
    out = np.empty(x.shape)
    for i in np.ndindex(x.shape):
        d = np.zeros(x.shape)
        d[i] = eps
        out[i] = (f(x + d) - f(x - d)) / (2 * eps)
    return out


@pytest.mark.row("AD-04")
def test_gradients_of_the_trainable_arguments(rng: np.random.Generator) -> None:
    """S2 L258: a jitted, differentiable loss; gradients of W and b in signature order."""
    @ts.jit
    @ts.autodiff
    def loss_function(x: Tensor, W: Tensor, b: Tensor, y_true: Tensor) -> Tensor:
        y_pred = x @ W + b
        return ts.mean((y_pred - y_true) ** 2)

    x, y = rng.standard_normal((8, 4)), rng.standard_normal((8, 3))
    w, b = rng.standard_normal((4, 3)), rng.standard_normal(3)
    grad_fn = ts.grad(loss_function)
    wide = lambda a: ts.tensor(a, ts.f64)  # noqa: E731
    grad_W, grad_b = grad_fn(wide(x), ts.param(w, ts.f64), ts.param(b, ts.f64), wide(y))
    assert grad_W.shape == (4, 3) and grad_b.shape == (3,)
    np.testing.assert_allclose(
        grad_W.numpy(), difference(lambda v: np.mean((x @ v + b - y) ** 2), w), atol=1e-7)
    np.testing.assert_allclose(
        grad_b.numpy(), difference(lambda v: np.mean((x @ w + v - y) ** 2), b), atol=1e-7)


@pytest.mark.row("AD-05")
def test_one_trainable_argument_gives_a_bare_gradient(rng: np.random.Generator) -> None:
    """S4 L93: grad_W = ts.grad(train_step)(x, y, W)."""
    def train_step(x: Tensor, y: Tensor, W: Tensor) -> Tensor:
        return ts.mean((ts.tanh(x @ W) - y) ** 2)

    x, y, w = rng.standard_normal((5, 3)), rng.standard_normal((5, 2)), rng.standard_normal((3, 2))
    grad_W = ts.grad(train_step)(
        ts.tensor(x, ts.f64), ts.tensor(y, ts.f64), ts.param(w, ts.f64))
    assert isinstance(grad_W, Tensor) and grad_W.shape == (3, 2)
    np.testing.assert_allclose(
        grad_W.numpy(), difference(lambda v: np.mean((np.tanh(x @ v) - y) ** 2), w), atol=1e-8)


@pytest.mark.row("AD-07")
def test_a_single_argument_is_differentiated(rng: np.random.Generator) -> None:
    w = rng.standard_normal((3, 3))
    g = ts.grad(lambda W: ts.sum(ts.sin(W @ W)))(ts.tensor(w, ts.f64))
    np.testing.assert_allclose(
        g.numpy(), difference(lambda v: np.sum(np.sin(v @ v)), w), atol=1e-7)


@pytest.mark.row("AD-08")
def test_forward_mode(rng: np.random.Generator) -> None:
    x, t, u = (rng.standard_normal((2, 3)) for _ in range(3))
    f = lambda v: ts.sum(ts.exp(ts.sin(v)) * v)  # noqa: E731
    value, along = ts.jvp(f, (ts.tensor(x, ts.f64),), (ts.tensor(t, ts.f64),))
    g = ts.grad(f)(ts.tensor(x, ts.f64)).numpy()
    terms = np.exp(np.sin(x)) * (1 + np.abs(x))  # of g = e^sin(x) (1 + x cos(x)); they may cancel

    def size(direction: np.ndarray) -> float:
        return float(np.sum(terms * np.abs(direction)))

    assert_close(along.numpy(), np.vdot(g, t), n=6, scale=size(t))
    assert_close(value.numpy(), np.sum(np.exp(np.sin(x)) * x), n=6, scale=size(np.ones_like(x)))
    both = ts.jvp(f, (ts.tensor(x, ts.f64),), (ts.tensor(3.0 * t - u, ts.f64),))[1]
    assert_close(both.numpy(), 3.0 * np.vdot(g, t) - np.vdot(g, u), n=6,
                 scale=size(3 * np.abs(t) + np.abs(u)))


@pytest.mark.row("AD-10", "AD-11", "AD-12")
def test_custom_gelu_of_the_guide(rng: np.random.Generator) -> None:
    """S2 L276-293. The formula differs from the derivative by up to 8.3e-4, so its use shows."""
    @ts.custom_vjp
    def custom_gelu(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + ts.erf(x / 2**0.5))

    def custom_gelu_fwd(x: Tensor) -> tuple:
        return custom_gelu(x), x

    def custom_gelu_bwd(x: Tensor, grad_output: Tensor) -> Tensor:
        tanh_term = ts.tanh(0.7978845608 * (x + 0.044715 * x**3))
        slope = 0.5 * (1 + tanh_term) + 0.5 * x * (1 - tanh_term**2) * (
            0.7978845608 * (1 + 3 * 0.044715 * x**2))
        return grad_output * slope

    custom_gelu.defvjp(custom_gelu_fwd, custom_gelu_bwd)
    x = np.concatenate([[-1.94], rng.standard_normal(7)])
    tensor = ts.tensor(x, ts.f64)
    g = ts.grad(lambda v: ts.sum(custom_gelu(v)))(tensor).numpy()
    t = np.tanh(0.7978845608 * (x + 0.044715 * x**3))
    want = 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * 0.7978845608 * (1 + 3 * 0.044715 * x**2)
    assert_close(g, want, n=4)
    exact = ts.grad(lambda v: ts.sum(0.5 * v * (1 + ts.erf(v / 2**0.5))))(tensor).numpy()
    assert 5e-4 < np.max(np.abs(g - exact)) < 1e-3


class KVCache:
    """A state object of a user: keys so far."""

    def __init__(self, k: Any, heads: int):
        self.k, self.heads = k, heads


ts.register_tree(KVCache, lambda c: ((c.k,), c.heads), lambda heads, k: KVCache(k[0], heads))


@pytest.mark.row("AD-24", "AD-25")
def test_jit_takes_state_objects_and_static_keywords(rng: np.random.Generator) -> None:
    """S3 L126: transformer_block(x, cache: KVCache, *, heads: int, p: float)."""
    seen: list[int] = []

    @ts.jit @ ts.autodiff
    def transformer_block(x: Tensor, cache: KVCache, *, heads: int, p: float) -> tuple:
        seen.append(heads)
        q = ts.reshape(x, (x.shape[0], heads, x.shape[1] // heads))
        y = ts.reshape(ts.tanh(q) * (1.0 - p), x.shape)
        return ts.cast_like(y, x), KVCache(ts.concatenate([cache.k, x]), cache.heads)

    x = ts.tensor(rng.standard_normal((2, 8)).astype(np.float32))
    cache = KVCache(ts.zeros((0, 8)), heads=2)
    y, grown = transformer_block(x, cache, heads=2, p=0.5)
    assert isinstance(grown, KVCache) and grown.k.shape == (2, 8) and grown.heads == 2
    assert_close(y.numpy(), np.tanh(x.numpy()) * 0.5)
    _, again = transformer_block(x, grown, heads=4, p=0.5)
    assert again.k.shape == (4, 8)
    transformer_block(x, cache, heads=2, p=0.5)
    assert seen == [2, 4] and transformer_block.specializations == 2


@pytest.mark.row("AD-24")
def test_gradients_reach_what_a_call_appends_to_a_cache(rng: np.random.Generator) -> None:
    """Q80: a (tensor, cache) result is differentiated through ts.vjp or a loss around it."""
    def step(x: Tensor, cache: KVCache) -> tuple:
        grown = KVCache(ts.concatenate([cache.k, x * 2.0]), 1)
        return ts.sum(grown.k**2), grown

    old, x = rng.standard_normal((1, 3)), rng.standard_normal((2, 3))
    cache = KVCache(ts.tensor(old, ts.f64), 1)
    g, grown = ts.grad(step, has_aux=True)(ts.tensor(x, ts.f64), cache)
    assert isinstance(grown, KVCache) and grown.k.shape == (3, 3)
    assert_close(g.numpy(), 8.0 * x)


@pytest.mark.row("AD-26")
def test_return_annotations_are_checked_and_set_the_type() -> None:
    @ts.jit
    def good(x: ts.Tensor["B", "S", ts.f32]) -> ts.Tensor["B", "S", ts.bf16]:
        return x * 2.0

    @ts.jit
    def bad(x: ts.Tensor["B", "S", ts.f32]) -> ts.Tensor["B", ts.bf16]:
        return x

    x = ts.ones((2, 3))
    assert str(good(x).dtype) == "bf16" and str(ts.jit(good)(x).dtype) == "bf16"
    with pytest.raises(ShapeError):
        bad(x)
    with pytest.raises((ShapeError, DTypeError)):
        good(ts.ones((2, 3), "f64"))
    g = ts.grad(lambda v: ts.sum(ts.cast(good(v), "f32")))(x)
    assert str(g.dtype) == "f32" and g.numpy().tolist() == [[2.0] * 3] * 2
