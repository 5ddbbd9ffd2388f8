"""Sums over long columns on GPUs: in the kernel that makes their elements, strip by strip."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest

import tessera as ts
from lowered_functions import normal
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.kernels import strips
from tessera.graph.cuda.kernels.generate_kernels import source_of
from tessera.graph.schedule.ir import ScheduledGroup
from tessera.runtime.target import parse_target
from tolerance import assert_close

TARGET = parse_target("sm_90a")


def _run(fn: Callable, *xs: ts.Tensor) -> tuple[list[np.ndarray], tuple[ScheduledGroup, ...]]:
    program = CudaProgram(ts.jit(fn).graph(*xs), TARGET)
    return [np.asarray(y) for y in program.run(list(xs))], program.plan.groups


@pytest.mark.parametrize("shape", [(1024, 8), (3, 701, 5), (4099, 33), (8, 256, 300)])
def test_a_sum_of_ragged_rows(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    x = normal(rng, *shape)
    axes = tuple(range(len(shape) - 1))
    (got,), groups = _run(lambda x: ts.sum(ts.exp(x), axis=axes), x)
    assert [g.kind for g in groups] == ["strips", "columns"]
    want = np.exp(np.asarray(x, np.float64)).sum(axes)
    assert_close(got, want, "f32", n=x.size // shape[-1])


def test_a_norm_and_its_sums_are_one_kernel(rng: np.random.Generator) -> None:
    def backward(x: Any, g: Any, b: Any, dy: Any) -> Any:
        return ts.vjp(lambda x, g, b: ts.layernorm(x, g, b), x, g, b)[1](dy)

    x, dy = normal(rng, 5, 311, 72), normal(rng, 5, 311, 72)
    g, b = normal(rng, 72), normal(rng, 72)
    (dx, dg, db), groups = _run(backward, x, g, b, dy)
    assert [k.kind for k in groups] == ["strips", "columns"]  # of both sums
    x64, d64 = (np.asarray(t, np.float64).reshape(-1, 72) for t in (x, dy))
    r = 1 / np.sqrt(x64.var(1, keepdims=True) + 1e-5)
    h = (x64 - x64.mean(1, keepdims=True)) * r
    assert_close(dg, (d64 * h).sum(0), "f32", n=1555)
    assert_close(db, d64.sum(0), "f32", n=1555)
    dh = d64 * np.asarray(g, np.float64)
    want = r * (dh - dh.mean(1, keepdims=True) - h * (dh * h).mean(1, keepdims=True))
    assert_close(dx.reshape(-1, 72), want, "f32", n=72)


def test_sums_of_two_loops_are_two_kernels(rng: np.random.Generator) -> None:
    """What one loop makes is there at one time, what two make is not."""
    x, y = normal(rng, 1024, 8), normal(rng, 1024, 8)
    got, groups = _run(lambda x, y: tuple(ts.sum(ts.exp(t), axis=0) for t in (x, y)), x, y)
    assert sorted(g.kind for g in groups) == ["columns", "columns", "strips", "strips"]
    for total, t in zip(got, (x, y), strict=True):
        assert_close(total, np.exp(np.asarray(t, np.float64)).sum(0), "f32", n=1024)


def test_some_sums_of_a_loop_are_one_kernel(rng: np.random.Generator) -> None:
    def fn(x: Any) -> Any:
        return tuple(ts.sum(x * float(i + 1) + ts.exp(x), axis=0) for i in range(5))

    x = normal(rng, 1024, 8)
    got, groups = _run(fn, x)
    assert [(len(g.writes), len(g.grid)) for g in groups if g.kind == "columns"] == [(4, 3), (1, 2)]
    x64 = np.asarray(x, np.float64)
    for i, total in enumerate(got):
        assert_close(total, (x64 * (i + 1) + np.exp(x64)).sum(0), "f32", n=1024)


@pytest.mark.parametrize("columns, read_last", [(64, True), (72, False)])
def test_sums_of_strips_leave_the_cache_when_they_are_read(
        columns: int, read_last: bool, rng: np.random.Generator) -> None:
    """Where their columns are whole lines, on chips on which that was measured."""
    x = normal(rng, 1024, columns)
    for target, expected in ((TARGET, read_last), (parse_target("sm_80"), False)):
        program = CudaProgram(ts.jit(lambda x: ts.sum(ts.exp(x), axis=0)).graph(x), target)
        (group,) = (g for g in program.plan.groups if g.kind == "columns")
        assert ("tile.discard_box(" in source_of(group).text) is expected
        (got,) = program.run([x])
        assert_close(got, np.exp(np.asarray(x, np.float64)).sum(0), "f32", n=1024)
    both = CudaProgram(ts.jit(lambda x: ts.sum(x, axis=0)).graph(normal(rng, 700, 64)), TARGET)
    assert "discard" not in source_of(both.plan.groups[0]).text  # an argument stays


@pytest.mark.parametrize("rows, columns, carried", [
    (1024, 768, True), (1024, 1024, True), (1040, 1024, True), (1025, 1024, False),
    (1024, 512, False), (1024, 1032, False)])  # ragged; short; a row in each block
def test_the_next_rows_come_into_registers(rows: int, columns: int, carried: bool,
                                           rng: np.random.Generator) -> None:
    """Of the last block of a strip none. What strips work on at one time lies together."""
    def backward(x: Any, g: Any, dy: Any) -> Any:
        dx, dg = ts.vjp(ts.rmsnorm, x, g)[1](dy)
        return ts.cast(dx, "bf16"), dg

    x, dy = (normal(rng, rows, columns, dtype="bf16") for _ in range(2))
    g = normal(rng, columns)
    (dx, dg), groups = _run(backward, x, g, dy)
    assert dict(groups[0].attrs).get("carried", False) is carried
    text = source_of(groups[0]).text
    assert text.count("tile.load(V") == (5 if carried else 3)
    assert re.search(rf"m = strip \* {groups[0].schedule.m} \+ i \* {groups[0].grid[0]}\b", text)
    assert (dict(groups[0].schedule.extra) == {"RESIDENT": 4}) is carried
    x64, d64 = (np.asarray(t, np.float64) for t in (x, dy))
    r = 1 / np.sqrt((x64 * x64).mean(1, keepdims=True) + 1e-6)
    assert_close(dg, (d64 * x64 * r).sum(0), "f32", n=rows)
    dh = d64 * np.asarray(g, np.float64)
    want = r * (dh - x64 * r * r * (dh * x64).mean(1, keepdims=True))
    assert_close(np.asarray(dx, np.float64), want, "bf16", n=2)


@pytest.mark.parametrize("rows", [(1600,), (40, 8, 5)])
def test_rows_cut_anew_end_no_loop(rows: tuple[int, ...], rng: np.random.Generator) -> None:
    """The sum of what a loop makes is taken in it, however its rows are written for the sum."""
    def fn(x: Any) -> Any:
        y = ts.cast(ts.exp(x), "bf16")
        return y, ts.sum(ts.cast(ts.reshape(y, (*rows, 24)), "f32"), axis=tuple(range(len(rows))))

    x = normal(rng, 4, 400, 24)
    (y, total), groups = _run(fn, x)
    assert [g.kind for g in groups] == ["strips", "columns"]
    want = np.asarray(ts.cast(ts.tensor(y, "bf16"), "f32"), np.float64).sum((0, 1))
    assert_close(total, want, "f32", n=1600)


def test_a_sum_of_a_matmul_is_taken_behind_its_reshape(rng: np.random.Generator) -> None:
    """By the loop that reads the matmul's result in the same rows."""
    def fn(x: Any, w: Any, g: Any) -> Any:
        y = ts.cast(ts.reshape(x @ w, (4, 300, 72)), "f32")
        return ts.softmax(y * g), ts.sum(y, axis=(0, 1))

    x, w = normal(rng, 1200, 16, dtype="bf16"), normal(rng, 16, 72, dtype="bf16")
    (_, total), groups = _run(fn, x, w, normal(rng, 72))
    assert [g.kind for g in groups] == ["gemm", "strips", "columns"]
    y = np.asarray(ts.cast(x @ w, "f32"), np.float64)
    assert_close(total, y.sum(0), "f32", n=1200)


