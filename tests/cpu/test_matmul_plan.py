"""How products are launched: blocks, parts and swapped operands by the extents and the card."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

import tessera as ts
from fake_gpu import Torch
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from hopper_lowering import lowered, program, run
from tessera import bf16, f32, fp8_e4m3, stdlib, tile
from tessera.kernels.cards import Card
from tessera.kernels.gemm import LAYOUTS
from tessera.kernels.matmul_blocks import BLOCK_US, MatmulExtents, rank_blocks
from tessera.kernels.matmul_plan import ProductPlan, plan_product
from tessera.runtime.target import parse_target
from tessera.tile.cuda.emit.emitter import ArgumentFacts
from tessera.tile.cuda.emit.warp_specialised import emit_warp_specialised
from tessera.tile.cuda.lower.warp_specialised import Refusal
from tessera.tile.kernel.kernel import Kernel
from tolerance import assert_close

H200 = Card(132, 4800, frozenset({"bf16", "f16", "fp8_e4m3", "fp8_e5m2"}))


def groups(p: ProductPlan, M: int, N: int) -> int:
    return -(-M // p.rows) * -(-N // p.columns) * p.parts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("M, N, K", [
    (512, 512, 512), (1024, 1024, 1024), (1, 8192, 8192), (16, 8192, 8192), (8192, 16, 8192),
    (768, 768, 32768), (1024, 1024, 65536), (4096, 4096, 4096), (16384, 50304, 768)], ids=str)
def test_a_plan_covers_the_product_and_keeps_the_card_busy(M, N, K, layout):
    p = plan_product(bf16, M, N, K, layout, H200)
    block = (p.columns, p.rows) if p.swapped else (p.rows, p.columns)
    assert block in BLOCK_US and (p.parts - 1) * p.depth < K <= max(1, p.parts) * (p.depth or K)
    assert groups(p, M, N) >= 60 and str(p.parts) in p.why + "1"


def test_few_rows_are_the_columns_of_a_block():
    for M, N in ((1, 8192), (16, 8192), (8192, 16)):
        p = plan_product(bf16, M, N, 8192, "nt", H200)
        assert p.swapped == (M < N) and min(p.rows, p.columns) <= 16
    assert plan_product(bf16, 4, 8192, 8192, "tn", H200).rows == 16  # rows of 8 bytes are none
    assert "transposed result" in plan_product(bf16, 1, 8192, 8192, "nn", H200).why


@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_blocks_of_the_transposed_result_may_be_one_for_each_multiprocessor(layout):
    """4 x 33 of 128 x 96, where 64 x 256 are 98. Results leave as rows of 16 bits."""
    p = plan_product(bf16, 3136, 512, 2048, layout, H200)
    assert (p.rows, p.columns, p.swapped, p.parts) == (96, 128, True, 1)
    assert groups(p, 3136, 512) == 132 and "of the transposed result" in p.why
    assert not plan_product(bf16, 3136, 512, 2048, layout, H200, result_bits=32).swapped
    for other in ((3136, 504, 2048), (3136, 512, 4096), (3136, 1536, 2048), (768, 2048, 2048)):
        assert not plan_product(bf16, *other, layout, H200).swapped
    assert not plan_product(bf16, 3136, 512, 2048, "t" + layout[1], H200).swapped


def test_a_smaller_card_has_other_waves():
    """2048^3 is 128 of the usual blocks: one wave of 132 multiprocessors, two of 114."""
    large, small = (plan_product(bf16, 2048, 2048, 2048, "nt", replace(H200, multiprocessors=n))
                    for n in (132, 114))
    assert (large.rows, large.columns) == (128, 256) and "on 132" in large.why
    assert (small.rows, small.columns) != (128, 256) and "on 114" in small.why


def test_what_is_chosen_by_the_user_or_has_no_tensor_cores_is_as_usual():
    assert plan_product(bf16, 512, 512, 65536, "nt", H200, free=False).parts == 1
    p = plan_product(f32, 512, 512, 65536, "nt", H200)
    assert (p.rows, p.columns, p.step, p.parts, p.swapped) == (64, 64, 16, 1, False)
    assert plan_product(bf16, 16, 8192, 8192, "nt", Card(108)).swapped is False
    p = plan_product(fp8_e4m3, 8192, 8192, 8192, "nt", H200)
    assert (p.rows, p.columns, p.step, p.cluster) == (192, 128, 128, 1)
    p = plan_product(fp8_e4m3, 4096, 4096, 4096, "nt", H200)
    assert (p.rows, p.columns, p.step, p.cluster) == (128, 128, 128, 1)
    p = plan_product(f32, 4096, 4096, 4096, "nt", H200)
    assert (p.rows, p.columns, p.step, p.warps) == (128, 256, 32, 8)


@pytest.mark.parametrize("extents, layout, shared", [
    ((2632, 9176, 4952), "nt", "rows"), ((1000, 1000, 1000), "nn", "columns"),
    ((3000, 1000, 5000), "tn", "rows")])
def test_blocks_share_the_larger_operand_where_rows_are_two_lines(extents, layout, shared):
    p = plan_product(bf16, *extents, layout, H200)
    assert p.cluster == 2 and f"share {shared}" in p.why
    assert (p.rows > p.columns) == (shared == "rows")
    near = [n // 64 * 64 for n in extents]
    p = plan_product(bf16, *near, layout, H200)
    assert p.cluster == 1 or (p.rows, p.columns) in ((128, 256), (240, 128))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_blocks_are_in_pairs_where_rows_have_an_even_number(layout):
    for M, cluster in ((16384, 2), (16384 - 128, 1), (16384 - 64, 2)):
        p = plan_product(bf16, M, 4096, 4096, layout, H200)
        assert (p.rows, p.columns, p.cluster) == (128, 256, cluster), (M, p)
    assert plan_product(bf16, 128, 8192, 8192, layout, H200).cluster == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_224_columns_leave_fewer_multiprocessors_idle(layout):
    """1536 in pairs are twelve waves on 132 multiprocessors, 1344 of 256 columns eleven."""
    p = plan_product(bf16, 6144, 7168, 8192, layout, H200)
    assert (p.rows, p.columns, p.cluster) == (128, 224, 2)


def test_blocks_wait_for_no_neighbour_where_memory_decides():
    x = MatmulExtents(256, 16384, 8192, 16, 16)
    assert [b.cluster for b in rank_blocks(x, ((128, 256),), False, H200)] == [1]
    x = replace(x, M=16384)
    assert [b.cluster for b in rank_blocks(x, ((128, 256),), False, H200)] == [2, 1]


def test_blocks_of_96_columns_are_read_either_way():
    """128 of 192 x 96 keep 132 multiprocessors busy."""
    plans = [plan_product(bf16, 1536, 1536, 1536, w, H200) for w in LAYOUTS]
    assert {(p.rows, p.columns, p.cluster) for p in plans} == {(192, 96, 1)}


def test_short_products_begin_early():
    """Whose time a launch is a good part of; all global memory is behind the wait."""
    plans = {n: plan_product(bf16, n, n, n, "nt", H200)
             for n in (512, 1024, 2048, 4096)}
    assert {n: p.dependent for n, p in plans.items()} == {
        512: True, 1024: True, 2048: False, 4096: False}


def test_a_schedule_says_why():
    a = ts.ones((72, 6000), "bf16")
    stdlib.gemm(a, a, transpose_b=True)
    text = stdlib.gemm.inspect_ir("schedule")
    assert "parts of K" in text and "the quickest by the estimate" in text


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("extents", [(70, 90, 50), (1, 77, 130), (33, 1, 40), (5, 5, 1)], ids=str)
def test_rows_that_tma_cannot_read_are_copied(extents, layout, gpu, rng):
    """On a GPU, where they do not begin at 16 bytes; a single column is a row."""
    (M, N, K), how = extents, LAYOUTS[layout]
    kernels = {n: Kernel(k.fn, grid=k.grid) for n, k in stdlib.gemm.kernels.items()}
    gemm = type(stdlib.gemm)(stdlib.gemm.fn, kernels, stdlib.gemm.record)
    a = rng.standard_normal((K, M) if layout[0] == "t" else (M, K)).astype(np.float16)
    b = rng.standard_normal((N, K) if layout[1] == "t" else (K, N)).astype(np.float16)
    copied = sum(x.shape[1] != 1 and x.shape[1] % 8 != 0 or x.shape[1] == 1 and x.shape[0] % 8 != 0
                 for x in (a, b))
    for _ in range(2):  # the second as it was written down
        gpu.launched.clear()
        got = gemm(Torch(a), Torch(b), **how)
        assert [n for n in gpu.launched if n == "aligned_rows"] == ["aligned_rows"] * copied
        want = stdlib.gemm.record.reference(a.astype("f8"), b.astype("f8"), **how)
        assert_close(got.x, want, "f16", n=K)


# --- as warpgroups do it ------------------------------------------------------------------------
@dataclass(frozen=True)
class Facts:
    """What a launch knows of its operands: rows of multiples of 8 elements, not of 16."""

    divisible: frozenset[str] = frozenset()
    eights: frozenset[str] = frozenset({"A0", "A1", "B0", "B1", "M", "N"})
    aligned: frozenset[str] = frozenset("ABDP")


def matrices(rng, M, N, K, layout):
    shapes = (M, K) if layout[0] == "n" else (K, M), (K, N) if layout[1] == "n" else (N, K)
    a, b = (rng.standard_normal(s).astype(bf16.numpy) for s in shapes)
    x, y = (np.asarray(v, np.float64) for v in (a, b))
    return a, b, (x.T if layout[0] == "t" else x) @ (y.T if layout[1] == "t" else y)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_warpgroups_of_every_plan(layout, swapped, parts, rng):
    """Ragged extents, few of them in the swapped form; parts that end before the last step."""
    M, N, K = (24, 136, 328) if swapped else (136, 88, 328)
    a, b, want = matrices(rng, M, N, K, layout)
    flipped = {"n": "t", "t": "n"}
    ways = flipped[layout[1]] + flipped[layout[0]] if swapped else layout
    block = {"BM": 16, "BN": 64} if swapped else {"BM": 64, "BN": 32}
    how = {"layout": ways, "swapped": swapped, **block}
    grid = (-(-M // block["BM"]), -(-N // block["BN"]))
    if parts == 1:
        kernel, args = stdlib.gemm.kernels["gemm_whole"], (a, b, np.full(
            (M, N), np.nan, bf16.numpy), f32)
    else:
        kernel, grid = stdlib.gemm.kernels["gemm_parts"], (*grid, parts)
        args = (a, b, np.full((parts, M, N), np.nan, np.float32), 128, f32)
    made = program(kernel, *args, facts=Facts(), **how)
    run(kernel, made, grid, *args, blocks=3, **how)
    got = np.asarray(args[2], np.float64)
    assert_close(got if parts == 1 else got.sum(0), want, "bf16", n=K)
    assert made.pipeline.tiles == "static" and made.rings[0].slots > 4


@pytest.mark.parametrize("columns", [72, 96, 144])
@pytest.mark.parametrize("layout", ["nn", "tn"])
def test_columns_of_a_block_may_end_within_what_is_brought(layout, columns, rng):
    """Rows of b lie across K, and come in pieces of 128 or 64 bytes, half of them by each block."""
    M, N, K = 264, 200, 136
    a, b, want = matrices(rng, M, N, K, layout)
    how = {"layout": layout, "BM": 64, "BN": columns, "CLUSTER": 2}
    args = (a, b, np.full((M, N), np.nan, bf16.numpy), f32)
    kernel = stdlib.gemm.kernels["gemm_whole"]
    made = program(kernel, *args, facts=Facts(), **how)
    (ring,) = made.rings
    assert [load.blocks for load in ring.loads] == [1, 2]
    width = 32 if columns == 96 else 64  # of as wide pieces as bring nothing in vain, or the widest
    assert ring.loads[1].panels == -(-columns // width)
    run(kernel, made, (-(-M // 64), -(-N // columns)), *args, blocks=4, **how)
    assert_close(np.asarray(args[2], np.float64), want, "bf16", n=K)


def test_rows_of_16_bytes_are_not_known_without_the_extents_that_show_it(rng):
    a, b, _ = matrices(rng, 136, 88, 328, "nt")
    args = a, b, np.zeros((136, 88), bf16.numpy), f32
    made = lowered(stdlib.gemm.kernels["gemm_whole"], *args, layout="nt", BM=64, BN=32,
                   facts=Facts(eights=frozenset({"M", "N"})))
    assert isinstance(made, Refusal) and "may not be multiples of 16" in made.reason


def test_a_launch_knows_multiples_of_eight(gpu, rng):
    kernel = Kernel(stdlib.gemm.kernels["gemm_whole"].fn)
    a, b, d = (Torch(np.zeros(s, np.float16)) for s in ((72, 64), (56, 64), (72, 56)))
    kernel(a, b, d, f32, layout="nt", BM=64, BN=32)
    assert (gpu.requests[-1].divisible, gpu.requests[-1].eights) == (
        {"A1", "B1"}, {"A0", "B0", "M", "N"})


@pytest.mark.parametrize("extents, resident", [
    ((768,) * 3, 2), ((1000,) * 3, 2), ((128, 4096, 1024), 2), ((1024,) * 3, 1),
    ((4096,) * 3, 1), ((16, 4096, 1024), 1), ((256, 256, 16384), 1)])
def test_short_products_leave_room_for_the_next_launch(extents, resident):
    """Where one warpgroup multiplies, and a launch does not fill the GPU by blocks alone."""
    assert plan_product(bf16, *extents, "nt", H200).resident == resident
    assert plan_product(fp8_e4m3, *extents, "nt", H200).resident == 1


@pytest.mark.parametrize("dependent", [False, True])
def test_a_kernel_that_starts_early_waits_before_it_reads(dependent, rng):
    a, b, _ = matrices(rng, 128, 128, 128, "nt")
    function = stdlib.gemm.kernels["gemm_whole"].lower(a, b, np.zeros((128, 128), bf16.numpy), f32,
                                                       layout="nt", BM=64, BN=64)
    schedule = ts.Schedule(DEPENDENT=dependent, source="auto")
    made = emit_warp_specialised(function, schedule, parse_target("sm_90a"), ArgumentFacts(
        frozenset({"A0", "A1", "B0", "B1", "M", "N"}), frozenset("ABD")))
    assert isinstance(made, tuple) and made[1].dependent is dependent
    body = made[1].source.partition("def gemm_whole")[2]
    assert ("dependents_wait()" in body) == ("dependents_launch()" in body) == dependent
    if dependent:
        assert body.index("sync()") < body.index("dependents_wait()") < body.index("acquire(")


@ts.kernel
def waits_itself(A: ts.Tensor["M", "K"], B: ts.Tensor["K", "N"], D: ts.Tensor["M", "N"],
                 LATE=False):
    if LATE:
        acc = tile.load(A[0:64, 0:64])
    tile.grid_dependency_wait()
    tile.launch_dependents()
    if not LATE:
        acc = tile.load(A[0:64, 0:64])
    D[0:64, 0:64] = tile.dot(acc, tile.load(B[0:64, 0:64]))


def test_a_wait_at_a_kernel_s_begin_is_that_of_the_form():
    """Not one behind an access: what reads before it may not be put behind."""
    x = ts.zeros((64, 64), "bf16")
    facts = ArgumentFacts(frozenset("MNK"), frozenset("ABD"))
    made = emit_warp_specialised(waits_itself.lower(x, x, x), None, parse_target("sm_90a"), facts)
    assert isinstance(made, tuple) and made[1].dependent
    body = made[1].source.partition("def waits_itself")[2]
    assert body.count("dependents_wait()") == 1
    assert body.index("dependents_wait()") < body.index("acquire(")
    late = emit_warp_specialised(waits_itself.lower(x, x, x, LATE=True), None,
                                 parse_target("sm_90a"), facts)
    assert isinstance(late, Refusal) and "grid_dependency_wait" in late.reason
