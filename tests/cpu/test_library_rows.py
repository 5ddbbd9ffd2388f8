"""The library's softmax and layer norm of rows of every length, and how rows are shared out."""

from __future__ import annotations

import math

import numpy as np
import pytest

import tessera as ts
from tessera.graph.cuda import CudaProgram
from tessera.kernels import ROUTINES
from tessera.kernels.row_blocks import LONGEST, routine_blocks, row_blocks
from tessera.runtime.target import parse_target
from tolerance import assert_close

SOFTMAX, LAYERNORM = ROUTINES["stable_softmax"], ROUTINES["efficient_layernorm"]
LONG = 25000  # of f32: more than a group brings to shared memory


# Columns of a row: rows and warps of a group, of a million rows, of three, and of one. Four warps
# with 16 elements a lane, or 32 where a quarter of them or more does not exist.
SHORT = {1: ((2048, 4), (4, 1), (1, 1)), 5: ((256, 4), (4, 1), (1, 1)),
         64: ((32, 4), (4, 1), (1, 1)), 100: ((16, 4), (4, 1), (1, 1)),
         256: ((8, 4), (4, 2), (1, 1)), 640: ((4, 4), (4, 4), (1, 1)),
         1024: ((2, 4), (2, 4), (1, 2)), 1025: ((2, 4), (2, 4), (1, 2)),
         3072: ((1, 4), (1, 4), (1, 4)), 3073: ((1, 8), (1, 8), (1, 8)),
         LONGEST: ((1, 8), (1, 8), (1, 8))}


@pytest.mark.parametrize("columns", SHORT)
def test_short_rows_fill_a_group_and_long_ones_have_lanes_enough(columns: int) -> None:
    blocks = [row_blocks(rows, columns) for rows in (1 << 20, 3, 1)]
    assert {b.columns for b in blocks} == {columns}
    assert tuple((b.rows, b.warps) for b in blocks) == SHORT[columns]


@pytest.mark.parametrize("columns", [LONGEST + 1, 5000, 20000, 100000])
def test_rows_that_do_not_fit_are_gone_through_in_passes(columns: int) -> None:
    b = row_blocks(100, columns)
    assert b.rows == 1 and b.columns < columns and b.held
    assert routine_blocks(100, columns, 16, None).held == (2 * columns <= 96 << 10)


@pytest.mark.parametrize(("columns", "target", "warps"), [
    (40000, "sm_90a", 8), (65536, "sm_90a", 8), (65540, "sm_90a", 16), (114688, "sm_90a", 8),
    (131072, "sm_90a", 8), (131076, "sm_90a", 32), (65536, "sm_80", 16), (65536, "sm_89", 32)])
def test_a_row_is_held_where_the_chip_has_shared_memory_for_it(columns: int, target: str,
                                                               warps: int) -> None:
    chip = parse_target(target).generation
    b = routine_blocks(100, columns, 16, chip)
    assert (b.warps, b.held) == (warps, warps < 32)
    blocks = -(-columns // b.groups // b.columns)
    assert not b.held or 2 * blocks * b.columns < chip.group_shared_bytes


@pytest.mark.parametrize("columns", [64, 300, 1024, 3000])
def test_a_graph_and_the_library_share_rows_out_alike(columns: int) -> None:
    x = ts.zeros((1 << 12, columns), "bf16")
    program = CudaProgram(ts.jit(ts.softmax).graph(x), parse_target("sm_90a"))
    (group,) = program.plan.groups
    ((_, _, sizes),) = SOFTMAX.launches(x)
    assert sizes["BM"] == group.schedule.m == row_blocks(1 << 12, columns).rows


@pytest.mark.parametrize("n", [100, 5000, 8192, LONG])
def test_rows_without_weight_are_zeros_and_bad_numbers_stay_in_theirs(
        n: int, rng: np.random.Generator) -> None:
    x = (3 * rng.standard_normal((7, n))).astype(np.float32)
    x[1], x[2, 3], x[3, n - 1], x[4, 7] = -np.inf, np.inf, np.nan, -np.inf
    x[5] = np.finfo(np.float32).min
    x[6, :n - 1], x[6, n - 1] = -np.inf, -1000
    y = SOFTMAX(x)
    for row in (0, 4, 5, 6):
        e = np.exp(x[row].astype(np.float64) - float(x[row].max()))
        assert_close(y[row], e / e.sum(), "f32", n=n)
    assert (y[1] == 0).all() and np.isnan(y[2:4]).all()


@pytest.mark.parametrize("n", [5, 300, 5000, 8192, LONG, 32768])
def test_the_variance_of_rows_far_from_zero(n: int, rng: np.random.Generator) -> None:
    """Within what the mean's own rounding does to the differences."""
    x = (100 + rng.standard_normal((2, n))).astype(np.float32)
    one, zero = np.ones(n, np.float32), np.zeros(n, np.float32)
    wide = x.astype(np.float64)
    want = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    assert np.abs(LAYERNORM(x, one, zero) - want).max() < 100 * 2.0**-24 * 4 * math.log2(n)
