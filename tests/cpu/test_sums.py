"""Sums against f64, at the bound of docs/reference/numerics.md: along any axes, however long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from emulator import compare
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.kernels import group_statements

U, U64 = 2.0**-24, 2.0**-53
RUNS = {"eager": lambda f: f, "compiled": ts.jit}


def bound(x: np.ndarray, axis: Any, chain: int = 512) -> np.ndarray:
    """(chain u + n 2^-53) sum |x| + u |sum|, of f32 terms."""
    wide = x.astype(np.float64)
    total = np.abs(wide).sum(axis)
    n = x.size // max(total.size, 1)
    return (chain * U + n * U64) * total + U * np.abs(wide.sum(axis))


def check(got: Any, want: np.ndarray, allowed: np.ndarray) -> None:
    error = np.abs(np.asarray(got).astype(np.float64) - want)
    assert (error <= allowed).all(), f"{error.max():.3g} where {allowed.min():.3g} is allowed"


CASES = [
    ((1_000_000, 3), 0), ((100_000, 8), 0), ((2, 100_000, 3), 1), ((1_000_000,), 0),
    ((3, 300_000), 1), ((400, 300, 3), (0, 1)), ((100_000, 2, 3), (0, 2)), ((50, 9000, 2), None),
    ((1, 2000, 1, 200), (1, 3)),
]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("shape, axis", CASES, ids=str)
def test_sums_keep_the_bound(shape: tuple, axis: Any, run: str, rng: np.random.Generator) -> None:
    """Equal terms, whose rounding errors all have one sign, and random ones; as they lie in memory,
    transposed, and made on the way. One f32 addition after another is 1 % off on the first."""
    total = RUNS[run](lambda x: (ts.sum(x, axis), ts.sum(x * 1.0, axis)))
    for x in (np.full(shape, 0.1, np.float32), rng.random(shape, np.float32) + 0.5):
        for got in total(x):
            check(got, x.astype(np.float64).sum(axis), bound(x, axis))
    for y in (np.asfortranarray(x), np.asfortranarray(x)[::-1]):
        got = RUNS[run](lambda y: ts.sum(y, axis))(y)
        check(got, y.astype(np.float64).sum(axis), bound(y, axis))


def test_one_addition_after_another_breaks_the_bound() -> None:
    """What the bound is for: it tells the two ways apart."""
    x = np.full((1_000_000, 3), 0.1, np.float32)
    one_by_one = np.add.reduce(x, axis=0)
    assert (np.abs(one_by_one - x.astype(np.float64).sum(0)) > 100 * bound(x, 0)).all()


@pytest.mark.parametrize("run", RUNS)
def test_what_is_made_of_sums(run: str) -> None:
    n = 400_000
    x = np.full((n, 4), 0.1, np.float32)
    x[::2] += 1.0
    wide, wrap = x.astype(np.float64), RUNS[run]
    near = 600 * U  # of positive terms, relative; a square adds one rounding, a quotient one
    for name, want in (("mean", wide.mean(0)), ("var", wide.var(0)), ("std", wide.std(0))):
        fn = getattr(ts, name)
        got = wrap(lambda x, fn=fn: fn(x, 0))(x)
        np.testing.assert_allclose(np.asarray(got), want, rtol=near)
    norm = wrap(lambda x: ts.norm(x, axis=0))(x)
    np.testing.assert_allclose(np.asarray(norm), np.linalg.norm(wide, axis=0), rtol=near)
    log = wrap(lambda x: ts.logsumexp(x, axis=0))(x)
    np.testing.assert_allclose(np.asarray(log), np.log(np.exp(wide).sum(0)), rtol=near)
    bias = wrap(ts.grad(lambda b, x: ts.sum(ts.multiply(x, b)), argnums=0))
    np.testing.assert_allclose(np.asarray(bias(np.ones(4, np.float32), x)), wide.sum(0), rtol=near)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("run", RUNS)
def test_running_sums(run: str, axis: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((300_000, 2)).astype(np.float32) + np.float32(0.1)
    x = x if axis == 0 else np.ascontiguousarray(x.T)
    wide = x.astype(np.float64)
    want = wide.cumsum(axis)
    allowed = U * np.abs(want) + np.arange(300_000).reshape((-1, 1) if axis == 0 else (1, -1)) * \
        U64 * np.abs(wide).cumsum(axis)
    got = RUNS[run](lambda x: ts.cumsum(x, axis))(x)
    assert str(got.dtype) == "f32"
    check(got, want, allowed)


@pytest.mark.parametrize("width", [1, 5, 100])
def test_sums_of_segments(width: int, rng: np.random.Generator) -> None:
    """Most rows belong to one id; the others are added as they come."""
    n = 120_000 if width < 100 else 20_000
    ids = np.where(rng.random(n) < 0.9, 3, rng.integers(-6, 6, n))
    u = np.full((n, width), 0.1, np.float32)
    want, size = np.zeros((6, width)), np.zeros((6, 1))
    np.add.at(want, ids % 6, u.astype(np.float64))
    np.add.at(size, ids % 6, 1.0)
    got = ts.segment_sum(u, ids, 6)
    check(got, want, (128 * U + size * U64) * want + U * want)
    table = ts.grad(lambda w: ts.sum(ts.take(w, ids, axis=0) * u))(np.zeros((6, width), np.float32))
    check(table, want, (128 * U + size * U64) * want + U * want)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("M, K, N", [(1, 700_000, 2), (3, 600_000, 2), (2, 9001, 3)])
def test_products_of_great_depth(M: int, K: int, N: int, run: str,
                                 rng: np.random.Generator) -> None:
    a = np.full((M, K), 0.1, np.float32)
    b = rng.random((K, N), np.float32)
    want = a.astype(np.float64) @ b.astype(np.float64)
    check(RUNS[run](ts.matmul)(a, b), want, ((4096 + 129) * U + K * U64) * want)


# --- kernels for a GPU ------------------------------------------------------------------------
def lowered(fn: Callable, *inputs: ts.Tensor) -> CudaProgram:
    return CudaProgram(ts.jit(fn).graph(*inputs), "sm_80")


def test_long_sums_of_kernels_are_kept_in_f64() -> None:
    """More than 128 blocks one after another, at the real sizes: the text that is compiled."""
    def first(*shape: int) -> str:
        graph = ts.jit(lambda x: ts.sum(x, 0)).graph(ts.Tensor[(*shape, ts.f32)])
        return CudaProgram(graph, "sm_80").launches[0].source.text

    for shape in ((100_000_000, 8), (200_000_001,)):  # strips of 2^18 rows; parts in passes
        assert "f64" in first(*shape) and "tile.full" in first(*shape)
    for shape in ((1000, 40), (200_000, 40), (1_000_001,)):  # of few blocks; of strips of 16; parts
        assert "f64" not in first(*shape)


@pytest.mark.parametrize("shape, axis", [((600, 20), 0), ((2, 500, 20), 1), ((20_000,), 0)])
def test_long_sums_of_kernels_emulated(shape: tuple, axis: int, monkeypatch: pytest.MonkeyPatch,
                                       rng: np.random.Generator) -> None:
    """The device code adds the blocks in f64: against the interpreter, and f64."""
    monkeypatch.setattr(group_statements, "CHAIN", 2)
    x = ts.tensor(rng.random(shape, np.float32))
    program = lowered(lambda x: ts.sum(x, axis), x)
    (launch,) = program.launches
    assert "f64" in launch.source.text
    memory = program._host_memory([x.array])
    types = {b.name: b.type for b in program.plan.buffers}
    given = [ts.Tensor(memory[program.base(n)].reshape(s), types[n]) for n, s in launch.arguments]
    compare(launch.kernel, *given, lanes=launch.group.schedule.lanes, target="sm_80",
            schedule=launch.group.schedule, rtol=1e-5, atol=1e-5)
    (got,) = program.run([x.array])
    check(got, x.array.astype(np.float64).sum(axis), bound(x.array, axis, 40))
