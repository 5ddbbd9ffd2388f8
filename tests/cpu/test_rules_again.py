"""Second derivatives through functions with rules of the user's: the rules hold there too.

Each rule says another derivative than the body has, so that a use of the body's shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import Tensor, f64
from tessera.errors import GradError
from tolerance import assert_close

tile = ts.tile


def with_vjp(again: bool) -> Any:
    """x whose rule says 2; again: bwd calls it too."""
    @ts.custom_vjp
    def f(x: Any) -> Any:
        return 1.0 * x

    f.defvjp(lambda x: (f(x), x), lambda x, g: 2.0 * g * f(x) / x if again else 2.0 * g)
    return f


def with_jvp() -> Any:
    @ts.custom_jvp
    def f(x: Any) -> Any:
        return 1.0 * x

    f.defjvp(lambda primals, tangents: (f(*primals), 2.0 * tangents[0]))
    return f


def with_kernel(again: bool) -> Any:
    @ts.kernel
    def copied(x: Tensor["N", f64], y: Tensor["N", f64]):
        y[tile_n:tile_n + 4] = tile.load(x[tile_n:tile_n + 4])

    def f(x: Any) -> Any:
        y = ts.zeros_like(x)
        copied(x, y)
        return y

    def forward(x: Any, y: Any) -> Any:
        copied(x, y)
        return y, (x, y)

    def backward(saved: Any, g: Any) -> Any:
        x, y = saved
        return 2.0 * g * (f(x) / x if again else 1.0), None

    copied.defvjp(forward, backward)
    return f


KINDS = {"vjp": lambda: with_vjp(False), "vjp, called in bwd": lambda: with_vjp(True),
         "jvp": with_jvp, "kernel": lambda: with_kernel(False),
         "kernel, called in bwd": lambda: with_kernel(True)}


@pytest.fixture(params=KINDS)
def f(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]()


@pytest.fixture
def want(request: pytest.FixtureRequest, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """x, and the second derivative of sum sin f(x) where f' is 2: that of 2 cos f(x) is
    -4 sin f(x); called in bwd, 2 f(x) / x is differentiated too: 2 (2 / x - f(x) / x^2) more."""
    x = rng.uniform(0.5, 2.0, 5)
    more = 2.0 / x * np.cos(x) if "called" in request.node.callspec.params["f"] else 0.0
    return x, -4.0 * np.sin(x) + more


RUNS: dict[str, Callable] = {
    "grad of grad": lambda loss, x: ts.grad(lambda v: ts.sum(ts.grad(loss)(v)))(x),
    "jit": lambda loss, x: ts.jit(ts.grad(lambda v: ts.sum(ts.jit(ts.grad(loss))(v))))(x),
    "vmap": lambda loss, x: ts.vmap(
        ts.grad(lambda v: ts.sum(ts.grad(loss)(v))))(ts.stack([x, x]))[1],
    "grad of vmap": lambda loss, x: ts.grad(
        lambda v: ts.sum(ts.vmap(ts.grad(loss))(v)))(ts.stack([x, x]))[0],
    "hvp": lambda loss, x: ts.hvp(loss, (x,), (ts.ones_like(x),)),
    "checkpoint": lambda loss, x: ts.grad(
        lambda v: ts.sum(ts.grad(ts.checkpoint(loss))(v)))(x),
}


@pytest.mark.parametrize("run", RUNS)
def test_a_second_derivative_has_the_rule(f: Any, want: Any, run: str) -> None:
    x, second = want
    found = RUNS[run](lambda v: ts.sum(ts.sin(f(v))), ts.tensor(x, f64))
    assert_close(found, second, n=8)


def test_a_third_derivative_has_it(rng: np.random.Generator) -> None:
    """f' is 2, so d^3 sin f is -8 cos f."""
    x = rng.uniform(0.5, 2.0, 5)
    total = lambda g: lambda v: ts.sum(g(v))  # noqa: E731
    for f in (with_vjp(False), with_jvp(), with_kernel(False)):
        loss = lambda v, f=f: ts.sum(ts.sin(f(v)))  # noqa: E731
        found = ts.grad(total(ts.grad(total(ts.grad(loss)))))(ts.tensor(x, f64))
        assert_close(found, -8.0 * np.cos(x), n=8)


def test_a_captured_tensor_stays_that_of_the_call(rng: np.random.Generator) -> None:
    x, w = rng.uniform(0.5, 2.0, 5), rng.uniform(0.5, 2.0, 5)
    weight = ts.tensor(w, f64)

    @ts.custom_vjp
    def f(x: Any) -> Any:
        return weight * x

    f.defvjp(lambda x: (f(x), None), lambda _, g: 2.0 * weight * g)
    found = ts.grad(lambda v: ts.sum(ts.grad(lambda v: ts.sum(ts.sin(f(v))))(v)))(ts.tensor(x, f64))
    assert_close(found, -4.0 * w * w * np.sin(w * x), n=8)


def test_random_numbers_of_the_function_are_those_of_the_call() -> None:
    """In fwd the function draws what it draws outside, also when that is differentiated."""
    @ts.custom_vjp
    def noisy(x: Any) -> Any:
        return x * ts.random.uniform((3,), 1.0, 2.0, "f64")

    noisy.defvjp(lambda x: (y := noisy(x), y / x), lambda mask, g: g * mask)
    value, slope = ts.value_and_grad(lambda x: ts.sum(noisy(x)))(ts.ones(3, f64))
    assert_close(ts.sum(slope), value.numpy(), n=8)


def test_a_call_in_a_rule_with_other_shapes_runs_without_it() -> None:
    @ts.custom_vjp
    def f(x: Any) -> Any:
        return 1.0 * x

    f.defvjp(lambda x: (ts.concatenate([f(x[:1]), f(x[1:])]), None), lambda _, g: 2.0 * g)
    x = np.array([0.5, 1.0, 2.0])
    assert_close(ts.grad(lambda v: ts.sum(ts.sin(f(v))))(ts.tensor(x, f64)), 2.0 * np.cos(x),
                 n=8)


def test_forward_mode_of_a_reverse_rule_is_refused_outside_of_rules() -> None:
    with pytest.raises(GradError, match="no forward-mode derivative: the rule of f"):
        ts.jvp(with_vjp(False), (1.0,), (1.0,))


@pytest.mark.parametrize("name, ops", [
    ("stable_softmax", ts.softmax),
    ("flash_attention_2", lambda x: ts.attention(x, x, x))])
def test_a_second_derivative_through_a_routine(name: str, ops: Callable, rng: Any) -> None:
    """In both modes, with that of the same in ops."""
    routine = getattr(ts.stdlib, name)
    attention = name == "flash_attention_2"
    x = rng.standard_normal((2, 8, 16) if attention else (3, 8))
    call = (lambda v: routine(v, v, v)) if attention else routine

    def second(f: Callable, v: Any) -> Any:
        def loss(v: Any) -> Any:
            return ts.sum(ts.sin(3.0 * f(v)))

        twice = ts.grad(lambda v: ts.sum(ts.grad(loss)(v) ** 2))
        return twice(v), ts.hvp(loss, (v,), (v,))

    found, wanted = second(call, ts.tensor(x, "f32")), second(ops, ts.tensor(x, f64))
    for got, want in zip(found, wanted, strict=True):
        assert_close(got, want.numpy(), n=64, scale=np.abs(want.numpy()).max())
