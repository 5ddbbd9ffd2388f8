"""Matmuls with weights of 4 and 6 bits: lowered, on the interpreter and in emulated instructions.

The form: bytes go to shared memory as they lie, warps share the sum over k.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest

import tessera as ts
import tile_gpu
from emulator import compare
from tessera import Tensor, config, tile
from tessera.errors import DTypeError, ShapeError
from tessera.numerics import decode, find_dtype
from tessera.runtime.generations import GENERATIONS
from tessera.stdlib import gemm_packed
from tessera.tile.cuda.compile import emit_kernel
from tessera.tile.cuda.lower.multiply_codes import holds, multiply_codes
from tessera.tile.cuda.lower.stage_loads import Room, stage_matmul_loads
from tessera.tile.interpreter.launch import run as interpret
from tessera.tile.interpreter.memory import Memory
from tessera.tile.ir.ir import Op, walk
from tessera.tile.passes import verify
from tolerance import assert_close

CODES = ("fp4_e2m1", "fp4_e3m0", "fp6_e2m3", "fp6_e3m2", "int4")
SM90 = GENERATIONS["sm_90"]


@ts.kernel
def product(W: Tensor["N", "K"], X: Tensor["M", "K"], D: Tensor["M", "N", ts.f32],
            BN=32, BM=16, BK=128):
    depth = min(BK, K)
    acc = tile.zeros((BN, BM))
    for k in range(0, K, depth):
        w = tile.cast(tile.load(W[tile_n:tile_n+BN, k:k+depth]), X.dtype)
        acc = tile.dot(w, tile.load(X[tile_m:tile_m+BM, k:k+depth]).T, acc)
    D[tile_m:tile_m+BM, tile_n:tile_n+BN] = acc.T


@ts.kernel
def begun(W: Tensor["N", "K"], X: Tensor["M", "K"], B: Tensor["N", ts.f32],
          D: Tensor["M", "N", ts.f32], BN=32, BM=16, BK=128):
    depth = min(BK, K)
    acc = tile.broadcast(tile.load(B[tile_n:tile_n+BN])[:, None], (BN, BM))
    for k in range(0, K, depth):
        w = tile.cast(tile.load(W[tile_n:tile_n+BN, k:k+depth]), X.dtype)
        acc = tile.dot(w, tile.load(X[tile_m:tile_m+BM, k:k+depth]).T, acc)
    D[tile_m:tile_m+BM, tile_n:tile_n+BN] = acc.T


def weights(rng, codes, shape):
    if find_dtype(codes).kind != "float":
        return ts.tensor(rng.integers(-8, 8, shape).astype(np.int8), codes)
    return ts.tensor(2 * rng.standard_normal(shape).astype(np.float32), codes)


def arguments(rng, codes, M, N, K, x="bf16"):
    return (weights(rng, codes, (N, K)),
            ts.tensor(rng.standard_normal((M, K)).astype(np.float32), x), ts.zeros((M, N), ts.f32))


def numbers(t):
    return np.array(decode(t.array, t.dtype), np.float64)


# --- in emulated instructions -----------------------------------------------------------------
@pytest.mark.parametrize("x", ["bf16", "f16", "fp8_e4m3"])
@pytest.mark.parametrize("codes", CODES)
def test_codes_are_multiplied_as_they_lie(rng, codes, x):
    """Each of four warps has 64 of 256 numbers of k, and all 32 rows: 2 x 2 blocks, 4 steps."""
    ran = compare(product, *arguments(rng, codes, 20, 70, 768, x), lanes=128, target="sm_90",
                  rtol=1e-4, atol=1e-3, BK=256)
    groups, iterations = 2 * 3, 3
    assert ran.ran("mma_m16n8k16") == groups * iterations * 4 * 2 * 2
    assert ran.ran("conflicts") == ran.ran("passes of ld") == 0
    assert ran.ran("passes of st") == 0 or x.startswith("fp8")  # columns of sums lie otherwise
    placed = x == "bf16" or codes == "int4"  # more than shifts and masks
    assert (ran.ran("fma_") > 0) == placed
    assert f"{codes} as they lie, in 4 parts of k" in "\n".join(ran.emitted.notes)


@pytest.mark.parametrize("lanes, BN, BM, BK", [(32, 16, 8, 64), (256, 64, 64, 256),
                                               (512, 64, 16, 512), (128, 64, 32, 128),
                                               (64, 128, 8, 256)])
def test_blocks_and_warps(rng, lanes, BN, BM, BK):
    """Warps beyond the parts of k have rows of their own."""
    ran = compare(product, *arguments(rng, "fp6_e3m2", BM + 1, BN + 3, 2 * BK), lanes=lanes,
                  target="sm_90", rtol=1e-4, atol=1e-3, BN=BN, BM=BM, BK=BK)
    assert f"in {min(lanes // 32, BK // 64)} parts of k" in "\n".join(ran.emitted.notes)


@pytest.mark.parametrize("K", [64, 192, 257, 300])
@pytest.mark.parametrize("codes", CODES)
def test_rows_of_any_length(rng, codes, K):
    """Where rows are no multiples of 16 bytes copies are narrower; what pads a row is zeros."""
    compare(product, *arguments(rng, codes, 3, 33, K), lanes=64, target="sm_90", rtol=1e-4,
            atol=1e-3, BK=64)


def test_sums_may_begin_with_something(rng):
    w, x, d = arguments(rng, "fp4_e2m1", 17, 40, 256, "f16")
    b = rng.standard_normal(40).astype(np.float32)
    ran = compare(begun, w, x, b, d, lanes=64, target="sm_90", rtol=1e-4, atol=1e-3)
    assert "as they lie" in "\n".join(ran.emitted.notes)


def test_older_targets_multiply_16_bits_alone(rng):
    for x, parts in (("bf16", True), ("fp8_e4m3", False)):
        ran = compare(product, *arguments(rng, "fp4_e2m1", 16, 32, 128, x), lanes=64,
                      target="sm_80", rtol=1e-4, atol=1e-3)
        assert ("as they lie" in "\n".join(ran.emitted.notes)) == parts


# --- which loops take the form ----------------------------------------------------------------
def lowered(kernel, args, warps=4, **kwargs):
    bound, function, chosen, lanes, _, _ = tile_gpu.prepare(kernel, args, kwargs, None, 32 * warps)
    facts = tile_gpu.facts_of(function, bound)
    return bound, multiply_codes(function, warps, SM90, facts.divisible), chosen


def takes(kernel, args, **kwargs):
    _, function, _ = lowered(kernel, args, **kwargs)
    return any(isinstance(n, Op) and n.name == "matmul_codes" for n in walk(function.body))


@pytest.mark.parametrize("codes, x, holding", [
    ("fp6_e2m3", "fp8_e5m2", False), ("fp6_e3m2", "fp8_e5m2", True), ("int4", "bf16", True),
    ("fp4_e3m0", "fp8_e4m3", True)])
def test_a_cast_that_rounds_is_left_alone(rng, codes, x, holding):
    assert holds(find_dtype(x), find_dtype(codes)) == holding
    args = arguments(rng, codes, 16, 32, 128, x)
    assert takes(product, args) == holding
    compare(product, *args, lanes=64, target="sm_90", rtol=1e-4, atol=1e-3)


def test_other_loops_are_left_alone(rng):
    args = arguments(rng, "int4", 16, 32, 128)
    assert takes(product, args)
    assert not takes(product, args, BK=32)  # less than the four lanes of a row read
    assert not takes(product, args, BM=128)
    assert not takes(product, args, warps=8, BK=64, BN=64)  # eight warps, of which one has k

    @ts.kernel
    def twice(W: Tensor["N", "K"], X: Tensor["M", "K"], D: Tensor["M", "N", ts.f32]):
        depth, acc = min(64, K), tile.zeros((32, 16))
        for k in range(0, K, depth):
            w = tile.cast(tile.load(W[tile_n:tile_n+32, k:k+depth]), X.dtype)
            acc = tile.dot(w, tile.load(X[tile_m:tile_m+16, k:k+depth]).T, acc) * 0.5
        D[tile_m:tile_m+16, tile_n:tile_n+32] = acc.T

    assert not takes(twice, args)


def test_the_form_comes_before_warpgroups_that_specialise(rng):
    from tessera.runtime.target import parse_target

    args = arguments(rng, "fp4_e2m1", 16, 64, 128)
    bound, function, _, _, _, _ = tile_gpu.prepare(product, args, {"BN": 64, "BM": 8}, None, 128)
    made = emit_kernel(function, 64, parse_target("sm_90a"), tile_gpu.facts_of(function, bound))
    assert "packed weights are multiplied as they lie" in made.refusal.reason


@pytest.mark.parametrize("kernel", [product, begun], ids=["product", "begun"])
@pytest.mark.parametrize("codes", ["fp4_e2m1", "fp6_e3m2", "int4"])
def test_the_lowered_loop_computes_the_same_and_has_no_race(rng, codes, kernel):
    w, x, d = arguments(rng, codes, 20, 40, 320, "f16")
    b = [rng.standard_normal(40).astype(np.float32)] if kernel is begun else []
    found = []
    for steps in (0, 1, 2):
        bound, function, chosen = lowered(kernel, copy.deepcopy((w, x, *b, d)))
        if steps == 0:
            function = tile_gpu.prepare(kernel, copy.deepcopy((w, x, *b, d)), {}, None, 128)[1]
        if steps == 2:
            function = stage_matmul_loads(function, SM90, Room(100 << 10, 3, warps=True))
            ops = [n for n in walk(function.body) if isinstance(n, Op)]
            assert not [n for n in ops if n.name == "load_tile" and len(n.outs[0].type.shape) > 1]
        verify(function)
        with config.scope(debug=True):
            interpret(function, bound, chosen, 128, kernel.__name__)
        found.append(next(m.flat for n, m in bound.values.items()
                          if isinstance(m, Memory) and n == "D"))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-4, atol=1e-4)


# --- the routine ------------------------------------------------------------------------------
@pytest.mark.parametrize("codes", CODES)
def test_fp8_rows_give_bf16(rng, codes):
    w, x, _ = arguments(rng, codes, 5, 24, 100, "fp8_e4m3")
    s = rng.uniform(0.5, 2, 24).astype(np.float32)
    y = gemm_packed(x, w, scale=s)
    assert y.type == ts.bf16
    assert_close(y.array, numbers(x) @ numbers(w).T * s, "bf16", 8)


def test_bytes_of_another_library_are_weights(rng):
    w, x, _ = arguments(rng, "fp6_e2m3", 4, 16, 64)
    raw = np.asarray(ts.as_bytes(w).array)
    same = gemm_packed(x, ts.from_bytes(raw, "fp6_e2m3", (16, 64)))
    np.testing.assert_array_equal(same.array, gemm_packed(x, w).array)


def test_what_it_refuses(rng):
    w, x, _ = arguments(rng, "int4", 4, 16, 64)
    with pytest.raises(DTypeError, match="(?s)x is f32.*one of bf16, f16, fp8_e4m3"):
        gemm_packed(np.zeros((4, 64), np.float32), w)
    with pytest.raises(DTypeError, match="(?s)w is bf16.*from_bytes"):
        gemm_packed(x, x)
    with pytest.raises(ShapeError, match=r"x is \[4, 32\], w is \[16, 64\]"):
        gemm_packed(ts.zeros((4, 32), "bf16"), w)
    with pytest.raises(ShapeError, match=r"scale is \[4\]"):
        gemm_packed(x, w, scale=np.ones(4, np.float32))
    with pytest.raises(DTypeError, match="scale is f64"):
        gemm_packed(x, w, scale=np.ones(16))
    with pytest.raises(ShapeError, match="no elements"):
        gemm_packed(ts.zeros((4, 0), "bf16"), ts.zeros((16, 0), "int4"))
    assert gemm_packed(ts.zeros((0, 64), "bf16"), w).shape == (0, 16)
