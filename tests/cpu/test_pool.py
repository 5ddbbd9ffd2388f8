"""Options of pooling against windows that are collected one by one."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

import tessera as ts
from cpu.test_lowering_emulated import emulate
from emulator import compare
from tessera.errors import ShapeError
from tessera.graph import functions as F
from tessera.graph.cpu import windows as compiled_windows
from tessera.graph.cuda import CudaProgram
from tessera.kernels.windows import (
    LANES,
    gradient_axis,
    reduce_windows,
    reduced_axis,
    window_form,
    window_max_gradient,
)
from tolerance import assert_close


def extents(n: int, k: int, s: int, p: int, d: int, ceil_mode: bool) -> int:
    """How many windows: PyTorch's formula, with its rule that none begins behind the image."""
    room = (n + 2 * p - d * (k - 1) - 1) / s
    count = (math.ceil(room) if ceil_mode else math.floor(room)) + 1
    return count - 1 if ceil_mode and (count - 1) * s >= n + p else count


def windows(x: np.ndarray, k: tuple, s: tuple, p: tuple, d: tuple, ceil_mode: bool):
    """Per place: (elements inside x [n, N, C], how many positions lie within x and its padding)"""
    H, W = x.shape[2:]
    places = [range(extents(n, *each, ceil_mode)) for n, *each in
              zip((H, W), k, s, p, d, strict=True)]
    for at in itertools.product(*places):
        inside, positions = [], 0
        for j in itertools.product(range(k[0]), range(k[1])):
            r, c = (at[i] * s[i] - p[i] + j[i] * d[i] for i in (0, 1))
            positions += r < H + p[0] and c < W + p[1]
            if 0 <= r < H and 0 <= c < W:
                inside.append(x[:, :, r, c])
        yield at, np.array(inside), positions


def pooled(x, kind, k, s, p, d, ceil_mode, include=True):
    out: dict[tuple, Any] = {}
    for at, inside, positions in windows(x, k, s, p, d, ceil_mode):
        out[at] = inside.max(0) if kind == "max" else \
            inside.sum(0) / (positions if include else len(inside))
    rows, columns = (max(a[i] for a in out) + 1 for i in (0, 1))
    return np.stack([np.stack([out[r, c] for c in range(columns)], -1) for r in range(rows)], -2)


OPTIONS = [
    ((2, 2), (2, 2), (0, 0), (1, 1)), ((3, 2), (2, 3), (1, 1), (1, 1)),
    ((3, 3), (2, 2), (1, 0), (2, 1)), ((2, 3), (3, 2), (0, 1), (1, 2)),
    ((1, 1), (3, 3), (0, 0), (1, 1)),
]
ON_A_GPU = [(*o, dtype) for o, dtype in zip(
    [*OPTIONS, ((3, 3), (1, 1), (1, 1), (1, 1))], ("f32", "bf16") * 3, strict=True)]


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize(("k", "s", "p", "d"), OPTIONS)
def test_max_pool(k, s, p, d, ceil_mode, rng: np.random.Generator) -> None:
    for shape in ((2, 3, 7, 8), (1, 1, 6, 5)):
        x = rng.standard_normal(shape).astype(np.float32)
        pool = lambda x: ts.max_pool2d(x, k, s, p, d, ceil_mode)  # noqa: E731
        for run in (pool, ts.jit(pool)):
            np.testing.assert_array_equal(run(x), pooled(x, "max", k, s, p, d, ceil_mode))
        ts.gradcheck(pool, (x,))


@pytest.mark.parametrize(("k", "s", "p", "d", "dtype", "least"), [
    (*OPTIONS[0], "f32", 0), (*OPTIONS[2], "f64", 0), (*OPTIONS[2], "f32", math.inf),
    ((7, 7), (1, 1), (3, 3), (1, 1), "f32", 0)])
