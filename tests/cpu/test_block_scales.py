"""Matmuls of fp8 codes whose blocks have scales, in the form that specialises warpgroups."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from hopper_lowering import Known, run
from tessera import stdlib
from tessera.kernels.gemm_block_scaled import BLOCKS, block_scaled_nt
from tessera.runtime.generations import GENERATIONS
from tessera.tile.cuda.lower.warp_specialised import WarpSpecialisedProgram, lower_warp_specialised
from tolerance import assert_close

HOPPER = GENERATIONS["sm_90a"]
FACTS = Known(frozenset({"M", "N", "K", "ME"}), frozenset({"A", "SA", "B", "SB", "D"}))


def drawn(M: int, N: int, K: int, rng) -> tuple[ts.Tensor, ...]:
    many = -(-K // 128)
    a, b = (ts.tensor(rng.standard_normal(s).astype("f4"), "fp8_e4m3") for s in ((M, K), (N, K)))
    s, t = (ts.tensor(np.exp2(rng.uniform(-4, 4, shape)).astype("f4")) for shape in (
        (many, M), (-(-N // 128), many)))
    return a, s, b, t


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_scales_come_with_the_codes_that_they_are_of(block, rng):
    """Two rows of the weights' scales, three of the activations'; rows and columns that end within
    a block."""
    M, N, K = 208, 176, 320
    given = drawn(M, N, K, rng)
    args = (*given, ts.tensor(np.full((M, N), np.nan, "f4"), "bf16"))
    how = {"BM": block[0], "BN": block[1]}
    made = lower_warp_specialised(block_scaled_nt.lower(*args, **how), None, FACTS, HOPPER)
    assert isinstance(made, WarpSpecialisedProgram), made
    (ring,) = made.rings
    assert [load.tensor for load in ring.loads] == ["A", "B", "SA"]
    run(block_scaled_nt, made, (-(-M // block[0]), -(-N // block[1])), *args, blocks=4, **how)
    want = stdlib.gemm_block_scaled.record.expected(list(given), {})[0]
    assert_close(np.asarray(ts.cast(args[4], "f32").array, "f8"), want, "bf16", n=K,
                 scale=float(np.abs(want).max()))


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
