"""Launches that are not given: every element that a kernel's guards speak of is done."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from fake_gpu import Torch, filled
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from tessera import Tensor, f32, i32, int32
from tessera.errors import ArgumentError

tile = ts.tile


def guarded_less(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    i = tile.linear_id()
    if i < M * N:
        y[i // N, i % N] = 2.0 * x[i // N, i % N]


def returns(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    i = tile.linear_id()
    if x.shape[0] * x.shape[1] <= i:
        return
    y[i // N, i % N] = 2.0 * x[i // N, i % N]


def by_row(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    i = tile.linear_id()
    row, column = i // N, i % N
    if row < M:
        y[row, column] = 2.0 * x[row, column]


def written_out(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    i = tile.group_id() * tile.group_size() + tile.local_id()
    if i <= M * N - 1:
        y[i // N, i % N] = 2.0 * x[i // N, i % N]


def several_each(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    i = tile.linear_id()
    for k in range(2):
        j = 2 * i + k
        if 2 * i < M * N and j < M * N:
            y[j // N, j % N] = 2.0 * x[j // N, j % N]


def a_group_each(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    g = tile.group_id()
    if g < M:
        for j in tile.range(tile.local_id(), N, tile.group_size()):
            y[g, j] = 2.0 * x[g, j]


def strided(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    for i in range(tile.linear_id(), M * N, tile.num_groups() * tile.group_size()):
        y[i // N, i % N] = 2.0 * x[i // N, i % N]


def a_loop_from_what_is_there(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    i = tile.linear_id()
    if i < M * N:
        v, n = x[i // N, i % N], i
        for _ in range(1):
            v = v + v
        while n > 0:
            n = n // 2
        y[i // N, i % N] = v


def a_group_a_row(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    g = tile.group_id()
    y[g, 0:N] = 2.0 * tile.load(x[g, 0:N])


def a_group_an_element(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    g = tile.group_id()
    for j in range(N):
        y[g, j] = 2.0 * x[g, j]


def blocks_of_groups(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    m = tile.group_id() * 2
    y[m:m + 2, 0:N] = 2.0 * tile.load(x[m:m + 2, 0:N])


def warps_of_groups(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    m = tile.group_id() * (tile.group_size() // 32) + tile.warp_id()
    if m < M:
        for j in range(tile.lane_id(), N, 32):
            y[m, j] = 2.0 * x[m, j]


def four_each(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    i = 4 * tile.linear_id()
    for j in range(4):
        if i + j < M * N:
            y[(i + j) // N, (i + j) % N] = 2.0 * x[(i + j) // N, (i + j) % N]


def four_by_a_loop(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    i = 4 * tile.linear_id()
    for j in range(i, min(i + 4, M * N)):
        y[j // N, j % N] = 2.0 * x[j // N, j % N]


def held_at_the_end(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    i = min(tile.linear_id(), M * N - 1)
    y[i // N, i % N] = 2.0 * x[i // N, i % N]


def rows_at_positions(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    m = tile.group_id() * 2 + tile.arange(0, 2)
    y[m, 0:N] = 2.0 * x[m, 0:N]


@pytest.mark.parametrize("body", [a_group_a_row, a_group_an_element, blocks_of_groups,
                                  warps_of_groups, four_each, four_by_a_loop, held_at_the_end,
                                  rows_at_positions])
def test_groups_that_nobody_counts_reach_the_end(body, rng):
    """By where their boxes, elements and loops begin."""
    x = rng.standard_normal((370, 5), np.float32)
    y = np.full_like(x, np.nan)
    ts.kernel(body)(x, y)
    assert np.array_equal(y, 2 * x)


def sums_of_groups(x: Tensor["N", f32], y: Tensor["G", f32]):
    g = tile.group_id()
    y[g] = tile.reduce_sum(tile.load(x[g*64:g*64+64]))


def added_by_groups(x: Tensor["N", f32], y: Tensor["G", f32]):
    g = tile.group_id()
    tile.atomic_add(y, g, tile.reduce_sum(tile.load(x[g*64:g*64+64])))


@pytest.mark.parametrize("body", [sums_of_groups, added_by_groups])
def test_groups_alone_are_as_many_as_begin_there(body, rng):
    """The largest extent asks for threads, and here are none that are numbered."""
    x = rng.standard_normal(333).astype(np.float32)
    y = np.zeros(6, np.float32)
    ts.kernel(body)(x, y)
    assert np.allclose(y, np.pad(x, (0, 51)).reshape(6, 64).sum(1), atol=1e-4)


def test_groups_that_are_too_few_are_told_by_a_checked_run(rng):
    x = rng.standard_normal((37, 5), np.float32)
    k = ts.kernel(blocks_of_groups)
    with ts.config.scope(debug=True), pytest.warns(
            RuntimeWarning, match=r"y has 37 elements along axis 0, M, and the 18 groups of the "
            r"launch store 2 each: the last 1 are left as they were. 19 groups reach the end"):
        k[18](x, np.empty_like(x))
    with ts.config.scope(debug=True):
        k[19](x, np.empty_like(x))


@pytest.mark.parametrize("shape", [(64, 64), (1, 1), (37, 53), (300, 3), (0, 5)])
@pytest.mark.parametrize("body", [guarded_less, returns, by_row, written_out, several_each,
                                  a_group_each, strided, a_loop_from_what_is_there])
def test_every_element_is_done(body, shape, rng):
    x = rng.standard_normal(shape).astype(np.float32)
    y = np.full_like(x, np.nan)
    ts.kernel(body)(x, y)
    assert np.array_equal(y, 2 * x)


def test_an_index_without_a_guard_is_one():
    @ts.kernel
    def k(y: Tensor["M", "N", f32]):
        i = tile.linear_id()
        y[i // N, i % N] = 1.0

    y = np.zeros((64, 64), np.float32)
    k(y)
    assert y.all()


def numbered(y: Tensor["M", "N", f32], rows: i32, columns: i32):
    i = tile.linear_id()
    if i < rows * columns:
        y[i // columns, i % columns] = 1.0


def test_a_guard_on_numbers_of_the_call(rng):
    for rows, columns in ((64, 64), (3, 50), (64, 1)):
        y = np.zeros((64, 64), np.float32)
        ts.kernel(numbered)(y, rows, columns)
        assert y[:rows, :columns].all() and y.sum() == rows * columns


def test_the_short_way_to_a_gpu_knows_what_the_grid_depends_on(gpu, driver):
    kernel = ts.kernel(numbered)
    for rows, columns in ((2, 2), (64, 64), (2, 2), (64, 64)):
        y = filled(np.zeros((64, 64), np.float32))
        kernel(Torch(y), rows, columns)
        assert y.sum() == rows * columns
    assert [launch.grid[0] for launch in driver.launches] == [1, 32, 1, 32]


def test_one_group_that_cannot_do_all_is_refused():
    @ts.kernel
    def k(y: Tensor["N", f32]):
        t = tile.local_id()
        if t < N:
            y[t] = 1.0

    y = np.zeros(4096, np.float32)
    with pytest.raises(ArgumentError, match="one group of 128 lanes, and this asks for 4096: the "
                                            "rest would not be done") as caught:
        k(y)
    assert "ts.tile.linear_id()" in str(caught.value) and "if t < N" in str(caught.value)
    k(y[:100])
    assert y[:100].all() and not y[100:].any()
    k[1, 64](y)  # what is given is done as given


# --- launches that are given ----------------------------------------------------------------------
def axes1(y: Tensor["M", "N", int32]):
    if tile.local_id() == 0:
        tile.atomic_add(y, (tile.group_id(0), 0), tile.group_size())


def axes2(y: Tensor["M", "N", int32]):
    if tile.local_id() == 0:
        tile.atomic_add(y, (tile.group_id(0), tile.group_id(1)), tile.group_size())


def linear(y: Tensor["M", "N", int32]):
    if tile.local_id() == 0:
        tile.atomic_add(y, (tile.group_id(), 0), tile.group_size())


def axes3(y: Tensor["M", "N", int32]):
    if tile.local_id() == 0:
        tile.atomic_add(y, (tile.group_id(0), tile.group_id(1) + 2 * tile.group_id(2)), 1)


def table(rows, columns, value):
    want = np.zeros((8, 6), np.int32)
    want[:rows, :columns] = value
    return want


@pytest.mark.parametrize("body, launch, want", [
    (axes1, "k[4, 64]", (4, 1, 64)), (axes1, "k[(4, 64)]", (4, 1, 64)),
    (axes1, "k[4]", (4, 1, 128)), (axes1, "k[(4,), 64]", (4, 1, 64)),
    (axes1, "k[[4], 64]", (4, 1, 64)),
    (linear, "k[4, 64]", (4, 1, 64)), (linear, "k[[2, 2]]", (4, 1, 128)),
    (linear, "k[(2, 2), 64]", (4, 1, 64)), (linear, "k[4, None]", (4, 1, 128)),
    (axes2, "k[(4, 2)]", (4, 2, 128)), (axes2, "k[4, 2]", (4, 2, 128)),
    (axes2, "k[[4, 2]]", (4, 2, 128)), (axes2, "k[(4, 2),]", (4, 2, 128)),
    (axes2, "k[(4, 2), 64]", (4, 2, 64)), (axes2, "k[[4, 2], 64]", (4, 2, 64)),
    (axes2, "k[(4, 2), None]", (4, 2, 128)), (axes2, "k[np.int64(4), 2]", (4, 2, 128)),
    (axes3, "k[4, 2, 3]", (4, 6, 1)), (axes3, "k[(4, 2, 3), 64]", (4, 6, 1)),
])
def test_forms_of_a_launch(body, launch, want):
    y = np.zeros((8, 6), np.int32)
    eval(launch, {"k": ts.kernel(body), "np": np})(y)
    assert np.array_equal(y, table(*want))


@pytest.mark.parametrize("body, launch, message, hint", [
    (axes2, "k[4]", "axes2 uses axis 1 of the grid, the launch has 1 axis", "axes2[4, groups_1]"),
    (axes2, "k[4, 2, 64]", "axes2 uses 2 axes of the grid, the launch [4, 2, 64] has 3",
     "axes2[(4, 2), 64]"),
    (axes1, "k[4, 2, 64]", "axes1 uses 1 axis of the grid, the launch [4, 2, 64] has 3",
     "axes1[groups, lanes]"),
    (axes2, "k", "axes2 uses ts.tile.group_id(axis): it needs a grid",
     "axes2[groups_0, groups_1](...)"),
    (axes1, "k", "axes1 uses ts.tile.group_id(axis): it needs a grid", "axes1[groups](...)"),
    (axes1, "k[4][64]", "axes1[4] is a launch already", "axes1[4, 64](...)"),
    (axes1, "k[-1]", "groups of a launch are numbers >= 0, got -1", "k[groups, lanes](...)"),
    (axes1, "k['4']", "groups of a launch are numbers >= 0, got '4'", "k[groups, lanes](...)"),
    (axes1, "k[4, '64']", "lanes of a launch is a number >= 1, got '64'", ""),
])
def test_what_is_no_launch(body, launch, message, hint):
    with pytest.raises(ArgumentError) as caught:
        eval(launch, {"k": ts.kernel(body)})(np.zeros((8, 6), np.int32))
    assert message in str(caught.value) and hint in str(caught.value)


@pytest.mark.parametrize("body, call", [(axes1, "k[groups](y)"),
                                        (axes2, "k[groups_0, groups_1](y)")])
def test_the_hint_for_a_missing_grid_works(body, call):
    k, y = ts.kernel(body), np.zeros((8, 6), np.int32)
    with pytest.raises(ArgumentError) as caught:
        k(y)
    assert call[1:].replace("(y)", "(...)") in str(caught.value)
    eval(call, {"k": k, "y": y, "groups": 2, "groups_0": 2, "groups_1": 3})
    assert y.sum() == 128 * (2 if body is axes1 else 6)


def test_pairs_on_a_gpu(gpu, driver):
    for body, groups, lanes in ((axes1, 4, 2), (axes2, 8, 128)):
        y = filled(np.zeros((8, 6), np.int32))
        kernel = ts.kernel(body)
        for _ in range(2):
            kernel[4, 2](Torch(y))
        assert driver.launches[-1].grid[0] == groups and driver.launches[-1].threads == lanes


def number_before(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    g = tile.group_id()
    for j in tile.range(0, N, 32):
        y[g, j:j+32] = tile.load(x[g, j:j+32]) * 2.0


def coordinate(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    g = tile.group_id(0)
    for j in tile.range(0, N, 32):
        y[g, j:j+32] = tile.load(x[g, j:j+32]) * 2.0


def number_inside(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    for j in tile.range(0, N, 32):
        y[tile.group_id(), j:j+32] = tile.load(x[tile.group_id(), j:j+32]) * 2.0


def number_behind(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    for j in tile.range(0, N, 32):
        y[0, j:j+32] = tile.load(x[0, j:j+32]) * 2.0
    i = tile.linear_id()
    if N <= i and i < M * N:
        y[i // N, i % N] = 2.0 * x[i // N, i % N]


@pytest.mark.parametrize("body", [number_before, coordinate, number_inside, number_behind])
def test_a_kernel_that_numbers_its_groups_has_no_range_as_its_grid(body, rng):
    x = rng.standard_normal((4, 128), np.float32)  # as many rows as blocks of a row
    y = np.full_like(x, np.nan)
    ts.kernel(body)[4](x, y)
    assert np.array_equal(y, 2 * x)


def test_an_axis_that_the_grid_of_blocks_lacks(rng):
    @ts.kernel
    def k(x: Tensor["M", "N", f32]):
        x[tile_m:tile_m + 4, tile.group_id(1)] = tile.zeros((4,))

    with pytest.raises(ts.TesseraError, match=r"group_id\(1\): the grid of this kernel is that of "
                       "its blocks along M"):
        k(rng.standard_normal((8, 3), np.float32))


# --- lanes that nobody counted --------------------------------------------------------------------
def a_row_each(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    m, lane = tile.group_id(0), tile.local_id()
    if lane < N:
        y[m, lane] = 2.0 * x[m, lane]


def a_block_each(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    lane = tile.local_id()
    if lane < N:
        y[tile_m, lane] = 2.0 * x[tile_m, lane]


def beside_blocks(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    x[tile_m:tile_m + 1, 0:N] = tile.load(x[tile_m:tile_m + 1, 0:N])
    i = tile.linear_id()
    if i < M * N:
        y[i // N, i % N] = 2.0 * x[i // N, i % N]


def blocks_of_256(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    i = tile.group_id() * 256 + tile.local_id()
    if i < M * N:
        y[i // N, i % N] = 2.0 * x[i // N, i % N]


@pytest.mark.parametrize("body, groups, said, lanes", [
    (a_row_each, 3, "in groups of 128 lanes, and this asks for 700", 700),
    (a_block_each, None, "in groups of 128 lanes, and this asks for 700", None),
    (beside_blocks, None, "as 3 groups of 128 lanes, one for each block along M", None),
    (blocks_of_256, None, "numbers 256 elements for each group and is launched in groups of 128 "
                          "lanes", 256)])
def test_lanes_that_would_leave_elements_undone(body, groups, said, lanes, rng):
    x = rng.standard_normal((3, 700), np.float32)
    k = ts.kernel(body)
    with pytest.raises(ArgumentError, match="the rest would not be done") as err:
        (k if groups is None else k[groups])(x, np.empty_like(x))
    assert said in str(err.value) and err.value.where.text.startswith("if "), str(err.value)
    if lanes:
        y = np.full_like(x, np.nan)
        k[groups or -(-x.size // 256), lanes](x, y)
        assert np.array_equal(y, 2 * x)


def a_warp_each(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    m = tile.group_id() * 4 + tile.warp_id()
    if m < M:
        for j in range(tile.lane_id(), N, 32):
            y[m, j] = 2.0 * x[m, j]


def two_each(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    i = tile.group_id() * 256 + tile.local_id()
    if i < M * N:
        y[i // N, i % N] = 2.0 * x[i // N, i % N]
    if i + 128 < M * N:
        y[(i + 128) // N, (i + 128) % N] = 2.0 * x[(i + 128) // N, (i + 128) % N]


def a_row_of_pointers(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    m = tile.group_id() * 4 + tile.warp_id()
    if m < M:
        begin = int(x[m, 0] * 0.0) + tile.lane_id()
        for j in range(begin, N, 32):
            y[m, j] = 2.0 * x[m, j]


@pytest.mark.parametrize("body", [a_warp_each, two_each, a_row_of_pointers])
def test_groups_for_what_threads_add_to_their_numbers(body, rng):
    x = rng.standard_normal((50, 77), np.float32)
    y = np.full_like(x, np.nan)
    ts.kernel(body)(x, y)
    assert np.array_equal(y, 2 * x)


@ts.kernel
def from_a_thread_on(x: Tensor["M", f32], y: Tensor["M", f32], first: int32):
    i = tile.group_id() * 4 + (tile.warp_id() + first)
    if 0 <= i and i < M:
        y[i] = 2.0 * x[i]


@pytest.mark.parametrize("first", [0, -1, -3])
def test_groups_for_threads_that_begin_at_a_number_of_the_call(first, rng):
    x = rng.standard_normal(12, np.float32)
    y = np.full_like(x, np.nan)
    from_a_thread_on(x, y, first)
    assert np.array_equal(y, 2 * x)


def counted(x: Tensor["N", f32], c: Tensor[1, int32]):
    i = tile.group_id() * 64 + tile.local_id()
    if i < N:
        if x[i] > 0:
            tile.atomic_add(c, 0, 1)


def counted_or_left(x: Tensor["N", f32], c: Tensor[1, int32]):
    i = tile.group_id() * 64 + tile.local_id()
    if N <= i:
        return
    tile.atomic_add(c, 0, 1)


def counted_inside(x: Tensor["N", f32], c: Tensor[1, int32]):
    i = tile.group_id() * 64 + tile.local_id()
    if i < N:
        if tile.local_id() < 64:
            tile.atomic_add(c, 0, 1)


@pytest.mark.parametrize("body", [counted, counted_or_left])
def test_lanes_that_would_add_elements_twice(body):
    k, c = ts.kernel(body), np.zeros(1, np.int32)
    for launch in (k, k[4], k[4, 96]):
        with pytest.raises(ArgumentError, match="numbers 64 elements .* added twice") as err:
            launch(np.ones(200, np.float32), c)
        assert err.value.where.text == "tile.atomic_add(c, 0, 1)" and c[0] == 0
    for launch, n in ((k[4, 64], 200), (k[1, 128], 100), (k[2], 64)):
        c[:] = 0
        launch(np.ones(n, np.float32), c)
        assert c[0] == n


def overlapped(x: Tensor["F", 128, f32], y: Tensor["N", f32]):
    i = tile.group_id() * 64 + tile.local_id()
    if i < N:
        tile.atomic_add(y, i, x[tile.group_id(), tile.local_id()])


def test_groups_that_overlap_and_know_it(rng):
    c, y = np.zeros(1, np.int32), np.zeros(320, np.float32)
    ts.kernel(counted_inside)[4, 128](np.ones(200, np.float32), c)
    assert c[0] == 200
    frames = rng.integers(0, 9, (4, 128)).astype(np.float32)
    ts.kernel(overlapped)[4, 128](frames, y)
    want = np.zeros_like(y)
    for g, frame in enumerate(frames):
        want[g * 64:g * 64 + 128] += frame
    assert np.array_equal(y, want)


@pytest.mark.parametrize("call, said", [
    ("k[()](c)", "groups of a launch are numbers"), ("k[1, 2**31](c)", "at most 2147483647"),
    ("ts.jit(lambda x: k(x))(None)", "must be an array"),
    ("k.inspect_ir(c)", "no level")])
def test_launches_of_what_is_none(call, said):
    """Errors of Python's own, from inside, before."""
    names = {"k": ts.kernel(axes2), "ts": ts, "c": np.zeros((8, 6), np.int32)}
    with pytest.raises(ArgumentError, match=said) as err:
        eval(call, names)
    assert err.value.where is not None