def test_gradient_of_max_pool(k, s, p, d, dtype, least, monkeypatch, rng) -> None:
    """Elements that tie share it; all of a window with a NaN have one. In a compiled loop and
    without."""
    monkeypatch.setattr(compiled_windows, "LEAST", least)
    x = rng.integers(-3, 3, (2, 2, 9, 11)).astype(np.float64)
    x[0, 0, 3, 3], x[1, 0, 2:, 5:] = np.nan, np.inf
    places = tuple(extents(n, *each, False) for n, *each in zip((9, 11), k, s, p, d, strict=True))
    g, want = rng.standard_normal((2, 2, *places)), np.zeros_like(x)
    for at in np.ndindex(2, 2, *places):
        rows, columns = ([i for i in range(a * s - p, a * s - p + k * d, d) if 0 <= i < n]
                         for a, n, k, s, p, d in zip(at[2:], (9, 11), k, s, p, d, strict=True))
        part = x[at[:2]][np.ix_(rows, columns)]
        ties = part == part.max()
        want[at[:2]][np.ix_(rows, columns)] += np.nan if np.isnan(part).any() else \
            np.where(ties, g[at] / ties.sum(), 0.0)
    given = ts.tensor(x, dtype), ts.tensor(g, dtype)
    pulled = lambda x, g: ts.vjp(lambda x: ts.max_pool2d(x, k, s, p, d), x)[1](g)  # noqa: E731
    for run in (pulled, ts.jit(pulled)):
        assert_close(run(*given), want, dtype, n=49, scale=np.abs(g).max() * 49)


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize(("k", "s", "p"), [o[:3] for o in OPTIONS if o[3] == (1, 1)])
def test_avg_pool(k, s, p, ceil_mode, include, rng: np.random.Generator) -> None:
    for shape in ((2, 3, 7, 8), (1, 1, 6, 5)):
        x = rng.standard_normal(shape).astype(np.float32)
        pool = lambda x: ts.avg_pool2d(x, k, s, p, ceil_mode, include)  # noqa: E731
        want = pooled(x.astype(np.float64), "avg", k, s, p, (1, 1), ceil_mode, include)
        for run in (pool, ts.jit(pool)):
            assert_close(run(x), want, n=9)
        ts.gradcheck(pool, (x,))


@pytest.mark.parametrize(("k", "s", "p", "d", "dtype"), ON_A_GPU)
def test_pools_of_a_gpu_read_windows_where_they_lie(k, s, p, d, dtype, rng) -> None:
    x = ts.cast(ts.tensor(rng.standard_normal((2, 3, 7, 8)).astype(np.float32)), dtype)
    fns = [lambda x: ts.max_pool2d(x, k, s, p, d, True), lambda x: ts.avg_pool2d(x, k, s, p)]
    for fn, spread in zip(fns, (d, (1, 1)), strict=True):
        program, got = CudaProgram(ts.jit(fn).graph(x), "sm_90a"), fn(x)
        shared = any(n * (j - 1) >= i for i, j, n in zip(s, k, spread, strict=True))
        kinds = ["launch" if shared else "elements"] + ["loop"] * (
            dtype == "f32" and fn is fns[1])  # a mean of f32 is divided behind the sum
        assert [g.kind for g in program.plan.groups] == kinds
        assert_close(program.run([x])[0], got, dtype, n=9)
        if fn is fns[0]:
            np.testing.assert_array_equal(program.run([x])[0], got.array)


@pytest.mark.parametrize(("k", "s", "p", "d", "dtype"), ON_A_GPU)
def test_gradients_of_pools_of_a_gpu_are_one_kernel(k, s, p, d, dtype, rng) -> None:
    """All bits as on a CPU: elements that tie, NaN, and windows whose largest is the padding's."""
    a = rng.integers(-3, 3, (2, 3, 7, 8)).astype(np.float32)
    a[0, 0, 3, 3], a[0, 1, :4], a[1, 0, 2:, 5:] = np.nan, -np.inf, np.inf
    x = ts.tensor(a, dtype)
    pools = [lambda x: ts.max_pool2d(x, k, s, p, d, True), lambda x: ts.max_pool2d(x, k, s, p, d)]
    pools += [lambda x: ts.avg_pool2d(x, k, s, p)] * (d == (1, 1))
    for pool in pools:
        g = ts.tensor(rng.standard_normal(pool(x).shape).astype(np.float32), dtype)
        run = ts.jit(lambda x, g, pool=pool: ts.vjp(pool, x)[1](g))
        program = CudaProgram(run.graph(x, g), "sm_90a")
        assert len(program.plan.groups) == 1
        got, want = (np.asarray(y, np.float32) for y in (program.run([x, g])[0], run(x, g).array))
        np.testing.assert_array_equal(got, want)
        there = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(got[there]), np.signbit(want[there]))


