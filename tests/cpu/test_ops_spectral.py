"""Fourier and cosine transforms against numpy.fft and scipy.fft; Parseval, inverses, adjoints."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import scipy.fft

import tessera as ts
from derivatives import assert_derivatives
from tessera import wide_arrays
from tessera.errors import ArgumentError, AxisError, DTypeError, ShapeError, UnknownNameError
from tolerance import assert_close

EXTENTS = [1, 2, 3, 4, 7, 8, 31, 64]
NORMS = pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
DTYPES = pytest.mark.parametrize("dtype", [np.float64, np.float32])


def parts(rng: np.random.Generator, *shape: int, dtype: Any = np.float64) -> tuple:
    """A complex tensor as a pair, and its values as NumPy's complex numbers."""
    re, im = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    return (ts.tensor(re), ts.tensor(im)), re.astype(np.float64) + 1j * im


def joined(pair: Any) -> np.ndarray:
    re, im = (np.asarray(x, np.float64) for x in pair)
    return re + 1j * im


def assert_pair(got: Any, want: np.ndarray, dtype: Any = np.float64, n: int = 64) -> None:
    assert isinstance(got, tuple) and len(got) == 2
    scale = float(np.sqrt(np.mean(np.abs(want) ** 2)))
    for part, expected in zip(got, (want.real, want.imag), strict=True):
        assert_close(part, expected, dtype=dtype, n=n, scale=scale)


# --- values -----------------------------------------------------------------------------------
@NORMS
@DTYPES
@pytest.mark.parametrize("n", EXTENTS)
def test_fft_and_ifft(n: int, dtype: type, norm: str, rng: np.random.Generator) -> None:
    pair, z = parts(rng, 3, n, 2, dtype=dtype)
    for fn, oracle in ((ts.fft, np.fft.fft), (ts.ifft, np.fft.ifft)):
        want = oracle(z, axis=1, norm=norm)
        for run in (fn, ts.jit(lambda x, f=fn: f(x, axis=1, norm=norm))):
            assert_pair(run(pair, axis=1, norm=norm) if run is fn else run(pair), want, dtype)
        assert_pair(fn(pair[0], axis=1, norm=norm), oracle(z.real, axis=1, norm=norm), dtype)
    back = ts.ifft(ts.fft(pair, axis=1, norm=norm), axis=1, norm=norm)
    assert_pair(back, z, dtype)
    assert back.real.dtype is pair[0].dtype


@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["now", "jit"])
def test_pairs_have_the_arithmetic_of_complex_numbers(run: Any, rng: np.random.Generator) -> None:
    r, w = rng.standard_normal((3, 5)), rng.standard_normal((3, 5)) + 1j
    x, z = ts.tensor(r), ts.Complex(ts.tensor(w.real), ts.tensor(w.imag))
    for f in (lambda x, z: (z * 2, 2 - z, z / (1 + z), 1 / z, z * 1j / 2j, -z + z),
              lambda x, z: (x * z, x + z, x - z, x / z, x.T @ z, z * x, z - x, z / x),
              lambda x, z: (abs(z), z.conj(), z @ (z.conj() + x).real.T)):
        for got, want in zip(run(f)(x, z), f(r, w), strict=True):
            assert isinstance(got, ts.Complex) == np.iscomplexobj(want)
            np.testing.assert_allclose(np.asarray(got), want, rtol=1e-12, atol=1e-12)
    magnitude, angle = run(lambda z: (ts.abs(z), z.angle()))(z)
    assert_close(magnitude, abs(w), dtype=np.float64)
    assert_close(angle, np.angle(w), dtype=np.float64)


