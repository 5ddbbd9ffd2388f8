"""Dense linear algebra against NumPy and SciPy in f64: solves, factors, norms, errors, gradients.

The ops' own rules are tested for every op in test_ops_registry.py; here are their values, the
public functions around them, and what they do where there is no result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.linalg

import tessera as ts
from derivatives import assert_derivatives
from tessera.errors import ArgumentError, AxisError, GradError, NumericsError, ShapeError
from tolerance import assert_close

SIZES = [1, 2, 15, 16, 17, 50]  # substitutions are halved above 16
LEADS = pytest.mark.parametrize("lead", [(), (2, 3)], ids=["matrix", "batch"])
DTYPES = pytest.mark.parametrize("dtype", [np.float64, np.float32])


def mT(a: Any) -> np.ndarray:
    return np.swapaxes(np.asarray(a), -1, -2)


def conditioned(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Matrices with singular values between 1 and 3."""
    u, s, vh = np.linalg.svd(rng.standard_normal(shape), full_matrices=False)
    return (u * rng.uniform(1, 3, s.shape)[..., None, :]) @ vh


def spd(rng: np.random.Generator, *shape: int) -> np.ndarray:
    a = conditioned(rng, *shape)
    made = a @ mT(a)
    return (made + mT(made)) / 2


def draw(dtype: type, a: np.ndarray) -> tuple[ts.Tensor, np.ndarray]:
    """A tensor and its values in f64."""
    x = ts.tensor(a.astype(dtype))
    return x, x.numpy().astype(np.float64)


# --- solves -----------------------------------------------------------------------------------
@DTYPES
@LEADS
@pytest.mark.parametrize("n", SIZES)
def test_solve_and_inv(n: int, lead: tuple, dtype: type, rng: np.random.Generator) -> None:
    a, wa = draw(dtype, conditioned(rng, *lead, n, n))
    b, wb = draw(dtype, rng.standard_normal((*lead, n, 3)))
    for run in (ts.solve, ts.jit(ts.solve)):
        assert_close(run(a, b), np.linalg.solve(wa, wb), dtype=dtype, n=n)
    assert_close(ts.inv(a), np.linalg.inv(wa), dtype=dtype, n=n)


@DTYPES
@LEADS
@pytest.mark.parametrize("n", SIZES)
def test_triangular_solve(n: int, lead: tuple, dtype: type, rng: np.random.Generator) -> None:
    """The other triangle is noise: it must not be read."""
    a, wa = draw(dtype, rng.standard_normal((*lead, n, n)) / n + 2 * np.eye(n))
    b, wb = draw(dtype, rng.standard_normal((*lead, n, 2)))
    for lower in (True, False):
        for unit in (True, False):
            for transpose in (True, False):
                got = ts.triangular_solve(a, b, lower=lower, transpose=transpose,
                                          unit_diagonal=unit)
                want = np.empty(wb.shape)
                for i in np.ndindex(lead):
                    want[i] = scipy.linalg.solve_triangular(
                        wa[i], wb[i], lower=lower, trans=int(transpose), unit_diagonal=unit)
                assert_close(got, want, dtype=dtype, n=n)


def test_vectors_and_leading_axes_that_broadcast(rng: np.random.Generator) -> None:
    a, b = conditioned(rng, 4, 3, 3), rng.standard_normal(3)
    want = np.linalg.inv(a) @ b
    assert_close(ts.solve(a, b), want, n=9)
    many = rng.standard_normal((2, 1, 3, 5))
    assert_close(ts.solve(a, many), np.linalg.inv(a) @ many, n=9)
    assert_close(ts.triangular_solve(a[0], b), scipy.linalg.solve_triangular(a[0], b, lower=True),
                 n=30)
    assert_derivatives(ts.solve, rng, a, b)
    assert_derivatives(lambda x, y: ts.triangular_solve(x, y, lower=False, transpose=True), rng,
                       a[0] + 3 * np.eye(3), b)