def test_gradients_of_large_windows_of_a_gpu(rng) -> None:
    """In smaller ops; the largest elements are found by one kernel, which reads windows."""
    x = ts.tensor(rng.integers(-3, 3, (1, 2, 7, 8)).astype(np.float32))
    run = ts.jit(ts.grad(lambda x: ts.sum(ts.max_pool2d(x, 5, 1, 2) ** 2)))
    program = CudaProgram(run.graph(x), "sm_90a")
    assert [s.op for g in program.plan.groups for s in g.steps].count("kernel") == 1
    np.testing.assert_array_equal(program.run([x])[0], run(x))


@pytest.mark.parametrize(("k", "s", "p", "dtype"), [(3, 2, 1, "bf16"), (2, 2, 0, "f32")])
def test_pools_emulated(k, s, p, dtype, rng) -> None:
    """The kernels in machine instructions: a patch that the image cuts off, windows that are none,
    NaN and infinities."""
    a = rng.integers(-3, 3, (2, 3, 5)).astype(np.float32)
    a[0, 1, 3], a[1, :, 3:] = np.nan, -np.inf
    places = tuple(extents(n, k, s, p, 1, False) for n in a.shape[1:])
    g = ts.tensor(rng.standard_normal((2, *places)).astype(np.float32), dtype)
    axes = (gradient_axis(n, o, k, s, 1, p) for n, o in zip(a.shape[1:], places, strict=True))
    form = window_form((gradient_axis(1, 1, 1, 1, 1, 0), *axes), True)
    count = 2 * math.prod(axis.patches for axis in form.axes)
    compare(window_max_gradient, ts.tensor(a.ravel(), dtype), F.flatten(g),
            ts.zeros((a.size,), dtype), count, form, lanes=LANES, target="sm_90a", lockstep=False)
    axes = (reduced_axis(n, o, k, s, 1, p) for n, o in zip(a.shape[1:], places, strict=True))
    form = window_form((reduced_axis(1, 1, 1, 1, 1, 0), *axes))
    compare(reduce_windows, ts.tensor(a.ravel(), dtype), ts.zeros((math.prod(g.shape),), dtype),
            2 * math.prod(axis.patches for axis in form.axes), form, "max", 1.0, lanes=LANES,
            target="sm_90a", lockstep=False)
    spread = lambda g: ts.vjp(lambda x: ts.avg_pool2d(x, k, s, p), x)[1](g)  # noqa: E731
    x = ts.zeros((1, *a.shape), dtype)
    assert emulate(spread, F.reshape(g, (1, *g.shape)), target="sm_90a") == 1


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "int4"])
def test_max_pool_of_integers(dtype: str, rng: np.random.Generator) -> None:
    t = ts.as_type(dtype).dtype
    a = rng.integers(t.min, min(t.max, 2**40) + 1, (2, 1, 5, 5))
    a[0, 0, :2, :2] = t.min  # the padding must not be larger
    x = ts.tensor(a, dtype)
    y = ts.max_pool2d(x, 2, 2, 1)
    assert y.type == x.type
    want = pooled(a.astype(np.float64), "max", (2, 2), (2, 2), (1, 1), (1, 1), False)
    np.testing.assert_array_equal(np.asarray(y.tolist()), want)


def test_pools_under_vmap(rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 2, 1, 5, 6))
    for pool in (lambda x: ts.max_pool2d(x, 2, 2, 1, 2, True),
                 lambda x: ts.avg_pool2d(x, 2, 2, 1, True, False)):
        assert_close(ts.vmap(pool)(x), np.stack([pool(v).numpy() for v in x]), n=4)


def test_ceil_mode_needs_numbers() -> None:
    pool = ts.jit(lambda x: ts.max_pool2d(x, 2, ceil_mode=True))
    with pytest.raises(ShapeError, match="ceil_mode needs a known extent, got H"):
        pool.infer(ts.Tensor["N", 3, "H", 8, ts.f32])
    with pytest.raises(ts.ArgumentError, match="dilation=0"):
        ts.max_pool2d(ts.zeros((1, 1, 4, 4)), 2, dilation=0)