def test_pairs_beside_numpy_and_at_the_ends_of_their_range(rng: np.random.Generator) -> None:
    z = ts.fft(rng.standard_normal((2, 4)))
    assert z.shape == (2, 4) and z.ndim == 2 and z.type == z.real.type
    np.testing.assert_allclose(np.asarray(1j * np.ones(4) * z + np.float32(2)), 1j * z.numpy() + 2)
    wider = ts.Complex(z.real[0], z.imag[0]) + np.ones((3, 4))
    np.testing.assert_allclose(wider.numpy(), np.ones((3, 4)) + z.numpy()[0])
    half = ts.rfft(ts.ones(4, ts.bf16))
    assert {(half * 2).type, (half / half).type, (half * 1j).type} == {ts.bf16}
    big = ts.Complex(ts.tensor([1e30]), ts.tensor([1e30]))
    assert (big / big).numpy() == 1 and np.allclose((1 / big).numpy(), 5e-31 - 5e-31j, rtol=1e-6)


def test_plain_tuples_stand_for_pairs_in_carries_and_branches() -> None:
    x, zero = ts.ones(8), ts.zeros(8)
    for made in (ts.scan(lambda c, r: (ts.fft(c), r), (x, zero), ts.ones(2))[0],
                 ts.fori_loop(0, 2, lambda i, c: tuple(ts.fft(c)), ts.Complex(x, zero)),
                 ts.cond(x[0] > 0, lambda: ts.fft(ts.fft(x)), lambda: (x, zero))):
        re, im = made
        assert np.allclose(re.numpy(), 8) and np.allclose(im.numpy(), 0)


def test_pairs_are_refused_where_one_tensor_is_needed() -> None:
    z = ts.fft(ts.ones((2, 4)))
    for wrong in (lambda: ts.exp(z), lambda: ts.sum(z), lambda: ts.tensor(z), lambda: ts.add(1, z)):
        with pytest.raises(ArgumentError, match="a complex tensor where a real one is needed"):
            wrong()
    for wrong in (lambda: z < z, lambda: z + None, lambda: z ** 0.5):  # type: ignore[operator]
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(TypeError, match="compare abs"):
        _ = z >= z
    with pytest.raises(AttributeError, match=r"ts.map_tree\(lambda t: t.T, z\)"):
        _ = z.T
    with pytest.raises(TypeError, match="two real tensors, or an array of complex numbers"):
        ts.Complex(ts.ones(2))


def test_pairs_of_arrays_and_functions_of_both_parts(rng: np.random.Generator) -> None:
    a = rng.standard_normal((3, 4)) + 1j * rng.standard_normal((3, 4))
    z = ts.Complex(a)
    assert np.array_equal(z.real, a.real) and np.array_equal(z.imag, a.imag)
    assert np.array_equal((z * 1).numpy(), a) and ts.Complex(2 - 1j) * 1j == (1.0, 2.0)
    for at in (0, (slice(None), [3, 0]), (..., None, -1), np.array([True, False, True])):
        traced = ts.jit(lambda z: z[at])(z)  # noqa: B023  # called at once
        assert np.array_equal(z[at].numpy(), a[at])  # elements, not one of its parts
        assert np.array_equal(traced.numpy(), a[at]) and ts.Complex(z) is z
    total = ts.jit(lambda z: ts.map_tree(lambda t: ts.sum(t, axis=0), z))(z)
    assert isinstance(total, ts.Complex) and np.allclose(total.numpy(), a.sum(0))


def test_parts_are_tensors_of_one_shape(rng: np.random.Generator) -> None:
    a = rng.standard_normal((2, 3)) + 1j
    z = ts.Complex(a)
    assert type(z.real) is ts.Tensor and z.type is z.imag.type is ts.as_type("f64")
    a[0, 0] = 9.0
    assert z[0, 0].item() != 9.0  # a copy, as ts.tensor makes
    for whole in (ts.Complex(z.real, 0.0), ts.jit(lambda x: ts.Complex(x, 0))(z.real)):
        assert whole.imag.shape == (2, 3) and whole.imag.type == z.type
    assert ts.Complex(1, z.real).numpy().real.tolist() == np.ones((2, 3)).tolist()
    with pytest.raises(ts.ShapeError, match=r"shapes \[2, 3\] and \[3\]"):
        ts.Complex(z.real, z.imag[0])


