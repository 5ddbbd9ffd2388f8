"""Gradients of norms of rows too long for registers: result and sums in one kernel."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_driver import driver as driver
from lowered_functions import lowered, normal
from ptx_harness import require_compiler
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.kernels import long_strips, strips
from tessera.graph.cuda.kernels.generate_kernels import source_of
from tessera.graph.cuda.program.compile_ahead import compile_ahead, wanted_ahead
from tessera.kernels import cards, row_blocks
from tessera.kernels.cards import Card, planning_for
from tessera.runtime.clusters import clusters_at_once
from tessera.runtime.device import device
from tessera.runtime.target import parse_target
from tessera.tile.launch.machine_code import compiling_for
from tolerance import assert_close

TARGET = parse_target("sm_90a")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 128 columns, rows of more than 256 are long."""
    monkeypatch.setattr(long_strips, "BLOCK", 128)
    monkeypatch.setattr(long_strips, "WARPS", 2)
    monkeypatch.setattr(long_strips, "SHARED", 256)
    monkeypatch.setattr(strips, "LEAST", 256)
    monkeypatch.setattr(strips, "WIDE", 256)
    monkeypatch.setattr(strips, "LARGE", 1)


def gradients(x: Any, w: Any, b: Any, dy: Any) -> Any:
    return ts.vjp(ts.layernorm, x, w, b)[1](dy)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("n, groups", [(384, 1), (512, 1), (768, 2), (1024, 2), (1536, 4),
                                       (3072, 8)])