def test_f32_is_computed_in_f64(rng: np.random.Generator) -> None:
    """A condition of 1e7 leaves no digit of f32 arithmetic; all that is rounded is the result."""
    hilbert = 1 / (np.arange(6)[:, None] + np.arange(6) + 1)
    a, wa = draw(np.float32, hilbert)
    b, wb = draw(np.float32, rng.standard_normal((6, 2)))
    assert_close(ts.solve(a, b), np.linalg.solve(wa, wb), dtype=np.float32)
    assert_close(ts.inv(a), np.linalg.inv(wa), dtype=np.float32)
    assert_close(ts.det(a), np.linalg.det(wa), dtype=np.float32)
    assert_close(ts.eigh(a)[0], np.linalg.eigvalsh(wa), dtype=np.float32)
    assert_close(ts.svd(a)[1], np.linalg.svd(wa)[1], dtype=np.float32)
    assert_close(ts.lu(a)[2], np.asarray(ts.lu(wa)[2]), dtype=np.float32)
    b, wb = draw(np.float32, rng.standard_normal((300, 2)))
    want = np.diff(wb, axis=0, prepend=0)  # sums of up to 300 terms that cancel
    assert_close(ts.triangular_solve(ts.ones((300, 300)), b), want, dtype=np.float32)


def test_low_precision_is_rounded_once(rng: np.random.Generator) -> None:
    a = ts.cast(conditioned(rng, 5, 5), "bf16")
    b = ts.cast(rng.standard_normal((5, 2)), "bf16")
    wide = ts.solve(ts.cast(a, "f64"), ts.cast(b, "f64"))
    got = ts.solve(a, b)
    assert got.dtype is ts.bf16
    assert_close(ts.cast(got, "f64"), wide, dtype="bf16")
    assert [x.dtype.name for x in ts.qr(a)] == ["bf16"] * 2
    assert ts.inv(np.array([[2, 0], [0, 4]])).dtype is ts.f32


@pytest.mark.parametrize("n", [-3, -1, 0, 1, 2, 5, 6])
def test_matrix_power(n: int, rng: np.random.Generator) -> None:
    a = conditioned(rng, 2, 4, 4)
    assert_close(ts.matrix_power(a, n), np.linalg.matrix_power(a, n), n=200)
    if n:
        assert_derivatives(lambda x: ts.matrix_power(x, n), rng, a)


@pytest.mark.parametrize("shape", [(4, 4), (7, 3), (3, 7), (2, 5, 3)])
def test_lstsq(shape: tuple, rng: np.random.Generator) -> None:
    a, b = conditioned(rng, *shape), rng.standard_normal((*shape[:-1], 2))
    size = 3.0 * float(np.abs(b).max())  # both go with |b| times the condition, here below 3
    assert_close(ts.lstsq(a, b), np.linalg.pinv(a) @ b, n=20, scale=size)
    assert_derivatives(ts.lstsq, rng, a, b)
    if len(shape) == 2:
        assert_close(ts.lstsq(a, b[:, 0]), np.linalg.lstsq(a, b[:, 0])[0], n=20, scale=size)


# --- factorizations ---------------------------------------------------------------------------
@DTYPES
@LEADS
@pytest.mark.parametrize("n", [1, 4, 17])
def test_cholesky_and_eigh(n: int, lead: tuple, dtype: type, rng: np.random.Generator) -> None:
    a, wa = draw(dtype, spd(rng, *lead, n, n))
    assert_close(ts.cholesky(a), np.linalg.cholesky(wa), dtype=dtype, n=n)
    w, v = ts.jit(ts.eigh)(a)
    want = np.linalg.eigvalsh(wa)
    size = float(np.abs(want).max())  # the algorithm is backward stable: errors go with |a|
    assert_close(w, want, dtype=dtype, n=n, scale=size)
    v = v.numpy().astype(np.float64)
    assert_close(mT(v) @ v, np.broadcast_to(np.eye(n), v.shape), dtype=dtype, n=9 * n, scale=1.0)
    assert_close(v * w.numpy()[..., None, :] @ mT(v), wa, dtype=dtype, n=4 * n, scale=size)