@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["now", "jit"])
def test_complex_tensors_are_compared_by_elements(run: Any) -> None:
    """As tuples they were equal when they were one object, and always true."""
    a = np.array([1 + 2j, 1 - 2j, 0, 3])
    z = ts.Complex(a)
    for other in (1 + 2j, 0, 3.0, a, a[::-1]):
        same, differ = run(lambda z: (z == other, z != other))(z)  # noqa: B023  # called at once
        assert same.tolist() == (a == other).tolist() and differ.tolist() == (a != other).tolist()
    assert run(lambda z: z == z)(z).numpy().all()
    assert [bool(z[i]) for i in range(4)] == [True, True, False, True]
    with pytest.raises(ArgumentError, match="truth of a tensor"):
        bool(z)


@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["now", "jit"])
def test_whole_powers_and_matmuls_with_arrays(run: Any, rng: np.random.Generator) -> None:
    a = rng.standard_normal((3, 3)) + 1j * rng.standard_normal((3, 3))
    z = ts.Complex(a)
    for n in (-3, -1, 0, 1, 2, 5, np.int64(2)):
        np.testing.assert_allclose(run(lambda z: z ** n)(z), a ** n, rtol=1e-12)  # noqa: B023
    slope = ts.grad(lambda z: ts.sum((z ** 3).real))(z)
    np.testing.assert_allclose(slope, np.conj(3 * a ** 2), rtol=1e-12)
    b = rng.standard_normal((2, 3)) + 1j
    np.testing.assert_allclose(run(lambda z: b @ z)(z), b @ a, rtol=1e-12)
    assert complex(z[0, 0]) == z[0, 0].item() == z.tolist()[0][0] == a[0, 0]
    with pytest.raises(TypeError, match="whole powers, got 0.5"):
        z ** 0.5


def test_complex_results_of_arrays_of_no_stated_type(rng: np.random.Generator) -> None:
    """Their parts are f64 that nobody asked for, as those of other results: each is remembered."""
    a = rng.standard_normal((3, 3))
    w, v = ts.eig(ts.tensor(a))
    assert wide_arrays.is_unstated(w.real) and wide_arrays.is_unstated(v.imag)
    np.testing.assert_allclose(a @ v.numpy(), v.numpy() * w.numpy(), atol=1e-12)
    assert wide_arrays.is_unstated(ts.fft.ifft(ts.Complex(a, a)).real)


