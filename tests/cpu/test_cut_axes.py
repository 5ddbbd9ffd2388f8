"""Reductions over axes that are cut otherwise on a GPU, in parts or several as one, and what is
computed of their numbers."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from lowered_functions import both_ways
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.kernels import column_passes, running_columns
from tessera.graph.cuda.passes import cut_axes, split_exponential_sums
from tolerance import assert_close

INF = np.inf


def kinds(fn, *args):
    return [g.kind for g in CudaProgram(ts.jit(fn).graph(*args)).plan.groups]


def instance_norm(x):
    away = x - ts.mean(x, axis=(2, 3), keepdims=True)
    return away * ts.rsqrt(ts.var(x, axis=(2, 3), keepdims=True) + 1e-5)


def gradients(x):
    return ts.grad(lambda x: ts.sum(instance_norm(x) ** 3))(x)


@pytest.mark.parametrize("fn, made", [
    (instance_norm, ["rows"]),
    (lambda x: ts.mean(x, axis=(2, 3)), ["rows"]),
    (lambda x: ts.mean(x, axis=(1, 2, 3)), ["rows"]),
    (lambda x: x * ts.rsqrt(ts.sum(x * x, axis=(2, 3), keepdims=True)) * x[:, :1], None),
    (lambda x: (x - ts.max(x, axis=(2, 3), keepdims=True)) * x[:, :, :1, :1], None),
    (lambda x: ts.sum(x[:, :, 1:] * x[:, :, :-1], axis=(2, 3)), None),
    (lambda x: ts.sum(x * ts.sum(x, axis=2, keepdims=True), axis=(2, 3)), None),
    (gradients, ["rows"])],
    ids=["norm", "mean", "three", "other", "mixed", "parts", "two spaces", "gradient"])
def test_last_axes_are_reduced_as_one(fn, made, rng, monkeypatch):
    """Also in what is computed with their numbers: a norm took six launches."""
    monkeypatch.setattr(cut_axes, "GROUPS", 2)
    x = rng.standard_normal((3, 4, 5, 7)).astype(np.float32)
    assert made is None or kinds(fn, x) == made
    (got,), (want,) = both_ways(fn, x)
    assert_close(got, want, "f32", n=140, scale=10 if fn is gradients else None)


@pytest.mark.parametrize("name, shape, axis", [
    ("max", (96, 5), 0), ("prod", (2, 70, 3), 1), ("min", (6, 16, 5), (0, 1)), ("any", (96, 5), 0),
    ("sum", (2, 70, 3), 1)])
def test_long_columns_of_few_groups_are_reduced_in_parts(name, shape, axis, rng, monkeypatch):
    """The largest down [65536, 64] had two groups of threads."""
    for limit, n in (("SMALL", 0), ("LEAST", 4)):
        monkeypatch.setattr(cut_axes, limit, n)
    x = rng.standard_normal(shape).astype(np.float32)
    if name == "prod":
        x = np.abs(x) ** 0.1
    fn = {"any": lambda x: ts.any(x > 1.9, axis)}.get(
        name, lambda x: getattr(ts, name)(ts.abs(x) + x[:1], axis))
    spaces = [g.space for g in CudaProgram(ts.jit(fn).graph(x)).plan.groups if g.kind == "columns"]
    assert len(spaces) >= 2 or name == "sum"
    (got,), (want,) = both_ways(fn, x)
    assert_close(got, want, None if name == "any" else "f32", n=96)


def test_exponentials_of_long_columns_are_those_of_parts(rng, monkeypatch):
    """One pass over the elements for both statistics. Infinities and NaN as on a CPU."""
    monkeypatch.setattr(split_exponential_sums, "SMALL", 0)
    x, axis = (30 * rng.standard_normal((2, 1024, 17))).astype(np.float32), 1
    at = (slice(None),)
    x[(*at, ..., 1)] = -INF
    x[(*at, slice(256), 2)], x[(*at, 5, 3)], x[(*at, 7, 4)] = -INF, INF, np.nan
    x[(*at, slice(256), 6)], x[(*at, 300, 6)], x[(*at, ..., 5)] = -INF, INF, INF
    x[(*at, ..., 7)] -= 500
    x[(*at, slice(256), 8)], x[(*at, slice(256, None), 8)] = -1000, -90

    def both(x):
        return ts.softmax(x, axis=axis), ts.logsumexp(x, axis=axis)

    for got, want in zip(*both_ways(both, x), strict=True):
        assert_close(got, want, "f32", n=1024)
    assert kinds(lambda x: ts.logsumexp(x, axis=axis), x) == ["columns"] * 2
    assert kinds(lambda x: ts.softmax(x, axis=axis), x) == ["columns"] * 2 + ["loop"]


@pytest.mark.parametrize("shape, axis", [((1024, 17), 0), ((1100, 17), 0), ((2, 1100, 40), 1)])
def test_powers_are_summed_while_the_largest_is_looked_for(shape, axis, rng, monkeypatch):
    """Parts of 64 or 100 rows, in blocks of 32 and a few over. Infinities and NaN as on a CPU."""
    monkeypatch.setattr(running_columns, "BLOCK", 256)
    monkeypatch.setattr(running_columns, "one_wave", lambda chip: 1)
    monkeypatch.setattr(split_exponential_sums, "SMALL", 0)
    x = (30 * rng.standard_normal(shape)).astype(np.float32)
    x[..., 1], x[..., 5] = -INF, INF
    at = (0,) * axis
    x[(*at, slice(256), 2)], x[(*at, 5, 3)], x[(*at, 7, 4)] = -INF, INF, np.nan
    x[(*at, slice(256), 6)], x[(*at, 300, 6)] = -INF, INF
    x[(*at, slice(0, 40), 7)], x[(*at, 40, 7)], x[(*at, 41, 7)] = -INF, 80, INF
    x[(*at, slice(256), 8)], x[(*at, slice(256, None), 8)] = -1000, -90
    x[..., 9] = np.arange(shape[axis])  # each larger than all before it

    def both(x):
        return ts.softmax(x, axis=axis), ts.logsumexp(x, axis=axis)

    plan = CudaProgram(ts.jit(both).graph(x)).plan
    assert any(dict(g.attrs).get("running") for g in plan.groups)
    for got, want in zip(*both_ways(both, x), strict=True):
        assert_close(got, want, "f32", n=1024)
    (got,), (want,) = both_ways(lambda x: ts.softmax(x * 0.5 - 1, axis=axis), x)
    assert_close(got, want, "f32", n=1024)


def test_squares_are_summed_about_an_element_of_the_column(rng, monkeypatch):
    """Whether that is far from the mean, or the mean is far from 0; also of what is computed."""
    monkeypatch.setattr(running_columns, "BLOCK", 256)
    monkeypatch.setattr(running_columns, "one_wave", lambda chip: 1)
    x = rng.standard_normal((1024, 24)).astype(np.float32)
    x[0, :8] += 1000
    x[:, 8:16] += 5000
    x[:, 16] = 3

    def moments(x):
        return ts.mean(x, axis=0), ts.var(x, axis=0)

    plan = CudaProgram(ts.jit(moments).graph(x)).plan
    assert any(dict(g.attrs).get("running") for g in plan.groups)
    for fn, y in ((moments, x), (lambda x: moments(2 * x + 1), 2 * x + 1)):
        mean, var = CudaProgram(ts.jit(fn).graph(x)).run([x])
        wide = y.astype(np.float64)
        size = np.abs(wide).max(0)
        np.testing.assert_allclose(mean, wide.mean(0), atol=128 * 2.0**-24 * size.max(), rtol=0)
        spread, rounding = wide.var(0), 2.0**-23 * size  # of what a difference is taken of
        assert (np.abs(var - spread) <= 130 * 2.0**-24 * spread
                + 4 * rounding * (np.sqrt(spread) + rounding)).all()


def test_what_is_made_of_numbers_is_made_by_their_kernel(rng):
    """A mean without its axis, a variance, a deviation: they were loops of their own."""
    x = rng.standard_normal((4, 40, 70)).astype(np.float32)
    for axis in (1, 2):
        for fn in (lambda x, a=axis: ts.mean(x, a), lambda x, a=axis: ts.std(x, a) + 1,
                   lambda x, a=axis: ts.log(ts.max(x, a) + 5) * 2):
            assert kinds(fn, x) == ["columns" if axis == 1 else "rows"]
            (got,), (want,) = both_ways(fn, x)
            assert_close(got, want, "f32", n=70)


def test_what_is_read_once_goes_in_wide_rows(rng, monkeypatch):
    """Registers need not hold it, whose rows were of 32 bytes then."""
    monkeypatch.setattr(column_passes, "GROUPS", 1)
    monkeypatch.setattr(column_passes, "SMALL", 0)
    x = ts.tensor(rng.standard_normal((2, 512, 70)).astype(np.float32))

    def fn(x):
        return ts.max(x, 1), ts.sum(x, 1)

    (group,) = CudaProgram(ts.jit(fn).graph(x)).plan.groups
    assert group.attr("ahead") and group.schedule.n == 64 and group.schedule.m < 512
    for got, want in zip(CudaProgram(ts.jit(fn).graph(x)).run([x.array]), fn(x), strict=True):
        assert_close(got, want.array, "f32", n=512)


def test_statistics_of_the_same_columns_are_one_kernel(rng):
    """Each read the elements once more."""
    x = rng.standard_normal((2, 40, 6)).astype(np.float32)

    def fn(x):
        return ts.max(x, 1), ts.min(x, 1), ts.sum(x, 1)

    assert kinds(fn, x) == ["columns"]
    for got, want in zip(*both_ways(fn, x), strict=True):
        assert_close(got, want, "f32", n=40)
