"""Softmax, norms, activations, rotary positions, losses and the steps between products."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import scipy.special

import tessera as ts
from derivatives import assert_derivatives
from tessera.errors import ArgumentError, AxisError, DTypeError, ShapeError
from tolerance import assert_close, f64

BF16 = ml_dtypes.bfloat16


def normal(rng, *shape, scale=1.0):
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def labels(rng, shape, classes):
    return rng.integers(0, classes, shape)


# --- elementwise ------------------------------------------------------------------------------
def gelu64(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    "gelu": (ts.gelu, gelu64),
    "gelu_exact": (lambda x: ts.gelu(x, exact=True), lambda x: x * scipy.special.ndtr(x)),
    "silu": (ts.silu, lambda x: x * scipy.special.expit(x)),
    "swish": (ts.swish, lambda x: x * scipy.special.expit(x)),
    "softplus": (ts.softplus, lambda x: np.logaddexp(0, x)),
    "leaky_relu": (lambda x: ts.leaky_relu(x, 0.2), lambda x: np.where(x > 0, x, 0.2 * x)),
    "elu": (lambda x: ts.elu(x, 1.5), lambda x: np.where(x > 0, x, 1.5 * np.expm1(x))),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
def test_activation_is_its_formula(name, run, rng):
    fn, formula = ACTIVATIONS[name]
    x = np.concatenate([normal(rng, 500, scale=3), np.float32([0, -0.0, 12, -12])])
    assert_close(run(fn)(ts.tensor(x)).numpy(), formula(f64(x)), n=16)
    wide = rng.standard_normal(500) * 3  # constants, too, are those of the type
    assert_close(run(fn)(ts.tensor(wide)).numpy(), formula(wide), "f64", n=16)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_rounds_once_to_the_type_of_x(name, rng):
    fn, formula = ACTIVATIONS[name]
    x = normal(rng, 400).astype(BF16)
    y = fn(ts.tensor(x))
    assert y.dtype is ts.bf16
    exact = formula(f64(x))
    ulp = np.abs(np.spacing(exact.astype(BF16)).astype(np.float64))
    assert np.all(np.abs(f64(y) - exact) <= 0.51 * ulp + 1e-7)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_derivatives(name, rng):
    x = rng.standard_normal(40) * 2
    assert_derivatives(ACTIVATIONS[name][0], rng, x[np.abs(x) > 1e-3])


@pytest.mark.parametrize("fn", [ts.gelu, ts.silu, ts.softplus, ts.elu])
def test_large_magnitudes_stay_finite(fn):
    x = np.float32([-1e4, -100, 100, 1e4])
    y = fn(ts.tensor(x)).numpy()
    np.testing.assert_allclose(y[2:], x[2:])
    assert np.all(np.isfinite(y)) and np.all(np.abs(y[:2]) <= 1)
    g = ts.grad(lambda v: ts.sum(fn(v)))(ts.tensor(x)).numpy()
    np.testing.assert_allclose(g, [0, 0, 1, 1], atol=1e-6)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("n", [1, 4096])  # through NumPy, and in a compiled loop
def test_gelu_at_huge_values(dtype, n):
    x = ts.tensor(np.tile([1e30, -1e30, 3e38, -3e38, 40.0, -40.0, 0.0], n), dtype)
    f = lambda x: ts.sum(ts.gelu(x))  # noqa: E731
    high = np.maximum(f64(x), 0.0)
    np.testing.assert_array_equal(f64(ts.jit(ts.gelu)(x)), high)
    np.testing.assert_array_equal(f64(ts.gelu(x)), high)
    slope = np.tile([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.5], n)
    np.testing.assert_array_equal(f64(ts.grad(f)(x)), slope)
    curve = f64(ts.grad(lambda x: ts.sum(ts.grad(f)(x)))(x))
    np.testing.assert_allclose(curve, np.tile([0.0] * 6 + [0.79788456], n), rtol=1e-6)


def test_the_two_gelus_differ_as_documented():
    x = np.linspace(-6, 6, 2001)
    gap = np.abs(f64(ts.gelu(ts.tensor(x))) - f64(ts.gelu(ts.tensor(x), exact=True))).max()
    assert 1e-4 < gap < 5e-4


# --- softmax ----------------------------------------------------------------------------------
@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
def test_softmax_family_equals_scipy(axis, run, rng):
    x = normal(rng, 3, 4, 17, scale=4)
    pairs = [
        (lambda v: ts.softmax(v, axis=axis), scipy.special.softmax(f64(x), axis=axis)),
        (lambda v: ts.log_softmax(v, axis=axis), scipy.special.log_softmax(f64(x), axis=axis)),
        (lambda v: ts.logsumexp(v, axis=axis), scipy.special.logsumexp(f64(x), axis=axis)),
    ]
    for fn, want in pairs:
        assert_close(run(fn)(ts.tensor(x)).numpy(), want, n=17)


def test_logsumexp_over_several_axes_and_kept(rng):
    x = normal(rng, 2, 3, 4)
    for axis in [None, (0, 2), (1,)]:
        for keep in (False, True):
            got = ts.logsumexp(ts.tensor(x), axis=axis, keepdims=keep).numpy()
            assert_close(got, scipy.special.logsumexp(f64(x), axis=axis, keepdims=keep), n=24)


@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("row, want", [
    ([np.inf, 0.0, 1.0], [np.nan, 0.0, 0.0]),
    ([np.nan, 0.0, 1.0], [np.nan, np.nan, np.nan]),
    ([-np.inf, 0.0, 0.0], [0.0, 0.5, 0.5]),
    ([-np.inf, -np.inf, -np.inf], [0.0, 0.0, 0.0]),
])
def test_logsumexp_has_no_finite_slope_where_its_result_is_not_finite(row, want, run):
    slope = run(ts.grad(ts.logsumexp))(ts.tensor(row))
    np.testing.assert_array_equal(slope.numpy(), np.float32(want))
    push = run(lambda x, t: ts.jvp(ts.logsumexp, (x,), (t,))[1])(ts.tensor(row), ts.ones(3))
    assert np.isnan(push.item()) == np.isnan(want).any()


def test_log_softmax_keeps_its_precision_far_from_zero(rng):
    x = normal(rng, 5, 9).astype(np.float64) + 1e4
    x = x.astype(np.float32)
    assert_close(ts.log_softmax(ts.tensor(x)).numpy(), scipy.special.log_softmax(f64(x), axis=-1),
                 n=9)


@pytest.mark.parametrize("fn", [
    ts.softmax, ts.log_softmax, ts.logsumexp, ts.softmax_safe, ts.logsumexp_safe,
    lambda x: ts.softmax(x, axis=0), lambda x: ts.logsumexp(x, axis=None),
])
def test_softmax_derivatives(fn, rng):
    assert_derivatives(fn, rng, rng.standard_normal((3, 5)))


def test_softmax_of_nothing_is_nothing():
    assert ts.softmax(ts.zeros((3, 0))).shape == (3, 0)
    assert ts.log_softmax(ts.zeros((0, 3))).shape == (0, 3)
    with pytest.raises(ShapeError, match="no elements"):
        ts.logsumexp(ts.zeros((3, 0)))
    with pytest.raises(AxisError):
        ts.softmax(ts.zeros((3,)), axis=1)


def test_integers_give_f32():
    y = ts.softmax(ts.tensor([[1, 2, 3]]))
    assert y.dtype is ts.f32
    assert_close(y.numpy(), scipy.special.softmax([[1.0, 2.0, 3.0]], axis=-1), n=3)


# --- norms ------------------------------------------------------------------------------------
def rms64(x, w=1.0, eps=1e-6):
    x = f64(x)
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * w


def layer64(x, g=1.0, b=0.0, eps=1e-5):
    x = f64(x)
    c = x - x.mean(-1, keepdims=True)
    return c / np.sqrt(np.mean(c * c, -1, keepdims=True) + eps) * g + b


@pytest.mark.parametrize("rms, layer", [(ts.rmsnorm, ts.layernorm),
                                        (ts.rmsnorm_safe, ts.layernorm_safe)],
                         ids=["fast", "safe"])
@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("shape", [(7,), (3, 64), (2, 3, 65), (4, 1)])
def test_norms_equal_fp64(rms, layer, run, shape, rng):
    x, w, b = normal(rng, *shape), normal(rng, shape[-1]), normal(rng, shape[-1])
    n = shape[-1]
    assert_close(run(rms)(ts.tensor(x)).numpy(), rms64(x), n=n)
    assert_close(run(rms)(ts.tensor(x), ts.tensor(w)).numpy(), rms64(x, w), n=n)
    assert_close(run(layer)(ts.tensor(x)).numpy(), layer64(x), n=n)
    got = run(layer)(ts.tensor(x), ts.tensor(w), ts.tensor(b)).numpy()
    assert_close(got, layer64(x, w, b), n=n)
    got = run(lambda v: layer(v, beta=ts.tensor(b), eps=0.1))(ts.tensor(x)).numpy()
    assert_close(got, layer64(x, b=f64(b), eps=0.1), n=n)


NORMS = {
    "rmsnorm": (ts.rmsnorm, 1), "rmsnorm_plain": (ts.rmsnorm, 0),
    "rmsnorm_safe": (ts.rmsnorm_safe, 1), "layernorm": (ts.layernorm, 2),
    "layernorm_plain": (ts.layernorm, 0), "layernorm_safe": (ts.layernorm_safe, 2),
}


@pytest.mark.parametrize("name", NORMS)
def test_norm_derivatives(name, rng):
    fn, weights = NORMS[name]
    extra = [rng.standard_normal(6) for _ in range(weights)]
    assert_derivatives(fn, rng, rng.standard_normal((2, 3, 6)), *extra)


@pytest.mark.parametrize("fn, oracle", [(ts.rmsnorm, rms64), (ts.layernorm, layer64)])
def test_norms_of_bf16_compute_wide(fn, oracle, rng):
    x = normal(rng, 4, 96).astype(BF16)
    y = fn(ts.tensor(x))
    assert y.dtype is ts.bf16
    want = oracle(x)
    assert np.abs(f64(y) - want).max() <= 2.0**-8 * np.abs(want).max() * 1.05


def test_a_weight_of_another_extent_is_an_error():
    with pytest.raises(ShapeError, match="weight has shape") as info:
        ts.rmsnorm(ts.zeros((2, 4)), ts.zeros((3,)))
    assert "ts.rmsnorm" in str(info.value)
    with pytest.raises(ShapeError, match="beta has shape"):
        ts.layernorm(ts.zeros((2, 4)), beta=ts.zeros((2, 4)))
    with pytest.raises(ShapeError, match="needs an axis"):
        ts.layernorm_safe(ts.tensor(1.0))


# --- rotary -----------------------------------------------------------------------------------
def rotary64(x, positions, base=10000.0):
    """As complex numbers, halves as real and imaginary part."""
    half = x.shape[-1] // 2
    angle = f64(positions)[..., None] * base ** (-np.arange(half) / half)
    z = (f64(x)[..., :half] + 1j * f64(x)[..., half:]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], -1)


@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
def test_rotary_turns_pairs_of_halves(run, rng):
    x = normal(rng, 2, 3, 50, 8)
    got = run(ts.rotary_embedding)(ts.tensor(x)).numpy()
    assert_close(got, rotary64(x, np.arange(50)), n=2)


@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
def test_rotary_positions_may_be_data(run, rng):
    x = normal(rng, 2, 3, 5, 8)
    one = rng.integers(0, 100_000, 5)
    got = run(lambda v, p: ts.rotary_embedding(v, 500.0, p))(ts.tensor(x), ts.tensor(one)).numpy()
    assert_close(got, rotary64(x, one, 500.0), n=4)
    each = rng.integers(0, 100, (2, 5))
    got = run(lambda v, p: ts.rotary_embedding(v, positions=p))(ts.tensor(x), ts.tensor(each))
    assert_close(got.numpy(), rotary64(x, each[:, None]), n=4)


def test_rotary_keeps_lengths_and_depends_on_distance_only(rng):
    q, k = normal(rng, 1, 16), normal(rng, 1, 16)
    at = lambda x, p: f64(ts.rotary_embedding(ts.tensor(x), positions=ts.tensor([p])))  # noqa: E731
    assert math.isclose(np.linalg.norm(at(q, 77)), np.linalg.norm(q), rel_tol=1e-6)
    near = (at(q, 3) * at(k, 10)).sum()
    far = (at(q, 203) * at(k, 210)).sum()
    assert abs(near - far) < 1e-5


def test_rotary_derivatives_and_errors(rng):
    assert_derivatives(ts.rotary_embedding, rng, rng.standard_normal((2, 3, 4)))
    for shape in [(3, 5), (4,)]:
        with pytest.raises(ShapeError, match="even D"):
            ts.rotary_embedding(ts.zeros(shape))
    with pytest.raises(ShapeError, match="do not fit"):
        ts.rotary_embedding(ts.zeros((3, 4)), positions=ts.tensor([1, 2]))
    with pytest.raises(DTypeError, match="positions are integers"):
        ts.rotary_embedding(ts.zeros((3, 4)), positions=ts.zeros((3,)))


def test_rotary_with_a_symbolic_length():
    f = ts.jit(ts.rotary_embedding)
    assert str(f.infer(ts.Tensor["B", "S", 8, ts.bf16])) == "Tensor['B', 'S', 8, bf16]"


# --- heads ------------------------------------------------------------------------------------
def test_heads_go_apart_and_together(rng):
    x = normal(rng, 2, 5, 12)
    apart = ts.split_heads(ts.tensor(x), heads=3)
    np.testing.assert_array_equal(apart.numpy(), x.reshape(2, 5, 3, 4).transpose(0, 2, 1, 3))
    np.testing.assert_array_equal(ts.merge_heads(apart).numpy(), x)
    with pytest.raises(ShapeError, match="heads=5"):
        ts.split_heads(ts.tensor(x), heads=5)
    with pytest.raises(ShapeError, match="heads=5"):
        ts.split_qkv(ts.tensor(x), heads=5)
    with pytest.raises(ShapeError, match="merge_heads needs"):
        ts.merge_heads(ts.tensor(x))


def test_the_derivative_of_a_split_is_one_concatenation():
    def loss(x):
        a, b, c = ts.split(x, 3, axis=-1)
        return ts.sum(a * 1.0) + ts.sum(b * 2.0) + ts.sum(c * 3.0)

    g = ts.grad(loss)
    x = ts.zeros((2, 6))
    np.testing.assert_array_equal(g(x).numpy(), [[1, 1, 2, 2, 3, 3]] * 2)
    text = g.compiled.inspect_ir("graph")
    assert text.count("concatenate(") == 1 and "pad(" not in text
    part = ts.grad(lambda x: ts.sum(ts.split(x, [1, 5], axis=1)[1]))
    np.testing.assert_array_equal(part(x).numpy(), [[0, 1, 1, 1, 1, 1]] * 2)


# --- losses -----------------------------------------------------------------------------------
def nll64(x, t, smoothing=0.0):
    logp = scipy.special.log_softmax(f64(x), axis=-1)
    q = np.eye(x.shape[-1])[t] * (1 - smoothing) + smoothing / x.shape[-1]
    return -(q * logp).sum(-1)


@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_of_labels(run, smoothing, rng):
    x, t = normal(rng, 4, 6, 11, scale=3), labels(rng, (4, 6), 11)
    rows = nll64(x, t, smoothing)
    for reduction, want in [("none", rows), ("sum", rows.sum()), ("mean", rows.mean())]:
        fn = run(lambda a, b, r=reduction: ts.cross_entropy(
            a, b, reduction=r, label_smoothing=smoothing))
        assert_close(fn(ts.tensor(x), ts.tensor(t)).numpy(), want, n=24)


@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
def test_cross_entropy_of_probabilities(run, rng):
    x = normal(rng, 5, 7, scale=2)
    p = scipy.special.softmax(rng.standard_normal((5, 7)), axis=-1)
    p[0] = np.eye(7)[2]
    logp = scipy.special.log_softmax(f64(x), axis=-1)
    fn = run(lambda a, b: ts.cross_entropy(a, b))
    assert_close(fn(ts.tensor(x), ts.tensor(p.astype("f4"))).numpy(), -(p * logp).sum(-1).mean(),
                 n=35)
    soft = ts.cross_entropy(ts.tensor(x), ts.tensor(p), label_smoothing=0.3).numpy()
    assert_close(soft, -((0.7 * p + 0.3 / 7) * logp).sum(-1).mean(), dtype="f32", n=35)


def test_zero_probability_of_an_impossible_class_is_no_nan():
    x = ts.tensor([[0.0, -np.inf, 0.0]])
    assert ts.cross_entropy(x, ts.tensor([[0.5, 0.0, 0.5]])).item() == pytest.approx(math.log(2))
    assert ts.cross_entropy(x, ts.tensor([0])).item() == pytest.approx(math.log(2))
    assert ts.cross_entropy(x, ts.tensor([1])).item() == math.inf


@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
def test_ignored_rows_do_not_count(run, rng):
    x, t = normal(rng, 6, 5), labels(rng, (6,), 5)
    t[[1, 4]] = -100
    keep = t != -100
    fn = run(lambda a, b: ts.cross_entropy(a, b, ignore_index=-100))
    assert_close(fn(ts.tensor(x), ts.tensor(t)).numpy(), nll64(x[keep], t[keep]).mean(), n=6)
    g = ts.grad(lambda a, b: ts.cross_entropy(a, b, ignore_index=-100))(ts.tensor(x), ts.tensor(t))
    assert np.all(g.numpy()[~keep] == 0) and np.all(g.numpy()[keep] != 0)
    every = fn(ts.tensor(x), ts.tensor(np.full(6, -100)))
    assert every.item() == 0.0


def test_cross_entropy_is_stable_and_its_gradient_too():
    x = np.float32([[1e4, 0, -1e4], [1e4, 1e4 + 1, 0]])
    t = np.array([1, 0])
    value, g = ts.value_and_grad(lambda a: ts.cross_entropy(a, t))(ts.tensor(x))
    assert_close(value.numpy(), nll64(x, t).mean(), n=3)
    want = (scipy.special.softmax(f64(x), axis=-1) - np.eye(3)[t]) / 2
    np.testing.assert_allclose(g.numpy(), want, atol=1e-6)


def test_cross_entropy_derivatives(rng):
    t = ts.tensor(labels(rng, (4,), 5))
    p = ts.tensor(scipy.special.softmax(rng.standard_normal((4, 5)), axis=-1))
    x = rng.standard_normal((4, 5))
    for kw in [{}, {"label_smoothing": 0.2}, {"reduction": "none"}, {"ignore_index": 3}]:
        assert_derivatives(lambda a, kw=kw: ts.cross_entropy(a, t, **kw), rng, x)
    assert_derivatives(lambda a, b: ts.cross_entropy(a, b), rng, x, p.numpy())


def test_labels_outside_the_classes_are_loud():
    x = ts.zeros((2, 3))
    with pytest.raises(ArgumentError, match="label 3 is outside 0 .. 2"):
        ts.cross_entropy(x, ts.tensor([0, 3]))
    assert math.isnan(ts.jit(lambda a, b: ts.cross_entropy(a, b))(x, ts.tensor([0, 3])).item())
    assert math.isnan(ts.jit(lambda a, b: ts.cross_entropy(a, b))(x, ts.tensor([0, -1])).item())


@pytest.mark.parametrize("bad, error, match", [
    (lambda: ts.cross_entropy(ts.zeros((2, 3)), ts.tensor([1])), ShapeError, "one integer per row"),
    (lambda: ts.cross_entropy(ts.zeros((2, 3)), ts.tensor([True, False])), DTypeError, "labels"),
    (lambda: ts.cross_entropy(ts.zeros((2, 3)), ts.zeros((2, 4))), ShapeError, "probabilities"),
    (lambda: ts.cross_entropy(ts.zeros((1, 3)), ts.tensor([1]), reduction="avg"), ArgumentError,
     "reduction 'avg'"),
    (lambda: ts.cross_entropy(ts.zeros((1, 3)), ts.tensor([1]), label_smoothing=1.0),
     ArgumentError, "label_smoothing"),
    (lambda: ts.mse(ts.zeros((2, 3)), ts.zeros((3,))), ShapeError, "differ"),
    (lambda: ts.mse(ts.tensor([1]), ts.tensor([2])), DTypeError, "needs floats"),
    (lambda: ts.binary_cross_entropy_with_logits(ts.zeros((2,)), ts.zeros((3,))), ShapeError,
     "targets"),
])
def test_loss_errors(bad, error, match):
    with pytest.raises(error, match=match):
        bad()


def test_binary_cross_entropy(rng):
    x, t = normal(rng, 50, scale=20), rng.random(50).astype("f4")
    p = scipy.special
    want = -(t * p.log_expit(f64(x)) + (1 - t) * p.log_expit(-f64(x)))
    fn = ts.binary_cross_entropy_with_logits
    assert_close(fn(ts.tensor(x), ts.tensor(t), reduction="none").numpy(), want, n=4)
    assert_close(fn(ts.tensor(x), ts.tensor(t)).numpy(), want.mean(), n=50)
    assert_derivatives(fn, rng, rng.standard_normal(6), rng.random(6))


def test_mse_of_bf16_rounds_once(rng):
    a, b = normal(rng, 300).astype(BF16), normal(rng, 300).astype(BF16)
    got = ts.mse(ts.tensor(a), ts.tensor(b))
    assert got.dtype is ts.bf16
    assert got.item() == np.mean((f64(a) - f64(b)) ** 2).astype(BF16)
    assert_derivatives(ts.mse, rng, rng.standard_normal((2, 3)), rng.standard_normal((2, 3)))


# --- what a compiler sees ---------------------------------------------------------------------
def loops(fn, *args):
    return [line for line in fn.inspect_ir("schedule").splitlines() if "  loop " in line]


@pytest.mark.parametrize("fn", [ts.softmax, ts.softmax_safe, ts.rmsnorm, ts.layernorm, ts.gelu,
                                ts.rmsnorm_safe, ts.layernorm_safe, ts.log_softmax])
def test_each_is_one_loop_and_its_gradient_another(fn, rng):
    x = ts.tensor(normal(rng, 64, 128))
    forward = ts.jit(lambda v: fn(v))
    forward(x)
    assert len(loops(forward)) == 1
    pulled = ts.jit(lambda v, g: ts.vjp(fn, v)[1](g))
    pulled(x, x)
    assert len(loops(pulled)) == 1, pulled.inspect_ir("schedule")


def test_the_step_of_a_loss_is_one_loop(rng):
    x, t = ts.tensor(normal(rng, 64, 128)), ts.tensor(labels(rng, (64,), 128))
    both = ts.value_and_grad(lambda a, b: ts.cross_entropy(a, b))
    both(x, t)
    full = [line for line in loops(both.compiled) if "[64, 128]" in line]
    assert len(full) == 1, both.compiled.inspect_ir("schedule")