@NORMS
@DTYPES
@pytest.mark.parametrize("n", EXTENTS)
def test_rfft_and_irfft(n: int, dtype: type, norm: str, rng: np.random.Generator) -> None:
    x = rng.standard_normal((n, 3)).astype(dtype)
    want = np.fft.rfft(x.astype(np.float64), axis=0, norm=norm)
    got = ts.rfft(x, axis=0, norm=norm)
    assert_pair(got, want, dtype)
    assert_close(ts.irfft(got, n, axis=0, norm=norm), x, dtype=dtype, n=64)
    full = ts.fft(x, axis=0, norm=norm)
    assert_pair(tuple(p[: n // 2 + 1] for p in full), want, dtype)
    pair, z = parts(rng, n // 2 + 1, 3, dtype=dtype)  # not the frequencies of a real tensor
    assert_close(ts.irfft(pair, n, axis=0, norm=norm), np.fft.irfft(z, n, axis=0, norm=norm),
                 dtype=dtype, n=64)


@pytest.mark.parametrize("axes", [(-2, -1), (0, 2), (1, 0)])
@NORMS
def test_fft2_and_ifft2(axes: tuple, norm: str, rng: np.random.Generator) -> None:
    pair, z = parts(rng, 4, 5, 6)
    got = ts.fft2(pair, None, axes, norm)
    assert_pair(got, np.fft.fft2(z, axes=axes, norm=norm))
    assert_pair(ts.ifft2(got, None, axes, norm), z)
    assert_pair(ts.fft2(pair[0], None, axes, norm), np.fft.fft2(z.real, axes=axes, norm=norm))


def drawn_arguments(rng: np.random.Generator, name: str, ndim: int) -> dict[str, Any]:
    """Of a function of numpy.fft, its points and axes there or not."""
    given: dict[str, Any] = {"norm": rng.choice([None, "backward", "ortho", "forward"])}
    if not name.endswith(("2", "n")):
        given |= {"axis": int(rng.integers(-ndim, ndim))} if rng.random() < 0.6 else {}
        return given | ({"n": int(rng.integers(1, 12))} if rng.random() < 0.5 else {})
    count = 2 if name.endswith("2") else int(rng.integers(1, ndim + 1))
    if rng.random() < 0.6:
        places = rng.permutation(ndim)[:count]
        given["axes"] = [int(a) - ndim * int(rng.integers(2)) for a in places]
    if rng.random() < 0.5 and (name[-1] == "2" or "axes" in given):
        given["s"] = [int(rng.choice([1, 2, 3, 8, 9, -1])) for _ in range(count)]
    return given


REAL = ("rfft", "ihfft", "rfft2", "rfftn")


@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft", "fft2", "ifft2",
                                  "rfft2", "irfft2", "fftn", "ifftn", "rfftn", "irfftn"])
def test_arguments_are_those_of_numpy(name: str, rng: np.random.Generator) -> None:
    """Random shapes and arguments, with NumPy's names; the same ones are refused."""
    ours, oracle = getattr(ts.fft, name), getattr(np.fft, name)
    for _ in range(60):
        shape = rng.integers(1, 9, rng.integers(2, 5))
        pair, z = parts(rng, *shape)
        real = name in REAL or rng.random() < 0.3
        x, z = (pair[0], z.real) if real else (pair, z)
        given = drawn_arguments(rng, name, len(shape))
        try:
            want = oracle(z, **given)
        except ValueError:
            with pytest.raises(ArgumentError):
                ours(x, **given)
            continue
        got = ours(x, **given)
        assert isinstance(got, tuple) == np.iscomplexobj(want)
        value = joined(got) if isinstance(got, tuple) else np.asarray(got)
        np.testing.assert_allclose(value, want, rtol=0, atol=1e-12 * max(1, np.abs(want).max()))


def test_positions_of_arguments_are_those_of_numpy(rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 4, 5))
    for name in ("fft2", "ifft2", "rfft2", "fftn", "ifftn", "rfftn"):
        args = ((2, 6), (0, 1), "ortho")
        assert_pair(getattr(ts, name)(x, *args), getattr(np.fft, name)(x, *args))
    for name in ("irfft2", "irfftn"):
        assert_close(getattr(ts, name)(x, (2, 6), (0, 1), "ortho"),
                     getattr(np.fft, name)(x, (2, 6), (0, 1), "ortho"), n=32)


@pytest.mark.parametrize("n", [1, 2, 7, 8])
def test_fftfreq_and_rfftfreq(n: int) -> None:
    for ours, oracle in ((ts.fftfreq, np.fft.fftfreq), (ts.fft.rfftfreq, np.fft.rfftfreq)):
        np.testing.assert_array_equal(ours(n, 0.3, "f64"), oracle(n, 0.3))
        np.testing.assert_array_equal(ours(n, d=1e-3), oracle(n, 1e-3).astype(np.float32))
        assert ours(n).dtype is ts.f32
    for wrong in (0, -2, 2.0, True):
        with pytest.raises(ArgumentError, match="positive number of points"):
            ts.fftfreq(wrong)
    with pytest.raises(ArgumentError, match="0 apart"):
        ts.rfftfreq(4, 0.0)


def test_the_names_of_numpy_are_attributes_of_fft() -> None:
    names = [n for n in np.fft.__all__ if hasattr(ts, n)]
    assert len(names) == 18 == len(np.fft.__all__)
    assert all(getattr(ts.fft, n) is getattr(ts, n) for n in names)
    re, im = ts.jit(lambda x: ts.fft.rfft(x))(np.ones(4, np.float32))
    assert re.tolist() == [4, 0, 0] and im.tolist() == [0, 0, 0]
    assert pickle.loads(pickle.dumps(ts.fft)) is ts.fft is copy.deepcopy(ts.fft)


def test_a_name_that_fft_does_not_have() -> None:
    with pytest.raises(UnknownNameError, match="ts.fft has no 'rffft'") as found:
        ts.fft.rffft  # noqa: B018
    assert found.value.hint == "did you mean 'rfft'?"
    assert not hasattr(ts.fft, "fft3")


def test_the_conjugate_of_unsigned_parts() -> None:
    z = np.array([3, 1, 2], np.uint8), np.array([0, 4, 5], np.uint8)
    assert_close(ts.hfft(z), np.fft.hfft(z[0] + 1j * z[1]).astype(np.float32), dtype=np.float32,
                 n=16)


@pytest.mark.parametrize("n", [1, 4, 5, 9])
def test_number_of_points(n: int, rng: np.random.Generator) -> None:
    """More than there are: zeros follow; fewer: the first ones."""
    pair, z = parts(rng, 2, 5)
    assert_pair(ts.fft(pair, n), np.fft.fft(z, n))
    assert_pair(ts.ifft(pair, n), np.fft.ifft(z, n))
    assert_pair(ts.rfft(pair[0], n), np.fft.rfft(z.real, n))
    assert_close(ts.irfft(pair, n), np.fft.irfft(z, n), n=16)
    assert_close(ts.irfft(pair), np.fft.irfft(z), n=16)
    assert_close(ts.irfft(pair[0]), np.fft.irfft(z.real), n=16)


@pytest.mark.parametrize("n", [4, 7, 32])
def test_parseval(n: int, rng: np.random.Generator) -> None:
    pair, z = parts(rng, 3, n)
    energy = np.sum(np.abs(z) ** 2, -1)
    assert_close(np.sum(np.abs(joined(ts.fft(pair))) ** 2, -1) / n, energy, n=n)
    assert_close(np.sum(np.abs(joined(ts.ifft(pair, norm="ortho"))) ** 2, -1), energy, n=n)
    half = np.abs(joined(ts.rfft(pair[0]))) ** 2
    doubled = np.sum(half, -1) * 2 - half[:, 0] - (half[:, -1] if n % 2 == 0 else 0)
    assert_close(doubled / n, np.sum(z.real**2, -1), n=n)
    assert_close(ts.sum(ts.square(ts.dct(pair[0], norm="ortho")), -1), np.sum(z.real**2, -1), n=n)


@pytest.mark.parametrize("norm", [None, "ortho"])
@pytest.mark.parametrize("type", [2, 3])
@DTYPES
@pytest.mark.parametrize("n", EXTENTS)
def test_dct_and_idct(n: int, dtype: type, type: int, norm: str | None,
                      rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, n, 3)).astype(dtype)
    for fn, oracle in ((ts.dct, scipy.fft.dct), (ts.idct, scipy.fft.idct)):
        want = oracle(x.astype(np.float64), type, axis=1, norm=norm)
        assert_close(fn(x, type, axis=1, norm=norm), want, dtype=dtype, n=64)
    back = ts.idct(ts.dct(x, type, 1, norm), type, 1, norm)
    assert_close(back, x, dtype=dtype, n=64)
    assert back.dtype is ts.tensor(x).dtype


