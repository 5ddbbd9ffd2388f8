"""Matmuls and shared memory in emulated machine instructions: results, barriers, alignment.

No GPU and no compiler: tests/emulator carries out what the emitted source says.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import tessera as ts
from emulator import compare
from kernels import seeds
from matmul_kernels import ATTENTION, CHAIN, NESTED, Gemm, array, make
from tessera.tile.cuda.emit.emitter import ArgumentFacts
from tessera.tile.tuning.gpus import gpu


def check(gemm: Gemm, rng, M, N, K, lanes=128, **options):
    return compare(gemm.kernel, *gemm.arguments(rng, M, N, K), groups=gemm.groups(M, N),
                   lanes=lanes, rtol=gemm.tolerance, atol=8 * gemm.tolerance, **options)


@pytest.mark.parametrize("style", ["implicit", "explicit", "stored", "ring"])
@pytest.mark.parametrize("orders", ["NT", "NN", "TN", "TT"])
def test_orders(rng, orders, style):
    ran = check(Gemm(orders=orders, style=style), rng, 64, 64, 96)
    blocks, trips, steps, pieces = 2, 3, 2, 4  # a warp has 16 x 32 of 32 x 64: 4 matmuls a step
    assert ran.ran("mma_m16n8k16") == blocks * trips * steps * pieces
    assert ran.ran("ld_shared") == 0, "fragments come by ldmatrix"
    assert (ran.ran("cp_async_cg_16") > 0) == (style != "stored")
    assert ran.ran("conflicts") == 0


@pytest.mark.parametrize("style", ["implicit", "explicit", "stored"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (70, 50, 40), (33, 65, 31), (64, 30, 0),
                                   (31, 100, 129)], ids=str)
def test_ragged(rng, shape, style):
    check(Gemm(style=style), rng, *shape)


@pytest.mark.parametrize("block", [(16, 8, 16), (4, 4, 4), (20, 12, 24), (20, 12, 20),
                                   (64, 48, 48), (16, 8, 7)], ids=str)
@pytest.mark.parametrize("style", ["implicit", "explicit", "stored"])
def test_blocks(rng, block, style):
    for swizzle in ("xor", None):
        check(Gemm(block=block, style=style, swizzle=swizzle), rng, block[0] + 1, block[1] + 3,
              2 * block[2])


@pytest.mark.parametrize("style", ["implicit", "explicit"])
@pytest.mark.parametrize("dtype, size", [("bf16", None), ("f32", 4), ("f64", 8)])
def test_nothing_is_known_of_the_arguments(rng, dtype, size, style):
    """Without alignment each element is moved by itself, asynchronously where it is 4 bytes."""
    sums = "f64" if dtype == "f64" else "f32"
    gemm = Gemm(dtype, style=style, sums=sums, result=sums)
    ran = check(gemm, rng, 33, 64, 48, facts=ArgumentFacts())
    assert ran.ran("cp_async_cg_16") == 0
    assert (ran.ran(f"cp_async_ca_{size}") > 0) == (size is not None)


@pytest.mark.parametrize("lanes", [16, 32, 48, 64, 96, 256, 512])
def test_lanes(rng, lanes):
    check(Gemm(block=(64, 64, 32)), rng, 64, 64, 64, lanes=lanes)


TYPES = [Gemm("f32"), Gemm("f32", precision="tf32"), Gemm("tf32"),
         Gemm("f64", sums="f64", result="f64"), Gemm("int8", sums="int32", result="int32"),
         Gemm("uint8", sums="int32", result="int32"),
         Gemm("int16", sums="int32", result="int32"), Gemm("int32", sums="int64", result="int64"),
         Gemm("bf16", sums="bf16", result="bf16"), Gemm("f16", result="f16")]


NARROW = [Gemm("fp8_e4m3"), Gemm("fp8_e4m3", other="fp8_e5m2"), Gemm("fp4_e2m1"),
          Gemm("fp4_e3m0"), Gemm("fp6_e2m3"), Gemm("fp6_e3m2"),
          Gemm("int4", sums="int32", result="int32")]


@pytest.mark.parametrize("style", ["implicit", "explicit", "stored"])
@pytest.mark.parametrize("gemm", NARROW, ids=lambda g: f"{g.dtype}{g.other}")
def test_narrow_types(rng, gemm, style):
    """fp8 by its own instructions from sm_89 on; all others as f16 or int8, exactly."""
    for target, orders in (("sm_80", "NT"), ("sm_89", "TN")):
        ran = check(replace(gemm, orders=orders, style=style, block=(32, 32, 32)), rng, 33, 32, 64,
                    target=target)
        kind = "s8" if gemm.dtype == "int4" else "f16"
        if gemm.dtype.startswith("fp8") and target == "sm_89":
            kind = "e4m3"
        assert ran.ran(f"mma_m16n8k{16 if kind == 'f16' else 32}") == ran.ran("mma") > 0


@pytest.mark.filterwarnings("ignore:dot adds to a tile of bf16:RuntimeWarning")
@pytest.mark.parametrize("style", ["implicit", "explicit", "stored"])
@pytest.mark.parametrize("orders", ["NT", "TN"])
@pytest.mark.parametrize("gemm", TYPES, ids=lambda g: f"{g.dtype}-{g.sums}-{g.precision}")
def test_types(rng, gemm, orders, style):
    check(replace(gemm, orders=orders, style=style, block=(32, 32, 16)), rng, 40, 32, 32)


@pytest.mark.parametrize("gemm, what", [
    (Gemm("f32"), None), (Gemm("f32", precision="tf32"), "mma_m16n8k8_f32_tf32"),
    (Gemm("int8", sums="int32", result="int32"), "mma_m16n8k32_s32_s8"),
    (Gemm("f64", sums="f64", result="f64"), None)], ids=lambda x: str(x)[:20])
def test_the_unit_that_multiplies(rng, gemm, what):
    ran = check(replace(gemm, block=(32, 32, 32)), rng, 32, 32, 32)
    assert ran.ran("mma") == (ran.ran(what) if what else 0)
    assert (ran.ran("mma") > 0) == (what is not None)


@pytest.mark.parametrize("target, what", [("sm_75", "mma_m16n8k8_f32_f16"),
                                          ("sm_90", "mma_m16n8k16_f32_f16")])
def test_targets(rng, target, what):
    for style in ("implicit", "explicit"):
        ran = check(Gemm("f16", style=style), rng, 40, 64, 64, target=target)
        assert ran.ran("mma") == ran.ran(what) > 0
        assert (ran.ran("cp_async") > 0) == (target != "sm_75")


def test_conflicts_are_seen(rng):
    """So that the count of 0 elsewhere says something."""
    assert check(Gemm(style="explicit", swizzle=None), rng, 32, 64, 32).ran("conflicts of ldm") > 0


def test_bf16_before_sm_80_is_done_by_threads(rng):
    assert check(Gemm(), rng, 40, 64, 64, target="sm_75").ran("mma") == 0


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages(rng, stages):
    """One barrier for each iteration of a ring, and one before it: its first fragments are read
    there. """
    ran = check(Gemm(), rng, 32, 64, 32 * 7, schedule=ts.Schedule(stages=stages))
    assert ran.ran("sync") == (1 + 7 if stages > 1 else 2 * 7)


CROWDED = """
@ts.kernel
def crowded(A: Tensor["M", "K", ts.bf16], B: Tensor["N", "K", ts.bf16],
            C: Tensor["M", "N", ts.bf16]):
    acc = tile.zeros((128, 128))
    for k in range(0, K, 128):
        acc = tile.dot(tile.load(A[0:128, k:k+128]), tile.load(B[0:128, k:k+128]).T, acc)
    C[0:128, 0:128] = tile.dot(tile.load(A[0:128, 0:128]), tile.cast(acc * 0.01, ts.bf16))
