"""grad, vjp, jvp, vmap and Jacobians: what they take, what they give, and how they nest."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from derivatives import t64
from tessera.errors import ArgumentError, GradError, ShapeError, TraceError
from tessera.graph.escapes import LostChangeWarning
from tessera.tensor import Tensor
from tolerance import assert_close


def f32(a: Any) -> Tensor:
    return ts.tensor(np.asarray(a, np.float32), ts.f32)


def bump(x: Tensor) -> Tensor:
    return ts.sum(ts.tanh(x) * x * x)


# --- which arguments --------------------------------------------------------------------------
def test_argument_zero_by_default() -> None:
    assert ts.grad(lambda x, y: x * y * y)(2.0, 3.0).item() == 9.0


def test_params_come_first_in_signature_order() -> None:
    def loss(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
        return ts.sum((x * w + b - t) * 2.0)

    x, w, b = f32([1.0, 2.0]), ts.param([3.0, 4.0]), ts.param([0.0, 0.0])
    dw, db = ts.grad(loss)(x, w, b, f32([1.0, 1.0]))
    np.testing.assert_array_equal(dw.numpy(), [2.0, 4.0])
    np.testing.assert_array_equal(db.numpy(), [2.0, 2.0])


def test_params_inside_a_dict_select_their_argument() -> None:
    def loss(x: Tensor, p: dict) -> Tensor:
        return ts.sum(x * p["w"]) + p["b"]

    g = ts.grad(loss)(f32([1.0, 2.0]), {"w": ts.param([3.0, 4.0]), "b": ts.param(1.0)})
    assert set(g) == {"w", "b"}
    np.testing.assert_array_equal(g["w"].numpy(), [1.0, 2.0])
    assert g["b"].item() == 1.0


def test_argnums_and_wrt_win_over_params() -> None:
    def loss(x: Tensor, w: Tensor, z: Tensor) -> Tensor:
        return ts.sum(x * w * z)

    x, w, z = f32([2.0]), ts.param([3.0]), f32([5.0])
    assert ts.grad(loss, argnums=0)(x, w, z).item() == 15.0
    assert ts.grad(loss, argnums=-1)(x, w, z).item() == 6.0
    assert [g.item() for g in ts.grad(loss, argnums=(2, 0))(x, w, z)] == [6.0, 15.0]
    assert ts.grad(loss, wrt="z")(x, w, z).item() == 6.0
    assert [g.item() for g in ts.grad(loss, wrt=("z", "w"))(x, w, z)] == [6.0, 10.0]
    assert [g.item() for g in ts.grad(loss, wrt={"z", "w"})(x, w, z)] == [10.0, 6.0]
    for one in ({"argnums": (0,)}, {"argnums": [-3]}, {"wrt": ("x",)}):
        value, grads = ts.value_and_grad(loss, **one)(x, w, z)
        assert isinstance(grads, tuple) and [g.item() for g in grads] == [15.0]
    pair = ts.jacrev(loss, argnums=(2, 0))(x, w, z)  # as grad does
    assert [g.item() for g in pair] == [6.0, 15.0]
    with pytest.raises(ArgumentError, match="asked for twice: x, x"):
        ts.grad(loss, argnums=(0, -3))(x, w, z)
    with pytest.raises(ArgumentError, match="did you mean|'q' is not an argument"):
        ts.grad(loss, wrt="q")(x, w, z)
    with pytest.raises(ArgumentError, match="argnums 3"):
        ts.grad(loss, argnums=3)(x, w, z)
    with pytest.raises(ArgumentError, match="not both"):
        ts.grad(loss, argnums=0, wrt="x")(x, w, z)


def test_variadic_and_keyword_arguments() -> None:
    def loss(*xs: Tensor, scale: float, **more: Tensor) -> Tensor:
        return xs[0] * xs[1] * xs[1] * scale + more["c"]

    g = ts.grad(loss, argnums=1)(2.0, 3.0, scale=10.0, c=f32(1.0))
    assert g.item() == 120.0
    both = ts.grad(loss, wrt="xs")(2.0, 3.0, scale=1.0, c=f32(1.0))
    assert [g.item() for g in both] == [9.0, 12.0]
    assert ts.grad(loss, wrt="c")(2.0, 3.0, scale=1.0, c=f32(1.0)).item() == 1.0


def test_nested_params_give_gradients_of_the_same_structure() -> None:
    params = {"layers": [{"w": f32([[1.0, 2.0]])}, {"w": f32([[3.0], [4.0]])}], "b": f32(0.5)}

    def loss(p: dict, x: Tensor) -> Tensor:
        h = x
        for layer in p["layers"]:
            h = h @ layer["w"]
        return ts.sum(h) + p["b"]

    g = ts.grad(loss)(params, f32([[2.0]]))
    np.testing.assert_array_equal(g["layers"][0]["w"].numpy(), [[6.0, 8.0]])
    np.testing.assert_array_equal(g["layers"][1]["w"].numpy(), [[2.0], [4.0]])
    assert g["b"].item() == 1.0


def test_integer_and_bool_arguments_pass_along() -> None:
    def loss(x: Tensor, index: Tensor, mask: Tensor, flip: bool) -> Tensor:
        picked = ts.where(mask, x, 0.0)[index]
        return ts.sum(-picked if flip else picked)

    x, index, mask = f32([1.0, 2.0, 3.0]), ts.tensor([0, 0, 2]), ts.tensor([True, False, True])
    np.testing.assert_array_equal(ts.grad(loss)(x, index, mask, True).numpy(), [-2, 0, -1])
    np.testing.assert_array_equal(ts.grad(loss)(x, index, mask, False).numpy(), [2, 0, 1])
    value, pull = ts.vjp(lambda a, i: a[i], x, index)
    g, none = pull(ts.ones_like(value))
    assert none is None
    np.testing.assert_array_equal(g.numpy(), [2, 0, 1])
    moved = ts.jvp(lambda a, i: (a[i], i), (x, index), (f32([1.0, 2.0, 3.0]), index))[1]
    np.testing.assert_array_equal(moved[0].numpy(), [1.0, 1.0, 3.0])
    assert moved[1] is None


def test_unused_arguments_have_zero_gradients() -> None:
    g = ts.grad(lambda x, y: ts.sum(x * 2.0), argnums=(0, 1))(f32([1.0]), f32([[1.0, 2.0]]))
    np.testing.assert_array_equal(g[1].numpy(), [[0.0, 0.0]])
    assert ts.grad(lambda x: f32(3.0))(f32([1.0, 2.0])).numpy().tolist() == [0.0, 0.0]


def test_a_constant_function_and_a_captured_result() -> None:
    held = f32(7.0)
    value, g = ts.value_and_grad(lambda x: held)(f32(1.0))
    assert value.item() == 7.0 and g.item() == 0.0
    assert ts.jvp(lambda x: held, (f32(1.0),), (f32(1.0),))[1].item() == 0.0
    out = ts.vmap(lambda x: held)(f32([1.0, 2.0]))
    assert out.numpy().tolist() == [7.0, 7.0]


# --- types ------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["bf16", "f16", "fp8_e4m3"])
def test_low_precision_params_have_f32_gradients(name: str) -> None:
    w = ts.cast(f32([0.5, 2.0]), name)
    g = ts.grad(lambda v: ts.sum(v * v))(w)
    assert str(g.dtype) == "f32"
    assert_close(g.numpy(), [1.0, 4.0], dtype=name)


def test_f64_stays_f64() -> None:
    g = ts.grad(lambda x: x * x * x)(t64(1 / 3))
    assert g.dtype is ts.f64
    assert_close(g.numpy(), 3 * (1 / 3) ** 2)


def test_integers_scaled_tensors_and_vectors_are_refused() -> None:
    with pytest.raises(GradError, match="with respect to x: a int64.* has no derivative"):
        ts.grad(lambda x: ts.sum(x))(ts.tensor([1, 2]))
    scaled = ts.cast(f32([1.0, 2.0]), "fp8_e4m3 @scaled('amax')")
    with pytest.raises(GradError, match="scaled tensor"):
        ts.grad(lambda x: ts.sum(ts.dequantize(x)))(scaled)
    with pytest.raises(GradError, match=r"float scalar, it returns f32\[2\]"):
        ts.grad(lambda x: x * x)(f32([1.0, 2.0]))
    with pytest.raises(GradError, match="returns tuple"):
        ts.grad(lambda x: (ts.sum(x), x))(f32([1.0, 2.0]))
    with pytest.raises(GradError, match="has_aux=True, it returns Tensor|has_aux=True, it returns"):
        ts.grad(lambda x: ts.sum(x), has_aux=True)(f32([1.0]))
    with pytest.raises(ArgumentError, match="grad needs a function"):
        ts.grad(f32(1.0))


def test_aux_may_hold_any_python_object() -> None:
    def loss(x: Tensor) -> tuple:
        return ts.sum(x * x), {"n": x * 2.0, "name": "run", "none": None}

    g, aux = ts.grad(loss, has_aux=True)(f32([1.0, 2.0]))
    assert aux["name"] == "run" and aux["none"] is None
    np.testing.assert_array_equal(aux["n"].numpy(), [2.0, 4.0])
    (value, again), g2 = ts.value_and_grad(loss, has_aux=True)(f32([1.0, 2.0]))
    assert value.item() == 5.0 and again["name"] == "run"
    np.testing.assert_array_equal(g.numpy(), g2.numpy())


# --- vjp, jvp ---------------------------------------------------------------------------------
def test_vjp_value_and_pullback_used_twice() -> None:
    value, pull = ts.vjp(lambda x: x * x + 2 * x, 3)
    assert value.item() == 15.0
    assert pull(1.0).item() == 8.0 and pull(2.0).item() == 16.0

    @ts.jit
    def inside(x: Tensor) -> tuple:
        y, back = ts.vjp(lambda v: v * v + 2 * v, x)
        return y, back(ts.ones_like(y)), back(3.0 * ts.ones_like(y))

    assert [t.item() for t in inside(f32(3.0))] == [15.0, 8.0, 24.0]


def test_a_pullback_serves_inside_a_later_trace() -> None:
    _, pull = ts.vjp(ts.sin, t64([0.5, 1.0]))
    out = ts.jit(lambda g: pull(g))(t64([1.0, 2.0]))
    assert_close(out.numpy(), np.cos([0.5, 1.0]) * [1.0, 2.0])


def test_vjp_of_nested_values(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((2, 3))
    value, pull = ts.vjp(lambda p: {"s": p["a"] * p["b"], "d": [p["a"] - p["b"]]},
                         {"a": t64(a), "b": t64(b)})
    g = pull({"d": [t64(np.ones(3))], "s": t64(np.full(3, 2.0))})  # keys in another order
    assert_close(value["s"].numpy(), a * b)
    assert_close(g["a"].numpy(), 2 * b + 1)
    assert_close(g["b"].numpy(), 2 * a - 1)
    with pytest.raises(ArgumentError, match="the cotangent has structure"):
        pull(t64(np.ones(3)))
    with pytest.raises(ShapeError, match="the cotangent has shape"):
        pull({"d": [t64(np.ones(2))], "s": t64(np.ones(3))})


def test_jvp_is_the_gradient_along_the_tangent_and_linear(rng: np.random.Generator) -> None:
    x, t, u = rng.standard_normal((3, 5))
    value, moved = ts.jvp(bump, (t64(x),), (t64(t),))
    g = ts.grad(bump)(t64(x)).numpy()
    assert_close(moved.numpy(), g @ t, n=5)
    assert_close(value.numpy(), np.sum(np.tanh(x) * x * x), n=5)
    both = ts.jvp(bump, (t64(x),), (t64(2 * t + u),))[1].numpy()
    one = ts.jvp(bump, (t64(x),), (t64(u),))[1].numpy()
    assert_close(both, 2 * moved.numpy() + one, n=5, scale=1.0)


def test_jvp_checks_its_tangents() -> None:
    with pytest.raises(ArgumentError, match="takes tuples"):
        ts.jvp(bump, f32([1.0]), f32([1.0]))
    with pytest.raises(ArgumentError, match="structure"):
        ts.jvp(bump, (f32([1.0]),), (f32([1.0]), f32([1.0])))
    with pytest.raises(ShapeError, match="tangent has shape"):
        ts.jvp(bump, (f32([1.0]),), (f32([1.0, 2.0]),))


@pytest.mark.parametrize("fn", [
    lambda x: ts.concatenate([x, x * 2.0]), lambda x: ts.pad(x, 1), lambda x: ts.stack([x, x]),
    lambda x: x[1:], lambda x: ts.flip(x), lambda x: ts.where(x > 0, x, 0.0),
    lambda x: ts.concatenate([x, ts.zeros_like(x)]),
    lambda x: ts.concatenate([ts.cast(ts.tensor([1.0]), x.dtype), x]),
], ids=["concatenate", "pad", "stack", "slice", "flip", "where", "zeros", "constant"])
def test_structural_ops_on_bf16_have_f32_derivatives(fn: Callable) -> None:
    x, t = ts.cast(f32([1.0, -2.0, 3.0]), "bf16"), f32([0.1, 0.2, 0.3])
    y, moved = ts.jvp(fn, (x,), (t,))
    assert str(y.dtype) == "bf16" and str(moved.dtype) == "f32"
    g = ts.vjp(fn, x)[1](ts.ones(y.shape))
    assert str(g.dtype) == "f32"
    assert_close(np.sum(moved.numpy()), g.numpy() @ t.numpy(), dtype="bf16")


# --- vmap -------------------------------------------------------------------------------------
def test_vmap_axes_of_nested_arguments(rng: np.random.Generator) -> None:
    w, b, x = rng.standard_normal((3, 4)), rng.standard_normal(4), rng.standard_normal((4, 5))
    out = ts.vmap(lambda p, v: p["w"] * v + p["b"], in_axes=({"w": 0, "b": None}, None))(
        {"w": t64(w), "b": t64(b)}, t64(x[:, 0]))
    assert_close(out.numpy(), w * x[:, 0] + b)
    out = ts.vmap(lambda p, v: ts.sum(p["w"] * v), in_axes=(None, -1), out_axes=-1)(
        {"w": t64(b)}, t64(x))
    assert_close(out.numpy(), b @ x, n=4)
    pair = ts.vmap(lambda v: (v, {"s": ts.sum(v), "n": None}), in_axes=1, out_axes=(1, 0))(t64(x))
    assert pair[0].shape == (4, 5) and pair[1]["s"].shape == (5,) and pair[1]["n"] is None
    assert_close(pair[0].numpy(), x)


def test_vmap_passes_strings_and_flags_through() -> None:
    def f(x: Tensor, how: str, negate: bool = False, *, power: int = 1) -> Tensor:
        y = ts.exp(x) if how == "exp" else x
        return (-y if negate else y) ** power

    x = t64([0.0, 1.0])
    assert_close(ts.vmap(f, in_axes=(0, None, None))(x, "exp", True, power=2).numpy(),
                 np.exp([0.0, 1.0]) ** 2)
    assert ts.vmap(f, in_axes=(0, None))(x, "no").numpy().tolist() == [0.0, 1.0]
    assert ts.vmap(f)(x, how="no", negate=True, power=3).numpy().tolist() == [0.0, -1.0]


def test_defaults_are_not_mapped_and_named_arguments_are_whole() -> None:
    def f(x: Tensor, w: Tensor, eps: float = 0.5) -> Tensor:
        return ts.sum(x * w) + eps

    x, w = t64([[1.0], [2.0]]), t64([3.0])
    mapped = ts.vmap(f, in_axes=(0,))
    assert mapped(x, w=w).numpy().tolist() == [3.5, 6.5]
    assert mapped(x, w=w, eps=1.5).numpy().tolist() == [4.5, 7.5]
    assert ts.vmap(f)(x, x).numpy().tolist() == [1.5, 4.5]
    before = mapped.specializations
    mapped(x, w=w, eps=2.5)  # a number that may be traced is: no new trace
    assert mapped.specializations == before
    g = ts.grad(lambda x, n=2: ts.sum(x**3) * n)
    assert g(t64([2.0])).item() == 24.0
    with pytest.raises(ArgumentError, match="missing a required argument: 'w'"):
        ts.grad(f)(x)


def test_a_transform_can_be_inspected() -> None:
    g = ts.grad(bump)
    text = g.inspect_ir("graph", f32([1.0, 2.0]))
    assert "tanh" in text and "grad(bump)" in text
    assert str(g.infer(ts.Tensor["N", ts.f32])) == "Tensor['N', f32]"
    lines = [line.split("    # ") for line in str(g.graph(f32([1.0]))).splitlines()]
    assert sum(" = tanh(" in line[0] for line in lines) == 1
    added = [line for line in lines if " = add(" in line[0]]  # sums of cotangents
    assert added and all("ts.sum(ts.tanh(x) * x * x)" in line[1] for line in added)
    assert repr(g) == "<grad(bump)>"


def test_vmap_out_axes_none_and_errors(rng: np.random.Generator) -> None:
    x = t64(rng.standard_normal((3, 2)))
    whole = ts.vmap(lambda v: (v, ts.ones((2,))), out_axes=(0, None))(x)
    assert whole[1].shape == (2,)
    with pytest.raises(Exception, match="out_axes is None for a result that depends"):
        ts.vmap(lambda v: v, out_axes=None)(x)
    with pytest.raises(ShapeError, match="mapped extents differ: args.0 has 3, args.1 has 2"):
        ts.vmap(lambda a, b: a)(x, x[:2])
    with pytest.raises(ShapeError, match="vmap over a scalar"):
        ts.vmap(lambda a: a)(t64(1.0))
    with pytest.raises(ArgumentError, match="at least one mapped"):
        ts.vmap(lambda a: a, in_axes=None)(x)
    with pytest.raises(ArgumentError, match="in_axes has 2 entries for 1"):
        ts.vmap(lambda a: a, in_axes=(0, 0))(x)
    with pytest.raises(ArgumentError, match="does not fit"):
        ts.vmap(lambda a: a["w"], in_axes=({"v": 0},))({"w": x})


def test_vmap_keeps_scaled_tensors_whole() -> None:
    scaled = ts.cast(f32([[1.0, 2.0], [3.0, 4.0]]), "fp8_e4m3 @scaled('amax')")
    out = ts.vmap(lambda v, s: ts.sum(v * ts.dequantize(s)), in_axes=(0, None))(
        f32([1.0, 2.0]), scaled)
    assert_close(out.numpy(), [10.0, 20.0], dtype="fp8_e4m3")
    with pytest.raises(ArgumentError, match="vmap over args.0, a scaled tensor"):
        ts.vmap(lambda s: ts.sum(ts.dequantize(s)))(scaled)


@pytest.mark.row("PAR-04")
def test_vmap_equals_the_stacked_loop(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((4, 3, 2)), rng.standard_normal((2, 5))

    def f(x: Tensor, y: Tensor) -> Tensor:
        return ts.tanh(x @ y)

    out = ts.vmap(f, in_axes=(0, None))(t64(a), t64(b))
    want = np.stack([f(t64(row), t64(b)).numpy() for row in a])
    assert_close(out.numpy(), want, n=2)
    assert_close(out.numpy(), np.tanh(a @ b), n=2)


# --- Jacobians --------------------------------------------------------------------------------
def test_jacobians_of_several_arguments_and_nested_results(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((2, 3)), rng.standard_normal(3)

    def f(m: Tensor, v: Tensor) -> dict:
        return {"y": m @ v, "s": ts.sum(v * v)}

    for jac in (ts.jacrev, ts.jacfwd):
        out = jac(f, argnums=(0, 1))(t64(a), t64(b))
        want = np.einsum("ij,k->ijk", np.eye(2), b)
        assert_close(out["y"][0].numpy(), want)
        assert_close(out["y"][1].numpy(), a)
        assert_close(out["s"][1].numpy(), 2 * b)
        assert out["s"][0].shape == (2, 3) and not out["s"][0].numpy().any()
        assert_close(jac(lambda m, v: m @ v, argnums=1)(t64(a), t64(b)).numpy(), a)


def test_hessian_and_hvp(rng: np.random.Generator) -> None:
    x, y, t = rng.standard_normal((3, 3))

    def f(u: Tensor, v: Tensor) -> Tensor:
        return ts.sum(u * u * u * v)

    h = ts.hessian(f)(t64(x), t64(y))
    assert_close(h.numpy(), np.diag(6 * x * y))
    grid = ts.hessian(f, argnums=(0, 1))(t64(x), t64(y))
    assert_close(grid[0][1].numpy(), np.diag(3 * x * x))
    assert_close(grid[1][0].numpy(), np.diag(3 * x * x))
    assert not grid[1][1].numpy().any()
    assert_close(ts.hvp(lambda u: ts.sum(u**3), (t64(x),), (t64(t),)).numpy(), 6 * x * t)


def test_jacobians_of_nested_arguments(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((2, 3))
    params = {"a": t64(a), "more": [t64(b), t64(2.0)]}

    def f(p: dict, x: Tensor) -> Tensor:
        return ts.sum(ts.sin(p["a"]) * p["more"][0] ** 2) * p["more"][1] * x

    h = ts.hessian(f)(params, t64(0.5))
    assert_close(h["a"]["a"].numpy(), np.diag(-np.sin(a) * b * b))
    assert_close(h["a"]["more"][0].numpy(), np.diag(np.cos(a) * 2 * b))
    assert_close(h["more"][0]["more"][0].numpy(), np.diag(2 * np.sin(a)))
    assert_close(h["more"][1]["a"].numpy(), np.cos(a) * b * b / 2)
    for jac in (ts.jacrev, ts.jacfwd):
        out = jac(lambda p, x: {"y": p["a"] * x}, argnums=(0, 1))(params, t64(b))["y"]
        assert_close(out[0]["a"].numpy(), np.diag(b))
        assert out[0]["more"][0].shape == (3, 3) and not out[0]["more"][0].numpy().any()
        assert_close(out[1].numpy(), np.diag(a))
        with pytest.raises(ArgumentError, match="no tensor"):
            jac(lambda p: p)([])


def test_jacobians_keep_what_is_no_tensor_in_arguments() -> None:
    x = {"w": t64([2.0, 3.0]), "square": True, "name": "layer", "more": None}

    def f(p: dict) -> Tensor:
        return p["w"] ** 2 if p["square"] else p["w"]

    for jac in (ts.jacrev, ts.jacfwd):
        out = jac(f)(x)
        assert out["w"].tolist() == [[4.0, 0.0], [0.0, 6.0]]
        assert [out[k] for k in ("square", "name", "more")] == [None] * 3
    assert ts.hessian(lambda p: ts.sum(f(p)))(x)["w"]["w"].tolist() == [[2.0, 0.0], [0.0, 2.0]]



# --- nesting ----------------------------------------------------------------------------------
def mix(x: Tensor) -> Tensor:
    return ts.sum(ts.sin(x) * ts.exp(-x * x)) + ts.mean(x) ** 3


COMPOSED: dict[str, Callable] = {
    "grad(grad)": lambda x: ts.grad(lambda v: ts.sum(ts.grad(mix)(v) ** 2))(x),
    "jvp(grad)": lambda x: ts.jvp(ts.grad(mix), (x,), (ts.cos(x),))[1],
    "grad(jvp)": lambda x: ts.grad(lambda v: ts.jvp(mix, (v,), (ts.cos(v),))[1])(x),
    "vmap(grad)": lambda x: ts.vmap(ts.grad(mix))(x),
    "grad(vmap)": lambda x: ts.grad(lambda v: ts.sum(ts.vmap(mix)(v) ** 2))(x),
    "jit(vmap(grad))": lambda x: ts.jit(ts.vmap(ts.grad(mix)))(x),
    "vmap(grad(vmap))": lambda x: ts.vmap(
        lambda r: ts.grad(lambda v: ts.sum(ts.vmap(ts.tanh)(v) * r))(r))(x),
    "grad(jit(grad))": lambda x: ts.grad(lambda v: ts.sum(ts.jit(ts.grad(mix))(v) ** 3))(x),
    "jacfwd(vmap)": lambda x: ts.jacfwd(ts.vmap(mix))(x),
    "vmap(hessian)": lambda x: ts.vmap(ts.hessian(mix))(x),
}


@pytest.mark.row("PAR-05", "AD-22", "AD-23")
@pytest.mark.parametrize("name", COMPOSED)
def test_composed_transforms_are_their_differences(name: str, rng: np.random.Generator) -> None:
    """The composition differentiated once more, both modes, against differences in f64."""
    assert ts.gradcheck(COMPOSED[name], (t64(0.5 * rng.standard_normal((2, 3))),))


def test_composed_values_against_differences(rng: np.random.Generator) -> None:
    """The derivative inside each composition too, not only the outer one."""
    x = 0.5 * rng.standard_normal((2, 3))
    eps = 1e-6

    def slope(row: np.ndarray) -> np.ndarray:
        out = np.empty_like(row)
        for i in np.ndindex(row.shape):
            d = np.zeros_like(row)
            d[i] = eps
            out[i] = (mix(t64(row + d)).item() - mix(t64(row - d)).item()) / (2 * eps)
        return out

    rows = np.stack([slope(r) for r in x])
    np.testing.assert_allclose(COMPOSED["vmap(grad)"](t64(x)).numpy(), rows, atol=1e-8)
    np.testing.assert_allclose(COMPOSED["jit(vmap(grad))"](t64(x)).numpy(), rows, atol=1e-8)
    np.testing.assert_allclose(COMPOSED["jvp(grad)"](t64(x)).numpy(), (
        slope(x + eps * np.cos(x)) - slope(x - eps * np.cos(x))) / (2 * eps), atol=1e-3)


def test_closures_at_every_depth(rng: np.random.Generator) -> None:
    """grad inside jit inside vmap inside grad, each using values of all outer functions."""
    a, xs = rng.standard_normal(3), rng.standard_normal((2, 3))

    def outer(w: Tensor) -> Tensor:
        def row(x: Tensor) -> Tensor:
            @ts.jit
            def inner(y: Tensor) -> Tensor:
                return ts.grad(lambda z: ts.sum(ts.sin(z * w) * x * y))(x)

            return ts.sum(inner(x * w) ** 2)

        return ts.sum(ts.vmap(row)(t64(xs)))

    assert ts.gradcheck(outer, (t64(a),))
    got = outer(t64(a)).item()
    want = sum(np.sum((a * np.cos(x * a) * x * x * a) ** 2) for x in xs)
    assert got == pytest.approx(want, rel=1e-12)


def test_third_derivative() -> None:
    third = ts.grad(ts.grad(ts.grad(lambda x: x**4)))
    assert third(t64(2.0)).item() == 48.0


# --- gradcheck --------------------------------------------------------------------------------
def test_gradcheck_shows_the_wrong_element() -> None:
    @ts.custom_jvp
    def wrong(x: Tensor) -> Tensor:
        return x * x

    wrong.defjvp(lambda p, t: (p[0] * p[0], t[0] * p[0] * ts.tensor([2.0, 2.5], ts.f64)))
    with pytest.raises(GradError) as err:
        ts.gradcheck(lambda a, b: wrong(a) + b, (t64([1.0, 3.0]), t64([1.0, 1.0])))
    text = str(err.value)
    assert "args.0[1]" in text and "<--" in text and "reverse" in text and "forward" in text
    bad = [line for line in text.splitlines() if "<--" in line]
    assert len(bad) == 2 and all("args.0" in line for line in bad)
    assert ts.gradcheck(lambda a, b: a * a + b, (t64([1.0, 3.0]), t64([1.0, 1.0])), order=2)


@pytest.mark.parametrize("wrap", [lambda f: f, ts.jit], ids=["plain", "compiled"])
def test_gradcheck_draws_alike_in_all_its_evaluations(wrap: Callable) -> None:
    x = ts.tensor([1.0, 2.0, 3.0, 4.0])

    def drawn(x: Tensor) -> Tensor:
        return ts.sum(ts.scan(lambda c, _: (ts.dropout(c, 0.5) * x, None), x, length=2)[0])

    assert ts.gradcheck(wrap(drawn), (x,), order=2)
    wrong = ts.custom_jvp(lambda x: x * x)
    wrong.defjvp(lambda primals, tangents: (wrong(*primals), primals[0] * tangents[0]))
    with pytest.raises(GradError, match="are off"):
        ts.gradcheck(wrap(lambda x: ts.sum(wrong(ts.dropout(x, 0.5)))), (x,))


def test_gradcheck_of_a_rule_for_one_mode_says_which() -> None:
    cube = ts.custom_vjp(lambda x: x ** 3)
    cube.defvjp(lambda x: (cube(x), x), lambda x, g: 3.0 * x * x * g)
    with pytest.raises(GradError) as err:
        ts.gradcheck(cube, (ts.ones((3,)),))
    assert "modes=('reverse',)" in err.value.hint
    assert ts.gradcheck(cube, (ts.ones((3,)),), modes=("reverse",))


def test_gradcheck_converts_and_checks_its_arguments() -> None:
    assert ts.gradcheck(lambda x, n: x * x * ts.cast(n, "f64"), (f32([1.0, 2.0]), ts.tensor([3])))
    with pytest.raises(ArgumentError, match="as a tuple"):
        ts.gradcheck(bump, t64([1.0]))
    with pytest.raises(ArgumentError, match="no mode 'sideways'"):
        ts.gradcheck(bump, (t64([1.0]),), modes=("sideways",))
    with pytest.raises(GradError, match="no argument has a floating type"):
        ts.gradcheck(lambda n: n, (ts.tensor([3]),))


# --- what a traced function cannot do -----------------------------------------------------------
class Holder:
    def __init__(self, x: Any):
        self.x = x


def test_results_that_hide_traced_tensors_are_errors() -> None:
    def later(x: Tensor) -> Any:
        yield x

    async def soon(x: Tensor) -> Any:
        return x

    for f in (lambda x: {x}, Holder, lambda x: (x, [Holder(x)])):
        with pytest.raises(TraceError, match="returns a (set|Holder) with a traced tensor inside"):
            ts.jit(f)(ts.ones(3))
    with pytest.raises(TraceError, match="returns a Holder with"):
        ts.grad(lambda x: (ts.sum(x), Holder(x)), has_aux=True)(ts.ones(3))
    with pytest.raises(ArgumentError, match="returns a generator, which would run when"):
        ts.jit(later)(ts.ones(3))
    with pytest.raises(ArgumentError, match="returns a coroutine"):
        ts.jit(soon)(ts.ones(3))
    assert ts.jit(lambda x: (x, Holder(3)))(ts.ones(3))[1].x == 3


def test_arguments_that_are_changed_in_place_are_told() -> None:
    """The caller's are as before: when it is not compiled they would not be."""
    def step(params: dict) -> Tensor:
        params["w"] = params["w"] * 2.0
        return ts.sum(params["w"])

    for wrap, which in ((ts.jit, "its argument 'params'"), (ts.grad, "an argument"),
                        (ts.vmap, "an argument")):
        params = {"w": ts.ones(3)}
        with pytest.warns(LostChangeWarning, match=f"step changes {which} in place.*return what"):
            wrap(step)(params)
        assert params["w"].tolist() == [1.0] * 3
    with pytest.warns(LostChangeWarning, match="'xs'"):
        ts.jit(lambda xs: xs.append(1.0))([ts.ones(3)])

    def returned(params: dict, **more: Any) -> dict:
        params["w"] = params["w"] * more.pop("k")
        return params

    assert ts.jit(returned)({"w": ts.ones(2)}, k=ts.ones(2))["w"].tolist() == [1.0] * 2


def test_a_compiled_transform_is_the_transform() -> None:
    """What a call names is passed whole, and defaults are the function's, compiled as not: they
    were mapped over where extents allowed it, and refused elsewhere."""
    def scaled(x, s, axis=-1, half=False):
        y = ts.sort(x * s, axis)
        return y / 2.0 if half else y

    x, s = ts.tensor([[3.0, 1.0], [2.0, 5.0]]), ts.tensor([1.0, 10.0])
    batched = ts.vmap(scaled)
    twice, partial = ts.jit(ts.jit(batched)), functools.partial(batched, s=s)
    for call in (batched, ts.jit(batched), twice, ts.jit(partial)):
        named = call(x) if getattr(call, "fn", None) is partial else call(x, s=s)
        assert named.tolist() == [[3.0, 10.0], [2.0, 50.0]]
    for call in (batched, ts.jit(batched), twice, ts.jit(ts.checkpoint(batched))):
        assert call(x, s).tolist() == [[1.0, 3.0], [20.0, 50.0]]
        assert call(x, s=s, half=True).tolist() == [[1.5, 5.0], [1.0, 25.0]]
    assert ts.jit(ts.vmap(ts.median))(x).tolist() == [2.0, 3.5]