@DTYPES
@LEADS
@pytest.mark.parametrize("m, n", [(1, 1), (5, 5), (7, 3), (3, 7), (4, 1)])
def test_qr_and_svd(m: int, n: int, lead: tuple, dtype: type, rng: np.random.Generator) -> None:
    a, wa = draw(dtype, conditioned(rng, *lead, m, n))
    k = min(m, n)
    q, r = (x.numpy().astype(np.float64) for x in ts.jit(ts.qr)(a))
    wq, wr = np.linalg.qr(wa)
    assert_close(q, wq, dtype=dtype, n=100)
    assert_close(r, wr, dtype=dtype, n=100, scale=3.0)
    assert (np.tril(r, -1) == 0).all()
    u, s, vh = (x.numpy().astype(np.float64) for x in ts.svd(a))
    assert u.shape == (*lead, m, k) and vh.shape == (*lead, k, n)
    assert_close(s, np.linalg.svd(wa, compute_uv=False), dtype=dtype, n=20)
    assert_close(u * s[..., None, :] @ vh, wa, dtype=dtype, n=100, scale=3.0)
    for x in (mT(u) @ u, vh @ mT(vh)):
        assert_close(x, np.broadcast_to(np.eye(k), x.shape), dtype=dtype, n=100)


@LEADS
@pytest.mark.parametrize("n", [1, 2, 6])
def test_eig(n: int, lead: tuple, rng: np.random.Generator) -> None:
    a = rng.standard_normal((*lead, n, n))
    (w_re, w_im), (v_re, v_im) = ts.eig(a)
    w, v = w_re.numpy() + 1j * w_im.numpy(), v_re.numpy() + 1j * v_im.numpy()
    np.testing.assert_allclose(a @ v, v * w[..., None, :], atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(v, axis=-2), 1)
    np.testing.assert_allclose(np.sum(w, -1), np.trace(a, axis1=-2, axis2=-1), atol=1e-12)


def test_eig_of_a_rotation_is_imaginary() -> None:
    (w_re, w_im), _ = ts.eig([[0.0, -2.0], [2.0, 0.0]])
    assert_close(w_re, [0, 0], n=2, scale=1.0)
    assert sorted(w_im.tolist()) == pytest.approx([-2, 2])


@LEADS
@pytest.mark.parametrize("m, n", [(1, 1), (2, 2), (1, 5), (5, 1), (33, 33), (40, 17), (17, 40)])
def test_lu(m: int, n: int, lead: tuple, rng: np.random.Generator) -> None:
    a = rng.standard_normal((*lead, m, n))
    order, lower, upper = (x.numpy() for x in ts.jit(ts.lu)(a))
    k = min(m, n)
    assert lower.shape == (*lead, m, k) and upper.shape == (*lead, k, n)
    assert (np.triu(lower, 1) == 0).all() and (np.tril(upper, -1) == 0).all()
    assert (np.diagonal(lower, axis1=-2, axis2=-1) == 1).all() and (np.abs(lower) <= 1).all()
    assert (np.sort(order, -1) == np.arange(m)).all() and order.dtype == np.int64
    assert_close(lower @ upper, np.take_along_axis(a, order[..., None], -2), n=20 * n)
    for i in np.ndindex(lead):
        p, wl, wu = scipy.linalg.lu(a[i])
        np.testing.assert_array_equal(np.argmax(p, 0), order[i])
        np.testing.assert_allclose(lower[i], wl, atol=1e-9)
        np.testing.assert_allclose(upper[i], wu, atol=1e-9)


def test_lu_of_a_singular_matrix_is_one_all_the_same(rng: np.random.Generator) -> None:
    a = np.outer(rng.standard_normal(4), rng.standard_normal(4))
    a[:, 1] = 0
    order, lower, upper = (x.numpy() for x in ts.lu(a))
    np.testing.assert_allclose(lower @ upper, a[order], atol=1e-14)
    with pytest.raises(NumericsError, match="singular"):
        ts.grad(lambda x: ts.sum(ts.lu(x)[2]))(a)


