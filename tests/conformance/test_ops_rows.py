"""Rows of the area OPS that need no GPU."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera import accum, bf16, f16, f32, fp8_e4m3, int8, loss_scale
from tolerance import assert_close, f64

RUNS = pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])


def draw(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.row("OPS-02", "OPS-03")
@RUNS
@pytest.mark.parametrize("a, b", [
    ((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((2, 1, 3, 4), (6, 4, 2)),
    ((4,), (4, 2)), ((3, 4), (4,)), ((4,), (4,)), ((0, 4), (4, 2)),
])
def test_matmul(run, a, b, rng):
    x, y = draw(rng, *a), draw(rng, *b)
    want = np.matmul(f64(x), f64(y))
    size = float(np.matmul(np.abs(f64(x)), np.abs(f64(y))).max(initial=0.0))  # sums may cancel
    for op in (ts.matmul, lambda p, q: p @ q):
        assert_close(run(op)(ts.tensor(x), ts.tensor(y)).numpy(), want, n=4, scale=size)


@pytest.mark.row("OPS-04")
@RUNS
def test_cast(run, rng):
    x = draw(rng, 1000) * 300
    for name, other in [("bf16", ml_dtypes.bfloat16), ("fp8_e5m2", ml_dtypes.float8_e5m2)]:
        got = run(lambda v, n=name: ts.cast(v, n))(ts.tensor(x)).array
        np.testing.assert_array_equal(got.view(np.uint8), x.astype(other).view(np.uint8))


@pytest.mark.row("OPS-05", "OPS-06", "OPS-08", "OPS-09")
@RUNS
def test_reductions(run, rng):
    x = draw(rng, 4, 5, 6)
    t = ts.tensor(x)
    for axis in (None, -1, 0, (0, 2)):
        for keep in (False, True):
            kw = {"axis": axis, "keepdims": keep}
            np.testing.assert_array_equal(run(lambda v, k=kw: ts.max(v, **k))(t).numpy(),
                                          np.max(x, **kw))
            assert_close(run(lambda v, k=kw: ts.sum(v, **k))(t).numpy(), np.sum(f64(x), **kw),
                         n=120)
    assert run(lambda v: ts.max(ts.abs(v)))(t).item() == np.abs(x).max()
    assert_close(run(lambda v: ts.sum(v**2))(t).numpy(), np.sum(f64(x) ** 2), n=120)
    x[1, 2, 3] = np.nan
    assert np.isnan(run(lambda v: ts.max(v, axis=-1))(ts.tensor(x)).numpy()[1, 2])


@pytest.mark.row("OPS-08")
@RUNS
def test_sums_have_a_fixed_order(run, rng):
    x = ts.tensor(draw(rng, 300, 1000))
    fn = run(lambda v: ts.sum(v, axis=-1))
    bits = fn(x).array.tobytes()
    assert all(fn(x).array.tobytes() == bits for _ in range(5))
    assert fn(ts.tensor(np.ones((1, 4096)), bf16)).item() == 4096


@pytest.mark.row("OPS-07")
@RUNS
def test_exp(run, rng):
    x = np.concatenate([draw(rng, 5000) * 20, np.float32([0, -0.0, 88, -87, -100, 89])])
    got = run(ts.exp)(ts.tensor(x)).numpy()
    with np.errstate(over="ignore"):
        want = np.exp(x)
        near = np.isfinite(want)
        assert np.all(np.abs(got[near] - want[near]) <= 2 * np.spacing(want[near]))
        np.testing.assert_array_equal(got[~near], want[~near])


@pytest.mark.row("OPS-10", "OPS-11", "OPS-15", "OPS-16", "OPS-17", "OPS-18")
@RUNS
def test_elementwise(run, rng):
    x = np.concatenate([draw(rng, 500) * 3, np.float32([0.5, 1.5, 2.5, -0.5, -1.5, 0])])
    t = ts.tensor(x)
    for fn, want in [(ts.round, np.round(x)), (ts.abs, np.abs(x))]:
        np.testing.assert_array_equal(run(fn)(t).numpy(), want)
    assert_close(run(ts.tanh)(t).numpy(), np.tanh(f64(x)))
    assert_close(run(ts.sqrt)(ts.tensor(np.abs(x))).numpy(), np.sqrt(np.abs(f64(x))))
    assert ts.pi == math.pi
    assert_close(float(ts.sqrt(2 * ts.pi)), math.sqrt(2 * math.pi), dtype="f32")
    for p in (2, 3, -1, 0.5):
        base = np.abs(x) + 0.5 if p in (-1, 0.5) else x
        assert_close(run(lambda v, p=p: v**p)(ts.tensor(base)).numpy(), f64(base) ** p)
    assert_close(ts.grad(lambda v: ts.sum(v**3))(t).numpy(), 3 * f64(x) ** 2)


@pytest.mark.row("OPS-12")
@RUNS
def test_astype(run):
    x = ts.tensor(np.float32([1.9, -1.9, 0.5, 300, -300, np.inf, -np.inf, np.nan]))
    fn = run(lambda v: v.astype(int8))
    assert fn(x).tolist() == [1, -1, 0, 127, -128, 127, -128, 0]
    ts.debug.flags()
    with ts.debug.numerics("flag"):
        fn(x)
    found = ts.debug.flags()
    assert (found.nan, found.overflow) == (1, 2)  # the NaN that became 0, and +-300


@pytest.mark.row("OPS-13")
@RUNS
def test_relu(run):
    x = ts.tensor([-2.0, 0.0, 3.0])
    assert run(ts.relu)(x).tolist() == [0, 0, 3]
    assert run(ts.grad(lambda v: ts.sum(ts.relu(v))))(x).tolist() == [0, 0, 1]


@pytest.mark.row("OPS-14")
@RUNS
def test_mse(run, rng):
    a, b = draw(rng, 5, 7), draw(rng, 5, 7)
    got = run(ts.mse)(ts.tensor(a), ts.tensor(b))
    assert got.shape == ()
    assert_close(got.numpy(), ((f64(a) - f64(b)) ** 2).mean(), n=35)


SHAPES = [((), (3,)), ((3,), (3,)), ((2, 3), (3,)), ((2, 1), (1, 3)), ((4, 1, 3), (2, 1)),
          ((1,), (5,)), ((0, 3), (3,)), ((2, 3), ())]


@pytest.mark.row("OPS-19")
@RUNS
@pytest.mark.parametrize("a, b", SHAPES)
def test_operators_broadcast(run, a, b, rng):
    x, y = draw(rng, *a), np.float32(np.abs(draw(rng, *b)) + 0.5)
    for op in (lambda p, q: p + q, lambda p, q: p - q, lambda p, q: p * q, lambda p, q: p / q):
        assert_close(run(op)(ts.tensor(x), ts.tensor(y)).numpy(), op(f64(x), f64(y)))
    for op in (lambda p: 2 - p, lambda p: p * 3, lambda p: p / 4.0, lambda p: 1.5 + p):
        assert_close(run(op)(ts.tensor(x)).numpy(), op(f64(x)))


@pytest.mark.row("OPS-19")
@RUNS
def test_operators_keep_the_policy(run):
    t = bf16 @ accum(bf16) @ loss_scale(4.0)
    x = ts.ones((2, 3), t)
    for op in (lambda v: v + v, lambda v: 2 * v - 1.0, lambda v: v / 3, lambda v: v**3, ts.exp):
        assert run(op)(x).type == t
    assert run(lambda p, q: p + q)(x, ts.ones((3,), f32)).dtype is f32


@pytest.mark.row("OPS-20")
@RUNS
def test_bias(run, rng):
    x, W, b = draw(rng, 2, 4, 3), draw(rng, 3, 5), draw(rng, 5)
    got = run(lambda x, W, b: ts.matmul(x, W) + b)(*map(ts.tensor, (x, W, b)))
    assert_close(got.numpy(), f64(x) @ f64(W) + f64(b), n=3)


@pytest.mark.row("OPS-21")
@RUNS
def test_transpose(run, rng):
    x = draw(rng, 3, 5)
    np.testing.assert_array_equal(run(lambda v: v.T)(ts.tensor(x)).numpy(), x.T)


@pytest.mark.row("OPS-22")
@RUNS
def test_gelu(run, rng):
    x = draw(rng, 500) * 3
    want = 0.5 * f64(x) * (1 + np.tanh(0.79788456 * (f64(x) + 0.044715 * f64(x) ** 3)))
    assert_close(run(ts.gelu)(ts.tensor(x)).numpy(), want, n=16)


@pytest.mark.row("OPS-23")
@RUNS
def test_residual(run, rng):
    x, f = draw(rng, 50), draw(rng, 50)
    plain = run(lambda a, b: ts.residual(a, b, dropout=0.0))(ts.tensor(x), ts.tensor(f))
    np.testing.assert_array_equal(plain.numpy(), x + f)
    zero, one = ts.zeros((200_000,)), ts.ones((200_000,))
    fn = run(lambda a, b: ts.residual(a, b, dropout=0.25))
    ts.random.seed(5)
    first = fn(zero, one).numpy()
    ts.random.seed(5)
    np.testing.assert_array_equal(fn(zero, one).numpy(), first)
    assert set(np.unique(first)) == {0.0, np.float32(1 / 0.75)}
    sigma = math.sqrt(0.25 / 0.75 / first.size)
    assert abs(first.mean(dtype=np.float64) - 1) < 5 * sigma


@pytest.mark.row("OPS-24")
@RUNS
def test_split_qkv(run, rng):
    B, S, H, D = 2, 5, 3, 4
    qkv = draw(rng, B, S, 3 * H * D)
    got = run(lambda v: ts.split_qkv(v, heads=H))(ts.tensor(qkv))
    want = qkv.reshape(B, S, 3, H, D).transpose(2, 0, 3, 1, 4)
    assert len(got) == 3
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g.numpy(), w)


@pytest.mark.row("OPS-25")
@RUNS
def test_cast_like(run):
    like = ts.zeros((2,), fp8_e4m3 @ accum(f32) @ loss_scale(8.0))
    y = run(lambda a, b: ts.cast_like(a, b))(ts.tensor([0.3, 1000.0]), like)
    assert y.type == like.type


@pytest.mark.row("OPS-27")
@RUNS
def test_dropout(run):
    """The bit of an element is a function of seed, stream, step and its index, not of the shape
    or of a rank: a longer tensor begins with the mask of a shorter one."""
    fn = run(lambda v: ts.dropout(v, 0.5))
    masks = []
    for n in (64, 64, 256):
        ts.random.seed(9)
        masks.append(fn(ts.ones((n,))).numpy())
    np.testing.assert_array_equal(masks[0], masks[1])
    np.testing.assert_array_equal(masks[0], masks[2][:64])
    x = ts.ones((64,), f16)
    assert ts.dropout(x, 0.5, training=False) is x