def test_rows_are_read_once_for_the_result_and_the_sums(
        n: int, groups: int, debug: bool, rng: np.random.Generator) -> None:
    x, dy, w, b = (normal(rng, *s) for s in ((201, n), (201, n), (n,), (n,)))
    made = lowered(gradients, x, w, b, dy)
    group = made.plan.groups[0]
    assert [g.kind for g in made.plan.groups] == ["strips", "columns"]
    rows = -(-201 // long_strips.STRIPS[groups])  # of some strips one less
    assert (group.attr("cluster"), group.attr("rows")) == (groups, rows)
    with ts.config.scope(debug=debug):
        dx, dw, db = made.run([x, w, b, dy])
    x64, d64 = np.asarray(x, np.float64), np.asarray(dy, np.float64)
    r = 1 / np.sqrt(x64.var(1, keepdims=True) + 1e-5)
    h = (x64 - x64.mean(1, keepdims=True)) * r
    assert_close(dw, (d64 * h).sum(0), "f32", n=201)
    assert_close(db, d64.sum(0), "f32", n=201)
    dh = d64 * np.asarray(w, np.float64)
    want = r * (dh - dh.mean(1, keepdims=True) - h * (dh * h).mean(1, keepdims=True))
    assert_close(dx, want, "f32", n=n)


def test_scaled_differences_are_fused_where_elements_have_16_bits(rng: np.random.Generator) -> None:
    """Two operations for an element of the result and one for that of a sum; of f32 the mean is
    taken off first. Rows are far from zero."""
    n, x = 1024, 30 + rng.standard_normal((201, 1024)).astype(np.float32)
    given = [ts.cast(v, "bf16") for v in (
        ts.tensor(x), normal(rng, n), normal(rng, n), normal(rng, 201, n))]
    made = lowered(gradients, *given)
    written = [source_of(lowered(gradients, *xs).plan.groups[0]).text.split("_w0", 1)[1]
               for xs in (given, [ts.cast(v, "f32") for v in given])]
    assert " - " not in written[0] and " - " in written[1]
    dx, dw, db = (np.asarray(v, np.float64) for v in made.run(given))
    x64, w64, _, d64 = (np.asarray(v, np.float64) for v in given)
    r = 1 / np.sqrt(x64.var(1, keepdims=True) + 1e-5)
    h, dh = (x64 - x64.mean(1, keepdims=True)) * r, d64 * w64
    assert_close(dw, (d64 * h).sum(0), "bf16", scale=np.abs(d64 * h).sum(0))
    want = r * (dh - dh.mean(1, keepdims=True) - h * (dh * h).mean(1, keepdims=True))
    assert_close(dx, want, "bf16", scale=np.abs(want) + 2.0**-8 * r * np.abs(dh))


@pytest.mark.parametrize("rows, n, target", [
    (192, 8192, "sm_90a"), (192, 700, "sm_90a"), (131, 512, "sm_90a"), (192, 1024, "sm_80")])
def test_other_rows_are_read_twice(rows: int, n: int, target: str) -> None:
    """Longer ones, no whole blocks, fewer rows than groups, and groups that have no cluster."""
    x, w = ts.Tensor[rows, n, "f32"], ts.Tensor[n, "f32"]
    found = lowered(gradients, x, w, w, x, target=parse_target(target)).plan.groups
    assert [g.kind for g in found][:2] == ["rows", "strips"]


@pytest.mark.parametrize("R, rows", [(192, 2), (4096, 32), (32768, 125), (1 << 20, 127),
                                     (1 << 21, 128), (1009, 8), (132, None)])
def test_strips_are_as_many_as_run_at_once_or_some_times_that(R: int, rows: int | None) -> None:
    """A sum in f32 has 128 rows at most."""
    found = long_strips.long_strips(R, 512, TARGET.generation)
    assert (found and found.rows) == rows


def test_rows_come_while_others_are_worked_on() -> None:
    """Three at a time where a group waits twice a row and none runs beside it, else two."""
    how = long_strips.LongStrips(8, 1, 512, 4096 * 3 + 1024)
    assert [how.room_for(n, 1024) for n in (4096, 4097, 6144, 6145)] == [3, 2, 2, 0]
    for columns, want in ((512, (3, 2)), (1024, (3, 2))):
        x, w = ts.Tensor[192, columns, "f32"], ts.Tensor[columns, "f32"]
        layer, rms = lowered(gradients, x, w, w, x), lowered(
            lambda x, w, dy: ts.vjp(ts.rmsnorm, x, w)[1](dy), x, w, x)
        assert tuple(p.plan.groups[0].attr("under_way") for p in (layer, rms)) == want


def test_a_row_is_written_between_the_statistics_of_the_next() -> None:
    """Where a group has a multiprocessor to itself: half of it behind each of two."""
    x, w = ts.Tensor[192, 512, "f32"], ts.Tensor[512, "f32"]
    text = source_of(lowered(gradients, x, w, w, x).plan.groups[0]).text
    loop = text[text.index("for i in range"):]
    found = re.findall(r"tile\.row_sum|V\d+\[m:m\+1, \d+:\d+\] =|tile\.barrier|cp_async\(v0", loop)
    kinds = [re.sub(r"V.*", "store", f) for f in found]
    one = ["tile.row_sum"] * 2 + ["store"] * 2
    assert kinds == ["tile.barrier", *one, *one, "tile.barrier", "cp_async(v0"]


@pytest.mark.parametrize("kept_kib, form", [(2, {"cluster": 1, "rows": 2, "under_way": 2}),
                                            (108, {"rows": 2})])
def test_two_groups_have_a_multiprocessor_or_rows_are_held_whole(
        kept_kib: int, form: dict[str, int], rng: np.random.Generator,
        monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SHARED", 512), ("SHARED_BLOCK", 128), ("SHARED_WARPS", 2),
                        ("KEPT_BYTES", kept_kib << 10)):
        monkeypatch.setattr(long_strips, name, value)
    monkeypatch.setattr(strips, "WIDE", 512)
    x, dy, w, b = (normal(rng, *s) for s in ((301, 512), (301, 512), (512,), (512,)))
    made = lowered(gradients, x, w, b, dy)
    group = made.plan.groups[0]
    assert group.kind == "strips" and dict(group.attrs).items() >= form.items()
    assert ("under_way" in dict(group.attrs)) == ("under_way" in form)
    _, dw, db = made.run([x, w, b, dy])
    x64, d64 = np.asarray(x, np.float64), np.asarray(dy, np.float64)
    h = (x64 - x64.mean(1, keepdims=True)) / np.sqrt(x64.var(1, keepdims=True) + 1e-5)
    assert_close(dw, (d64 * h).sum(0), "f32", n=301)
    assert_close(db, d64.sum(0), "f32", n=301)


def test_operands_that_leave_no_room_are_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = ts.Tensor[192, 512, "f32"], ts.Tensor[512, "f32"]
    monkeypatch.setattr(long_strips, "KEPT_BYTES", 222 << 10)
    assert lowered(gradients, x, w, w, x).plan.groups[0].kind == "rows"


@pytest.mark.parametrize("n, groups, many", [(1024 + 512, 4, 30), (3072, 8, 15), (768, 2, 66)])
def test_as_many_clusters_share_rows_as_run_at_one_time_on_the_card(
        n: int, groups: int, many: int) -> None:
    """The card is asked about clusters of four groups and of eight; others are sure to run."""
    x, w = ts.Tensor[4096, n, "f32"], ts.Tensor[n, "f32"]
    with planning_for(Card(clusters=((2, 60), (4, 30), (8, 15)))):
        group = lowered(gradients, x, w, w, x).plan.groups[0]
    parts = -(-many * -(-4096 // (many * 128)))
    assert (group.attr("cluster"), group.attr("rows")) == (groups, -(-4096 // parts))


def test_strips_are_compiled_ahead_for_each_number_of_clusters(monkeypatch: pytest.MonkeyPatch
                                                               ) -> None:
    monkeypatch.setattr(sys.modules[compile_ahead.__module__], "CLUSTER_COUNTS", (((8, 15),),))
    x, w = ts.Tensor[450, 3072, "f32"], ts.Tensor[3072, "f32"]
    require_compiler()
    graph = ts.jit(gradients).graph(x, w, w, x)
    made, plans = compile_ahead(graph, TARGET), list[set[str]]()
    for count in (14, 15):
        with compiling_for(TARGET), planning_for(Card(clusters=((8, count),))):
            wanted = wanted_ahead(CudaProgram(graph, TARGET, on_host=()))
            plans.append({w.request.portable_key(w.function) for w in wanted})
    assert plans[0] != plans[1] and set().union(*plans) <= set(made)


def test_the_driver_is_asked_how_many_clusters_run(driver: Any, monkeypatch: pytest.MonkeyPatch
                                                   ) -> None:
    """On the machine's card; not by ranks, whose cards may differ, and not about others."""
    chip = device().target.generation
    clusters_at_once.cache_clear()
    monkeypatch.setattr(driver, "clusters", 15)
    assert (row_blocks.strip_count(8, chip), row_blocks.strip_count(2, chip)) == (15, 66)
    assert row_blocks.routine_blocks(300, 131072, 16, chip, 32).strips == 15
    assert row_blocks.strip_count(8, parse_target("sm_100a").generation) == 14 * 148 // 132
    monkeypatch.setattr(cards, "launched_size", lambda: 2)
    assert row_blocks.strip_count(8, chip) == 14
    clusters_at_once.cache_clear()