@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (3, 5), (2, 3, 4)])
def test_gradients_through_the_public_factorizations(shape: tuple,
                                                     rng: np.random.Generator) -> None:
    """Values of several outputs in one; the registry tests each op alone."""
    a = conditioned(rng, *shape)
    k = min(shape[-2:])
    a = a + np.eye(*shape[-2:]) * np.arange(1, shape[-1] + 1) * 2  # singular values apart

    def of_svd(x: Any) -> Any:
        u, s, vh = ts.svd(x)
        return ts.sum(u[..., :k, :] * s[..., None, :] * vh[..., :k], axis=-1) + s

    assert_derivatives(of_svd, rng, a)
    assert_derivatives(lambda x: ts.qr(x)[0] @ (ts.qr(x)[1] ** 2), rng, a)
    assert_derivatives(lambda x: ts.lu(x)[1] @ (ts.lu(x)[2] ** 2), rng, a)


def test_the_gradient_of_a_product_of_factors_is_that_of_the_matrix(
        rng: np.random.Generator) -> None:
    a, w = conditioned(rng, 3, 4, 4), rng.standard_normal((3, 4, 4))

    def lu_product(x: Any) -> Any:
        p, lower, upper = ts.lu(x)
        return ts.take_along_axis(lower @ upper, ts.expand_dims(ts.argsort(p), -1), axis=-2)

    for product in (lambda x: ts.qr(x)[0] @ ts.qr(x)[1], lu_product):
        got = ts.grad(lambda x, f=product: ts.sum(f(x) * w))(a)
        np.testing.assert_allclose(got, w, atol=1e-11)
    spd_a = spd(rng, 3, 4, 4)
    got = ts.grad(lambda x: ts.sum(ts.cholesky(x) @ ts.swapaxes(ts.cholesky(x), -1, -2) * w))(spd_a)
    np.testing.assert_allclose(got, (w + mT(w)) / 2, atol=1e-11)


def test_gradients_of_equal_singular_values_and_eigenvalues() -> None:
    """Of values they exist; of vectors they do not, and are NaN."""
    eye = np.eye(3)
    assert ts.grad(lambda x: ts.sum(ts.svd(x)[1]))(eye).tolist() == eye.tolist()
    assert ts.grad(lambda x: ts.sum(ts.eigh(x)[0]))(eye).tolist() == eye.tolist()
    assert np.isnan(ts.grad(lambda x: ts.sum(ts.eigh(x)[1] ** 3))(eye)).any()


def test_transforms_compose(rng: np.random.Generator) -> None:
    """The gradient of log det is the inverse, its derivative -A^-1 T A^-1, in a batch."""
    a, t = spd(rng, 4, 3, 3), rng.standard_normal((3, 3))
    t = t + t.T
    logdet = lambda x: 2 * ts.sum(ts.log(ts.diagonal(ts.cholesky(x))))  # noqa: E731
    inverse = np.linalg.inv(a)
    assert_close(ts.jit(ts.vmap(ts.grad(logdet)))(a), inverse, n=50)
    push = lambda x: ts.jvp(ts.grad(logdet), (x,), (ts.tensor(t),))[1]  # noqa: E731
    assert_close(ts.vmap(push)(ts.tensor(a)), -inverse @ t @ inverse, n=200)


# --- determinants -----------------------------------------------------------------------------
@DTYPES
@LEADS
@pytest.mark.parametrize("n", [1, 2, 9])
def test_determinants(n: int, lead: tuple, dtype: type, rng: np.random.Generator) -> None:
    a, wa = draw(dtype, conditioned(rng, *lead, n, n))
    assert_close(ts.det(a), np.linalg.det(wa), dtype=dtype, n=n)
    for got, want in zip(ts.slogdet(a), np.linalg.slogdet(wa), strict=True):
        assert_close(got, want, dtype=dtype, n=n)