"""


def test_a_ring_makes_room_for_others(rng):
    """2 stages of 64 KiB fit into 163 KiB beside A alone, but not beside the second matmul's B."""
    args = [array(rng, "bf16", (128, 128)) for _ in range(3)]
    ran = compare(make(CROWDED, "crowded"), *args, groups=1, lanes=256, rtol=5e-2, atol=5e-1)
    assert ran.emitted.shared_bytes <= gpu("sm_80").shared_bytes


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("S", [64, 50, 1])
def test_attention(rng, S, causal):
    q, k, v = (array(rng, "bf16", (2, S, 32)) for _ in range(3))
    ran = compare(make(ATTENTION, "attention"), q, k, v, array(rng, "f32", (2, S, 32)), 0.125,
                  causal=causal, groups=(-(-S // 64), 2), lanes=128, rtol=2e-2, atol=2e-2)
    assert ran.ran("st_shared") == 0, "P stays in registers"


def test_chain_of_matmuls(rng):
    a, b, d = (array(rng, "bf16", s) for s in ((128, 48), (48, 64), (64, 32)))
    ran = compare(make(CHAIN.format(t="bf16"), "chain"), a, b, d, array(rng, "f32", (128, 32)),
                  groups=2, lanes=128, rtol=2e-2, atol=0.3)
    assert ran.ran("st_shared") == 0


def test_rings_in_a_loop(rng):
    a, b = array(rng, "bf16", (96, 160)), array(rng, "bf16", (100, 160))
    compare(make(NESTED, "nested"), a, b, array(rng, "f32", (96, 100)), groups=3, lanes=64,
            rtol=3e-4, atol=3e-3)


def test_every_group_of_a_grid_in_bands(rng):
    check(Gemm(block=(16, 16, 16)), rng, 19 * 16, 3 * 16, 16, lanes=32)


@pytest.mark.parametrize("name, shapes", [
    ("gemm", [(128, 32), (32, 128), (128, 128)]),
    ("corrected_gemm", [(128, 96), (96, 128), (128, 128)]),
    ("flash_attention", [(2, 100, 64)] * 3)])
def test_kernels_of_the_documents(rng, name, shapes):
    given = [array(rng, "f32" if name != "flash_attention" and i == 2 else "bf16", s)
             for i, s in enumerate(shapes)]
    compare(getattr(seeds, name), *given, rtol=2e-2, atol=5e-2)


RACY = """
@ts.kernel
def racy(A: Tensor["M", "N", ts.bf16], C: Tensor["M", "N", ts.bf16]):
    s = tile.alloc_shared((32, 32), ts.bf16, swizzle="xor")
    {copy}(s, {what})
    {barrier}
    C[0:16, 0:32] = tile.load(s[16:32, 0:32])
"""  # threads read what others wrote


@pytest.mark.parametrize("barrier, message", [("tile.barrier()", None), ("pass", "barrier|waited")])
@pytest.mark.parametrize("copy, what", [("tile.cp_async", "A[0:32, 0:32]"),
                                        ("tile.store", "tile.load(A[0:32, 0:32]).T")])
def test_a_missing_barrier_is_seen(rng, copy, what, barrier, message):
    """The emulator's own check, and that a barrier alone completes copies."""
    kernel = make(RACY.format(copy=copy, what=what, barrier=barrier), "racy")
    given = (array(rng, "bf16", (32, 32)), array(rng, "bf16", (32, 32)))
    if message is None:
        compare(kernel, *given, groups=1, lanes=64)
        return
    with pytest.raises(AssertionError, match=message):
        compare(kernel, *given, groups=1, lanes=64)
