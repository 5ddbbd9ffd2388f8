"""Reductions over the groups of a cluster, under the interpreter and as compiled."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import tessera as ts
from ptx_harness import require_compiler
from tessera import f32, f64, i32
from tessera.errors import ArgumentError, UnsupportedTargetError
from tessera.tile.ir.errors import DivergenceError, KernelError, TileError
from tolerance import assert_close

TYPES = {"f32": f32, "f64": f64, "i32": i32}


def row_kernel(kind: str, groups: int, loops: int = 1) -> Any:
    """y[g] = `kind` of all columns of the row that g's cluster has."""
    tile = ts.tile
    across = getattr(tile, f"cluster_{kind}")
    along = getattr(tile, f"row_{kind}")

    @ts.kernel(grid=lambda M: M * groups)
    def rows(x: ts.Tensor["M", "N"], y: ts.Tensor["G"], S: int):
        m = tile.group_id(0) // groups
        first = tile.group_id(0) % groups * S
        total = across(along(tile.load(x[m:m+1, first:first+64], fill=0)), groups)
        for _ in range(1, loops):
            total = across(total, groups)
        g = tile.group_id(0)
        y[g:g+1] = total

    return rows


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["sum", "max", "min", "prod"])
def test_each_group_gets_what_all_of_its_cluster_have(kind: str, groups: int, rng: Any) -> None:
    x = rng.standard_normal((3, 64 * groups)).astype(np.float32)
    y = np.full(3 * groups, np.nan, np.float32)
    row_kernel(kind, groups)(x, y, 64)
    want = getattr(np, kind)(x.astype(np.float64), axis=1)
    assert_close(y, np.repeat(want, groups), "f32", n=64 * groups, scale=np.abs(x).sum())


@pytest.mark.parametrize("debug", [False, True])
def test_in_a_loop_and_in_any_order(debug: bool, rng: Any) -> None:
    x = rng.integers(-9, 9, (70, 256)).astype(np.int32)
    y = np.zeros(280, np.int32)
    with ts.config.scope(debug=debug):
        row_kernel("sum", 4, loops=3)(x, y, 64)
    assert np.array_equal(y, np.repeat(x.sum(1), 4) * 16)


def test_a_grid_is_whole_clusters() -> None:
    @ts.kernel
    def few(y: ts.Tensor["G", f32]):
        g = ts.tile.group_id(0)
        y[g:g+1] = ts.tile.cluster_sum(ts.tile.full((1,), 1.0), 4)

    few[8](y := np.zeros(8, np.float32))
    assert (y == 4).all()
    with pytest.raises(ArgumentError, match="clusters of 4 groups, not a grid of 6"):
        few[6](np.zeros(6, np.float32))


def test_all_groups_of_a_cluster_come() -> None:
    @ts.kernel
    def some(y: ts.Tensor["G", f32]):
        g = ts.tile.group_id(0)
        if g < 5:
            y[g:g+1] = ts.tile.cluster_sum(ts.tile.full((1,), 1.0), 2)

    with pytest.raises(DivergenceError, match="needs all 2 groups of a cluster"):
        some[8](np.zeros(8, np.float32))


def test_what_is_no_tile_and_no_cluster() -> None:
    @ts.kernel
    def number(x: ts.Tensor["N", f32], y: ts.Tensor["G", f32], n: int = 2):
        g = ts.tile.group_id(0)
        y[g:g+1] = ts.tile.cluster_sum(ts.tile.load(x[0:4]) if n != 2 else 1.0, n)

    with pytest.raises(TileError, match="a cluster reduces tiles"):
        number[2](np.zeros(4, np.float32), np.zeros(2, np.float32))
    with pytest.raises(TileError, match=r"a cluster of 3 groups: there are \(1, 2, 4, 8, 16\)"):
        number[3](np.zeros(4, np.float32), np.zeros(3, np.float32), n=3)


def test_a_launch_has_clusters_of_one_size() -> None:
    @ts.kernel
    def two(y: ts.Tensor["G", f32]):
        g, one = ts.tile.group_id(0), ts.tile.full((1,), 1.0)
        y[g:g+1] = ts.tile.cluster_sum(one, 2) + ts.tile.cluster_max(one, 4)

    with pytest.raises(KernelError, match="clusters of 2 and 4 groups in one kernel"):
        two[4](np.zeros(4, np.float32))


def ptx_of(dtype: str, groups: int, loops: int = 1, target: str = "sm_90a") -> str:
    require_compiler()
    kernel, numpys = row_kernel("sum", groups, loops), TYPES[dtype].numpy
    kernel(np.zeros((3, 64 * groups), numpys), np.zeros(3 * groups, numpys), 64)
    return str(kernel.inspect_ir("ptx", target=target))


@pytest.mark.parametrize("dtype", TYPES)
def test_numbers_are_sent_to_each_group_and_counted(dtype: str) -> None:
    """Threads side by side have the same number: each sends it to a group."""
    ptx, words = ptx_of(dtype, 4), 2 if dtype == "f64" else 1
    assert len(re.findall(r"st\.async\.shared::cluster", ptx)) == words
    assert len(re.findall(r"barrier\.cluster\.arrive\.relaxed", ptx)) == 1
    assert len(re.findall(r"barrier\.cluster\.wait", ptx)) == 1
    (counted,) = re.findall(r"mbarrier\.arrive\.expect_tx\S+ _, \[%r\d+\], (%r\d+);", ptx)
    assert re.search(rf"mov\.\w+\s+{counted}, {16 * words};", ptx)