def test_determinants_of_singular_and_of_large_matrices() -> None:
    assert ts.det(np.ones((2, 2))).item() == 0
    sign, log = ts.slogdet(np.zeros((2, 2)))
    assert (sign.item(), log.item()) == (0, -np.inf)
    sign, log = ts.slogdet(np.diag([-1e200, 1e200, 1e200]))
    assert sign.item() == -1 and log.item() == pytest.approx(600 * np.log(10))


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_the_gradient_of_det_needs_no_inverse(rank: int, rng: np.random.Generator) -> None:
    """Cofactors: determinants of the minors, with alternating signs."""
    a = rng.standard_normal((3, rank)) @ rng.standard_normal((rank, 3))
    got = ts.grad(lambda x: ts.det(x))(a)
    want = np.empty((3, 3))
    for i, j in np.ndindex(3, 3):
        minor = np.delete(np.delete(a, i, 0), j, 1)
        want[i, j] = (-1) ** (i + j) * np.linalg.det(minor)
    np.testing.assert_allclose(got, want, atol=1e-13)


# --- norms ------------------------------------------------------------------------------------
@pytest.mark.parametrize("ord", [None, 0, 1, 2, 3, 0.5, -1, np.inf, -np.inf])
@pytest.mark.parametrize("axis", [0, -1])
def test_norms_of_vectors(ord: Any, axis: int, rng: np.random.Generator) -> None:
    a = rng.standard_normal((3, 4)) + 3
    for keepdims in (False, True):
        got = ts.norm(a, ord, axis, keepdims)
        assert_close(got, np.linalg.norm(a, ord, axis, keepdims), n=16)
    if ord != 0:
        assert_derivatives(lambda x: ts.norm(x, ord, axis), rng, a)


