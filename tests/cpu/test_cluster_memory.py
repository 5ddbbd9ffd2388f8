"""Shared memory that the groups of a cluster write for each other, under the interpreter and as
compiled."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import tessera as ts
from ptx_harness import require_compiler
from tessera import f16, f32, i32
from tessera.tile.ir.errors import (
    BoundsError,
    DivergenceError,
    KernelError,
    RaceError,
    TileError,
)

tile = ts.tile
LANES = 64


def around_kernel(groups: int, before: bool = False, behind: str = "cluster", loops: int = 1
                  ) -> Any:
    """y of a group is x of the one in front of it in its cluster, backwards; again and again.

    before: whether all wait before anything is written again.  behind: what they wait for before
    they read
    """
    @ts.kernel(grid=lambda G: G)
    def around(x: ts.Tensor["G", "L"], y: ts.Tensor["G", "L"]):
        g, lane = tile.group_id(0), tile.local_id()
        s = tile.alloc_shared((LANES,), x.dtype)
        number = x[g, lane]
        there = tile.cluster_shared(s, (g % groups + 1) % groups, groups)
        for i in range(loops):
            if before and i > 0:
                tile.cluster_barrier(groups)
            there[LANES - 1 - lane] = number
            if behind == "cluster":
                tile.cluster_barrier(groups)
            elif behind == "group":
                tile.barrier()
            number = s[lane]
        y[g, lane] = number

    return around


def around(kernel: Any, groups: int, clusters: int = 3, dtype: Any = np.float32,
           debug: bool = False) -> tuple[np.ndarray, np.ndarray]:
    x = np.arange(clusters * groups * LANES).astype(dtype).reshape(-1, LANES)
    y = np.zeros_like(x)
    with ts.config.scope(debug=debug):
        kernel.launcher(lanes=LANES)(x, y)
    return x.reshape(clusters, groups, LANES), y.reshape(clusters, groups, LANES)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_groups_write_to_each_other(groups: int, dtype: Any, debug: bool) -> None:
    x, y = around(around_kernel(groups), groups, dtype=dtype, debug=debug)
    assert np.array_equal(y, np.roll(x, 1, axis=1)[:, :, ::-1])


@pytest.mark.parametrize("debug", [False, True])
def test_again_when_all_have_read(debug: bool) -> None:
    x, y = around(around_kernel(4, True, loops=3), 4, debug=debug)
    assert np.array_equal(y, np.roll(x, 3, axis=1)[:, :, ::-1])


@pytest.mark.parametrize("behind", ["nothing", "group"])
def test_what_another_group_wrote_is_read_behind_a_barrier_of_the_cluster(behind: str) -> None:
    said = r"group \d+ reads it, and lane \d+ of group \d+ wrote it at line \d+, "
    with pytest.raises(RaceError, match=said + "with no barrier of the cluster") as error:
        around(around_kernel(2, behind=behind), 2, debug=True)
    assert error.value.hint == "put ts.tile.cluster_barrier(...) between the two accesses"


def test_nobody_writes_what_is_still_read() -> None:
    with pytest.raises(RaceError, match=r"group \d+ writes it, and lane \d+ of group \d+ read"):
        around(around_kernel(2, before=False, loops=2), 2, debug=True)


def test_barriers_of_a_group_count_behind_those_of_the_cluster() -> None:
    """A lane reads what another wrote behind the barrier of the cluster."""
    @ts.kernel
    def shifted(y: ts.Tensor["G", "L", i32]):
        g, lane = tile.group_id(0), tile.local_id()
        s = tile.alloc_shared((LANES,), i32)
        tile.cluster_barrier(2)
        s[lane] = lane + g
        y[g, lane] = s[(lane + 1) % LANES]

    with ts.config.scope(debug=True), pytest.raises(RaceError, match="no barrier in between"):
        shifted[2, LANES](np.zeros((2, LANES), np.int32))


# --- mistakes -------------------------------------------------------------------------------------
def mistaken(body: Any, *, groups: int = 2) -> None:
    y = np.zeros((groups, LANES), np.float32)
    body[groups, LANES](y)


def test_a_group_of_the_cluster() -> None:
    @ts.kernel
    def beyond(y: ts.Tensor["G", "L", f32]):
        there = tile.cluster_shared(tile.alloc_shared((8,), f32), tile.group_id(0) + 1, 2)
        there[0] = 1.0

    with pytest.raises(BoundsError, match="group 2 of a cluster of 2"):
        mistaken(beyond)


@pytest.mark.parametrize("debug", [False, True])
def test_each_lane_writes_to_a_group_of_its_own(debug: bool) -> None:
    """What all lanes write alike, too, goes to the groups of all of them."""
    @ts.kernel
    def scattered(x: ts.Tensor["G", "L", f32], y: ts.Tensor["G", "L", f32]):
        lane, g = tile.local_id(), tile.group_id(0)
        s, all_g = tile.alloc_shared((LANES,), f32), tile.alloc_shared((4,), f32)
        number = x[g, lane]
        tile.cluster_shared(s, lane % 4, 4)[g % 4 * (LANES // 4) + lane // 4] = number
        tile.cluster_shared(all_g, lane % 4, 4)[g % 4] = tile.cast(g, "f32")
        tile.cluster_barrier(4, words=2 * LANES)
        y[g, lane] = s[lane] + all_g[lane % 4]

    x = np.arange(8 * LANES, dtype=np.float32).reshape(8, LANES)
    y = np.zeros_like(x)
    with ts.config.scope(debug=debug):
        scattered[8, LANES](x, y)
    # [cluster, from, i, to] -> [cluster, to, from, i]
    want = x.reshape(2, 4, LANES // 4, 4).transpose(0, 3, 1, 2).reshape(8, LANES)
    groups = 4 * (np.arange(8) // 4)[:, None] + np.arange(LANES) % 4
    assert np.array_equal(y, want + groups)
    text = scattered.inspect_ir("target", target="sm_90a")
    assert "first_lane" not in text


def test_it_is_written_and_not_read() -> None:
    @ts.kernel
    def pulls(y: ts.Tensor["G", "L", f32], whole: bool = False):
        there = tile.cluster_shared(tile.alloc_shared((LANES,), f32), 0, 2)
        if whole:
            y[0, 0:LANES] = tile.load(there[0:LANES])
        else:
            y[0, 0] = there[1]

    with pytest.raises(TileError, match="load_element of another group's shared memory"):
        mistaken(pulls)
    with pytest.raises(TileError, match="view of another group's shared memory"):
        pulls[2, LANES](np.zeros((2, LANES), np.float32), whole=True)


def test_it_is_added_to_by_that_group_alone() -> None:
    @ts.kernel
    def adds(y: ts.Tensor["G", "L", f32]):
        there = tile.cluster_shared(tile.alloc_shared((LANES,), f32), 0, 2)
        tile.atomic_add(there, 0, 1.0)

    with pytest.raises(TileError, match="atomic of another group's"):
        mistaken(adds)


def test_words_of_shared_buffers() -> None:
    @ts.kernel
    def half(y: ts.Tensor["G", "L", f32]):
        tile.cluster_shared(tile.alloc_shared((LANES,), f16), 0, 2)

    @ts.kernel
    def tensor(y: ts.Tensor["G", "L", f32]):
        tile.cluster_shared(y, 0, 2)

    @ts.kernel
    def three(y: ts.Tensor["G", "L", f32]):
        tile.cluster_barrier(3)

    for kernel, said in ((half, "elements of f16"), (tensor, "is no shared buffer of a group"),
                         (three, r"a cluster of 3 groups: there are \(1, 2, 4, 8, 16\)")):
        with pytest.raises(TileError, match=said):
            mistaken(kernel)


def test_all_groups_of_a_cluster_come() -> None:
    @ts.kernel
    def some(y: ts.Tensor["G", "L", f32]):
        if tile.group_id(0) < 1:
            tile.cluster_barrier(2)

    with pytest.raises(DivergenceError, match="needs all 2 groups of a cluster"):
        mistaken(some)


def test_clusters_are_of_one_size() -> None:
    @ts.kernel
    def two(y: ts.Tensor["G", "L", f32]):
        tile.cluster_barrier(2)
        tile.cluster_barrier(4)

    with pytest.raises(KernelError, match="clusters of 2 and 4 groups in one kernel"):
        mistaken(two, groups=4)


# --- as compiled ----------------------------------------------------------------------------------
def ptx_of(groups: int) -> str:
    require_compiler()
    kernel = around_kernel(groups)
    around(kernel, groups)
    return str(kernel.inspect_ir("ptx", target="sm_90a"))


def test_nobody_writes_before_all_have_begun() -> None:
    """They say that they have at the top, and it is waited for where the first writes."""
    ptx = ptx_of(4)
    order = re.findall(r"cluster\.arrive\.relaxed|cluster\.arrive\.release|cluster\.wait|"
                       r"mapa\.shared::cluster|st\.shared::cluster|ld\.global|ld\.shared", ptx)
    assert order == ["cluster.arrive.relaxed", "ld.global", "cluster.wait", "mapa.shared::cluster",
                     "st.shared::cluster", "cluster.arrive.release", "cluster.wait", "ld.shared"]


def test_a_cluster_of_one_is_a_group() -> None:
    ptx = ptx_of(1)
    assert not re.search(r"barrier\.cluster|shared::cluster", ptx)
    assert len(re.findall(r"bar\.sync", ptx)) == 1


@pytest.mark.parametrize("exchanges", [True, False])
def test_groups_of_a_cluster_follow_each_other_where_they_multiply(exchanges: bool) -> None:
    """Other kernels that multiply number theirs in bands of rows."""
    @ts.kernel
    def product(x: ts.Tensor["M", "K", f16], y: ts.Tensor["M", "N"]):
        m, n = tile.group_id(0) * 16, tile.group_id(1) * 16
        z = tile.dot(tile.load(x[m:m+16, :]), tile.load(x[n:n+16, :]).T)
        if exchanges:
            z = z - tile.cluster_max(tile.row_max(z), 4)[:, None]
        y[m:m+16, n:n+16] = z

    product[4, 4](np.ones((64, 64), np.float16), np.zeros((64, 64), np.float32))
    text = product.inspect_ir("target", target="sm_90a")
    assert ("band" in text) != exchanges


def counted(words: int, loops: int = 1, again: bool = False) -> Any:
    """Groups of two: each gets a word of each lane of the other."""
    @ts.kernel(grid=lambda G: G)
    def kernel(x: ts.Tensor["G", "L"], y: ts.Tensor["G", "L"]):
        g, lane = tile.group_id(0), tile.local_id()
        s = tile.alloc_shared((LANES,), x.dtype)
        tile.cluster_shared(s, 1 - g % 2, 2)[lane] = x[g, lane]
        if loops == 1:
            tile.cluster_barrier(2, words=words)
        else:
            for _ in range(loops):
                tile.cluster_barrier(2, words=words)
        if again:
            tile.cluster_barrier(2)
        y[g, lane] = s[lane]

    return kernel


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_a_barrier_of_words_is_waited_for_by_what_comes(dtype: Any) -> None:
    kernel = counted(LANES)
    x, y = around(kernel, 2, dtype=dtype, debug=True)
    assert np.array_equal(y, x[:, ::-1])
    text = kernel.inspect_ir("target", target="sm_90a")
    assert "send_word(" in text and f"i32({4 * LANES}))" in text and "cluster_arrive()" not in text


def test_a_barrier_of_other_words() -> None:
    with pytest.raises(KernelError, match=f"waits for {LANES + 1} words and a group gets {LANES}"):
        around(counted(LANES + 1), 2)
    for kernel, said in ((counted(LANES, 2), "counts words in a loop"),
                         (counted(LANES, again=True), "beside others of the cluster")):
        around(kernel, 2)
        with pytest.raises(KernelError, match=said):
            kernel.inspect_ir("target", target="sm_90a")