@pytest.mark.parametrize("kind", ["shuffled", "repeated"])
def test_merged_axes_are_gathered(kind: str, rng: np.random.Generator) -> None:
    """Where short runs stand in turn, in one kernel and no copies."""
    if kind == "shuffled":
        x = ts.tensor(rng.standard_normal((2, 3, 2, 3, 5, 7)).astype(np.float32))
        fn = lambda x: ts.reshape(ts.transpose(x, (0, 1, 4, 2, 5, 3)), (2, 3, 10, 21))  # noqa: E731
        want = np.asarray(x).transpose(0, 1, 4, 2, 5, 3).reshape(2, 3, 10, 21)
    else:
        x = ts.tensor(rng.standard_normal((4, 1, 6)).astype(np.float32))
        fn = lambda x: ts.reshape(ts.transpose(ts.broadcast_to(x, (4, 3, 6)), (0, 2, 1)),  # noqa: E731
                                  (4, 18))
        want = np.repeat(np.asarray(x)[:, 0], 3, axis=-1)
    program = CudaProgram(ts.jit(fn).graph(x), "sm_90a")
    groups = [(g.kind, g.steps[0].op) for g in program.plan.groups]
    assert groups.count(("elements", "moved")) == 1
    assert "note: a copy, because neighbours do not stay neighbours" in str(program.plan)
    assert "move" not in {g for g, _ in groups}
    assert np.array_equal(np.asarray(program.run([x])[0]), want)


@pytest.mark.parametrize("k", [7, (1, 41), (5, 11), 3])
def test_a_mean_of_windows_and_its_gradient_are_divided_once(k, rng) -> None:
    """Times 1 / n, which is rounded itself, the mean of 7 x 7 ones was less than one."""
    h, w = (k, k) if isinstance(k, int) else k
    x, g = ts.ones((1, 2, 2 * h, 3 * w)), rng.standard_normal((1, 2, 2, 3)).astype(np.float32)
    def pool(x: ts.Tensor) -> ts.Tensor:
        return ts.avg_pool2d(x, k)

    def back(x: ts.Tensor, g: ts.Tensor) -> ts.Tensor:
        return ts.vjp(pool, x)[1](g)

    want = np.repeat(np.repeat(g / np.float32(h * w), h, 2), w, 3)
    for run in (lambda f: f, ts.jit):
        assert set(run(pool)(x).numpy().ravel()) == {1.0}
        np.testing.assert_array_equal(run(back)(x, ts.tensor(g)).numpy(), want)
    for f, args in ((pool, [x]), (back, [x, ts.tensor(g)])):
        made = CudaProgram(ts.jit(f).graph(*args), "sm_90a").run(args)[0]
        np.testing.assert_array_equal(made, want if f is back else np.ones((1, 2, 2, 3)))


def pooled_between(w: Any, v: Any, x: Any) -> Any:
    """Of images whose channels lie together from one convolution to the next."""
    y = ts.max_pool2d(ts.relu(ts.conv2d(x, w, padding=1)), 3, 2, 1)
    y = ts.max_pool2d(ts.conv2d(y, v, padding=1), 2)
    return ts.mean(ts.cast(y, "f32") ** 2)


def test_windows_of_channels_that_lie_together(rng) -> None:
    """Threads beside each other have neighbours in memory: channels, as an axis of their own."""
    w, v, x = (ts.tensor(rng.standard_normal(s).astype(np.float32), "bf16")
               for s in ((16, 8, 3, 3), (8, 16, 3, 3), (2, 8, 12, 13)))
    step = ts.jit(ts.value_and_grad(pooled_between, argnums=(0, 1, 2)))
    program = CudaProgram(step.graph(w, v, x), "sm_90a")
    calls = [c for n in program.launches if (c := getattr(getattr(n, "shared", None), "call", None))
             and c.kernel.__name__ in ("reduce_windows", "window_max_gradient")]
    assert len(calls) == 3
    want, slopes = step(w, v, x)
    got = program.run([w.array, v.array, x.array])
    for made, y in zip(got, (want, *slopes), strict=True):
        assert_close(made, y.array.astype(np.float64), "bf16", n=64)
    spaces = [g.space for g in program.plan.groups if g.kind == "elements"]
    assert (2, 3, 3, 8) in spaces  # windows that share nothing, by elements
    form = str(calls[0])
    assert form.count("AxisForm") == 3 and "AxisForm(extent=16, places=16, patch=1," in form
