"""Convolutions without windows in memory: the three products in compiled loops, against f64."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import config
from tessera.graph.cpu import conv as direct
from tessera.graph.cpu import load, pool
from tessera.graph.cpu.conv import NARROW, WIDE
from tessera.graph.ops.conv_products import CONV, CONV_FILTER, CONV_INPUT
from tessera.numerics import as_type

F32, F64 = (as_type(name).dtype for name in ("f32", "f64"))
SHAPES = {f"{32 * t.lanes} bits, {t.rows}": t for t in (*WIDE, *NARROW)}


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    for name in ("LEAST", "THREADED"):
        monkeypatch.setattr(direct, name, 0)


@pytest.fixture
def used(monkeypatch) -> list[str]:
    """The products that the loops computed."""
    found = []
    for name in ("images", "adjoint_images", "filters"):
        compute = getattr(direct, name)
        monkeypatch.setattr(direct, name, lambda *a, compute=compute, name=name: (
            found.append(name), compute(*a))[1])
    return found


def products(x: Any, w: Any, g: Any, accum: Any, **how: Any) -> dict[str, np.ndarray]:
    how["accum"] = accum
    return {"y": CONV.ref(x, w, **how),
            "dx": CONV_INPUT.ref(g, w, spatial=x.shape[2:], **how),
            "dw": CONV_FILTER.ref(x, g, window=w.shape[2:], **how)}


def drawn(rng: np.random.Generator, N: int, C: int, F: int, spatial: tuple, window: tuple,
          **how: Any) -> tuple[np.ndarray, ...]:
    x = rng.standard_normal((N, how["groups"] * C, *spatial)).astype(np.float32)
    w = rng.standard_normal((how["groups"] * F, C, *window)).astype(np.float32)
    y = CONV.ref(*(t.astype(np.float64) for t in (x, w)), accum=F64, **how)
    return x, w, rng.standard_normal(y.shape).astype(np.float32)


def check(x: Any, w: Any, g: Any, **how: Any) -> None:
    got = products(x, w, g, F32, **how)
    want = products(*(t.astype(np.float64) for t in (x, w, g)), F64, **how)
    size = products(*(np.abs(t).astype(np.float64) for t in (x, w, g)), F64, **how)
    for name, value in got.items():
        assert value.dtype == np.float32 and value.shape == want[name].shape, name
        # each of the terms is rounded once, and sums are of at most 4096 of them
        assert (np.abs(value - want[name]) <= 40 * 2.0**-24 * size[name]).all(), name


CASES = [  # N, C, F, spatial, window, stride, padding, dilation, groups
    (2, 3, 5, (9, 11), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 1),
    (1, 4, 9, (20, 37), (3, 2), (1, 1), ((0, 0), (0, 3)), (1, 1), 1),
    (3, 2, 8, (14, 15), (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1), 1),
    (2, 2, 3, (13, 17), (5, 4), (3, 2), ((2, 0), (1, 2)), (1, 1), 2),
    (2, 1, 1, (12, 9), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 6),
    (2, 3, 4, (16, 18), (3, 3), (1, 2), ((2, 2), (2, 2)), (2, 3), 1),
    (1, 2, 2, (7, 8), (2, 2), (4, 3), ((0, 0), (0, 0)), (1, 1), 1),  # what no window touches
    (1, 2, 3, (5, 6), (2, 2), (1, 1), ((3, 4), (2, 3)), (1, 1), 1),  # windows of padding alone
    (2, 3, 4, (70,), (5,), (1,), ((2, 2),), (1,), 1),
    (2, 2, 6, (41,), (4,), (3,), ((0, 2),), (2,), 2),
    (2, 8, 16, (40, 24), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 1)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case, shape, monkeypatch, rng, used):
    monkeypatch.setattr(direct, "tile_shape", lambda rows: SHAPES[shape])
    *extents, stride, padding, dilation, groups = case
    how = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    check(*drawn(rng, *extents, **how), **how)
    assert used == ["images", "adjoint_images", "filters"]


@pytest.mark.parametrize("N, C, F, window, groups", [
    (2, 1, 1, (3, 3), 16), (2, 1, 2, (2, 2), 16), (1, 32, 1, (3, 3), 1), (1, 32, 3, (3, 3), 1),
    (1, 1, 32, (3, 3), 1), (1, 2, 40, (2, 2), 1)], ids=str)
def test_few_channels_are_multiplied_here_too(N, C, F, window, groups, rng, monkeypatch, used):
    """Depthwise, to one channel or three, and of filters of few elements: windows in memory took 3
    to 30 times as long."""
    monkeypatch.setattr(direct, "LEAST", 1 << 20)
    how = {"stride": (1, 1), "padding": ((1, 1), (1, 1)), "dilation": (1, 1), "groups": groups}
    check(*drawn(rng, N, C, F, (66, 67), window, **how), **how)
    assert used == ["images", "adjoint_images", "filters"]


@pytest.mark.parametrize("rows, wide, narrow", [
    (1, 1, 1), (2, 2, 2), (3, 4, 4), (4, 4, 4), (5, 8, 4), (64, 8, 4)])
def test_tiles_have_the_rows_that_are_used(rows, wide, narrow, monkeypatch):
    for has, want in ((True, wide), (False, narrow)):
        monkeypatch.setattr(load, "cpu_has", lambda _: has)  # noqa: B023
        t = direct.tile_shape.__wrapped__(rows)
        registers = 32 if has else 16
        assert t.rows == want and t.lanes == registers // 2
        assert t.rows * t.vectors + t.vectors < registers
        assert t.dot_rows * t.dots + t.dot_rows < registers and t.dot_rows <= t.rows


def test_long_sums_are_of_parts(rng, monkeypatch, used):
    """Of DEPTH products at most: those of one are added one after another."""
    monkeypatch.setattr(direct, "DEPTH", 7)
    how: dict[str, Any] = {"stride": (1, 2), "padding": ((1, 0), (0, 1)), "dilation": (1, 1),
                           "groups": 2}
    check(*drawn(rng, 2, 3, 4, (9, 12), (3, 2), **how), **how)
    assert used == ["images", "adjoint_images", "filters"]


def test_drawn_products(rng, used):
    """Of any extents."""
    for _ in range(12):
        rank = int(rng.integers(1, 3))
        spans = ((7, 24), (1, 4), (1, 4), (1, 3))
        spatial, window, stride, dilation = (tuple(map(int, rng.integers(*span, rank)))
                                             for span in spans)
        padding = tuple(map(tuple, rng.integers(0, 4, (rank, 2)).tolist()))
        how = {"stride": stride, "padding": padding, "dilation": dilation,
               "groups": int(rng.integers(1, 4))}
        N, C, F = map(int, rng.integers(1, 9, 3))
        check(*drawn(rng, N, C, F, spatial, window, **how), **how)
    assert used


def test_a_result_is_the_same_for_any_number_of_threads(monkeypatch, rng):
    how: dict[str, Any] = {"stride": (2, 1), "padding": ((1, 1), (1, 1)), "dilation": (1, 1),
                           "groups": 2}
    given = drawn(rng, 3, 4, 9, (21, 30), (3, 3), **how)
    found = []
    for threads in (1, 5):
        monkeypatch.setattr(config, "num_threads", threads)
        found.append(products(*given, F32, **how))
    for name in found[0]:
        assert (found[0][name] == found[1][name]).all()


def test_what_earlier_products_left_in_memory_is_not_met(rng):
    """Of NaN behind a channel or the last filter sums would be NaN, and computed from windows."""
    memory = (ctypes.c_float * (1 << 18)).from_address(pool.scratch(1 << 20))
    np.frombuffer(memory, np.float32)[:] = np.nan
    x, g = (rng.standard_normal(s).astype(np.float32) for s in ((2, 3, 24, 25), (2, 5, 24, 25)))
    out = np.empty((1, 5, 3, 3, 3), np.float32)
    assert direct.filters(x, g, out, (1, 1), ((1, 1), (1, 1)), (1, 1))


def test_infinities_stay_where_they_are(rng):
    """Positions beyond the end of a row are computed too, and multiplied by zeros."""
    how: dict[str, Any] = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1),
                           "groups": 1}
    x, w, g = drawn(rng, 2, 3, 4, (8, 9), (3, 3), **how)
    x[0, 1, 2, 8], g[1, 2, 0, 6] = np.inf, np.nan
    got, want = products(x, w, g, F32, **how), products(
        *(t.astype(np.float64) for t in (x, w, g)), F64, **how)
    for name, value in got.items():
        assert not np.isfinite(want[name]).all() and np.isfinite(want[name]).any()
        assert (np.isfinite(value) == np.isfinite(want[name])).all(), name


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_narrow_images_are_widened(kind, rng, used):
    x, w = (ts.cast(rng.standard_normal(s).astype(np.float32), kind)
            for s in ((2, 4, 10, 12), (6, 4, 3, 3)))
    y = ts.conv2d(x, w, padding=1)
    wide = [np.asarray(ts.cast(t, "f64")) for t in (x, w)]
    want = CONV.ref(*wide, stride=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1), groups=1,
                    accum=F64)
    np.testing.assert_allclose(np.asarray(ts.cast(y, "f64")), want, rtol=2.0**-7, atol=1e-2)
    assert used == ["images"] and y.dtype.name == kind


def test_a_compiled_function_and_its_gradient(rng, used):
    x = rng.standard_normal((2, 4, 10, 12)).astype(np.float32)
    w = rng.standard_normal((6, 4, 3, 3)).astype(np.float32)

    def loss(x: Any, w: Any) -> Any:
        return ts.sum(ts.conv2d(ts.tanh(x), w, padding=1, stride=2) ** 2)

    found = [ts.jit(ts.grad(loss, argnums=(0, 1)))(x, w), ts.grad(loss, argnums=(0, 1))(x, w)]
    assert sorted(used) == sorted(2 * ["images", "adjoint_images", "filters"])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("N, C, F", [(0, 2, 4), (2, 0, 4), (2, 3, 0)])
def test_nothing_is_added_up_to_zeros(N, C, F):
    """A rank may have no images, channels or filters."""
    for kind, accum in ((np.float32, F32), (np.float64, F64)):
        x, w, g = (np.ones(s, kind) for s in ((N, C, 5), (F, C, 3), (N, F, 5)))
        found = products(x, w, g, accum, stride=(1,), padding=((1, 1),), dilation=(1,), groups=1)
        assert {n: y.shape for n, y in found.items()} == {"y": (N, F, 5), "dx": (N, C, 5),
                                                          "dw": (F, C, 3)}
        assert not found["y"].any() or C
        assert not found["dx"].any() or F
        assert not found["dw"].any() or N


@pytest.mark.parametrize("what", ["sums of f64", "pointwise", "volumes"])
def test_others_are_matmuls(what, rng, used):
    shapes = {"sums of f64": ((1, 2, 8, 8), (3, 2, 3, 3)),
              "pointwise": ((1, 2, 8, 8), (3, 2, 1, 1)),
              "volumes": ((1, 2, 5, 6, 7), (3, 2, 2, 2, 2))}[what]
    kind = np.float64 if what == "sums of f64" else np.float32
    x, w = (rng.standard_normal(s).astype(kind) for s in shapes)
    rank = x.ndim - 2
    how = {"stride": (1,) * rank, "padding": ((0, 0),) * rank, "dilation": (1,) * rank, "groups": 1}
    CONV.ref(x, w, accum=F64 if kind == np.float64 else F32, **how)
    assert not used