def test_low_precision_is_rounded_once(rng: np.random.Generator) -> None:
    x = ts.cast(rng.standard_normal((2, 16)), "bf16")
    wide = np.asarray(ts.cast(x, "f64"))
    re, im = ts.fft(x)
    assert re.dtype is ts.bf16 and im.dtype is ts.bf16
    want = np.fft.fft(wide)
    for got, part in ((re, want.real), (im, want.imag)):
        np.testing.assert_allclose(np.asarray(ts.cast(got, "f64")), part, rtol=2**-8, atol=1e-5)
    assert ts.dct(x).dtype is ts.bf16 and ts.irfft((re, im)).dtype is ts.bf16
    assert ts.fft(np.arange(4)).real.dtype is ts.f32


# --- derivatives ------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_derivatives_of_the_public_functions(n: int, rng: np.random.Generator) -> None:
    re, im = rng.standard_normal((2, 3, n))

    def power(pair: Any) -> Any:
        re, im = pair
        return re ** 2 + 3.0 * im ** 3

    assert_derivatives(lambda a, b: power(ts.fft((a, b), n + 2)), rng, re, im)
    assert_derivatives(lambda a: power(ts.ifft(a)), rng, re)
    assert_derivatives(lambda a, b: power(ts.fft2((a, b))), rng, re, im)
    assert_derivatives(lambda a: power(ts.rfft(a)), rng, re)
    assert_derivatives(lambda a: power(ts.rfftn(a, (2, n + 1))), rng, re)
    assert_derivatives(lambda a, b: ts.irfftn((a, b), (2, n + 1)) ** 2, rng, re, im)
    assert_derivatives(lambda a, b: ts.hfft((a, b), n + 1) ** 2, rng, re, im)
    assert_derivatives(lambda a: power(ts.ihfft(a)), rng, re)
    assert_derivatives(lambda a, b: ts.irfft((a, b), 2 * n - 1) ** 2, rng, re, im)
    assert_derivatives(lambda a: ts.dct(a) ** 2 + ts.idct(a, 3) ** 2 + ts.dct(a, 3), rng, re)


