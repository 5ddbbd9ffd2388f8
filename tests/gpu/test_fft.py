"""Fourier transforms on the GPU, against f64 and against cuFFT's own error."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu

require_gpu()


def off(y, want):
    return np.linalg.norm(y - want) / np.linalg.norm(want)


def complex_of(y):
    re, im = y
    return np.asarray(re.numpy(), np.float64) + 1j * im.numpy()


def cufft_off(fn, z, want):
    """The error of cuFFT in f32."""
    cupy = pytest.importorskip("cupy")
    narrow = z.astype(np.complex64 if np.iscomplexobj(z) else np.float32)
    return off(cupy.asnumpy(fn(cupy.fft, cupy.asarray(narrow))), want)


@pytest.mark.parametrize("n", [1 << a for a in range(1, 21)] + [60, 225, 360, 1000, 1536, 3000,
                                                                6144, 7500, 3 * 5 * 7 * 64])
def test_lines(n, rng):
    """No less exact than cuFFT, eager and jitted, forwards and back."""
    re, im = rng.standard_normal((2, 3, n)).astype(np.float32)
    z = re.astype(np.float64) + 1j * im
    there, want = ts.to((ts.tensor(re), ts.tensor(im)), "cuda"), np.fft.fft(z)
    limit = 1.25 * cufft_off(lambda fft, z: fft.fft(z), z, want) + 1e-8
    for fn in (ts.fft, ts.jit(lambda *z: ts.fft(z))):
        y = fn(there) if fn is ts.fft else fn(*there)
        assert off(complex_of(y), want) < limit
        assert off(complex_of(ts.ifft(y)), z) < 2 * limit


@pytest.mark.parametrize("n", [4, 30, 256, 400] + [1 << a for a in range(10, 22)])
def test_real_points(n, rng):
    x = rng.standard_normal((5, n)).astype(np.float32)
    wide = x.astype(np.float64)
    y, want = ts.rfft(ts.tensor(x).to("cuda")), np.fft.rfft(wide)
    limit = 1.25 * cufft_off(lambda fft, x: fft.rfft(x), wide, want) + 1e-8
    assert off(complex_of(y), want) < limit
    assert off(ts.irfft(y, n).numpy(), wide) < 2 * limit


@pytest.mark.parametrize("shape", [(5, 64, 64), (5, 128, 128), (3, 256, 1024),
                                   (2, 1024, 1024), (300, 128, 256)])
def test_planes(shape, rng):
    re, im = rng.standard_normal((2, *shape)).astype(np.float32)
    z = re.astype(np.float64) + 1j * im
    there, want = ts.to((ts.tensor(re), ts.tensor(im)), "cuda"), np.fft.fft2(z)
    limit = 1.25 * cufft_off(lambda fft, z: fft.fft2(z), z, want)
    y = ts.jit(lambda *z: ts.fft2(z))(*there)
    assert off(complex_of(y), want) < limit
    assert off(complex_of(ts.ifft2(y)), z) < 2 * limit


@pytest.mark.parametrize("shape", [(512, 1 << 15), (64, 1 << 18), (16, 1 << 20)])
def test_passes_that_follow_each_other_have_the_same_bits_each_time(shape, rng):
    """Each group has waited for all that it reads, however many run at once."""
    re, im = ts.to(tuple(ts.tensor(x) for x in rng.standard_normal((2, *shape)).astype(np.float32)),
                   "cuda")
    fn = ts.jit(lambda *z: ts.fft(z))
    first = [y.numpy() for y in fn(re, im)]
    assert off(first[0][-1] + 1j * first[1][-1], np.fft.fft(re.numpy()[-1].astype(np.float64)
                                                           + 1j * im.numpy()[-1])) < 4e-7
    for _ in range(20):
        assert all(np.array_equal(a, b.numpy()) for a, b in zip(first, fn(re, im), strict=True))


@pytest.mark.parametrize("shape", [(256, 1 << 16), (64, 1 << 18), (8, 1 << 21)])
def test_passes_of_real_points_have_the_same_bits_each_time(shape, rng):
    x = ts.tensor(rng.standard_normal(shape).astype(np.float32)).to("cuda")
    there, back = ts.jit(lambda x: ts.rfft(x)), ts.jit(lambda *y: ts.irfft(y))
    first = there(x)
    second = back(*first)
    assert off(complex_of(first)[-1], np.fft.rfft(x.numpy()[-1].astype(np.float64))) < 4e-7
    assert off(second.numpy(), x.numpy().astype(np.float64)) < 6e-7
    first, second = [y.numpy() for y in first], second.numpy()
    for _ in range(20):
        y = there(x)
        assert all(np.array_equal(a, b.numpy()) for a, b in zip(first, y, strict=True))
        assert np.array_equal(second, back(*y).numpy())


@pytest.mark.parametrize("shape, axes", [((3, 64, 40), (1,)), ((2, 32, 16, 128), (-3, -2, -1)),
                                         ((1024, 33), (0,)), ((1000, 35), (0,)),
                                         ((4096, 5), (0,))])
def test_other_axes(shape, axes, rng):
    re, im = rng.standard_normal((2, *shape)).astype(np.float32)
    z = re.astype(np.float64) + 1j * im
    y = ts.to((ts.tensor(re), ts.tensor(im)), "cuda")
    for axis in axes:
        y = ts.fft(y, axis=axis)
    assert off(complex_of(y), np.fft.fftn(z, axes=axes)) < 4e-7


def test_a_view_is_transformed_as_it_lies(rng):
    x = ts.tensor(rng.standard_normal((64, 256)).astype(np.float32)).to("cuda")
    y = ts.jit(lambda x: ts.fft(ts.transpose(x)[8:40]))(x)
    assert off(complex_of(y), np.fft.fft(x.numpy().T[8:40].astype(np.float64))) < 4e-7


def test_gradients(rng):
    x, w = (ts.tensor(rng.standard_normal((4, 512)).astype(np.float32)).to("cuda")
            for _ in range(2))

    def loss(x):
        return ts.sum(ts.irfft(ts.rfft(x)) * w) + ts.sum(ts.fft(x).real ** 2)

    f = np.fft.fft(x.numpy().astype(np.float64))
    want = w.numpy() + 2 * np.fft.fft(f.real).real
    assert off(ts.jit(ts.grad(loss))(x).numpy(), want) < 1e-6


@pytest.mark.parametrize("n, factors", [(256, (129,)), (4096, (3, 2049)), (32768, (16385,))])
def test_a_convolution(n, factors, rng):
    x = rng.standard_normal((2, 3, n)).astype(np.float32)
    re, im = rng.standard_normal((2, *factors)).astype(np.float32)

    @ts.jit
    def fn(x, re, im):
        a, b = ts.rfft(x)
        return ts.irfft((a * re - b * im, a * im + b * re))

    y = fn(*(ts.tensor(v).to("cuda") for v in (x, re, im))).numpy()
    h = re.astype(np.float64) + 1j * im
    assert off(y, np.fft.irfft(np.fft.rfft(x.astype(np.float64)) * h, n)) < 4e-7
