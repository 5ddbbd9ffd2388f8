"""Casts that round at random, and types of less than a byte, in graphs on a GPU: the CPU's bits."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
import tessera.numerics as tn
from gpu_harness import require_gpu

require_gpu()


def codes(x):
    return tn.to_codes(x.array)


@pytest.mark.row("NUM-20")
@pytest.mark.parametrize("kind", ["bf16", "f16", "fp8_e4m3", "fp8_e5m2 @saturate", "int8", "int32"])
def test_stochastic_casts(kind, rng):
    x = rng.standard_normal(5000) * 2.0 ** rng.integers(-30, 20, 5000)
    x[:8] = 0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -3e38, 448.1
    x, made = ts.tensor(x.astype(np.float32)), []
    for target in ("cpu", "cuda"):
        ts.random.seed(4)
        f = ts.jit(lambda x: ts.cast(x, f"{kind} @stochastic_round"), target=target)
        made.append([codes(f(x)) for _ in range(2)])
    assert np.array_equal(*made) and not np.array_equal(made[0][0], made[0][1])


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint16", "int32"])
def test_integers_wrap(kind, rng):
    ends = np.iinfo(kind)
    a, b = (rng.integers(ends.min, ends.max, 3001, kind, endpoint=True) for _ in range(2))
    f = ts.jit(lambda a, b: (a * b + a, -a, ~a, (a + b) // 2, (a - b) > a))
    with np.errstate(over="ignore"):
        want = (a * b + a, -a, ~a, (a + b) // 2, (a - b) > a)
    x, y = ts.tensor(a).to("cuda"), ts.tensor(b).to("cuda")
    for got, made in zip((*f(x, y), x + y), (*want, a + b), strict=True):
        assert np.array_equal(got.numpy(), made)


# --- less than a byte -----------------------------------------------------------------------------
PACKED = ["fp4_e2m1", "fp6_e2m3", "fp6_e3m2", "int4"]


def every(kind, shape):
    d = tn.find_dtype(kind)
    made = np.arange(np.prod(shape)) % (1 << d.bits)
    return ts.Tensor(made.astype(np.uint8).view(d.numpy).reshape(shape), tn.as_type(kind))


@pytest.mark.parametrize("kind", PACKED)
def test_packed_casts_and_moves(kind, rng):
    x = rng.standard_normal(3001) * 2.0 ** rng.integers(-7, 7, 3001)
    if kind != "int4":
        x[:5] = np.nan, np.inf, -np.inf, -0.0, 1e-40
    x, packed = ts.tensor(x.astype(np.float32)), every(kind, (13, 77)).to("cuda")
    f = ts.jit(lambda x: ts.cast(x, kind))
    got, want = f(x.to("cuda")), f(x)
    assert got.device == "cuda:0" and np.array_equal(codes(got) & 63, codes(want) & 63)
    for g in (lambda x: ts.cast(x, "f32"), ts.transpose, lambda x: ts.flip(x)[1:, ::3],
              lambda x: ts.cast(x, "bf16"), lambda x: ts.concatenate([x, x], 1), lambda x: x,
              lambda x: ts.take(x, ts.tensor([3, 0, 3])), lambda x: x + x, ts.sort):
        a, b = ts.jit(g)(packed), ts.jit(g)(every(kind, (13, 77)))
        assert a.type == b.type
        np.testing.assert_array_equal(a.numpy().astype(np.float64), b.numpy().astype(np.float64))


@pytest.mark.parametrize("kind", PACKED)
def test_packed_products(kind):
    x, y = every(kind, (256, 192)), every(kind, (192, 128))
    f = ts.jit(lambda x, y: ts.cast(x, "f32") @ ts.cast(y, "f32") if kind != "int4" else x @ y)
    got = f(x.to("cuda"), y.to("cuda")).numpy().astype(np.float64)
    want = x.array.astype(np.float64) @ y.array.astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-3)


@ts.kernel
def halved(x: ts.Tensor["M", "N", ts.fp4_e2m1], y: ts.Tensor["M", "N", ts.fp6_e3m2]):
    t = ts.tile.load(x[tile_m:tile_m + 16, tile_n:tile_n + 64])
    y[tile_m:tile_m + 16, tile_n:tile_n + 64] = ts.tile.cast(t, ts.f32) * 0.5


def test_packed_tensors_of_kernels_and_of_a_batch():
    def f(x):
        y = ts.zeros(x.shape, "fp6_e3m2")
        halved(x, y)
        return y

    x = every("fp4_e2m1", (3, 37, 101))
    got, want = ts.jit(ts.vmap(f))(x.to("cuda")), ts.jit(ts.vmap(f))(x)
    assert np.array_equal(codes(got) & 63, codes(want) & 63)
