"""Matmuls of fp8 codes whose blocks have scales, in the form that specialises warpgroups."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from hopper_lowering import Known, run
from tessera import stdlib
from tessera.kernels.gemm_block_scaled import BLOCKS, block_scaled_nt, block_scaled_parts
from tessera.runtime.generations import GENERATIONS
from tessera.tile.cuda.lower.warp_specialised import WarpSpecialisedProgram, lower_warp_specialised
from tolerance import assert_close

HOPPER = GENERATIONS["sm_90a"]
FACTS = Known(frozenset({"M", "N", "K", "ME"}), frozenset({"A", "SA", "B", "SB", "D", "P"}))


def drawn(M: int, N: int, K: int, rng) -> tuple[ts.Tensor, ...]:
    many = -(-K // 128)
    a, b = (ts.tensor(rng.standard_normal(s).astype("f4"), "fp8_e4m3") for s in ((M, K), (N, K)))
    s, t = (ts.tensor(np.exp2(rng.uniform(-4, 4, shape)).astype("f4")) for shape in (
        (many, M), (-(-N // 128), many)))
    return a, s, b, t


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_scales_come_with_the_codes_that_they_are_of(block, parts, rng):
    """Two rows of the weights' scales, three of the activations'; rows and columns that end within
    a block, and parts of K of which the last is shorter."""
    M, N, K = 208, 176, 320
    given = drawn(M, N, K, rng)
    kernel, grid = block_scaled_nt, (-(-M // block[0]), -(-N // block[1]))
    args = (*given, ts.tensor(np.full((M, N), np.nan, "f4"), "bf16"))
    how = {"BM": block[0], "BN": block[1]}
    if parts > 1:
        kernel, grid = block_scaled_parts, (*grid, parts)
        args = (*given, ts.tensor(np.full((parts, M, N), np.nan, "f4")), 256)
    made = lower_warp_specialised(kernel.lower(*args, **how), None, FACTS, HOPPER)
    assert isinstance(made, WarpSpecialisedProgram), made
    (ring,) = made.rings
    assert [load.tensor for load in ring.loads] == ["A", "B", "SA"]
    run(kernel, made, grid, *args, blocks=4, **how)
    got = np.asarray(ts.cast(args[4], "f32").array, "f8")
    want = stdlib.gemm_block_scaled.record.expected(list(given), {})[0]
    assert_close(got if parts == 1 else got.sum(0), want, "bf16", n=K,
                 scale=float(np.abs(want).max()))


def test_few_rows_are_summed_in_parts(rng):
    """Few blocks with a long K leave multiprocessors without work; a user's block is kept whole."""
    run, given = stdlib.gemm_block_scaled, drawn(16, 256, 4096, rng)
    names = [name for name, *_ in run.launches(*given)]
    assert names == ["block_scaled_parts", "sum_of_parts"]
    chosen = run.with_schedule(ts.Schedule(block=(64, 64)))
    assert [name for name, *_ in chosen.launches(*given)] == ["block_scaled_nt"]
    want = run.record.expected(list(given), {})[0]
    got = np.asarray(ts.cast(run(*given), "f32").array, "f8")
    assert_close(got, want, "bf16", n=4096, scale=float(np.abs(want).max()))


def test_of_nothing_the_sum_is_zero(rng):
    a, s, b, t = drawn(4, 130, 0, rng)
    assert not np.asarray(ts.cast(stdlib.gemm_block_scaled(a, s, b, t), "f32").array).any()


def test_what_does_not_fit_is_refused_by_name(rng):
    a, s, b, t = drawn(8, 136, 256, rng)
    run = stdlib.gemm_block_scaled
    with pytest.raises(ts.ShapeError, match=r"(?s)a_scale is \[8, 2\].*\[2, 8\]"):
        run(a, ts.tensor(s.array.T.copy()), b, t)
    with pytest.raises(ts.ShapeError, match=r"(?s)b_scale is \[1, 2\].*\[2, 2\]"):
        run(a, s, b, t[:1])
    with pytest.raises(ts.DTypeError, match="a_scale is bf16"):
        run(a, ts.cast(s, "bf16"), b, t)
    with pytest.raises(ts.DTypeError, match="operands are fp8_e4m3 and fp8_e5m2"):
        run(a, s, ts.cast(b, "fp8_e5m2"), t)
    with pytest.raises(ts.ShapeError, match=r"a is \[8, 256\]"):
        run(a, s, ts.cast(ts.zeros((136, 128)), "fp8_e4m3"), t)
    with pytest.raises(ts.ArgumentError, match="n=96"):
        run.with_schedule(ts.Schedule(block=(64, 96)))(a, s, b, t)
