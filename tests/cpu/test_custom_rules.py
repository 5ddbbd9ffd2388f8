"""custom_vjp, custom_jvp, stop_gradient: the user's rule is used, checked, and composes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from derivatives import t64
from tessera.errors import ArgumentError, GradError, ShapeError
from tessera.tensor import Tensor
from tolerance import assert_close


def make_cube() -> Any:
    """x^3 whose rule says 10 x g, so that a use of the rule shows."""
    @ts.custom_vjp
    def cube(x: Tensor) -> Tensor:
        return x * x * x

    cube.defvjp(lambda x: (cube(x), x), lambda x, g: 10.0 * x * g)
    return cube


# --- custom_vjp -------------------------------------------------------------------------------
@pytest.mark.row("AD-10", "AD-12")
def test_the_rule_is_used_and_the_primal_runs_without_it() -> None:
    cube = make_cube()
    x = t64([1.0, 2.0])
    for run in (cube, ts.jit(cube)):
        assert run(x).numpy().tolist() == [1.0, 8.0]
    loss = lambda v: ts.sum(cube(v))  # noqa: E731
    for g in (ts.grad(loss), ts.jit(ts.grad(loss)), ts.grad(ts.jit(loss))):
        assert g(x).numpy().tolist() == [10.0, 20.0]
    value, pull = ts.vjp(cube, x)
    assert value.numpy().tolist() == [1.0, 8.0]
    assert pull(t64([1.0, 1.0])).numpy().tolist() == [10.0, 20.0]


def test_fwd_replaces_the_primal_only_when_reversed() -> None:
    @ts.custom_vjp
    def f(x: Tensor) -> Tensor:
        return ts.sin(x)

    f.defvjp(lambda x: (ts.sin(x) + 0.0 * ts.exp(x), ts.cos(x)), lambda c, g: c * g)
    forward, backward = str(ts.jit(f).graph(t64(1.0))), ts.grad(f).graph(t64(1.0))
    assert "custom_vjp_call(" in forward
    top = [n.op.name for n in backward.nodes]
    assert "exp" in top and "custom_vjp_call" not in top


@pytest.mark.parametrize("kind", ["vmap(f)", "vmap(grad)", "grad(vmap)", "jit(vmap(grad))", "scan",
                                  "checkpoint", "cond"])
def test_custom_vjp_composes(kind: str, rng: np.random.Generator) -> None:
    cube = make_cube()
    x = rng.standard_normal(3)
    runs: dict[str, Callable] = {
        "vmap(f)": lambda v: ts.vmap(cube)(v) * 10.0 / (v * v),
        "vmap(grad)": ts.vmap(ts.grad(cube)),
        "grad(vmap)": ts.grad(lambda v: ts.sum(ts.vmap(cube)(v))),
        "jit(vmap(grad))": ts.jit(ts.vmap(ts.grad(cube))),
        "scan": ts.grad(lambda v: ts.sum(ts.scan(lambda c, e: (c, cube(e)), 0.0, v)[1])),
        "checkpoint": ts.grad(lambda v: ts.sum(ts.checkpoint(cube)(v))),
        "cond": ts.grad(lambda v: ts.sum(ts.cond(True, cube, lambda u: u, v))),
    }
    assert_close(runs[kind](t64(x)).numpy(), 10.0 * x, n=4)


def test_custom_vjp_under_vmap_with_an_unmapped_argument(rng: np.random.Generator) -> None:
    @ts.custom_vjp
    def scale(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    scale.defvjp(lambda x, w: (x * w, (x, w)),
                 lambda s, g: (g * s[1] * 2.0, ts.sum(g * s[0] * 3.0)))
    x, w = rng.standard_normal((4, 2)), 1.5
    loss = lambda w, x: ts.sum(ts.vmap(scale, in_axes=(0, None))(x, w))  # noqa: E731
    dw, dx = ts.grad(loss, argnums=(0, 1))(t64(w), t64(x))
    assert_close(dw.numpy(), 3.0 * x.sum(), n=8, scale=1.0)
    assert_close(dx.numpy(), np.full((4, 2), 3.0))


def test_second_derivative_goes_through_the_rule() -> None:
    cube = make_cube()
    assert ts.grad(ts.grad(cube))(t64(2.0)).item() == 10.0
    assert ts.jvp(ts.grad(cube), (t64(2.0),), (t64(1.0),))[1].item() == 10.0


def test_nested_and_constant_arguments() -> None:
    @ts.custom_vjp
    def f(p: dict, x: Tensor, power: int, how: str = "sum", *, twice: bool = False) -> dict:
        y = p["w"] * x**power
        return {"y": y * 2.0 if twice else y, "how": ts.sum(y) if how == "sum" else ts.mean(y)}

    def fwd(p: dict, x: Tensor, power: int, how: str, twice: bool) -> tuple:
        return f(p, x, power, how, twice=twice), {"p": p, "x": x, "power": power, "tag": "kept"}

    def bwd(saved: dict, g: dict) -> tuple:
        assert saved["tag"] == "kept" and saved["power"] == 3
        return {"w": g["y"] * 7.0, "b": None}, None, None, None, None

    f.defvjp(lambda p, x, power, how, *, twice: fwd(p, x, power, how, twice), bwd)
    p = {"w": t64([1.0, 2.0]), "b": t64(0.0)}
    loss = lambda p, x: ts.sum(f(p, x, 3, twice=True)["y"])  # noqa: E731
    g = ts.grad(loss, argnums=(0, 1))(p, t64([2.0, 3.0]))
    assert g[0]["w"].numpy().tolist() == [7.0, 7.0]
    assert g[0]["b"].item() == 0.0 and g[1].numpy().tolist() == [0.0, 0.0]


def test_integer_arguments_and_low_precision() -> None:
    @ts.custom_vjp
    def pick(x: Tensor, i: Tensor) -> Tensor:
        return x[i]

    pick.defvjp(lambda x, i: (x[i], (x, i)), lambda s, g: (ts.ones_like(s[0]) * 4.0, None))
    x = ts.cast(ts.tensor([1.0, 2.0]), "bf16")
    g = ts.grad(lambda v: ts.sum(pick(v, ts.tensor([1, 0]))))(x)
    assert str(g.dtype) == "f32" and g.numpy().tolist() == [4.0, 4.0]


def test_methods_can_be_decorated() -> None:
    class Layer:
        scale = 3.0

        @ts.custom_jvp
        def run(self, x: Tensor) -> Tensor:
            return x * self.scale

    Layer.run.defjvp(lambda p, t: (p[1] * p[0].scale if p[0] else p[1] * 3.0, t[1] * 5.0))
    assert ts.grad(lambda x: Layer().run(x))(t64(1.0)).item() == 5.0


def test_errors_of_custom_vjp_name_the_argument() -> None:
    @ts.custom_vjp
    def f(x: Tensor, w: Tensor) -> Tensor:
        return ts.sum(x) * ts.sum(w)

    x, w = t64([1.0, 2.0]), t64([1.0, 2.0, 3.0])
    with pytest.raises(GradError, match="custom_vjp f has no rule yet") as err:
        f(x, w)
    assert "f.defvjp(fwd, bwd)" in str(err.value)
    fwd = lambda x, w: (f(x, w), (x, w))  # noqa: E731
    cases: list[tuple[Callable, str]] = [
        (lambda s, g: g * s[0], r"returns 1 cotangents for 2 arguments: x, w"),
        (lambda s, g: (g * s[1], None), r"the cotangent of x has shape \[3\], x has \[2\]"),
        (lambda s, g: (None, ts.tensor([1, 2, 3])), "the cotangent of w is int64"),
        (lambda s, g: (None, {"a": g}), "the cotangent of w has structure"),
    ]
    for bwd, text in cases:
        f.defvjp(fwd, bwd)
        with pytest.raises((GradError, ArgumentError), match=text):
            ts.grad(f)(x, w)
    f.defvjp(lambda x, w: f(x, w), lambda s, g: (g, g))
    with pytest.raises(GradError, match=r"must return \(value, saved\)"):
        ts.grad(f)(x, w)
    f.defvjp(lambda x, w: (ts.cast(f(x, w), "f32"), x), lambda s, g: (g, g))
    with pytest.raises(GradError, match=r"returns f32\[\] as value 0, f returns f64\[\]"):
        ts.grad(f)(x, w)


def test_forward_mode_of_custom_vjp_is_refused() -> None:
    cube = make_cube()
    with pytest.raises(GradError, match="no forward-mode derivative: the rule of cube") as err:
        ts.jvp(cube, (t64(1.0),), (t64(1.0),))
    assert "ts.custom_jvp" in str(err.value)


def test_a_closed_over_value_that_is_differentiated_is_an_error() -> None:
    """Its gradient would silently be zero."""
    def loss(w: Tensor, x: Tensor) -> Tensor:
        @ts.custom_vjp
        def f(x: Tensor) -> Tensor:
            return x * w

        f.defvjp(lambda x: (f(x), None), lambda s, g: g * w)
        return f(x)

    assert ts.grad(loss, argnums=1)(t64(3.0), t64(2.0)).item() == 3.0
    with pytest.raises(GradError, match="closes over a value that is differentiated"):
        ts.grad(loss, argnums=0)(t64(3.0), t64(2.0))


# --- custom_jvp -------------------------------------------------------------------------------
def make_sin() -> Any:
    """sin with the derivative 3 cos."""
    @ts.custom_jvp
    def f(x: Tensor) -> Tensor:
        return ts.sin(x)

    @f.defjvp
    def rule(primals: tuple, tangents: tuple) -> tuple:
        (x,), (t,) = primals, tangents
        return f(x), 3.0 * ts.cos(x) * t

    return f


@pytest.mark.row("AD-13")
@pytest.mark.parametrize("kind", ["jvp", "grad", "vmap(grad)", "grad(vmap)", "jacfwd", "jit",
                                  "scan", "jvp in scan"])
def test_custom_jvp_serves_both_modes(kind: str, rng: np.random.Generator) -> None:
    f, x = make_sin(), rng.standard_normal(3)
    total = lambda v: ts.sum(f(v))  # noqa: E731
    one = ts.ones((3,), "f64")
    runs: dict[str, Callable] = {
        "jvp": lambda v: ts.jvp(f, (v,), (one,))[1],
        "grad": ts.grad(total),
        "vmap(grad)": ts.vmap(ts.grad(f)),
        "grad(vmap)": ts.grad(lambda v: ts.sum(ts.vmap(f)(v))),
        "jacfwd": lambda v: ts.sum(ts.jacfwd(f)(v), axis=0),
        "jit": ts.jit(ts.grad(total)),
        "scan": ts.grad(lambda v: ts.sum(ts.scan(lambda c, e: (c, f(e)), 0.0, v)[1])),
        "jvp in scan": lambda v: ts.jvp(
            lambda u: ts.scan(lambda c, e: (c, f(e)), 0.0, u)[1], (v,), (one,))[1],
    }
    assert_close(runs[kind](t64(x)).numpy(), 3.0 * np.cos(x), n=3)
    assert_close(f(t64(x)).numpy(), np.sin(x))


def test_custom_jvp_higher_orders_and_the_value_of_the_rule() -> None:
    f = make_sin()
    assert ts.grad(ts.grad(f))(t64(0.5)).item() == pytest.approx(-3.0 * math.sin(0.5))

    @ts.custom_jvp
    def g(x: Tensor) -> Tensor:
        return x

    g.defjvp(lambda p, t: (p[0] * 2.0, t[0]))  # another value, to see which one is used
    value, t = ts.jvp(g, (t64(3.0),), (t64(1.0),))
    assert value.item() == 6.0 and t.item() == 1.0
    assert g(t64(3.0)).item() == 3.0


def test_custom_jvp_with_nested_constant_and_integer_arguments() -> None:
    @ts.custom_jvp
    def f(p: dict, n: Tensor, power: int) -> tuple:
        return p["a"] ** power * ts.cast(n, "f64"), n

    def rule(primals: tuple, tangents: tuple) -> tuple:
        p, n, power = primals
        dp, dn, dpower = tangents
        assert dn is None and dpower is None and power == 2
        return f(p, n, power), (11.0 * dp["a"] + dp["b"], None)

    f.defjvp(rule)
    p = {"a": t64([1.0, 2.0]), "b": t64([1.0, 1.0])}
    g = ts.grad(lambda q: ts.sum(f(q, ts.tensor([2, 3]), 2)[0]))(p)
    assert g["a"].numpy().tolist() == [11.0, 11.0] and g["b"].numpy().tolist() == [1.0, 1.0]


def test_errors_of_custom_jvp() -> None:
    @ts.custom_jvp
    def f(x: Tensor) -> Tensor:
        return x * 2.0

    with pytest.raises(GradError, match="custom_jvp f has no rule yet"):
        f(t64(1.0))
    f.defjvp(lambda p, t: t[0])
    with pytest.raises(GradError, match=r"must return \(value, tangent\)"):
        ts.jvp(f, (t64(1.0),), (t64(1.0),))
    f.defjvp(lambda p, t: (p[0], ts.zeros((2,))))
    with pytest.raises(ShapeError, match=r"a tangent of shape \[2\], its value has \[\]"):
        ts.jvp(f, (t64(1.0),), (t64(1.0),))
    f.defjvp(lambda p, t: (ts.cast(p[0], "f32"), t[0]))
    with pytest.raises(GradError, match=r"returns a value f32\[\], f returns f64\[\]"):
        ts.jvp(f, (t64(1.0),), (t64(1.0),))

    def closed(w: Tensor) -> Tensor:
        @ts.custom_jvp
        def g(x: Tensor) -> Tensor:
            return x * w

        g.defjvp(lambda p, t: (p[0] * w, t[0] * w))
        return g(t64(2.0))

    for derive in (lambda: ts.grad(closed)(t64(1.0)),
                   lambda: ts.jvp(closed, (t64(1.0),), (t64(1.0),))):
        with pytest.raises(GradError, match="closes over a value"):
            derive()


def test_a_rule_with_random_numbers_uses_one_mask() -> None:
    @ts.custom_jvp
    def noisy(x: Tensor) -> Tensor:
        return ts.dropout(x, 0.5)

    noisy.defjvp(lambda p, t: (ts.dropout(p[0], 0.5), t[0]))
    out = ts.jit(ts.vmap(noisy, in_axes=1))(ts.ones((64, 2)))
    assert 0 < np.count_nonzero(out.numpy()) < 128


# --- stop_gradient ----------------------------------------------------------------------------
def test_stop_gradient_in_both_modes() -> None:
    f = lambda x: x * ts.stop_gradient(x * x)  # noqa: E731
    assert ts.grad(f)(t64(3.0)).item() == 9.0
    assert ts.jvp(f, (t64(3.0),), (t64(1.0),))[1].item() == 9.0
    assert ts.vmap(ts.grad(f))(t64([2.0, 3.0])).numpy().tolist() == [4.0, 9.0]
    tree = ts.stop_gradient({"a": t64(1.0), "b": [t64(2.0)]})
    assert tree["b"][0].item() == 2.0
    last = lambda x: ts.scan(lambda c, e: (ts.stop_gradient(c) + e, None), 0.0, x)[0]  # noqa: E731
    assert ts.grad(last)(t64([1.0, 2.0, 3.0])).numpy().tolist() == [0.0, 0.0, 1.0]
