"""Tuples in kernels: several results, and tuples that branches, loops and early returns make."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from emulator import compare
from fake_gpu import Foreign, filled
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from tessera import Tensor, f32, int32
from tolerance import assert_close

tile = ts.tile


@ts.kernel
def moments(x: Tensor["M", "N", f32]) -> tuple[Tensor["M", f32], Tensor["M", "N", f32]]:
    s = (tile.zeros((4,)), tile.full((4,), -1e30))
    for j in range(0, N, 8):
        block = tile.load(x[tile_m:tile_m + 4, j:j + 8])
        s = (s[0] + tile.row_sum(block), tile.maximum(s[1], tile.row_max(block)))
    return s[1], tile.load(x[tile_m:tile_m + 4, 0:20]) - s[0]


@ts.kernel
def extremes(x: Tensor["N", f32]) -> (f32, int32):
    t = tile.load(x[0:N])
    return tile.reduce_max(t), tile.argmax(t, axis=None)


def test_several_tensors(rng):
    x = rng.standard_normal((9, 20), np.float32)
    largest, rest = moments(x)
    assert np.array_equal(largest, x.max(1))
    assert_close(rest, x.astype(np.float64) - x.sum(1, keepdims=True, dtype=np.float64), "f32",
                 n=20, scale=float(np.abs(x).max()))
    compare(moments, x, target="sm_90")


def test_several_numbers(rng):
    x = rng.standard_normal(50, np.float32)
    assert extremes(x) == (float(x.max()), int(x.argmax()))
    compare(extremes, x, lanes=32, target="sm_90")


def test_several_results_in_graphs(rng):
    x = ts.tensor(rng.standard_normal((9, 20), np.float32))
    want = [y.numpy() for y in moments(x)]
    for got in (ts.jit(lambda x: moments(x))(x), [y[1] for y in ts.vmap(lambda x: moments(x))(
            ts.stack([x, x]))]):
        assert all(np.array_equal(y.numpy(), w) for y, w in zip(got, want, strict=True))
    top, at = ts.jit(lambda x: extremes(x[0]))(x)
    assert (top.item(), at.item()) == extremes(x[0])


def test_several_results_on_a_gpu(gpu, rng):
    x = rng.standard_normal((9, 20)).astype(np.float32)
    want = moments(x)
    for _ in range(2):  # the long way and the short one
        got = moments(Foreign(filled(x)))
        assert all(np.array_equal(y.numpy(), w) for y, w in zip(got, want, strict=True))
        assert extremes(Foreign(filled(x[0]))) == extremes(x[0])


# --- control flow ---------------------------------------------------------------------------------
def parts(v):
    if v > 0.0:
        return v, 1.0
    return -v, 0.0


def first_above(x, n, limit):
    for j in range(n):
        if x[j] > limit:
            return j, x[j]
    return -1, 0.0


def halved(v, n):
    p = (v, (n, 2))
    while p[1][0] > 0:
        p = (p[0] * 0.5, (p[1][0] - 1, p[1][1]))
    return p


@ts.kernel
def in_control_flow(x: Tensor["N", f32], y: Tensor["N", f32], z: Tensor["N", int32]):
    i = tile.linear_id()
    if i < N:
        size, positive = parts(x[i])
        at, found = first_above(x, N, i * 0.1 - 1.0)
        small, (left, two) = halved(x[i], i % 5)
        pair = (size, at) if positive > 0.5 else (found, two)
        y[i] = pair[0] + small
        z[i] = pair[1] + left


def test_tuples_through_branches_loops_and_returns(rng):
    x = rng.standard_normal(40, np.float32)
    y, z = np.full(40, np.nan, np.float32), np.full(40, -9, np.int32)
    with ts.config.scope(debug=True):
        in_control_flow(x, y, z)
    for i, v in enumerate(x):
        limit = np.float32(i) * np.float32(0.1) - np.float32(1.0)
        at = next((j for j in range(40) if x[j] > limit), -1)
        want = (abs(v), at) if v > 0 else (x[at] if at >= 0 else 0.0, 2)
        assert y[i] == np.float32(want[0] + v * np.float32(0.5) ** (i % 5)) and z[i] == want[1], i
    compare(in_control_flow, x, y, z, lockstep=False)


def grows(x: Tensor["N", f32]):
    p = (x[0], 1.0)
    for _ in range(3):
        p = (p[0], p[1], 2.0)
    x[0] = p[0]


def of_two_lengths(x: Tensor["N", f32]):
    p = (x[0], 1.0)
    if x[0] > 0.0:
        p = (x[0], 1.0, 2.0)
    x[0] = p[0]


def changes_an_item(x: Tensor["N", f32]):
    p = (x[0], tile.group_size())
    if x[0] > 0.0:
        p = (x[0], x[1])
    x[0] = p[0]


def some_arguments(x: Tensor["M", "N", f32]) -> tuple[Tensor["M", f32], Tensor["M", "N", f32]]:
    return tile.row_sum(tile.load(x[tile_m:tile_m + 4, 0:20])), x


def tile_and_number(x: Tensor["M", "N", f32]) -> tuple[f32, Tensor["M", f32]]:
    return 1.0, tile.row_sum(tile.load(x[0:M, 0:20]))


def one_too_many(x: Tensor["M", "N", f32]) -> tuple[f32, f32, f32]:
    return 1.0, 2.0


def other_rows(x: Tensor["M", "N", f32]) -> Tensor["N", f32]:
    return tile.row_sum(tile.load(x[tile_m:tile_m + 4, 0:20]))


@pytest.mark.parametrize("body, shape, line, said", [
    (grows, (4,), 2, "'p' changes in a loop from a tuple of 2 to a tuple of 3"),
    (of_two_lengths, (4,), 2, "'p': the branches of this if give it a tuple of 3 and a tuple of 2"),
    (changes_an_item, (4,), 2, "'p[1]' changes its type"),
    (some_arguments, (9, 20), 1, "of which some are arguments of it"),
    (tile_and_number, (9, 20), 1, "the kernel returns tiles and numbers"),
    (one_too_many, (9, 20), 1, "the kernel returns 2 values, its annotation names 3"),
    (other_rows, (9, 20), 1, "the result tensor<N x f32> has no axis M, along which each group"),
])
def test_what_no_tuple_can_be_is_told_at_its_line(body, shape, line, said):
    with pytest.raises(ts.TesseraError) as err:
        ts.kernel(body)(np.ones(shape, np.float32))
    assert said in str(err.value), str(err.value)
    assert err.value.where.line == body.__code__.co_firstlineno + line, str(err.value)
