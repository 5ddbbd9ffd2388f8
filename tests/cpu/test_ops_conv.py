"""Convolution and pooling against sums written out as loops in f64, and against scipy."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import Tensor, f32, sym
from tessera.errors import ArgumentError, DTypeError, ShapeError
from tolerance import assert_close


def loops(x: np.ndarray, w: np.ndarray, stride: tuple, pads: tuple, dilation: tuple,
          groups: int) -> np.ndarray:
    """The definition: one sum per output element."""
    x = np.pad(x.astype(np.float64), [(0, 0), (0, 0), *pads])
    each, per = w.shape[0] // groups, w.shape[1]
    out = [(n - d * (k - 1) - 1) // s + 1
           for n, k, s, d in zip(x.shape[2:], w.shape[2:], stride, dilation, strict=True)]
    y = np.zeros((x.shape[0], w.shape[0], *out))
    for o in range(w.shape[0]):
        lane = x[:, (o // each) * per:(o // each + 1) * per]
        for place in itertools.product(*map(range, out)):
            where = tuple(slice(i * s, i * s + d * (k - 1) + 1, d)
                          for i, s, d, k in zip(place, stride, dilation, w.shape[2:], strict=True))
            y[(slice(None), o, *place)] = (lane[(..., *where)] * w[o]).sum((1, *range(2, x.ndim)))
    return y


CASES = [
    # x, w, stride, padding as given, pads, dilation, groups
    ((2, 3, 6, 7), (4, 3, 3, 3), (1, 1), 0, ((0, 0), (0, 0)), (1, 1), 1),
    ((2, 3, 6, 7), (4, 3, 3, 2), (2, 1), 1, ((1, 1), (1, 1)), (1, 1), 1),
    ((1, 4, 9, 8), (6, 2, 3, 3), (1, 2), (1, (0, 2)), ((1, 1), (0, 2)), (2, 1), 2),
    ((2, 4, 5, 5), (4, 1, 3, 3), (1, 1), "same", ((1, 1), (1, 1)), (1, 1), 4),
    ((1, 2, 5, 6), (3, 2, 2, 4), (1, 1), "same", ((0, 1), (1, 2)), (1, 1), 1),
    ((1, 2, 7, 6), (3, 2, 3, 3), (2, 3), "same", ((1, 1), (0, 0)), (1, 1), 1),
    ((3, 5, 4, 4), (2, 5, 1, 1), (1, 1), "valid", ((0, 0), (0, 0)), (1, 1), 1),
    ((2, 2, 3, 3), (2, 2, 3, 3), (1, 1), 0, ((0, 0), (0, 0)), (1, 1), 1),
    ((0, 2, 3, 3), (2, 2, 3, 3), (1, 1), 0, ((0, 0), (0, 0)), (1, 1), 1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_conv2d_is_its_definition(case: tuple, rng: np.random.Generator) -> None:
    xs, ws, stride, padding, pads, dilation, groups = case
    x, w = rng.standard_normal(xs), rng.standard_normal(ws)
    b = rng.standard_normal(ws[0])
    want = loops(x, w, stride, pads, dilation, groups)
    keys: dict[str, Any] = dict(stride=stride, padding=padding, dilation=dilation, groups=groups)
    assert_close(ts.conv2d(x, w, **keys), want, dtype="f64", n=50)
    got = ts.jit(lambda x, w, b: ts.conv2d(x, w, b, **keys))(x, w, b)
    assert_close(got, want + b[:, None, None], dtype="f64", n=50)
    if padding == "same":
        assert got.shape[2:] == tuple(-(-n // s) for n, s in zip(xs[2:], stride, strict=True))


def test_conv2d_is_scipys_correlation(rng: np.random.Generator) -> None:
    from scipy.signal import correlate2d  # takes a second, in each process that collects tests

    x, w = rng.standard_normal((12, 9)), rng.standard_normal((3, 5))
    for mode in ("valid", "same"):
        assert_close(ts.conv2d(x[None, None], w[None, None], padding=mode).array[0, 0],
                     correlate2d(x, w, mode), dtype="f64", n=15)


@pytest.mark.parametrize(("stride", "dilation", "groups"), [(1, 1, 1), (3, 2, 2)])
def test_conv1d(stride: int, dilation: int, groups: int, rng: np.random.Generator) -> None:
    x, w = rng.standard_normal((2, 4, 13)), rng.standard_normal((6, 4 // groups, 3))
    want = loops(x, w, (stride,), ((2, 2),), (dilation,), groups)
    got = ts.conv1d(x, w, stride=stride, padding=2, dilation=dilation, groups=groups)
    assert_close(got, want, dtype="f64", n=12)


@pytest.mark.parametrize(("stride", "groups"), [(1, 1), ((2, 1), 2)])
def test_conv_gradients_are_finite_differences(stride: Any, groups: int,
                                               rng: np.random.Generator) -> None:
    """The loss is linear in x, w and b each: central differences are exact up to rounding."""
    args = [rng.standard_normal((2, 4, 5, 6)), rng.standard_normal((4, 4 // groups, 3, 2)),
            rng.standard_normal(4)]
    conv = lambda x, w, b: ts.conv2d(x, w, b, stride=stride, padding=1, groups=groups)  # noqa: E731
    weights = rng.standard_normal(conv(*args).shape)
    loss = lambda *a: ts.sum(conv(*a) * weights)  # noqa: E731
    grads = ts.grad(lambda x, w, b: loss(x, w, b), argnums=(0, 1, 2))(*args)
    for i, g in enumerate(grads):
        t = rng.standard_normal(args[i].shape)
        ahead, behind = (float(loss(*args[:i], args[i] + s * t, *args[i + 1:])) for s in (1, -1))
        assert_close(np.sum(g.array * t), (ahead - behind) / 2, dtype="f64", n=2000, scale=100.0)


def test_conv_under_vmap(rng: np.random.Generator) -> None:
    x, w = rng.standard_normal((3, 2, 2, 5, 5)), rng.standard_normal((3, 4, 2, 3, 3))
    conv = lambda x, w: ts.conv2d(x, w, padding=1)  # noqa: E731
    for axes in ((0, 0), (0, None), (None, 0)):
        got = ts.vmap(conv, in_axes=axes)(*(v if a == 0 else v[0]
                                            for v, a in zip((x, w), axes, strict=True)))
        want = np.stack([conv(x[i if axes[0] == 0 else 0], w[i if axes[1] == 0 else 0]).array
                         for i in range(3)])
        assert_close(got, want, n=18)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "fp8_e4m3", "int8"])
def test_conv_computes_wide_and_rounds_once(dtype: str, rng: np.random.Generator) -> None:
    x = ts.cast(rng.integers(-4, 5, (1, 3, 5, 5)).astype(np.float32), dtype)
    w = ts.cast(rng.integers(-4, 5, (2, 3, 3, 3)).astype(np.float32), dtype)
    exact = loops(x.array.astype(np.float64), w.array.astype(np.float64), (1, 1), ((0, 0),) * 2,
                  (1, 1), 1)
    out = ts.conv2d(x, w)
    if dtype == "int8":
        assert out.dtype.name == "int32"
        np.testing.assert_array_equal(out, exact)
    else:
        np.testing.assert_array_equal(out.array, ts.cast(exact.astype(np.float32), dtype).array)


def test_conv_with_symbolic_extents() -> None:
    N, H = sym("N H")
    conv = ts.jit(lambda x, w: ts.conv2d(x, w, padding="same"))
    assert conv.infer(Tensor["N", 3, "H", "H", f32], Tensor[8, 3, 3, 3, f32]).shape == (N, 8, H, H)
    valid = ts.jit(lambda x, w: ts.conv2d(x, w))
    assert valid.infer(Tensor["N", 3, "H", 9, f32], Tensor[8, 3, 3, 3, f32]).shape \
        == (N, 8, H - 2, 7)


# --- transposed -------------------------------------------------------------------------------
@pytest.mark.parametrize(("stride", "padding", "extra", "groups"),
                         [(1, 0, 0, 1), (2, 1, 1, 2), ((2, 3), (0, 1), (1, 2), 1)])
def test_conv_transpose2d_is_the_adjoint(stride: Any, padding: Any, extra: Any, groups: int,
                                         rng: np.random.Generator) -> None:
    """<g, conv(x, w)> = <conv_transpose(g, w), x>, and the extents are those of x."""
    steps = stride if isinstance(stride, tuple) else (stride, stride)
    pads = padding if isinstance(padding, tuple) else (padding, padding)
    extras = extra if isinstance(extra, tuple) else (extra, extra)
    shape = [(4 - 1) * s - 2 * p + 3 + e for s, p, e in zip(steps, pads, extras, strict=True)]
    x, w = rng.standard_normal((2, 4, *shape)), rng.standard_normal((6, 4 // groups, 3, 3))
    y = ts.conv2d(x, w, stride=stride, padding=padding, groups=groups)
    g = rng.standard_normal(y.shape)
    back = ts.conv_transpose2d(g, w, stride=stride, padding=padding, output_padding=extra,
                               groups=groups)
    assert back.shape == x.shape
    assert_close(np.vdot(g, y), np.vdot(back, x), dtype="f64", n=2000, scale=100.0)
    bias = rng.standard_normal(4)
    assert_close(ts.conv_transpose2d(g, w, bias, stride=stride, padding=padding,
                                     output_padding=extra, groups=groups),
                 back.array + bias[:, None, None], n=50)


# --- pooling ----------------------------------------------------------------------------------
@pytest.mark.parametrize(("window", "stride", "padding"),
                         [(2, None, 0), ((3, 2), (1, 2), (1, 0)), (3, 2, "same")], ids=str)
def test_pooling(window: Any, stride: Any, padding: Any, rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 3, 7, 6)).astype(np.float32)
    size = window if isinstance(window, tuple) else (window, window)
    steps = size if stride is None else stride if isinstance(stride, tuple) else (stride, stride)
    pads = {"0": ((0, 0), (0, 0)), "(1, 0)": ((1, 1), (0, 0)), "same": ((1, 1), (0, 1))}
    for fn, reduce, fill in ((ts.max_pool2d, np.max, -np.inf), (ts.avg_pool2d, np.mean, 0.0)):
        full = np.pad(x.astype(np.float64), ((0, 0), (0, 0), *pads[str(padding)]),
                      constant_values=fill)
        view = np.lib.stride_tricks.sliding_window_view(full, size, (2, 3))
        want = reduce(view[:, :, :: steps[0], :: steps[1]], axis=(-2, -1))
        assert_close(fn(x, window, stride, padding), want, dtype="f32", n=9)


def test_max_pool_gradient_and_nan() -> None:
    x = np.arange(16.0).reshape(1, 1, 4, 4)
    x[0, 0, 0, 0] = 5.0  # ties with x[1, 1]
    g = ts.grad(lambda x: ts.sum(ts.max_pool2d(x, 2)))(x)
    want = np.zeros((4, 4))
    want[[1, 3, 3], [3, 1, 3]] = 1.0
    want[[0, 1], [0, 1]] = 0.5
    np.testing.assert_array_equal(g.array[0, 0], want)
    x[0, 0, 1, 0] = np.nan
    assert np.isnan(ts.max_pool2d(x, 2).array[0, 0, 0, 0])


# --- errors -----------------------------------------------------------------------------------
X, W = ts.zeros((1, 3, 5, 5)), ts.zeros((2, 3, 3, 3))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: ts.conv2d(X[0], W), ShapeError, r"\[N, C, H, W\] and filters of 4 axes"),
        (lambda: ts.conv1d(X, W), ShapeError, r"\[N, C, W\] and filters of 3 axes"),
        (lambda: ts.conv2d(X, W[:, :2]), ShapeError, "image has 3 channels, the filters .* take 2"),
        (lambda: ts.conv2d(X, W[:, :1], groups=3), ShapeError, "2 filters do not split into 3"),
        (lambda: ts.conv2d(X, W, groups=0), ArgumentError, "groups=0"),
        (lambda: ts.conv2d(X, W, stride=0), ArgumentError, "stride=0"),
        (lambda: ts.conv2d(X, W, stride=-1), ArgumentError, "stride=-1"),
        (lambda: ts.conv2d(X, W, stride=(1, 2, 3)), ArgumentError, "2 of them, one per"),
        (lambda: ts.conv2d(X, W, dilation=1.5), ArgumentError, "dilation=1.5"),
        (lambda: ts.conv2d(X, W, dilation=3), ShapeError, "spans 7 does not fit the extent 5"),
        (lambda: ts.conv2d(X, W, padding="full"), ArgumentError, "padding='full'"),
        (lambda: ts.conv2d(X, W, padding=-1), ArgumentError, "non-negative"),
        (lambda: ts.conv2d(X, W, padding=(1, 2, 3)), ArgumentError, r"padding=\(1, 2, 3\)"),
        (lambda: ts.conv2d(X, W, ts.zeros((3,))), ShapeError, "for each of the 2 filters"),
        (lambda: ts.conv_transpose2d(X, W), ShapeError, "the image has 3 channels"),
        (lambda: ts.conv_transpose2d(X, W.transpose((1, 0, 2, 3)), output_padding=1), ArgumentError,
         "below the stride"),
        (lambda: ts.max_pool2d(X[0], 2), ShapeError, r"images \[N, C, H, W\]"),
        (lambda: ts.avg_pool2d(ts.zeros((1, 1, 4, 4), "int64"), 2), DTypeError, "floating type"),
        (lambda: ts.max_pool2d(X > 0, 2), DTypeError, "of bools"),
        (lambda: ts.max_pool2d(X, 2, padding=2), ArgumentError, "without an element"),
        (lambda: ts.avg_pool2d(X, 0), ArgumentError, "window=0"),
    ],
)
def test_errors(call: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text) as err:
        call()
    assert re.search(r"\n  x: (f32|int64|bool_)\[", str(err.value)), "the operands are listed"
