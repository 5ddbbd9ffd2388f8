"""Rows too long for registers, and what is approximated where only 16 bits of it are kept."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import tessera as ts
from emulator import Block, Builder
from emulator import register as as_register
from lowered_functions import normal
from tessera import stdlib
from tessera.graph.cuda import CudaProgram, choose_schedule
from tessera.graph.cuda.kernels import row_passes
from tessera.graph.cuda.kernels.generate_kernels import source_of
from tessera.graph.schedule.ir import ScheduledGroup
from tessera.kernels import row_blocks
from tessera.runtime.target import parse_target
from tessera.tile.cuda.instruction import Operand
from tessera.tile.cuda.intrinsics import elementwise
from tolerance import assert_close

TARGET = parse_target("sm_90a")


def _groups(fn: Any, *xs: Any, kind: str = "rows") -> list[ScheduledGroup]:
    return [g for g in CudaProgram(ts.jit(fn).graph(*xs), TARGET).plan.groups if g.kind == kind]


def _loss(x: Any, labels: Any) -> Any:
    loss, back = ts.vjp(lambda x: ts.cross_entropy(ts.cast(x, "f32"), labels), x)
    return loss, back(ts.ones(()))


# --- rows in shared memory --------------------------------------------------------------------
@pytest.mark.parametrize("rows, columns, staged", [
    (5, 1024, (0, 1)), (9, 256, (0, 1)), (6, 100, ())])
def test_rows_of_two_operands_come_to_shared_memory(
        rows: int, columns: int, staged: tuple[int, ...], rng: np.random.Generator) -> None:
    """All of a group's at once, where they are whole accesses of 16 bytes."""
    def gradient(x: Any, dy: Any) -> Any:
        return ts.cast(ts.vjp(ts.softmax, x)[1](dy), "bf16")

    x, dy = (normal(rng, rows, columns, dtype="bf16") for _ in range(2))
    program = CudaProgram(ts.jit(gradient).graph(x, dy), TARGET)
    (group,) = program.plan.groups
    assert dict(group.attrs).get("staged", ()) == staged
    with ts.config.scope(debug=True):
        (dx,) = program.run([x, dy])
    x64, d64 = (np.asarray(t, np.float64) for t in (x, dy))
    y = np.exp(x64 - x64.max(1, keepdims=True))
    y /= y.sum(1, keepdims=True)
    want = y * (d64 - (y * d64).sum(1, keepdims=True))
    assert_close(np.asarray(dx, np.float64), want, "bf16", n=2)


