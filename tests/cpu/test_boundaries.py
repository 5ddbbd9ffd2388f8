"""What lies in memory between kernels: the fewest bytes from which readers make their values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from lowered_functions import lowered, normal
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.kernels import column_passes
from tessera.graph.ops.gather import CHECK_INDEX
from tessera.graph.schedule.ir import ScheduledGroup
from tessera.graph.trace import apply
from tessera.runtime.target import parse_target
from tolerance import assert_close

TARGET = parse_target("sm_90a")
R, C = 1024, 520  # more than a megabyte of two bytes each


def _kept(groups: tuple[ScheduledGroup, ...]) -> list[str]:
    """Types of the large values that groups write."""
    return [w.type.dtype.name for g in groups for w in g.writes if len(w.shape) > 1
            and w.shape[-1] == C and w.shape[0] == R]


def _layer(x: Any, w: Any, v: Any) -> Any:
    """Of bf16 operands, with a function between two products."""
    pre = ts.cast(x @ w, "bf16")
    return ts.cast(ts.cast(ts.gelu(ts.cast(pre, "f32")), "bf16") @ v, "f32")


def test_of_a_function_its_operand_is_kept_and_not_its_derivative(rng: np.random.Generator
                                                                  ) -> None:
    def step(x: Any, w: Any, v: Any) -> Any:
        return ts.grad(lambda *a: ts.sum(_layer(*a)), argnums=(1, 2))(x, w, v)

    x = normal(rng, R, 16, dtype="bf16")
    w, v = normal(rng, 16, C, dtype="bf16"), normal(rng, C, 16, dtype="bf16")
    program = lowered(step, x, w, v)
    assert set(_kept(program.plan.groups)) == {"bf16"}
    for g in program.plan.groups:
        if g.kind == "gemm":  # no matmul waits for a gelu
            assert {s.op for s in g.steps} <= {"product", "cast"}
    for got, want in zip(program.run([x, w, v]), ts.jit(step)(x, w, v), strict=True):
        assert_close(got, want, "bf16", n=R)


def test_both_factors_of_a_gate_are_made_again(rng: np.random.Generator) -> None:
    """The gradient reads the matmul's result for the one factor's derivative; the other factor,
    rounded, is made of it as well."""
    def step(x: Any, w: Any, v: Any, u: Any) -> Any:
        def loss(w: Any, v: Any, u: Any) -> Any:
            h = ts.silu(x @ w) * (x @ v)
            return ts.sum(ts.cast(h @ u, "f32") ** 2)

        return ts.grad(loss, argnums=(0, 1, 2))(w, v, u)

    x = normal(rng, R, 16, dtype="bf16 @accum(f32)")
    w, v, u = (normal(rng, *s, dtype="bf16 @accum(f32)") for s in ((16, C), (16, C), (C, 16)))
    program = lowered(step, x, w, v, u)
    loops = [g for g in program.plan.groups if g.kind == "loop" and g.space == (R, C)]
    assert [len(g.writes) for g in loops] == [1, 2]  # the product of factors; two gradients
    reads = [{o.name for o in g.reads} for g in loops]
    assert len(reads[0]) == 2 and len(reads[1]) == 3 and reads[0] < reads[1]
    for got, want in zip(program.run([x, w, v, u]), ts.jit(step)(x, w, v, u), strict=True):
        assert_close(got, want, "bf16", n=R, scale=float(np.abs(np.asarray(want, float)).max()))


def test_a_norm_is_made_again_from_its_operand_and_two_numbers_a_row(rng: np.random.Generator
                                                                     ) -> None:
    def step(x: Any, g: Any, w: Any) -> Any:
        def loss(x: Any, g: Any) -> Any:
            h = ts.cast(ts.layernorm(x * 2.0, g, g), "bf16")
            return ts.sum(ts.cast(h @ w, "f32") ** 2)

        return ts.grad(loss, argnums=(0, 1))(x, g)

    x, g = normal(rng, R, C), normal(rng, C)
    w = normal(rng, C, 16, dtype="bf16")
    program = lowered(step, x, g, w)
    # the norm for the product, the gradient of it, the result: no normalised f32 rows
    assert sorted(_kept(program.plan.groups)) == ["bf16", "bf16", "f32"]
    for got, want in zip(program.run([x, g, w]), ts.jit(step)(x, g, w), strict=True):
        assert_close(got, want, "bf16", n=C)


def test_what_saves_less_than_a_third_stays(rng: np.random.Generator) -> None:
    """x, y (f32) would be read instead of their sum, which is read once."""
    def both(x: Any, y: Any, w: Any) -> Any:
        s = x + y
        m = ts.sum(s, axis=0)  # a sum of all rows, for which the rest waits
        return s * m

    x, y = normal(rng, R, C), normal(rng, R, C)
    groups = lowered(both, x, y, x).plan.groups
    assert sum(len([r for r in g.reads if r.shape[0] == R]) for g in groups) == 3


def test_a_result_of_the_function_is_written(rng: np.random.Generator) -> None:
    def two(x: Any, w: Any) -> Any:
        y = ts.cast(x, "f32") * 2.0
        return y, ts.cast(ts.cast(y, "bf16") @ w, "f32"), ts.sum(y, axis=0)

    x, w = normal(rng, R, C, dtype="bf16"), normal(rng, C, 8, dtype="bf16")
    program = lowered(two, x, w)
    got = program.run([x, w])
    assert_close(got[0], 2 * np.asarray(ts.cast(x, "f32"), np.float64), "f32")
    assert_close(got[2], 2 * np.asarray(ts.cast(x, "f32"), np.float64).sum(0), "f32", n=R)


def test_a_loop_whose_readers_do_all_of_it_is_none(rng: np.random.Generator) -> None:
    """Its value takes twice the bytes of what it is cast from."""
    def casts(x: Any) -> Any:
        return ts.cast(apply(CHECK_INDEX, ts.cast(x, "int64"), extent=7, wrap=True), "int32")

    x = ts.tensor(rng.integers(-7, 7, R * C).astype(np.int32))
    program = lowered(casts, x)
    assert all(g.steps for g in program.plan.groups)
    assert np.array_equal(program.run([x])[0], np.asarray(x) % 7)


def test_the_numbers_of_columns_are_not_read(rng: np.random.Generator) -> None:
    """A label is compared with the columns of its row; rows that fit, and longer ones in passes."""
    for n in (300, 17000):
        x, y = normal(rng, 5, n), ts.tensor(rng.integers(0, n, 5))
        program = lowered(ts.value_and_grad(ts.cross_entropy), x, y)
        rows = [g for g in program.plan.groups if g.kind == "rows" and g.space[-1] == n]
        assert rows and all(r.shape != (n,) for g in rows for r in g.reads)
        loss, dx = program.run([x, y])
        e = np.asarray(x, np.float64)
        p = np.exp(e - e.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        at = np.arange(5), np.asarray(y)
        assert_close(loss, -np.log(p[at]).mean(), "f32", n=n)
        p[at] -= 1
        assert_close(dx, p / 5, "f32", n=n)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("M, sums", [
    (4096, [(4096,)]), (65536, [(65536,)]), (1 << 17, [(64, 2048), (64,)])])
def test_numbers_of_rows_and_of_all_are_made_by_the_kernels_beside_them(
        M: int, sums: list[tuple[int, ...]], dtype: str, rng: np.random.Generator) -> None:
    """Labels in another type and whether they are inside, with the losses of their rows; a mean,
    with the last of its sums."""
    x, y = normal(rng, M, 24), rng.integers(0, 24, M).astype(dtype)
    program = lowered(ts.cross_entropy, x, ts.tensor(y))
    assert [(g.kind, g.space) for g in program.plan.groups if g.grid] == [
        ("rows", (M, 24)), *(("rows", s) for s in sums)]
    e = np.asarray(x, np.float64)
    m = e.max(1, keepdims=True)
    rows = np.log(np.exp(e - m).sum(1)) + m[:, 0] - e[np.arange(M), y]
    assert_close(program.run([x, ts.tensor(y)])[0], rows.mean(), "f32", n=M)
    y[77] = 24
    assert np.isnan(np.asarray(program.run([x, ts.tensor(y)])[0]))


def test_numbers_of_rows_that_wait_for_a_third_group_stay_outside_of_the_rows(
        rng: np.random.Generator) -> None:
    """Some are made of a sort, which is made of the rows whose largest they meet."""
    x = normal(rng, 64, 48)

    def f(x: ts.Tensor) -> ts.Tensor:
        last = ts.sort(ts.softmax(x), axis=0)[:, :1]
        return (ts.exp(last * 0.5) + 1.0) * ts.max(x, -1, keepdims=True)

    program = lowered(f, x)
    kinds = [g.kind for g in program.plan.groups if g.grid]
    assert kinds[0] == "rows" and kinds[-1] == "loop" and len(kinds) > 2
    e = np.asarray(x, np.float64)
    p = np.exp(e - e.max(1, keepdims=True))
    p = np.sort(p / p.sum(1, keepdims=True), 0)
    want = (np.exp(p[:, :1] * 0.5) + 1.0) * e.max(1, keepdims=True)
    assert_close(program.run([x])[0], want, "f32", n=48)


@pytest.mark.parametrize("name", ["softmax", "variance", "of several axes", "with a bias"])
def test_reductions_of_columns_make_what_they_read(name: str, rng: np.random.Generator) -> None:
    """Nothing of f32 that is as large as the operand lies in memory; rows end within a block."""
    fn = {"softmax": lambda x, b: ts.softmax(x, axis=1),
          "variance": lambda x, b: ts.var(x, axis=1),
          "of several axes": lambda x, b: ts.var(ts.reshape(x, (3, 10, 67, -1)), axis=(1, 2)),
          "with a bias": lambda x, b: ts.max(ts.cast(x, "f32") * b, axis=1)}[name]
    x, b = normal(rng, 3, 670, C, dtype="bf16"), normal(rng, C)
    program = lowered(fn, x, b)
    large = [w.type.dtype.name for g in program.plan.groups for w in g.writes
             if np.prod(w.shape) == x.array.size]
    assert large == (["bf16"] if name == "softmax" else [])
    (got,) = program.run([x, b])
    assert_close(got, ts.jit(fn)(x, b), "f32" if name == "with a bias" else "bf16", n=670)


@pytest.mark.parametrize("lane", [64, 1], ids=["held", "in passes"])
def test_columns_their_statistics_and_what_follows_are_one_kernel(
        lane: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number for each column that others read too leaves it; what waits for another kernel stays
    outside."""
    monkeypatch.setattr(column_passes, "GROUPS", 1)
    monkeypatch.setattr(column_passes, "LANE", lane)

    def fn(x: Any, u: Any) -> Any:
        mean = ts.mean(x, axis=1, keepdims=True)
        away = x - mean
        y = away * ts.rsqrt(ts.mean(away * away, axis=1, keepdims=True) + 1e-5)
        return y, mean, y * ts.max(u)

    x, u = normal(rng, 3, 134, 40), normal(rng, 7)
    program = lowered(fn, x, u)
    assert [g.kind for g in program.plan.groups] == ["columns", "rows", "loop"]
    for got, want in zip(program.run([x, u]), ts.jit(fn)(x, u), strict=True):
        assert_close(got, want, "f32", n=134, scale=4.0)


