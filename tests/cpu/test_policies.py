"""Policies at work: annotations, accumulation, loss scales, scaled storage, quantised classes."""

from __future__ import annotations

import math

import numpy as np
import pytest

import tessera as ts
from tessera import accum, bf16, f16, f32, fp8_e4m3, fp8_e5m2, int8, loss_scale, scaled
from tessera.errors import ArgumentError, BundleError, DTypeError, PolicyError, ShapeError
from tessera.numerics import as_type


def draw(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


# --- annotations ------------------------------------------------------------------------------
def product(x: ts.Tensor["M", "K", bf16 @ accum(f32)], w: ts.Tensor["K", "N", bf16 @ accum(f32)]):
    return x @ w


def test_an_annotation_fills_in_what_the_value_leaves_open(rng):
    f = ts.jit(product)
    y = f(ts.tensor(draw(rng, 2, 3), bf16), ts.tensor(draw(rng, 3, 4), bf16))
    assert y.type == bf16 @ accum(f32)
    assert f.inspect_ir("graph").count("retype(") == 2


def test_a_value_keeps_what_the_annotation_leaves_open(rng):
    def double(x: ts.Tensor["N", bf16]):
        return x + x

    x = ts.tensor(draw(rng, 3), bf16 @ accum(bf16) @ loss_scale(8.0))
    assert ts.jit(double)(x).type == x.type


def test_policies_that_contradict_each_other_raise(rng):
    x, w = ts.tensor(draw(rng, 2, 3), bf16 @ accum(bf16)), ts.tensor(draw(rng, 3, 4), bf16)
    with pytest.raises(PolicyError, match=r"argument x is bf16 @accum\(bf16\).*differ in accum"):
        ts.jit(product)(x, w)
    assert ts.jit(product, cast=True)(x, w).type == bf16 @ accum(f32)


@pytest.mark.parametrize("given, wanted", [
    (fp8_e5m2, fp8_e4m3), (f32, bf16), (int8, int8 @ scaled("amax")),
    (fp8_e4m3 @ scaled("amax"), fp8_e4m3), (fp8_e4m3 @ scaled("amax"), f32),
])
def test_another_storage_raises_or_is_cast(given, wanted, rng):
    def same(x):
        return x

    same.__annotations__ = {"x": ts.Tensor["N", wanted]}
    x = ts.tensor(np.round(draw(rng, 5) * 4) / 4, given)
    with pytest.raises(DTypeError, match="its annotation says") as info:
        ts.jit(same)(x)
    assert "cast=True" in info.value.hint
    y = ts.jit(same, cast=True)(x)
    assert y.type == as_type(wanted)
    np.testing.assert_array_equal(y.numpy(), ts.cast(x, wanted).numpy())


def test_a_cast_argument_is_a_node_and_has_a_gradient(rng):
    def loss(w: ts.Tensor["N", fp8_e4m3]):
        return ts.sum(ts.cast(w, f32) ** 2)

    w = ts.param(draw(rng, 6))
    f = ts.jit(loss, cast=True)
    assert " = cast(" in str(f.graph(w))
    g = ts.grad(f)(w)
    assert g.dtype is f32
    rounded = ts.cast(w, fp8_e4m3).numpy().astype(np.float32)
    np.testing.assert_allclose(g.numpy(), 2 * rounded, rtol=2**-4)


def test_a_return_annotation_may_be_a_scaled_type(rng):
    def pack(x: ts.Tensor["N", f32]) -> ts.Tensor["N", int8 @ scaled("amax")]:
        return x * 2.0

    x = draw(rng, 9)
    y = ts.jit(pack)(ts.tensor(x))
    assert y.type == int8 @ scaled("amax") and y.scale is not None
    assert np.abs(y.numpy() - 2 * x).max() <= float(y.scale.item()) * 0.51


def test_a_result_is_rounded_once_to_the_return_annotation(rng):
    """Not to fp8 first and then to bf16; but a cast of the user's own stands."""
    def wide(a: ts.Tensor["M", "K", fp8_e4m3], b: ts.Tensor["K", "N", fp8_e4m3]
             ) -> ts.Tensor["M", "N", bf16]:
        return a @ b

    def narrow(a: ts.Tensor["M", "K", fp8_e4m3], b: ts.Tensor["K", "N", fp8_e4m3]
               ) -> ts.Tensor["M", "N", bf16]:
        return ts.cast(a @ b, fp8_e5m2)

    a, b = ts.tensor(draw(rng, 4, 9), fp8_e4m3), ts.tensor(draw(rng, 9, 5), fp8_e4m3)
    exact = a.numpy().astype(np.float64) @ b.numpy().astype(np.float64)  # fp8 products: f32 exact
    want = ts.tensor(exact, bf16)
    f = ts.jit(wide)
    np.testing.assert_array_equal(f(a, b).array, want.array)
    assert f.inspect_ir("graph").count("fp8_e4m3[4, 5]") == 0
    coarse = ts.cast(ts.tensor(exact, fp8_e4m3), fp8_e5m2)
    np.testing.assert_array_equal(ts.jit(narrow)(a, b).numpy(), coarse.numpy().astype(np.float32))
    g = ts.grad(lambda w: ts.sum(ts.cast(f(a, w), f32)))(b)
    np.testing.assert_allclose(g.numpy(), np.outer(a.numpy().astype(np.float64).sum(0), np.ones(5)),
                               rtol=1e-6)


def test_jit_names_its_options():
    with pytest.raises(ArgumentError, match="no option 'casts'") as info:
        ts.jit(lambda x: x, casts=True)
    assert "'cast'" in info.value.hint


# --- accumulation -----------------------------------------------------------------------------
@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
def test_the_accumulate_type_of_sums_and_products(run):
    ones = np.ones((1, 4096))
    for t, want in [(bf16, 4096), (bf16 @ accum(bf16), 256), (f16 @ accum(f16), 2048)]:
        x = ts.tensor(ones, t)
        assert run(ts.sum)(x).item() == want
        assert run(ts.matmul)(x, ts.tensor(ones.T, t)).item() == want


@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
def test_f64_accumulation_of_f32(run):
    """2^25 + 1 - 2^25: f32 sums lose the 1, f64 sums keep it."""
    x = np.float32([2.0**25, 1.0, -(2.0**25)])
    assert run(ts.sum)(ts.tensor(x, f32 @ accum("f64"))).item() == 1.0


@pytest.mark.parametrize("name, top", [
    ("int8", 100), ("uint8", 200), ("int16", 30000), ("int4", 7),
])
def test_sums_of_narrow_integers_do_not_wrap(name, top):
    y = ts.sum(ts.tensor(np.full(300, top), name))
    assert y.item() == 300 * top and y.dtype is ts.int32
    assert ts.prod(ts.tensor(np.full(4, 7), name)).item() == 7**4
    ids = np.repeat([0, 2], [299, 1])
    for f in (lambda x: ts.segment_sum(x, ids, 3), lambda x: ts.bincount(ids, x, length=3)):
        y = f(ts.tensor(np.full(300, top), name))
        assert y.tolist() == [299 * top, 0, top] and y.dtype is ts.int32
    x = ts.tensor(np.full((2, 300), top), name)
    for f in (lambda x: ts.einsum("ij->i", x), lambda x: ts.einsum("i...->...", x.T),
              lambda x: ts.cumsum(x, axis=1)[:, -1]):
        for g in (f, ts.jit(f)):
            assert g(x).tolist() == [300 * top] * 2 and g(x).dtype is ts.int32
    assert ts.cumprod(ts.tensor(np.full(4, 7), name)).tolist() == [7, 49, 343, 2401]
    assert ts.einsum("ij->ji", x).type == name and ts.einsum("ij->i", x > 0).type == "bool_"


# --- loss scale -------------------------------------------------------------------------------
def tiny_gradient(t):
    """The gradient 1e-8 through a product stored as t, times the identity."""
    x, w = ts.tensor(np.eye(4), t), ts.param(np.eye(4), t)
    return ts.grad(lambda x, w: ts.sum(ts.cast(x @ w, f32) * 1e-8))(x, w)


@pytest.mark.parametrize("storage", [f16, fp8_e5m2])
def test_a_loss_scale_carries_small_gradients(storage):
    assert not np.any(tiny_gradient(storage).numpy())
    g = tiny_gradient(storage @ loss_scale(2.0**16))
    assert g.dtype is f32
    np.testing.assert_allclose(g.numpy(), 1e-8, rtol=2**-3)


def test_a_loss_scale_does_not_change_values(rng):
    x = draw(rng, 5, 5)
    a = ts.tensor(x, f16)
    b = ts.tensor(x, f16 @ loss_scale(128.0))
    np.testing.assert_array_equal((a @ a).numpy(), (b @ b).numpy())
    assert (b @ b).policy.loss_scale == 128.0


# --- scaled storage ---------------------------------------------------------------------------
def test_assignment_requantizes_a_scaled_tensor(rng):
    x = draw(rng, 4, 6)
    q = ts.cast(x, int8 @ scaled("amax"))
    held = q.scale
    x[1] = 100.0
    q[1] = np.full(6, 100.0)
    assert q.scale is held and held.item() == pytest.approx(100 / 127)
    assert np.abs(q.numpy() - x).max() <= held.item() / 2 + held.item() * 0.01 + 0.02
    with pytest.raises(ShapeError):
        q[0] = np.zeros(5)


@pytest.mark.parametrize("stack, axis", [
    (lambda f: ts.vmap(f), 0), (lambda f: ts.jit(ts.vmap(f)), 0),
    (lambda f: ts.vmap(f, out_axes=-1), -1),
    (lambda f: lambda x: ts.scan(lambda c, row: (c, f(row)), ts.tensor(0), x)[1], 0),
], ids=["vmap", "jit", "last axis", "scan"])
def test_codes_of_rows_have_a_scale_for_each(stack, axis, rng):
    """Square matrices too, in which a scale along the other axis would not show."""
    for shape, inner in (((6, 6), ""), ((5, 5, 5), ""), ((4, 5, 6), " @per_channel(1)")):
        x = ts.tensor(draw(rng, *shape))
        numeric = f'int8 @scaled("amax"){inner}'
        y = stack(lambda row, numeric=numeric: ts.cast(row, numeric))(x)
        rows = [ts.cast(row, numeric).numpy() for row in x]
        np.testing.assert_array_equal(y.numpy(), np.stack(rows, axis=axis))
        channel = 2 + axis if inner else axis % len(shape)
        assert y.type == as_type(f'int8 @scaled("amax") @per_channel({channel})')
        np.testing.assert_array_equal((y * 1.0).numpy(), y.numpy())


def test_codes_and_scale_apart(rng, tmp_path):
    """What is advised where a tensor is one array gives the same."""
    q = ts.quantize(ts.tensor(draw(rng, 4, 6)), 'int4 @scaled("amax") @per_channel(0)')
    loop = lambda xs: ts.scan(lambda c, x: (c, x), ts.tensor(0), xs)[1]  # noqa: E731
    for refused in (lambda: loop(q), lambda: ts.export(lambda: q * 1.0, tmp_path / "f"),
                    lambda: ts.export(lambda q: q * 1.0, tmp_path / "f", q)):
        with pytest.raises((ArgumentError, BundleError)) as info:
            refused()
        assert "ts.tensor(x.array, x.dtype) and x.scale" in info.value.hint
    codes, scale = loop((ts.tensor(q.array, q.dtype), q.scale))
    np.testing.assert_array_equal((ts.cast(codes, f32) * scale).numpy(), q.numpy())


def test_a_copy_of_a_scaled_tensor_is_its_own(rng):
    q = ts.cast(draw(rng, 3), int8 @ scaled("amax"))
    before = q.numpy().copy()
    c = q.copy()
    c[:] = 0.0
    np.testing.assert_array_equal(q.numpy(), before)


@pytest.mark.parametrize("t", ["int8 @per_channel(0)", "int8 @scaled(amax)", "fp8 @scaled(amax)"])
def test_results_of_scaled_operands_are_wide(t, rng):
    """A sum of int8 codes without their scale would be noise."""
    x = draw(rng, 4, 6)
    half_step = np.abs(x).max() / (28 if "fp8" in t else 254)  # fp8's largest is 14 steps
    q = ts.cast(x, t)
    for y, want in [(q + q, 2 * x), (ts.stop_gradient(q), x),
                    (ts.flip(q.T, 0), x.T[::-1])]:
        assert y.dtype is f32
        assert np.abs(y.numpy() - want).max() < 2 * half_step * 1.001


@pytest.mark.parametrize("name", ["fp4_e2m1", "fp4_e3m0", "fp6_e3m2", "fp6_e2m3", "int4"])
def test_packed_codes_times_their_scale(name, rng):
    """Of fp4_e3m0, whose codes NumPy holds as numbers of 8 bits, too. Each is half a step off at
    most, a step being the distance of its two neighbours."""
    x = draw(rng, 4, 6)
    q = ts.cast(x, f"{name} @scaled(amax)")
    step = 2.0 ** -q.dtype.man if q.dtype.kind == "float" else 2.0
    most = np.maximum(np.abs(x), q.scale.item()) * step / 2
    for y in (q.numpy(), ts.dequantize(q).numpy(), ts.jit(ts.dequantize)(q).numpy()):
        assert (np.abs(y - x) <= 1.1 * most).all()
    made = ts.jit(lambda q: q @ ts.ones((6, 2)))(q)
    np.testing.assert_allclose((q @ ts.ones((6, 2))).numpy(), made.numpy(), rtol=1e-6)


@pytest.mark.parametrize("t", ["int8 @scaled(amax)", "fp8 @scaled(amax)"])
def test_products_with_scaled_operands_are_as_wide_as_the_other(t, rng):
    """f64 beside codes stays f64, as in x * q."""
    x = ts.tensor(rng.standard_normal((4, 6)), "f64")
    q = ts.cast(draw(rng, 6, 3), t)
    want = x.numpy() @ ts.dequantize(q).numpy().astype(np.float64)
    for fn in (lambda x, q: x @ q, lambda x, q: ts.einsum("ij,jk->ik", x, q)):
        for y in (fn(x, q), ts.jit(fn)(x, q)):
            assert y.type == "f64"
            np.testing.assert_allclose(y.numpy(), want, rtol=1e-13)


@pytest.mark.parametrize("name", ["fp4_e2m1", "fp4_e3m0", "fp6_e3m2", "fp6_e2m3", "int4"])
def test_packed_scalars(name):
    x = ts.tensor(4.0, name)
    assert x.shape == () and x.item() == 4.0
    x[...] = 1.0
    assert x.item() == 1.0 and x.copy().item() == 1.0


# --- the dynamic scale ------------------------------------------------------------------------
def test_the_scale_follows_the_gradients():
    s = ts.DynamicLossScale(value=1024.0, interval=3)
    values = []
    for finite in [True, True, True, False, True, True, False, True, True, True]:
        s = s.after(finite)
        values.append(s.value)
    assert values == [1024, 1024, 2048, 1024, 1024, 1024, 512, 512, 512, 1024]


def test_the_scale_stays_in_its_bounds():
    s = ts.DynamicLossScale(value=2.0, smallest=1.0, largest=4.0, interval=1)
    assert [s.after(True).value, s.after(True).after(True).value] == [4.0, 4.0]
    assert s.after(False).after(False).value == 1.0
    for bad in [{"value": 0.0}, {"value": 2.0**30}, {"interval": 0}]:
        with pytest.raises(ArgumentError):
            ts.DynamicLossScale(**bad)


def test_unscale_takes_nested_gradients(rng):
    g = draw(rng, 3)
    s = ts.DynamicLossScale(value=8.0)
    out = s.unscale({"w": ts.tensor(g), "b": [ts.tensor(g)]})
    np.testing.assert_array_equal(out["w"].numpy(), g / 8)
    np.testing.assert_array_equal(out["b"][0].numpy(), g / 8)


def test_a_scale_inside_of_a_compiled_step_is_that_outside(rng):
    """A step in one function: the skipped one too, with its scale and marks of parameters."""
    params = {"w": ts.param(draw(rng, 3, 2)), "name": "layer"}
    optimizer = ts.optim.AdamW()

    def step(params, state, scale, x):
        def loss(p):
            return ts.sum(ts.cast(ts.cast(x @ p["w"], "f16"), "f32") ** 2) * scale.value

        grads = ts.grad(loss)(params)
        new, scale = scale.step(
            grads, lambda g: optimizer.update(params, g, state, 0.1), (params, state))
        return (*new, scale)

    inside = outside = params, optimizer.init(params), ts.DynamicLossScale(2.0**10, interval=2)
    compiled = ts.jit(step)
    for size in (1.0, 1.0, 1e5, 1.0):
        x = ts.tensor(size * draw(rng, 4, 3))
        inside, outside = compiled(*inside, x), step(*outside, x)
        np.testing.assert_array_equal(inside[0]["w"].numpy(), outside[0]["w"].numpy())
        scale, want = inside[2], outside[2]
        assert (scale.value.item(), scale.good.item()) == (want.value, want.good)
        assert inside[0]["w"].is_param and inside[1]["step"].item() == outside[1]["step"].item()
    assert want.value == 2.0**10 and want.good == 1 and inside[1]["step"].item() == 3
    assert compiled.specializations == 2  # of the first scale, which has Python numbers, and others
    again = inside[2].after(False)
    assert (again.value.item(), again.good.item(), again.interval) == (2.0**9, 0, 2)


def test_a_new_scale_compiles_nothing(rng):
    grads = ts.grad(ts.jit(lambda w, k: ts.sum(w * w) * k))
    w = ts.param(draw(rng, 4))
    for k in (2.0, 4.0):
        np.testing.assert_allclose(grads(w, k).numpy(), 2 * k * w.numpy(), rtol=1e-6)
    assert grads.compiled.specializations == 1


# --- classes ----------------------------------------------------------------------------------
def policy_class(name="Halves", **changes):
    body = {
        "storage": ts.int8, "scale": f32, "compute": f32, "accumulate": f32,
        "quantize": lambda self, x: (ts.round(x * 2.0), ts.tensor(0.5)),
        "dequantize": lambda self, q, scale: ts.cast(q, f32) * scale,
    } | changes
    return ts.precision_policy(type(name, (), body))


@pytest.mark.parametrize("kind", ['fp8_e4m3 @scaled("amax")', "int8 @per_channel(1)",
                                  "int4 @per_channel(0)"])
def test_tensors_without_elements_are_quantized(kind):
    for run in (lambda f: f, ts.jit):
        made = run(lambda x: ts.dequantize(ts.cast(x, kind)))(ts.zeros((0, 3)))
        assert made.shape == (0, 3) and made.type == "f32"


def test_a_type_without_a_scale_is_not_quantized():
    """It had one all the same, which its type did not say; of integers it could not be read."""
    for kind in ("fp8_e4m3", "int8"):
        with pytest.raises(DTypeError, match=f"{kind} has no scale") as info:
            ts.quantize(ts.ones(3), kind)
        assert '@scaled("amax")' in info.value.hint
    for scale in (-1.0, np.float32(np.nan), math.inf):
        with pytest.raises(ArgumentError, match="a scale of"):
            ts.quantize(ts.ones(3), 'int8 @scaled("amax")', scale)


def test_a_class_quantizes_under_jit_and_in_gradients(rng):
    kind = policy_class()
    x = draw(rng, 5)
    f = ts.jit(lambda v: ts.cast(v, kind))
    y = f(ts.tensor(x))
    assert y.type == as_type(kind)
    np.testing.assert_array_equal(y.array, np.round(x * 2).astype(np.int8))
    np.testing.assert_array_equal(y.numpy(), np.round(x * 2) / 2)
    w = ts.cast(x, kind)
    g = ts.grad(lambda v: ts.sum(v * w))(ts.tensor(draw(rng, 5)))
    np.testing.assert_array_equal(g.numpy(), w.numpy())


def test_a_class_has_a_code_for_each_element():
    kind = policy_class("Pairs", quantize=lambda self, x: (ts.round(x[:2]), ts.tensor(1.0)))
    with pytest.raises(ts.ShapeError, match="codes of .* have the shape of the values"):
        ts.cast(ts.ones(4), kind)


@pytest.mark.parametrize("dtype", [
    'fp8_e4m3 @scaled("amax")', "fp8_e5m2 @scaled(amax)", "fp8_e4m3 @per_channel(0)",
    "fp8_e4m3 @scaled(amax) @loss_scale(8)", "int8 @scaled(amax)", "int4 @per_channel(1)", "class"])
def test_a_scaled_cast_is_the_identity_of_derivatives(dtype, rng):
    """Cotangents pass as they are: none is rounded, and none is taken of the scale."""
    w, g = (ts.tensor(draw(rng, 8, 4) * k) for k in (1.0, 1e-30))
    dtype = policy_class() if dtype == "class" else dtype

    def f(w):
        return ts.sum(ts.dequantize(ts.transpose(ts.quantize(w, dtype))) * ts.transpose(g))

    np.testing.assert_array_equal(ts.grad(f)(w), g)
    np.testing.assert_array_equal(ts.jit(ts.grad(f))(w), g)
    _, tangent = ts.jvp(lambda w: ts.dequantize(ts.quantize(w, dtype)), (w,), (g,))
    np.testing.assert_array_equal(tangent, g)