def test_narrow_elements_are_added_in_f32(rng: np.random.Generator) -> None:
    x = normal(rng, 2048, 16, dtype="bf16")
    (got,), groups = _run(lambda x: ts.sum(x, axis=0), x)
    assert groups[0].kind == "strips" and groups[0].reads[0].type.dtype.name == "bf16"
    assert_close(got, np.asarray(ts.cast(x, "f32"), np.float64).sum(0), "bf16", n=2048)


def test_rows_too_long_to_be_held_are_summed_behind(rng: np.random.Generator) -> None:
    x = normal(rng, 1024, 8200)
    (y, total), groups = _run(lambda x: (s := ts.softmax(x), ts.sum(s, axis=0)), x)
    assert [g.kind for g in groups] == ["rows", "strips", "columns"]
    assert_close(total, np.asarray(y, np.float64).sum(0), "f32", n=1024)


def test_a_norm_of_long_rows_sums_behind_in_one_pass_over_its_operands(
        monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    def backward(x: Any, g: Any, b: Any, dy: Any) -> Any:
        return ts.vjp(lambda x, g, b: ts.layernorm(x, g, b), x, g, b)[1](dy)

    monkeypatch.setattr(strips, "WIDE", 64)
    x, dy, g, b = *(normal(rng, 1100, 72) for _ in range(2)), *(normal(rng, 72) for _ in range(2))
    (_, dg, db), groups = _run(backward, x, g, b, dy)
    assert [k.kind for k in groups] == ["rows", "strips", "columns"]
    x64, d64 = (np.asarray(t, np.float64) for t in (x, dy))
    h = (x64 - x64.mean(1, keepdims=True)) / np.sqrt(x64.var(1, keepdims=True) + 1e-5)
    assert_close(dg, (d64 * h).sum(0), "f32", n=1100)
    assert_close(db, d64.sum(0), "f32", n=1100)


@pytest.mark.parametrize("columns, ahead", [(72, False), (3000, True)])
def test_a_block_of_one_row_is_asked_for_ahead(columns: int, ahead: bool,
                                               rng: np.random.Generator) -> None:
    def fn(x: Any, w: Any) -> Any:
        return ts.sum((x - ts.mean(x, axis=-1, keepdims=True)) * w, axis=0)

    x, w = normal(rng, 1100, columns), normal(rng, columns)
    program = CudaProgram(ts.jit(fn).graph(x, w), TARGET)
    text = source_of(next(g for g in program.plan.groups if g.kind == "strips")).text
    loads = [line for line in text.splitlines() if "tile.load" in line]
    assert len(loads) == 2 and [("prefetch=2" in line) for line in loads] == [
        ahead and "m:m" in line for line in loads]


@pytest.mark.parametrize("rows, columns, warps, groups", [
    (1 << 14, 768, 4, 512), (1 << 14, 4096, 8, 256), (1 << 14, 8000, 16, 128),
    (1 << 14, 8192, 8, 261), (1 << 13, 768, 4, 512), (1 << 13, 2048, 4, 256)])
def test_wide_rows_are_held_by_more_warps_and_fewer_groups(rows: int, columns: int, warps: int,
                                                           groups: int) -> None:
    """Or go through shared memory, where they are whole blocks."""
    def fn(x: Any, w: Any, dy: Any) -> Any:
        return ts.vjp(lambda x, w: ts.rmsnorm(x, w), x, w)[1](dy)

    x = ts.zeros((rows, columns), "bf16")
    program = CudaProgram(ts.jit(fn).graph(x, ts.zeros((columns,)), x), TARGET)
    group = next(g for g in program.plan.groups if g.kind == "strips")
    assert group.schedule.warps == warps and group.grid == (groups,)


def test_infinities_and_nans_reach_their_sum_alone() -> None:
    x = np.ones((1500, 3), np.float32)
    x[7, 1], x[1499, 2] = np.inf, np.nan
    (got,), _ = _run(lambda x: ts.sum(x, axis=0), ts.tensor(x))
    assert got[0] == 1500 and np.isinf(got[1]) and np.isnan(got[2])


def test_short_columns_take_one_kernel(rng: np.random.Generator) -> None:
    (got,), groups = _run(lambda x: ts.sum(x, axis=0), x := normal(rng, 100, 40))
    assert [g.kind for g in groups] == ["columns"]
    assert_close(got, np.asarray(x, np.float64).sum(0), "f32", n=100)


def test_what_is_rounded_stochastically_is_summed(rng: np.random.Generator) -> None:
    """A cast that draws has a key beside its operand."""
    x = normal(rng, 2048, 32)
    got = CudaProgram(ts.jit(lambda x: ts.sum(ts.cast(ts.cast(
        ts.reshape(x, (64, 32, 32)), "bf16 @stochastic_round"), "f32"), axis=(0, 1))).graph(x),
        "sm_90a").run([x.array])[0]
    assert_close(got, np.asarray(x, np.float64).sum(0), "bf16", n=2048,
                 scale=float(np.abs(np.asarray(x)).sum(0).max()))


@pytest.mark.parametrize("shape", [(1024, 8), (3, 701, 40), (2, 600, 4100)])
def test_the_largest_element_goes_along_with_sums(shape: tuple[int, ...],
                                                  rng: np.random.Generator) -> None:
    """Of negative numbers, too: what lies beyond the last row is none of them."""
    def fn(x: Any) -> Any:
        y = ts.cast(-ts.exp(x), "bf16")
        wide = ts.cast(y, "f32")
        return y, ts.max(wide), ts.sum(wide, axis=tuple(range(len(shape) - 1)))

    (y, top, total), groups = _run(fn, normal(rng, *shape))
    assert "strip_max" in {s.op for s in groups[0].steps}
    assert [g.kind for g in groups if y.shape in {o.shape for o in g.reads}] == ["strips"]
    wide = np.asarray(ts.cast(ts.tensor(y, "bf16"), "f32"), np.float64).reshape(-1, shape[-1])
    assert top == wide.max() < 0
    assert_close(total, wide.sum(0), "f32", n=len(wide))


def test_the_largest_element_of_rows_with_statistics_is_one_more_of_these(
        rng: np.random.Generator) -> None:
    def fn(x: Any, g: Any) -> Any:
        y = ts.softmax(x)
        return y, ts.max(y * g), ts.sum(y * g, axis=0)

    x, g = normal(rng, 1024, 48), normal(rng, 48)
    (y, top, _), groups = _run(fn, x, g)
    ops = [s.op for k in groups for s in k.steps]
    assert "strip_sum" in ops and "strip_max" not in ops
    assert_close(top, (y * np.asarray(g)).max(), "f32", n=1)


def test_a_nan_is_the_largest_element() -> None:
    x = np.ones((1500, 3), np.float32)
    x[1499, 2] = np.nan
    (top, _), groups = _run(lambda x: (ts.max(x), ts.sum(x, axis=0)), ts.tensor(x))
    assert groups[0].kind == "strips" and np.isnan(top)


@pytest.mark.parametrize("rows, columns, strips", [
    (4096, 1024, 256), (8192, 1024, 512), (16384, 1024, 512), (65536, 1024, 512),
    (262144, 256, 1024)])
def test_rows_with_statistics_are_summed_in_as_many_strips_as_run_at_once(rows: int, columns: int,
                                                                          strips: int) -> None:
    """Four warps each, with registers for all of them at once; columns alone in long strips."""
    w, x, g = (ts.Tensor[columns, "f32"], ts.Tensor[rows, columns, "f32"],
               ts.Tensor[rows, columns, "bf16"])

    def gradients(x: Any, w: Any, b: Any, g: Any) -> Any:
        y, pull = ts.vjp(lambda *a: ts.cast(ts.layernorm(*a), "bf16"), x, w, b)
        return pull(g)

    def strips_in(fn: Callable, *types: Any) -> list[ScheduledGroup]:
        groups = CudaProgram(ts.jit(fn).graph(*types), TARGET).plan.groups
        return [g for g in groups if g.kind == "strips"]

    (norm,) = strips_in(gradients, x, w, w, g)
    assert norm.grid == (strips,) and norm.schedule.warps_ == 4
    assert dict(norm.schedule.extra).get("RESIDENT") == strips // 128
    (alone,) = strips_in(lambda g: ts.sum(ts.cast(g, "f32"), axis=0), g)
    assert alone.grid[0] <= 512 and prod(alone.grid) >= 3 * 132 * 3 // 4  # about a wave


@pytest.mark.parametrize(("rows", "strips"), [(512, 1), (32, 0), (4096, 1)])
def test_sums_over_fewer_but_longer_rows_are_strips_too(rows: int, strips: int) -> None:
    """Where rows are fewer still, columns make what they sum: either way it is not written."""
    N = (1 << 26) // rows
    types = (ts.Tensor[rows, N, "bf16"], ts.Tensor[N, "bf16"], ts.Tensor[N, "bf16"],
             ts.Tensor[rows, N, "bf16"])

    def fn(x: Any, w: Any, b: Any, dy: Any) -> Any:
        dx, dw, db = ts.vjp(ts.layernorm, x, w, b)[1](dy)
        return ts.cast(dx, "bf16"), dw, db

    groups = CudaProgram(ts.jit(fn).graph(*types), "sm_90a").plan.groups
    assert [g.kind for g in groups].count("strips") == strips
    wide = [o for g in groups for o in g.writes
            if o.type.dtype.name == "f32" and np.prod(o.shape) == rows * N]
    assert not wide