def test_the_adjoint_of_the_orthonormal_transform_is_its_inverse(rng: np.random.Generator) -> None:
    pair, z = parts(rng, 3, 8)
    g, gz = parts(rng, 3, 8)
    _, pull = ts.vjp(lambda p: ts.fft(p, norm="ortho"), pair)
    assert_pair(pull(g), np.fft.ifft(gz, norm="ortho"))
    _, pull = ts.vjp(lambda p: ts.fft(p), pair)
    assert_pair(pull(g), 8 * np.fft.ifft(gz))


def test_vmap_over_either_part(rng: np.random.Generator) -> None:
    pair, z = parts(rng, 3, 5)
    one = rng.standard_normal(5)
    got = ts.vmap(lambda a: ts.fft((a, ts.tensor(one))))(pair[0])
    assert_pair(got, np.fft.fft(z.real + 1j * one))
    got = ts.vmap(lambda b: ts.irfft((ts.tensor(one), b)))(pair[1])
    assert_close(got, np.fft.irfft(one + 1j * z.imag), n=16)


def test_a_convolution_is_a_product_of_transforms(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((2, 12))
    (ar, ai), (br, bi) = ts.rfft(a), ts.rfft(b)
    got = ts.irfft((ar * br - ai * bi, ar * bi + ai * br), 12)
    want = [sum(a[j] * b[(k - j) % 12] for j in range(12)) for k in range(12)]
    assert_close(got, want, n=48)


# --- order ------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(1,), (4,), (5,), (4, 5), (2, 3, 4), (0, 3)])
def test_fftshift_and_ifftshift(shape: tuple, rng: np.random.Generator) -> None:
    a = rng.standard_normal(shape)
    for axes in (None, -1, tuple(range(len(shape)))):
        np.testing.assert_array_equal(ts.fftshift(a, axes), np.fft.fftshift(a, axes))
        np.testing.assert_array_equal(ts.ifftshift(a, axes), np.fft.ifftshift(a, axes))
        np.testing.assert_array_equal(ts.ifftshift(ts.fftshift(a, axes), axes), a)
    pair = ts.fftshift((a, -a))
    np.testing.assert_array_equal(joined(pair), np.fft.fftshift(a - 1j * a))


@pytest.mark.parametrize("shift, axis", [(2, 0), (-3, 1), (7, 1), (0, 0), (4, None),
                                         ((1, 2), (0, 1)), (1, (0, 1)), ((1, 2), (0, 0))])
def test_roll(shift: Any, axis: Any, rng: np.random.Generator) -> None:
    a = rng.standard_normal((3, 5))
    np.testing.assert_array_equal(ts.roll(a, shift, axis), np.roll(a, shift, axis))
    w = rng.standard_normal((3, 5))
    got = ts.grad(lambda x: ts.sum(ts.roll(x, shift, axis) * w))(a)
    back = tuple(-s for s in shift) if isinstance(shift, tuple) else -shift
    np.testing.assert_array_equal(got, np.roll(w, back, axis))
    assert ts.roll(np.arange(3), 1).tolist() == [2, 0, 1]


# --- errors -----------------------------------------------------------------------------------
def test_errors() -> None:
    x = ts.ones((2, 4))
    with pytest.raises(ShapeError, match="no points to transform along axis 1"):
        ts.fft(ts.ones((2, 0)))
    with pytest.raises(ShapeError, match="no points"):
        ts.dct(ts.ones((0,)))
    with pytest.raises(ShapeError, match="real part .2, 4. and imaginary part .2, 3. differ"):
        ts.fft((x, ts.ones((2, 3))))
    with pytest.raises(ArgumentError, match="a pair .real, imaginary., got 3 parts"):
        ts.fft((x, x, x))
    with pytest.raises(ArgumentError, match="rfft takes a real tensor"):
        ts.rfft((x, x))
    with pytest.raises(ArgumentError, match="norm 'unitary'"):
        ts.fft(x, norm="unitary")
    for n in (0, -1, 2.0, True):
        for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
            with pytest.raises(ArgumentError, match="n="):
                getattr(ts.fft, name)(x, n)
    with pytest.raises(DTypeError, match=r"a pair of tensors: ts.Complex.x."):
        ts.fft(np.ones(3) * 1j)
    with pytest.raises(ArgumentError, match="s=.2,. for 2 axes"):
        ts.fftn(x, (2,), (0, 1))
    for s in (2, "ab"):
        with pytest.raises(ArgumentError):
            ts.fftn(x, s)
    with pytest.raises(ArgumentError, match="axes=1"):
        ts.ifftn(x, axes=1)
    with pytest.raises(ArgumentError, match="at least one axis"):
        ts.irfftn(x, axes=())
    with pytest.raises(ArgumentError, match="irfft to n=0 elements"):
        ts.irfft(ts.ones((1,)))
    with pytest.raises(ArgumentError, match="type=1"):
        ts.dct(x, 1)
    with pytest.raises(ArgumentError, match="norm='forward'"):
        ts.idct(x, norm="forward")
    for axes in ((0,), 0):
        with pytest.raises(ArgumentError, match="two axes are needed"):
            ts.fft2(x, axes=axes)
    for axes in ((1, 1), (1, -1)):
        with pytest.raises(AxisError, match="names an axis twice"):
            ts.ifft2(x, axes=axes)
    with pytest.raises(AxisError):
        ts.fft(x, axis=2)
    with pytest.raises(ArgumentError, match="2 shifts for 1 axes"):
        ts.roll(x, (1, 2), 0)


def test_parts_of_two_types_take_the_wider_one() -> None:
    re, im = ts.fft((ts.ones((4,), "f64"), ts.ones((4,), "bf16")))
    assert re.dtype is ts.f64 and im.dtype is ts.f64
    with pytest.raises(DTypeError):
        ts.fft((ts.ones((4,), "fp8_e4m3"), ts.ones((4,), "fp8_e5m2")))