@pytest.mark.parametrize("name, kinds", [
    ("channels last", "columns columns loop"), ("channels first", "rows columns loop"),
    ("columns", "columns columns loop")])
def test_variances_over_long_columns_read_them_once(name: str, kinds: str,
                                                    rng: np.random.Generator) -> None:
    """From parts, whose means are far from 0 and from each other."""
    fn = {"channels last": lambda x: ts.batch_norm(x, axis=3),
          "channels first": lambda x: ts.batch_norm(x),
          "columns": lambda x: (x - ts.mean(x, axis=0)) / ts.sqrt(ts.var(x, axis=0) + 1e-5)}[name]
    shape = {"channels last": (8, 8, 16, 24), "channels first": (3, 24, 16, 16),
             "columns": (1024, 24)}[name]
    drift = np.linspace(0, 3, shape[0]).reshape(-1, *(1,) * (len(shape) - 1))
    x = ts.tensor((rng.standard_normal(shape) + 5000 + drift).astype(np.float32))
    program = lowered(fn, x)
    assert [g.kind for g in program.plan.groups if g.kind != "loop"] == kinds.split()[:-1]
    wide = x.numpy().astype(np.float64)
    axes = {"channels last": (0, 1, 2), "channels first": (0, 2, 3), "columns": 0}[name]
    want = (wide - wide.mean(axes, keepdims=True)) / np.sqrt(wide.var(axes, keepdims=True) + 1e-5)
    (got,) = program.run([x])
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-3, atol=128 * 5000 * 2.0**-24)