def test_a_thread_sends_what_it_alone_has_to_all_groups() -> None:
    @ts.kernel
    def each(x: ts.Tensor["N", f32], y: ts.Tensor["N", f32]):
        y[0:32] = ts.tile.cluster_max(ts.tile.load(x[0:32]), 8)

    require_compiler()
    each[8](np.arange(32, dtype=np.float32), y := np.zeros(32, np.float32))
    assert np.array_equal(y, np.arange(32))
    ptx = each.inspect_ir("ptx", target="sm_90a")
    assert len(re.findall(r"st\.async\.shared::cluster", ptx)) == 8
    assert len(re.findall(r"mapa\.shared::cluster", ptx)) == 16


def test_what_follows_each_other_is_sent_before_any_is_waited_for() -> None:
    """But not what is made of the result of another."""
    tile = ts.tile

    @ts.kernel(grid=lambda M: M * 2)
    def three(x: ts.Tensor["M", "N", f32], y: ts.Tensor["G", f32]):
        g = tile.group_id(0)
        m, first = g // 2, g % 2 * 64
        t = tile.load(x[m:m+1, first:first+64], fill=0)
        a, b = tile.row_sum(t), tile.row_max(t)
        c, d = tile.cluster_sum(a, 2), tile.cluster_max(b, 2)
        y[g:g+1] = tile.cluster_sum(d, 2) + c

    require_compiler()
    x, y = np.arange(256, dtype=np.float32).reshape(2, 128), np.zeros(4, np.float32)
    three(x, y)
    assert np.array_equal(y, np.repeat(2 * x.max(1) + x.sum(1), 2))
    found = re.findall(r"st\.async|mbarrier\.try_wait", three.inspect_ir("ptx", target="sm_90a"))
    send, wait = "st.async", "mbarrier.try_wait"
    assert found == [send, send, wait, send, wait]  # one barrier counts what both send


def test_what_warps_have_met_for_is_under_way_at_once() -> None:
    """Who sends it puts it together alone; what stands between is done meanwhile. Not a number that
    somebody else needs, nor one that is sent with others than those of its meeting."""
    tile = ts.tile

    @ts.kernel
    def sums(x: ts.Tensor["M", "N", f32], z: ts.Tensor["M", "N", f32], y: ts.Tensor["G", f32],
             kept: bool):
        g = tile.group_id(0)
        m, first = g // 2, g % 2 * 4096
        t = tile.load(x[m:m+1, first:first+4096], fill=0)
        a = tile.row_sum(t)
        z[m:m+1, first:first+4096] = t + a[:, None] if kept else t + 1
        y[g:g+1] = tile.cluster_sum(a, 2)

    require_compiler()
    x, z = np.ones((2, 8192), np.float32), np.zeros((2, 8192), np.float32)
    for kept, order in ((False, ["put", "sent", "stored", "awaited"]),
                        (True, ["put", "stored", "sent", "awaited"])):
        y = np.zeros(4, np.float32)
        sums[4, 128](x, z, y, kept)
        assert np.array_equal(y, np.full(4, 8192))
        ptx = sums.inspect_ir("ptx", target="sm_90a")
        places = {"put": r"st\.shared", "sent": r"st\.async", "stored": r"st\.global\S*\.v4",
                  "awaited": r"mbarrier\.try_wait"}
        found = {name: [m.start() for m in re.finditer(p, ptx)] for name, p in places.items()}
        assert sorted(found, key=lambda name: found[name][0]) == order


def test_in_a_loop_groups_wait_for_what_is_sent_alone() -> None:
    """No barrier of the cluster, for which stores to memory would have to end first."""
    ptx = ptx_of("f32", 2, loops=3)
    assert len(re.findall(r"barrier\.cluster\.arrive", ptx)) == 1
    assert len(re.findall(r"mbarrier\.init", ptx)) == 2 * 2  # two for each exchange


@pytest.mark.parametrize("warps, barriers", [(1, 1), (4, 2)])
def test_a_barrier_that_a_loop_has_anyway_is_enough(warps: int, barriers: int) -> None:
    """What came in an iteration has been read by all threads before more comes in its place. Of a
    sum over warps the barriers are there: one before it is written, one before it is read."""
    tile = ts.tile

    @ts.kernel(grid=lambda M: M * 2)
    def sums(x: ts.Tensor["M", 256, f32], y: ts.Tensor["G", f32], loops: int):
        g = tile.group_id(0)
        m = g // 2
        t = tile.load(x[m:m+1, 0:256])
        total = tile.row_sum(t) * 0
        for i in range(0, loops):
            total = total + tile.cluster_sum(tile.row_sum(t + i), 2)
        y[g:g+1] = total

    require_compiler()
    made = sums.with_schedule(ts.Schedule(warps=warps))
    made(np.ones((2, 256), np.float32), y := np.zeros(4, np.float32), 3)
    assert np.array_equal(y, np.full(4, 2 * 256 * (1 + 2 + 3)))
    text = str(made.inspect_ir("target", target="sm_90a")).split("while ")[1]
    assert len(re.findall(r"^ +sync\(\)", text, re.M)) == barriers


def test_older_targets_have_no_clusters() -> None:
    with pytest.raises(UnsupportedTargetError, match="sm_80"):
        ptx_of("f32", 2, target="sm_80")