@pytest.mark.parametrize("n", [256, 9000])
def test_the_first_groups_ask_for_their_rows_while_another_kernel_ends(
        n: int, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """In L2, in front of the wait for that one; where there are more groups than run at once."""
    x, dy = (normal(rng, 48, n, dtype="bf16") for _ in range(2))
    asks = re.compile(r"if tile.group_id\(\) < 4:\n( +tile.prefetch_box\(V\d\[m:m\+\d.*\n){2}")
    (few,) = _groups(_softmax_gradient, x, dy)
    assert "prefetch_box" not in source_of(few).text
    monkeypatch.setattr(choose_schedule, "NEAR_GROUPS", 4)
    program = CudaProgram(ts.jit(_softmax_gradient).graph(x, dy), TARGET)
    (group,) = program.plan.groups
    assert asks.search(source_of(group).text)
    (one,) = _groups(ts.softmax, x)
    assert "prefetch_box" not in source_of(one).text
    older = CudaProgram(ts.jit(_softmax_gradient).graph(x, dy), parse_target("sm_80"))
    assert "prefetch_box" not in source_of(older.plan.groups[0]).text
    (dx,) = program.run([x, dy])
    x64, d64 = (np.asarray(t, np.float64) for t in (x, dy))
    y = np.exp(x64 - x64.max(1, keepdims=True))
    y /= y.sum(1, keepdims=True)
    want = y * (d64 - (y * d64).sum(1, keepdims=True))
    assert_close(np.asarray(dx, np.float64), want, "bf16", n=2)


@pytest.mark.parametrize("n, parts", [
    (17000, 1), (20480, 1), (50304, 1), (60000, row_passes.PARTS)])
def test_the_loss_and_its_gradient_read_a_row_once(n: int, parts: int, rng: np.random.Generator
                                                   ) -> None:
    """In parts that are waited for one after another where no other group computes meanwhile."""
    x, y = normal(rng, 3, n, dtype="bf16"), ts.tensor(rng.integers(0, n, 3).astype(np.int32))
    program = CudaProgram(ts.jit(_loss).graph(x, y), TARGET)
    group = next(g for g in program.plan.groups if g.kind == "rows" and g.space[-1] == n)
    assert [group.reads[i].type.dtype.name for i, _ in group.attr("brought")] == ["bf16"]
    text = source_of(group).text
    (name,) = re.findall(r"(V\w+): Tensor\[3, \d+, \w+\]", text)[:1]
    reads = re.findall(rf"{name}\[m:m\+1, (.*?)\]", text)  # of parts, and of what is left over
    step = group.schedule.n
    rest = [f"{n // step * step}:{n}"] * (n % step > 0)
    assert reads == [*rest, *[f"n:n+{step}"] * parts, f"0:{n}"]  # at last the label's element
    spans = [tuple(map(int, span)) for span in re.findall(r"in range\((\d+), (\d+), ", text)]
    coming, first = spans[:parts], spans[parts:2 * parts]
    assert coming == first and all(a[1] == b[0] for a, b in pairwise(coming))
    assert re.findall(r"cp_wait_group\((\d)\)\n.*tile.barrier", text) == [
        str(i) for i in reversed(range(parts))]
    loss, dx = program.run([x, y])
    e, at = np.asarray(x, np.float64), (np.arange(3), np.asarray(y))
    p = np.exp(e - e.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    assert_close(loss, -np.log(p[at]).mean(), "f32", n=n)
    p[at] -= 1
    assert_close(np.asarray(dx, np.float64), p / 3, "bf16")


@pytest.mark.parametrize("n", [4096, 4097, 5000, 5120, 8191, 8192])
def test_rows_of_one_block_and_a_rest(n: int, rng: np.random.Generator) -> None:
    x = normal(rng, 3, n, dtype="bf16")
    for fn in (ts.softmax, lambda x: ts.softmax(ts.cast(x, "f32"))):
        (got,) = CudaProgram(ts.jit(fn).graph(x), TARGET).run([x])
        e = np.exp(np.asarray(x, np.float64))
        assert_close(np.asarray(got, np.float64), e / e.sum(1, keepdims=True),
                     "bf16" if fn is ts.softmax else "f32", n=n)


@pytest.mark.parametrize("norm, weights, passes", [(ts.layernorm, 2, 2), (ts.rmsnorm, 1, 1)])
def test_statistics_of_a_norms_gradient_wait_for_nothing_but_the_mean(norm: Any, weights: int,
                                                                      passes: int) -> None:
    x, w = ts.Tensor[4, 5000, "bf16"], ts.Tensor[5000, "bf16"]
    (group,) = _groups(lambda *xs: ts.vjp(norm, *xs[:-1])[1](xs[-1])[0], x, *[w] * weights, x)
    assert set(re.findall(r"_p(\d)\b", source_of(group).text)) == set(map(str, range(passes)))


@pytest.mark.parametrize("n, brought, warps", [
    (20000, ((0, 4),), 8), (30000, ((0, 3),), 16), (57000, ((0, 6),), 16),
    (60000, ((0, 2),), 32)])
def test_a_group_of_more_warps_has_a_multiprocessor_where_rows_leave_no_room_for_two(
        n: int, brought: tuple, warps: int, rng: np.random.Generator) -> None:
    """Of a row that does not fit into shared memory as many blocks are there as have room."""
    x = normal(rng, 2, n)
    (group,) = _groups(lambda x: ts.softmax(x), x)
    assert group.attr("brought") == brought and group.schedule.warps == warps
    (got,) = CudaProgram(ts.jit(lambda x: ts.softmax(x)).graph(x), TARGET).run([x])
    e = np.exp(np.asarray(x, np.float64))
    assert_close(got, e / e.sum(1, keepdims=True), "f32", n=n)


# --- rows that the groups of a cluster share --------------------------------------------------
def _softmax_gradient(x: Any, dy: Any) -> Any:
    return ts.vjp(ts.softmax, x)[1](dy)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("n, groups", [(57344, 4), (40960, 4), (29952, 2)])
def test_a_row_is_read_once_by_groups_that_have_parts_of_it(
        n: int, groups: int, debug: bool, rng: np.random.Generator) -> None:
    """Also where a part is no whole number of blocks."""
    x = normal(rng, 3, n)
    (group,) = _groups(lambda x: ts.softmax(x), x)
    assert (group.attr("cluster"), group.grid) == (groups, (3 * groups,))
    text, part = source_of(group).text, n // groups
    assert f"first = tile.group_id(0) % {groups} * {part}" in text
    assert text.count("V0[m:m+1, first+") == 1 + (part % group.schedule.n > 0)
    with ts.config.scope(debug=debug):
        (got,) = CudaProgram(ts.jit(lambda x: ts.softmax(x)).graph(x), TARGET).run([x])
    e = np.exp(np.asarray(x, np.float64))
    assert_close(got, e / e.sum(1, keepdims=True), "f32", n=n)


def test_a_gradient_of_rows_that_groups_share(rng: np.random.Generator) -> None:
    x, dy = normal(rng, 2, 32768), normal(rng, 2, 32768)
    (group,) = _groups(_softmax_gradient, x, dy)
    assert group.attr("cluster") == 4 and len(group.attr("brought")) == 2
    (got,) = CudaProgram(ts.jit(_softmax_gradient).graph(x, dy), TARGET).run([x, dy])
    p, g = np.exp(np.asarray(x, np.float64)), np.asarray(dy, np.float64)
    p /= p.sum(1, keepdims=True)
    assert_close(got, p * (g - (p * g).sum(1, keepdims=True)), "f32", n=32768)


@pytest.mark.parametrize("rows, n, groups, together", [
    (4, 33280, 8, 2), (3, 33280, 8, 1), (2, 20480, 8, 2), (3, 20480, 4, 1)])
def test_two_rows_share_what_is_the_same_for_all(rows: int, n: int, groups: int, together: int,
                                                 rng: np.random.Generator) -> None:
    """A norm's weights come to shared memory with the rows, for both."""
    x, w, b = normal(rng, rows, n), normal(rng, n), normal(rng, n)
    (group,) = _groups(ts.layernorm, x, w, b)
    assert (group.attr("cluster"), group.schedule.m) == (groups, together)
    assert group.grid == (rows // together * groups,) and len(group.attr("brought")) == 3
    (got,) = CudaProgram(ts.jit(ts.layernorm).graph(x, w, b), TARGET).run([x, w, b])
    z = np.asarray(x, np.float64)
    want = (z - z.mean(1, keepdims=True)) / np.sqrt(z.var(1, keepdims=True) + 1e-5)
    assert_close(got, want * np.asarray(w) + np.asarray(b), "f32", n=n)


def test_weights_without_room_beside_a_row_come_once_for_a_strip_of_them(rng: np.random.Generator
                                                                         ) -> None:
    n = 131072
    x, w, b = (normal(rng, *s, dtype="bf16") for s in ((19, n), (n,), (n,)))
    program = CudaProgram(ts.jit(lambda *xs: ts.layernorm(*xs)).graph(x, w, b), TARGET)
    (group,) = program.plan.groups
    assert (group.kind, group.attr("cluster"), group.attr("rows")) == ("strips", 8, 2)
    (got,) = program.run([x, w, b])
    x64, w64, b64 = (np.asarray(v, np.float64) for v in (x, w, b))
    z = (x64 - x64.mean(1, keepdims=True)) / np.sqrt(x64.var(1, keepdims=True) + 1e-5)
    assert_close(np.asarray(got, np.float64), z * w64 + b64, "bf16", n=n)


def test_the_loss_of_rows_that_groups_share(rng: np.random.Generator) -> None:
    """Which column is a row's label is told by the column's number in the whole row."""
    n = 59904
    x, y = normal(rng, 3, n, dtype="bf16"), ts.tensor(rng.integers(0, n, 3).astype(np.int32))
    program = CudaProgram(ts.jit(_loss).graph(x, y), TARGET)
    group = next(g for g in program.plan.groups if g.kind == "rows" and g.space[-1] == n)
    assert group.attr("cluster") == 2
    loss, dx = program.run([x, y])
    p, at = np.exp(np.asarray(x, np.float64)), (np.arange(3), np.asarray(y))
    p /= p.sum(1, keepdims=True)
    assert_close(loss, -np.log(p[at]).mean(), "f32", n=n)
    p[at] -= 1
    assert_close(np.asarray(dx, np.float64), p / 3, "bf16")


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_librarys_kernels_share_rows(groups: int, rng: np.random.Generator) -> None:
    x, w, b = (rng.standard_normal(s).astype(np.float32) for s in ((4, 4096), (4096,), (4096,)))
    y, how = np.full_like(x, np.nan), {"BN": 512, "GROUPS": groups}
    stdlib.stable_softmax.kernels["long_softmax"](x, y, **how)
    e = np.exp(x.astype(np.float64))
    assert_close(y, e / e.sum(1, keepdims=True), "f32", n=4096)
    z = x - x.mean(1, keepdims=True, dtype=np.float64)
    for rows, brings in ((1, False), (2, True)):
        y[:] = np.nan
        stdlib.efficient_layernorm.kernels["long_layernorm"](
            x, w, b, y, 1e-5, ROWS=rows, brings=brings, **how)
        assert_close(y, z / np.sqrt(z.var(1, keepdims=True) + 1e-5) * w + b, "f32", n=4096)


@pytest.mark.parametrize("columns, bits, all_bits, found", [
    (65536, 16, 0, (1, 2)), (65536, 16, 32, (2, 8)), (131072, 16, 32, (1, 8)),
    (60000, 16, 0, (1, 1)), (32768, 16, 32, (1, 1))])
def test_how_the_librarys_rows_are_shared(columns: int, bits: int, all_bits: int, found: tuple
                                          ) -> None:
    b = row_blocks.routine_blocks(20, columns, bits, TARGET.generation, all_bits)
    assert (b.rows, b.groups) == found and b.columns < columns
    assert row_blocks.routine_blocks(20, columns, bits, None).groups == 1


@pytest.mark.parametrize("rows, columns, all_bits, found", [
    (300, 131072, 32, (14, 8)), (20, 131072, 32, (0, 8)), (300, 131072, 0, (0, 4)),
    (300, 65536, 32, (28, 4)), (40, 65536, 32, (0, 8))])
def test_long_rows_with_weights_are_taken_one_after_another(
        rows: int, columns: int, all_bits: int, found: tuple) -> None:
    b = row_blocks.routine_blocks(rows, columns, 16, TARGET.generation, all_bits)
    assert (b.strips, b.groups) == found


def test_the_librarys_strips_commit_their_weights_in_front() -> None:
    """A wait that committed something would count it as a row."""
    kernel = stdlib.efficient_layernorm.kernels["strip_layernorm"]
    x, w = ts.zeros((64, 2048), "bf16"), ts.zeros((2048,), "bf16")
    kernel.lower(x, w, w, x, 1e-5, BN=512, GROUPS=1, STRIPS=4)
    calls = re.findall(r"^ +(commit|wait_copies)\(\)", kernel.inspect_ir("target", target="sm_90a"),
                       re.M)
    assert calls == ["commit", "commit", "wait_copies", "commit"]


@pytest.mark.parametrize("how", ["alike", "far", "outlier"])
@pytest.mark.parametrize("strips, groups", [(2, 1), (4, 2), (3, 8)])
def test_the_librarys_strips(how: str, strips: int, groups: int, rng: np.random.Generator) -> None:
    """Of rows around zero, far from it, with one element of the sample far out; strips of two rows
    and three, fewer than come to shared memory at one time."""
    bf16 = ts.bf16.numpy
    x, w, b = (rng.standard_normal(s).astype(bf16) for s in ((7, 2048), (2048,), (2048,)))
    if how != "alike":
        x = (300 + 8 * x.astype("f4")).astype(bf16)
    x[:, 3] = 1e4 if how == "outlier" else x[:, 3]
    y = np.full_like(x, np.nan)
    with ts.config.scope(debug=True):
        stdlib.efficient_layernorm.kernels["strip_layernorm"](
            x, w, b, y, 1e-5, BN=1024 // groups, GROUPS=groups, STRIPS=strips)
    z = x.astype(np.float64) - x.mean(1, keepdims=True, dtype=np.float64)
    z = z / np.sqrt(z.var(1, keepdims=True) + 1e-5) * w.astype(np.float64)
    assert_close(y.astype(np.float64), z + b.astype(np.float64), "bf16",
                 scale=np.abs(z) + np.abs(b.astype(np.float64)))


@pytest.mark.parametrize("n, target", [(57000, "sm_90a"), (57344, "sm_80")])
def test_rows_are_not_shared_where_parts_would_not_begin_at_accesses_or_there_are_no_clusters(
        n: int, target: str) -> None:
    graph = ts.jit(lambda x: ts.softmax(x)).graph(ts.Tensor[600, n, "f32"])
    (group,) = CudaProgram(graph, parse_target(target)).plan.groups
    assert group.attr("cluster") == 1


def test_every_other_pass_over_memory_goes_backwards() -> None:
    def heads(n: int) -> list[str]:
        (group,) = _groups(lambda x: ts.softmax(x), ts.Tensor[600, n, "f32"])
        return re.findall(r"for n in range\((.*)\):", source_of(group).text)

    step = row_blocks.STREAMED
    whole = 300000 // step * step
    forth, back = f"0, {whole}, {step}", f"{whole - step}, -1, -{step}"
    assert heads(300000) == [forth, back, forth]
    held, whole = 3 * step, 80000 // step * step
    assert heads(80000)[-4:] == [
        f"{whole - step}, {held - step}, -{step}", f"{held - step}, -1, -{step}",
        f"0, {held}, {step}", f"{held}, {whole}, {step}"]
    assert not any("-1" in head for head in heads(20000))  # of rows in shared memory none does


def test_of_two_operands_one_is_brought_whole_and_one_in_part(rng: np.random.Generator) -> None:
    def fn(x: Any, y: Any) -> Any:
        z = x + ts.cast(y, "f32")
        return z - ts.max(z, axis=-1, keepdims=True)

    (group,) = _groups(fn, x := normal(rng, 2, 60001), y := normal(rng, 2, 60001, dtype="bf16"))
    brought = [group.reads[i].type.dtype.name for i, _ in group.attr("brought")]
    assert len(group.reads) == 2 and brought == ["bf16", "f32"]
    assert [many for _, many in group.attr("brought")] == [3, 1]
    (got,) = CudaProgram(ts.jit(fn).graph(x, y), TARGET).run([x, y])
    z = np.asarray(x, np.float32) + np.asarray(ts.cast(y, "f32"))
    assert np.array_equal(got, z - z.max(1, keepdims=True))


def test_bad_numbers_stay_in_their_rows() -> None:
    x = np.zeros((3, 20000), np.float32)
    x[0, 17], x[1, 19999] = np.nan, -np.inf
    got = CudaProgram(ts.jit(lambda x: ts.softmax(x)).graph(ts.tensor(x)), TARGET).run(
        [ts.tensor(x)])[0]
    assert np.isnan(got[0]).all() and got[1, 19999] == 0
    assert_close(got[1, :-1], np.full(19999, 1 / 19999), "f32", n=20000)
    assert_close(got[2], np.full(20000, 1 / 20000), "f32", n=20000)


@pytest.mark.parametrize("shape, parts", [
    ((1 << 17,), 64), ((3, 1 << 17), 64), ((17, 1 << 17), 0), (((1 << 17) + 1,), 64),
    ((1 << 15,), 0)])
def test_a_few_long_rows_are_reduced_by_many_groups(shape: tuple[int, ...], parts: int,
                                                    rng: np.random.Generator) -> None:
    x = normal(rng, *shape)
    fns = (lambda x: ts.sum(x, axis=-1), lambda x: ts.max(x, axis=-1))
    for fn, want in zip(fns, (np.sum, np.max), strict=True):
        program = CudaProgram(ts.jit(fn).graph(x), TARGET)
        rows = int(np.prod(shape[:-1]))
        assert program.plan.groups[0].space[0] == rows * max(parts, 1)
        rest = shape[-1] % 16 != 0  # which is reduced by itself, and joined
        assert len(program.plan.groups) == 1 + (parts > 0) + 2 * rest
        scale = np.abs(np.asarray(x, np.float64)).sum(-1)
        assert_close(program.run([x])[0], want(np.asarray(x, np.float64), -1), "f32",
                     n=shape[-1], scale=scale)


# --- approximations ---------------------------------------------------------------------------
def _texts(fn: Any, *xs: Any) -> str:
    return "\n".join(source_of(g).text for k in ("loop", "rows", "strips")
                     for g in _groups(fn, *xs, kind=k))


def test_what_is_rounded_to_16_bits_is_approximated(rng: np.random.Generator) -> None:
    x = normal(rng, 64, 300)
    narrow = _texts(lambda x: ts.cast(ts.gelu(x) * 2.0, "bf16"), x)
    assert "tile.sigmoid_approx(" in narrow and "tile.sigmoid(" not in narrow
    assert "tile.exp_approx(" in _texts(lambda x: ts.cast(ts.exp(x), "f16"), x)
    for fn in (ts.gelu,  # f32 results
               lambda x: (s := ts.sigmoid(x), ts.cast(s, "bf16")),
               lambda x: ts.cast(ts.sum(ts.exp(x), axis=-1, keepdims=True), "bf16"),
               lambda x: ts.cast(ts.where(ts.exp(x) > 0.5, 1.0, 2.0), "bf16"),
               lambda x: ts.cast(ts.cast(ts.sigmoid(x), "f64"), "bf16")):
        assert "_approx(" not in _texts(fn, x)


def test_powers_that_are_summed_from_their_maximum_on_are_approximated(
        rng: np.random.Generator) -> None:
    x = normal(rng, 64, 300)
    for fn in (lambda x: ts.softmax(ts.cast(x, "bf16")), ts.log_softmax, lambda x: ts.sum(
            ts.exp(x - ts.max(x, axis=-1, keepdims=True)), axis=-1)):
        text = _texts(fn, x)
        assert "tile.exp_approx(" in text and "tile.exp(" not in text
    narrow = _texts(lambda x: ts.cast(ts.vjp(ts.softmax, x)[1](x), "bf16"), x)
    assert "tile.exp_approx(" in narrow and "tile.exp(" not in narrow
    for fn in (lambda x: ts.vjp(ts.softmax, x)[1](x),  # 32 bits are kept of the weighted sum
               lambda x: ts.cast(ts.sum(x * ts.exp(x - 1), axis=-1, keepdims=True) * x, "bf16"),
               ts.softmax,  # the powers are kept
               lambda x: ts.sum(ts.exp(x - ts.min(x, axis=-1, keepdims=True)), axis=-1),
               lambda x: ts.sum(ts.exp(2 * x - ts.max(x, axis=-1, keepdims=True)), axis=-1),
               lambda x: ts.max(ts.exp(x - ts.max(x, axis=-1, keepdims=True)), axis=-1)):
        assert "_approx(" not in _texts(fn, x)


def test_what_a_sum_of_approximated_powers_loses_stays_within_its_bound(
        rng: np.random.Generator) -> None:
    """With every power off by as much as it may, and all to one side."""
    for n in (2, 1000, 1 << 17):
        for spread in (0.01, 1, 10, 100):
            d = rng.standard_normal(n) * spread
            d -= d.max()
            p = np.exp(d)
            off = (p * (1.4 * np.abs(d) + 4)).sum() / p.sum()
            assert off <= 1.4 * np.log(n) + 4


@pytest.mark.parametrize("name, terms, want", [
    ("exp_approx", 4, np.exp), ("sigmoid_approx", 6, lambda x: 1 / (1 + np.exp(-x)))])
def test_approximations_keep_their_bounds(name: str, terms: int, want: Any,
                                          rng: np.random.Generator) -> None:
    """What roundings do, in emulated instructions; the instructions' own errors are in the bound.
    """
    x = np.concatenate([rng.uniform(-87.3, 88.7, 20000), rng.uniform(-1, 1, 2000),
                        [0.0, -0.0]]).astype(np.float32)
    body = elementwise.operation(name, "f32").rule(Operand("x", "f32", 1)).body

    def run(v: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            (got,) = body(Builder(Block(len(v))), [as_register(v)])
        return np.asarray(got, np.float64)

    exact = want(x.astype(np.float64))
    assert (np.abs(run(x) - exact) <= (1.4 * np.abs(x) + terms) * 2.0**-24 * exact).all()
    ends = run(np.array([np.inf, -np.inf, np.nan], np.float32))
    assert ends[0] == want(np.inf) and ends[1] == 0 and np.isnan(ends[2])
