"""Functions that are short in ops, under the names other libraries give them, against NumPy."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import scipy.special

import tessera as ts
from functions import Case, check_derivatives, check_values, check_vmap, each, shapes
from tessera.errors import ArgumentError, AxisError, DTypeError, ShapeError
from tolerance import assert_close

IDS = np.array([0, 2, 2, 0, 4])


def with_ids(shape: tuple, ids: np.ndarray = IDS) -> Any:
    return lambda rng: (rng.standard_normal(shape), ids)


def segmented(reduce: Any, empty: float) -> Any:
    def oracle(u, ids):
        rows = [u[ids % 5 == s] for s in range(5)]
        return np.stack([reduce(r, axis=0) if len(r) else np.full(u.shape[1:], empty)
                         for r in rows])

    return oracle


def batch_normed(x, g, b, m=None, v=None):
    m = x.mean((0, 2, 3)) if m is None else m
    v = x.var((0, 2, 3)) if v is None else v
    each = lambda a: a[:, None, None]  # noqa: E731
    return (x - each(m)) / np.sqrt(each(v) + 1e-5) * each(g) + each(b)


def group_normed(x, g, b):
    rows = x.reshape(2, 3, 2, 5)
    y = (rows - rows.mean((2, 3), keepdims=True)) / np.sqrt(rows.var((2, 3), keepdims=True) + 1e-5)
    return y.reshape(x.shape) * g[:, None] + b[:, None]


def put(x, ids, v, add=False):
    y = x.copy()
    (np.add.at if add else lambda y, i, v: y.__setitem__(i, v))(y, ids, v)
    return y


def put_along(x, ids, v):
    y = x.copy()
    for i in np.ndindex(ids.shape):
        y[i[0], ids[i], i[2]] += v[i]
    return y


def lcse(x):
    return np.stack([scipy.special.logsumexp(x[..., :i + 1], axis=-1)
                     for i in range(x.shape[-1])], -1)


ROWS, COLUMNS = np.array([[0], [2]]), np.array([1, 3, -1])
ALONG = np.array([[[0, 1], [3, 1]], [[2, 2], [2, 0]]])

CASES = {
    "log2": Case(ts.log2, np.log2, shapes((3, 4), low=0.1), order=2, scale=1e-2),
    "log10": Case(ts.log10, np.log10, shapes((3, 4), low=0.1), order=2, scale=1e-2),
    "exp2": Case(ts.exp2, np.exp2, shapes((3, 4)), order=2),
    "reciprocal": Case(ts.reciprocal, lambda x: 1 / x, shapes((3, 4), low=0.5), order=2),
    "hypot": Case(ts.hypot, np.hypot, shapes((3, 4), (4,)), order=2),
    "lerp": Case(ts.lerp, lambda a, b, w: a + w * (b - a), shapes((3, 4), (4,), (3, 1)), scale=3),
    "cross": Case(ts.cross, np.cross, shapes((2, 3), (3,)), n=2, scale=1),
    "cross of an axis": Case(lambda a, b: ts.cross(a, b, axis=0),
                             lambda a, b: np.cross(a, b, axis=0), shapes((3, 2), (3, 2)), scale=1),
    "diff": Case(ts.diff, np.diff, shapes((2, 5)), scale=1),
    "diff twice": Case(lambda x: ts.diff(x, 2, 0), lambda x: np.diff(x, 2, 0), shapes((5, 2)),
                       scale=3),
    "kron": Case(ts.kron, np.kron, shapes((2, 3), (3, 2))),
    "kron of unlike ranks": Case(ts.kron, np.kron, shapes((2,), (2, 3, 2))),
    "chunk": Case(lambda x: ts.chunk(x, 3, 1), lambda x: (x[:, :3], x[:, 3:6], x[:, 6:]),
                  shapes((2, 7))),
    "chunk into fewer": Case(lambda x: ts.chunk(x, 4), lambda x: (x[:2], x[2:4], x[4:]),
                             shapes((5, 2))),
    "hstack": Case(lambda a, b: ts.hstack([a, b]), lambda a, b: np.hstack([a, b]),
                   shapes((2, 3), (2, 1))),
    "hstack of lines": Case(lambda a, b: ts.hstack([a, b]), lambda a, b: np.hstack([a, b]),
                            shapes((2,), (3,))),
    "vstack": Case(lambda a, b: ts.vstack([a, b]), lambda a, b: np.vstack([a, b]),
                   shapes((3,), (3,))),
    "meshgrid": Case(ts.meshgrid, lambda *a: tuple(np.meshgrid(*a)), shapes((2,), (3,), (4,))),
    "meshgrid ij": Case(lambda *a: ts.meshgrid(*a, indexing="ij"),
                        lambda *a: tuple(np.meshgrid(*a, indexing="ij")), shapes((2,), (3,))),
    "linear": Case(ts.linear, lambda x, w, b: x @ w.T + b, shapes((2, 3, 4), (5, 4), (5,)), n=5),
    "linear without bias": Case(ts.linear, lambda x, w: x @ w.T, shapes((4,), (5, 4)), n=5),
    "batch_norm": Case(ts.batch_norm, batch_normed, shapes((3, 2, 2, 3), (2,), (2,)), n=18),
    "batch_norm with statistics": Case(
        lambda x, g, b, m, v: ts.batch_norm(x, g, b, mean=m, var=v), batch_normed,
        shapes((3, 2, 2, 3), (2,), (2,), (2,), (2,), low=0.5), n=9),
    "batch_norm along the last": Case(
        lambda x: ts.batch_norm(x, axis=-1),
        lambda x: (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5), shapes((6, 3)), n=18),
    "group_norm": Case(lambda x, g, b: ts.group_norm(x, 3, g, b), group_normed,
                       shapes((2, 6, 5), (6,), (6,)), n=10),
    "cummin": Case(lambda x: ts.cummin(x, -1), lambda x: np.minimum.accumulate(x, -1),
                   shapes((3, 6))),
    "logcumsumexp": Case(lambda x: ts.logcumsumexp(x, -1), lcse, shapes((3, 6)), order=2, scale=1),
    "segment_max": Case(lambda u, i: ts.segment_max(u, i, 5), segmented(np.max, -np.inf),
                        with_ids((5, 3)), order=0),
    "segment_max, full": Case(lambda u, i: ts.segment_max(u, i, 2), lambda u, i: np.stack(
        [u[i == 0].max(0), u[i == 1].max(0)]), with_ids((4, 3), np.array([1, 0, 0, 1]))),
    "segment_min, full": Case(lambda u, i: ts.segment_min(u, i, 2), lambda u, i: np.stack(
        [u[i == 0].min(0), u[i == 1].min(0)]), with_ids((4, 3), np.array([1, 0, 0, 1]))),
    "segment_mean": Case(lambda u, i: ts.segment_mean(u, i, 5), segmented(np.mean, 0.0),
                         with_ids((5, 3)), n=3),
    "index_put": Case(lambda x, v: ts.index_put(x, (ROWS, COLUMNS), v),
                      lambda x, v: put(x, (ROWS, COLUMNS), v), shapes((4, 5, 2), (2, 3, 2))),
    "index_put of one axis": Case(lambda x, v: ts.index_put(x, COLUMNS, v),
                                  lambda x, v: put(x, (COLUMNS,), v), shapes((5, 2), (2,))),
    "index_put, added": Case(
        lambda x, v: ts.index_put(x, ([0, 0, 1], [1, 1, 0]), v, accumulate=True),
        lambda x, v: put(x, ([0, 0, 1], [1, 1, 0]), v, add=True), shapes((2, 3), (3,)), scale=1),
    "put_along_axis": Case(
        lambda x, v: ts.put_along_axis(x, np.array([[3, 0], [1, 2]]), v, 1),
        lambda x, v: (y := x.copy(), np.put_along_axis(y, np.array([[3, 0], [1, 2]]), v, 1))[0],
        shapes((2, 4), (2, 2))),
    "put_along_axis, added": Case(lambda x, v: ts.put_along_axis(x, ALONG, v, 1, "add"),
                                  lambda x, v: put_along(x, ALONG, v), shapes((2, 4, 2), (2, 2, 2)),
                                  scale=1),
}


@each(CASES)
def test_values(case: Case, rng: np.random.Generator) -> None:
    check_values(case, rng)


@each(CASES)
def test_derivatives(case: Case, rng: np.random.Generator) -> None:
    check_derivatives(case, rng)


@each(CASES)
def test_vmap(case: Case, rng: np.random.Generator) -> None:
    check_vmap(case, rng)


# --- edges ------------------------------------------------------------------------------------
def compiled(fn: Any) -> Any:
    """In extents that are worth a compiled loop."""
    def run(*xs: Any) -> Any:
        with ts.config.scope(loop_min_elements=1):
            return ts.jit(fn)(*xs)

    return run


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_hypot_at_the_edges(dtype: Any, rng: np.random.Generator) -> None:
    big, tiny = np.finfo(dtype).max / 2, np.finfo(dtype).tiny
    a = np.array([0, 0, np.inf, np.nan, np.nan, big, tiny, 3, -0.0, big], dtype)
    b = np.array([0, -4, np.nan, -np.inf, 1, big, tiny, 4, 0.0, 1], dtype)
    with np.errstate(all="ignore"):
        want = np.hypot(a.astype(np.longdouble), b.astype(np.longdouble)).astype(dtype)
    for run in (lambda f: f, compiled):
        np.testing.assert_allclose(run(ts.hypot)(a, b), want, rtol=4 * np.finfo(dtype).eps)
    g = ts.grad(lambda x, y: ts.hypot(x, y), argnums=(0, 1))(dtype(0), dtype(0))
    assert [v.item() for v in g] == [0.0, 0.0]
    assert ts.grad(lambda x: ts.hypot(x, dtype(0)))(dtype(-2)).item() == -1.0
    x = rng.standard_normal((2, 4000)).astype(dtype)
    assert_close(compiled(ts.hypot)(*x), np.hypot(*x.astype(np.longdouble)), dtype=dtype)


def test_bases_at_exact_powers() -> None:
    for dtype in (np.float32, np.float64):
        e = np.arange(-120, 121, dtype=dtype)
        for run in (lambda f: f, compiled):
            np.testing.assert_array_equal(run(ts.exp2)(e), 2.0 ** e)
            np.testing.assert_array_equal(run(ts.log2)(2.0 ** e), e)
    edge = np.float32([0, -1, np.inf, np.nan])
    for fn in (ts.log2, ts.log10):
        for run in (lambda f: f, compiled):
            np.testing.assert_array_equal(run(fn)(edge), [-np.inf, np.nan, np.inf, np.nan])


def test_lerp_meets_its_ends() -> None:
    a, b = np.float32([1e8, 0.1, -3]), np.float32([1, 0.7, 1e-8])
    np.testing.assert_array_equal(ts.lerp(a, b, 0.0), a)
    np.testing.assert_array_equal(ts.lerp(a, b, 1.0), b)


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "f16", "fp8_e5m2"])
def test_nan_to_num(dtype: str) -> None:
    x = ts.tensor(np.array([np.nan, np.inf, -np.inf, 1.5, 0.0]), dtype)
    most = float(x.dtype.max)
    for run in (lambda f: f, ts.jit):
        assert run(ts.nan_to_num)(x).tolist() == [0.0, most, -most, 1.5, 0.0]
        other = run(lambda x: ts.nan_to_num(x, nan=2.0, posinf=3.0, neginf=-4.0))(x)
        assert other.tolist() == [2.0, 3.0, -4.0, 1.5, 0.0] and other.type == x.type
    g = ts.grad(lambda x: ts.sum(ts.nan_to_num(x) * 2.0))(ts.cast(x, "f32"))
    assert g.tolist() == [0.0, 0.0, 0.0, 2.0, 2.0]
    assert ts.nan_to_num(ts.arange(3)).type == "int64"


def test_isclose(rng: np.random.Generator) -> None:
    b = rng.standard_normal(400)
    a = b + rng.choice([0, 1e-9, 1e-5, 1e-4], 400) * b
    edge = np.array([np.inf, -np.inf, np.nan, 1.0, 1e300])
    a, b = np.concatenate([a, np.repeat(edge, 5)]), np.concatenate([b, np.tile(edge, 5)])
    for equal_nan in (False, True):
        for rtol, atol in ((1e-5, 1e-8), (0.0, 1e-6), (1e-4, 0.0)):
            want = np.isclose(a, b, rtol, atol, equal_nan)
            close = functools.partial(ts.isclose, rtol=rtol, atol=atol, equal_nan=equal_nan)
            for run in (close, ts.jit(close)):
                np.testing.assert_array_equal(run(a, b), want)
            assert ts.allclose(a, b, rtol, atol, equal_nan).item() == want.all()
    assert ts.isclose(ts.tensor([3, 2**60]), ts.tensor([3, 2**60 + 1])).tolist() == [True, True]
    assert not ts.isclose(ts.tensor([3]), 4).item() and ts.allclose(2.0, 2.0).item()


def test_running_minima_of_integers_and_nan() -> None:
    x = np.array([[3, 1, 1, -2], [-128, 5, -128, 127]], np.int8)
    np.testing.assert_array_equal(ts.cummin(x, 1), np.minimum.accumulate(x, 1))
    nan = np.float32([2, np.nan, 1])
    np.testing.assert_array_equal(ts.cummin(nan), [2, np.nan, np.nan])
    assert ts.grad(lambda x: ts.sum(ts.cummin(x)))(np.float32([2, 1, 1])).tolist() == [1, 2, 0]


def test_logcumsumexp_without_overflow(rng: np.random.Generator) -> None:
    x = np.float32([-np.inf, -np.inf, 1000, 1001, -1000, np.inf])
    want = np.logaddexp.accumulate(x.astype(np.float64))
    for run in (lambda f: f, ts.jit):
        assert_close(run(ts.logcumsumexp)(x), want, dtype="f32")
    g = ts.grad(lambda x: ts.sum(ts.logcumsumexp(x)[2:]))(x[:5])
    p = 1 / (1 + np.exp(1.0))
    step = np.spacing(np.float32(1001))  # y is rounded to it, and the slope is exp(x - y)
    np.testing.assert_allclose(g, [0, 0, 1 + 2 * p, 2 * (1 - p), 0], rtol=step)
    long = rng.standard_normal(20_000).astype(np.float32)
    assert_close(ts.logcumsumexp(long), np.logaddexp.accumulate(long.astype(np.float64)),
                 dtype="f32")
    assert ts.logcumsumexp(np.zeros((2, 0), np.float32), 1).shape == (2, 0)


def test_segments_at_the_edges() -> None:
    u = ts.tensor([3, -1, 7], "int32")
    assert ts.segment_max(u, [0, 0, 2], 3).tolist() == [3, -(2**31), 7]
    assert ts.segment_min(u, [0, 0, 2], 3).tolist() == [-1, 2**31 - 1, 7]
    ties = np.float32([1, 1, 0, np.nan])
    g = ts.grad(lambda u: ts.segment_max(u, [0, 0, 0], 1)[0])(ties[:3])
    assert g.tolist() == [0.5, 0.5, 0.0]
    assert np.isnan(ts.segment_max(ties, [0, 0, 0, 1], 2)[1].item())
    assert ts.segment_mean(u, [1, 1, 1], 2).tolist() == [0.0, 3.0]
    with pytest.raises(AxisError):
        ts.segment_max(u, [0, 0, 3], 3)
    with pytest.raises(DTypeError, match="segment_max of bools"):
        ts.segment_max(u > 0, [0, 0, 1], 2)


def test_types_of_results() -> None:
    ints = ts.arange(6).reshape(2, 3)
    assert ts.diff(ints).type == ts.kron(ints, ints).type == ts.cross(ints, ints).type == "int64"
    assert ts.diff(ints > 2, axis=0).tolist() == [[True, True, True]]
    assert ts.linear(ts.ones((2, 3), "bf16"), ts.ones((4, 3), "bf16"), ts.ones(4)).type == "bf16"
    assert ts.batch_norm(ts.ones((2, 3), "bf16")).type == "bf16"
    assert ts.reciprocal(ts.tensor([2])).tolist() == [0.5]
    rounded = ts.index_put(ts.zeros(3, "bf16"), [1], 0.1, accumulate=True)
    assert rounded.type == "bf16" and rounded[1].item() == ts.tensor(0.1, "bf16").item()
    assert [p.shape for p in ts.chunk(ts.zeros((0, 2)), 3)] == [(0, 2)]


X = ts.ones((2, 4, 3))


@pytest.mark.parametrize(("call", "kind", "words"), [
    (lambda: ts.cross(X[..., :2], X), ShapeError, "3 elements along axis -1"),
    (lambda: ts.chunk(X, 0), ArgumentError, "chunks=0"),
    (lambda: ts.hstack([]), ArgumentError, "hstack needs a non-empty list"),
    (lambda: ts.vstack(X), ArgumentError, "vstack needs a non-empty list"),
    (lambda: ts.meshgrid(X), ShapeError, "meshgrid takes lines"),
    (lambda: ts.meshgrid(X[0, 0], indexing="yx"), ArgumentError, "indexing 'yx'"),
    (lambda: ts.diff(X, -1), ArgumentError, "n=-1 times"),
    (lambda: ts.linear(X, ts.ones((3, 5))), ShapeError, r"takes w \[I, O\]"),
    (lambda: ts.linear(X, ts.ones((5, 3)), ts.ones(3)), ShapeError, "the bias has shape"),
    (lambda: ts.batch_norm(X, mean=ts.ones(4)), ArgumentError, "both mean and var"),
    (lambda: ts.batch_norm(X, ts.ones(3)), ShapeError, r"gamma has shape \[3\]"),
    (lambda: ts.batch_norm(X[0, 0]), ShapeError, r"takes \[N, C, ...\]"),
    (lambda: ts.group_norm(X, 3), ShapeError, "a divisor of C"),
    (lambda: ts.index_put(X, (ROWS,) * 4, 0.0), ShapeError, "4 index tensors for the 3 axes"),
    (lambda: ts.index_put(X, ([9],), 0.0), AxisError, "index 9"),
    (lambda: ts.put_along_axis(X, [[0]], 0.0, 1), ShapeError, "do not fit"),
    (lambda: ts.put_along_axis(X[0], [[0, 0, 0]], 0.0, 0, "mul"), ArgumentError, "mode 'mul'"),
])
def test_errors(call: Any, kind: type, words: str) -> None:
    with pytest.raises(kind, match=words):
        call()


# --- interpolate ------------------------------------------------------------------------------
def lines(x, m, step, align):
    """Along the last axis, point by point."""
    n, out = x.shape[-1], []
    for i in range(m):
        at = i * (n - 1) / max(m - 1, 1) if align else max((i + 0.5) * step - 0.5, 0)
        low = min(int(at), n - 1)
        w = min(at - low, 1.0)
        out.append((1 - w) * x[..., low] + w * x[..., min(low + 1, n - 1)])
    return np.stack(out, -1)


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("size", [(3, 4), (6, 9), (1, 2), (3, 1), (2, 7)])
def test_bilinear(size: tuple, align: bool, rng: np.random.Generator) -> None:
    def oracle(x):
        y = lines(x, size[1], 4 / size[1], align)
        return np.swapaxes(lines(np.swapaxes(y, 2, 3), size[0], 3 / size[0], align), 2, 3)

    case = Case(lambda x: ts.interpolate(x, size, mode="bilinear", align_corners=align), oracle,
                shapes((2, 2, 3, 4)), n=4, scale=1)
    check_values(case, rng)
    check_derivatives(case, rng)
    check_vmap(case, rng)


def test_factors_nearest_and_other_ranks(rng: np.random.Generator) -> None:
    x = rng.standard_normal((1, 2, 5))
    assert_close(ts.interpolate(x, scale_factor=1.7, mode="linear"), lines(x, 8, 1 / 1.7, False),
                 n=4)
    want = x[..., [int(i / 1.7) for i in range(8)]]
    np.testing.assert_array_equal(ts.interpolate(x, scale_factor=1.7), want)
    np.testing.assert_array_equal(ts.interpolate(x, 3), x[..., [0, 1, 3]])
    image = rng.integers(0, 9, (1, 1, 2, 3))
    twice = ts.interpolate(image, scale_factor=(2, 2))
    assert twice.type == "int64"
    np.testing.assert_array_equal(twice, image.repeat(2, 2).repeat(2, 3))
    ramp = np.broadcast_to(np.arange(4.0), (1, 1, 2, 3, 4))
    y = ts.interpolate(ramp, (2, 3, 7), mode="trilinear", align_corners=True)
    np.testing.assert_allclose(y[0, 0, 1, 2], np.arange(7) / 2, rtol=1e-12)
    ts.gradcheck(lambda x: ts.interpolate(x, 7), (x,))


@pytest.mark.parametrize(("call", "words"), [
    (lambda x: ts.interpolate(x[0], 3), r"takes \[N, C, \*spatial\]"),
    (lambda x: ts.interpolate(x), "one of them"),
    (lambda x: ts.interpolate(x, 3, 2.0), "one of them"),
    (lambda x: ts.interpolate(x, 3, mode="bilinear"), 'mode \'bilinear\' for 1 spatial axes'),
    (lambda x: ts.interpolate(x, 3, mode="bicubic"), 'mode \'bicubic\''),
    (lambda x: ts.interpolate(x, 3, align_corners=True), "says nothing for nearest"),
    (lambda x: ts.interpolate(x, (3, 3)), r"size=\(3, 3\)"),
    (lambda x: ts.interpolate(x, 0), "size=0"),
    (lambda x: ts.interpolate(x, 2.5), "size=2.5"),
    (lambda x: ts.interpolate(x, scale_factor=0.1), "leaves"),
])
def test_interpolations_that_are_refused(call: Any, words: str) -> None:
    with pytest.raises((ShapeError, ArgumentError), match=words):
        call(ts.ones((1, 2, 4)))