@pytest.mark.parametrize("ord", [None, "fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf])
@pytest.mark.parametrize("axis", [(0, 1), (2, 0), (-1, -2)])
def test_norms_of_matrices(ord: Any, axis: tuple, rng: np.random.Generator) -> None:
    a = rng.standard_normal((3, 4, 5))
    for keepdims in (False, True):
        got = ts.norm(a, ord, axis, keepdims)
        assert_close(got, np.linalg.norm(a, ord, axis, keepdims), n=50)
    assert_derivatives(lambda x: ts.norm(x, ord, axis), rng, a)


def test_norm_of_everything_and_at_zero(rng: np.random.Generator) -> None:
    a = rng.standard_normal((3, 4, 5))
    assert ts.norm(a).item() == pytest.approx(np.linalg.norm(a))
    assert ts.norm(a, keepdims=True).shape == (1, 1, 1)
    assert ts.grad(lambda x: ts.norm(x))(np.zeros(3)).tolist() == [0, 0, 0]
    assert ts.norm(np.zeros((0,))).item() == 0
    assert np.isnan(ts.norm(np.array([1.0, np.nan])).item())
    assert ts.norm(np.array([1.0, -np.inf])).item() == np.inf


def test_norms_that_do_not_exist() -> None:
    x = ts.ones((2, 2, 2))
    with pytest.raises(ArgumentError, match="norm of a vector with ord='nuc'"):
        ts.norm(x, "nuc")
    for ord in ("fro", True, None):
        if ord is not None:
            with pytest.raises(ArgumentError, match="norm of a vector"):
                ts.norm(x, ord, 0)
    with pytest.raises(ArgumentError, match="norm of a matrix with ord=3"):
        ts.norm(x, 3, (0, 1))
    with pytest.raises(AxisError):
        ts.norm(x, 1, 3)


# --- errors -----------------------------------------------------------------------------------
@pytest.mark.parametrize("fn", [ts.cholesky, ts.inv, ts.det, ts.slogdet, ts.eigh, ts.eig,
                                lambda a: ts.solve(a, ts.ones((3,))),
                                lambda a: ts.matrix_power(a, 2)])
def test_square_matrices_are_needed(fn: Callable) -> None:
    with pytest.raises(ShapeError, match=r"square matrix is needed, got \[2, 3\]"):
        fn(ts.ones((2, 3)))


@pytest.mark.parametrize("fn", [ts.svd, ts.qr, ts.lu, ts.cholesky])
def test_matrices_are_needed(fn: Callable) -> None:
    with pytest.raises(ShapeError, match="a matrix needs two axes"):
        fn(ts.ones((3,)))


def test_right_sides_must_fit() -> None:
    with pytest.raises(ShapeError, match="3 equations and a right side"):
        ts.solve(ts.eye(3), ts.ones((2, 3)))
    with pytest.raises(ArgumentError, match="matrix_power needs an integer"):
        ts.matrix_power(ts.eye(3), 0.5)


def test_errors_name_the_matrix_in_the_batch(rng: np.random.Generator) -> None:
    a = spd(rng, 2, 3, 4, 4)
    a[1, 2, 0] = 0
    a[1, 2, :, 0] = 0
    for fn in (ts.inv, lambda x: ts.solve(x, ts.ones((4,), ts.f64)), ts.triangular_solve):
        args = (a, np.ones(4)) if fn is ts.triangular_solve else (a,)
        with pytest.raises(NumericsError, match=r"at batch index \(1, 2\) is singular") as info:
            fn(*args)
        assert info.value.code == "E_SINGULAR"
    for run in (ts.cholesky, ts.jit(ts.cholesky)):
        with pytest.raises(NumericsError, match=r"index \(1, 2\) is not positive def") as info:
            run(ts.tensor(a))
        assert info.value.code == "E_NOT_POSITIVE"
    with pytest.raises(NumericsError, match="the matrix is not positive definite"):
        ts.cholesky(-np.eye(2))
    a[1, 2, 0, 0] = np.nan
    for fn in (ts.svd, ts.eigh, ts.eig):
        with pytest.raises(NumericsError, match=r"index \(1, 2\) holds a NaN"):
            fn(a)


def test_a_zero_on_the_diagonal_is_named() -> None:
    a = np.eye(4)
    a[2, 2] = 0
    with pytest.raises(NumericsError, match="its diagonal is 0 in row 2"):
        ts.triangular_solve(a, np.ones(4))
    got = ts.triangular_solve(a, np.ones(4), unit_diagonal=True)
    assert got.tolist() == [1, 1, 1, 1]


def test_eig_says_that_it_has_no_derivative(rng: np.random.Generator) -> None:
    a = rng.standard_normal((3, 3))
    with pytest.raises(GradError, match="no reverse-mode derivative: eigenvectors of a general"):
        ts.grad(lambda x: ts.sum(ts.eig(x)[0].real))(a)
    with pytest.raises(GradError, match="no forward-mode derivative: eigenvectors of a general"):
        ts.jvp(lambda x: ts.eig(x)[0].real, (a,), (a,))


@pytest.mark.parametrize("shape", [(0, 0), (0, 3, 3), (2, 0, 0)])
def test_nothing_gives_nothing(shape: tuple) -> None:
    a = np.zeros(shape)
    for fn in (ts.inv, ts.cholesky, ts.det, lambda x: ts.solve(x, x), ts.triangular_solve):
        args = (a, a) if fn is ts.triangular_solve else (a,)
        assert fn(*args).shape in (shape, shape[:-2])
    order, lower, upper = ts.lu(a)
    assert (order.shape, lower.shape, upper.shape) == (shape[:-1], shape, shape)
    assert ts.lu(np.zeros((0, 3)))[2].shape == (0, 3) and ts.lu(np.zeros((3, 0)))[0].shape == (3,)
    assert [x.shape for x in ts.svd(a)] == [shape, shape[:-1], shape]
    assert [x.shape for x in ts.eigh(a)] == [shape[:-1], shape]