def test_rows_are_rounded_to_integers_where_their_scale_is_made(rng: np.random.Generator) -> None:
    def fn(x: Any) -> Any:
        scale = ts.max(ts.abs(x), axis=-1, keepdims=True) / 127
        return ts.cast(ts.round(x / scale), "int8"), scale

    x = normal(rng, 6, 40)
    program = lowered(fn, x)
    assert [g.kind for g in program.plan.groups] == ["rows"]
    for got, want in zip(program.run([x]), fn(x), strict=True):
        np.testing.assert_array_equal(got, want)


def test_columns_make_again_what_an_earlier_one_of_them_reads():
    """The gradient of a dice loss over classes: labels are widened where the first loop of a group
    of columns reads them from memory, and again in it."""
    B, K, S = 16, 21, 512

    def loss(x: Any, labels: Any) -> Any:
        p = ts.softmax(ts.cast(x, "f32"), axis=1)
        t = ts.cast(ts.arange(K)[None, :, None, None] == labels[:, None], "f32")
        shared, sizes = ts.sum(p * t, axis=(2, 3)), ts.sum(p + t, axis=(2, 3))
        return 1 - ts.mean(2 * shared / (sizes + 1))

    fn = ts.jit(lambda x, k: ts.grad(lambda x: loss(x, k))(x))
    graph = fn.graph(ts.Tensor[B, K, S, S, ts.bf16], ts.Tensor[B, S, S, ts.int32])
    for group in CudaProgram(graph, TARGET).plan.groups:
        made = {r.name for r in group.reads}
        for step in group.steps:
            assert all(a in made for a in step.args if isinstance(a, str))
            made.add(step.name)


def test_numbers_that_a_loop_makes_again_stand_behind_those_that_they_are_made_of(
        rng: np.random.Generator) -> None:
    """A bias in f32 is made where the gradient of its batch norm is, and so are numbers made of it.
    """
    def loss(x: Any, gamma: Any, beta: Any, w: Any) -> Any:
        return ts.sum(ts.cast(ts.tanh(ts.batch_norm(x, gamma, beta) @ w), "f32"))

    def step(*args: Any) -> Any:
        return ts.grad(loss, argnums=(0, 1, 2, 3))(*args)

    n = 270_000  # more than a megabyte of f32
    args = [normal(rng, *shape, dtype="bf16") for shape in ((n, 1), (1,), (1,), (1, 3))]
    for got, want in zip(lowered(step, *args).run(args), ts.jit(step)(*args), strict=True):
        assert_close(got, want, "bf16", n=n)
