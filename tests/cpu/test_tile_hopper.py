"""The warp-specialised form: the lowered program computes what the kernel computes, on a machine
that knows rings, slots and running matmuls; and what does not fit is refused with its reason."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from hopper_lowering import Known, compared, distance, lowered, poisoned, program, random, run
from hopper_programs import (
    accumulated,
    attention,
    batched,
    gemm_nn,
    gemm_nt,
    gemm_tn,
    kept_sums,
    matmul,
    normalised,
    swiglu,
    two_gemms,
    window,
)
from tessera import Tensor, bf16, f32, fp8_e4m3, int64
from tessera.tile.cuda.lower.warp_specialised import (
    Refusal,
    WarpSpecialisedProgram,
)
from tessera.tile.cuda.lower.warp_specialised.check import check_slots
from tessera.tile.cuda.lower.warp_specialised.machine import PipelineError, Rings
from tessera.tile.cuda.lower.warp_specialised.rewrite import map_blocks, ops_in, with_attrs
from tessera.tile.ir.errors import TileIRError
from tessera.tile.ir.ir import For, If, Op, While, walk
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.parsing import parse_ir
from tessera.tile.ir.printing import print_ir
from tessera.tile.ir.schedule import Schedule

LOG2E = 1.4426950408889634


def gemm_args(rng, kernel, M, N, K):
    a = random(rng, K, M) if kernel is gemm_tn else random(rng, M, K)
    b = random(rng, N, K) if kernel is gemm_nt else random(rng, K, N)
    return [a, b, poisoned(M, N)]


# --- results ----------------------------------------------------------------------------------
@pytest.mark.parametrize("kernel", [gemm_nt, gemm_nn, gemm_tn], ids=lambda k: k.__name__)
@pytest.mark.parametrize("shape", [(200, 300, 136), (128, 128, 512)])
def test_matmuls(kernel, shape, rng):
    M, N, K = shape
    made = compared(kernel, (-(-M // 128), -(-N // 128)), gemm_args(rng, kernel, M, N, K), 2)
    assert [r.slots for r in made.rings] == [6] and made.warpgroups == 2
    assert len(made.rings[0].loads) == 2  # A and B arrive together


@pytest.mark.parametrize("extra", [dict(IN_FLIGHT=1), dict(stages=2), dict(warps=4, BM=64)])
def test_matmuls_under_other_schedules(extra, rng):
    constants = {k: v for k, v in extra.items() if k == "BM"}
    schedule = Schedule(**{k: v for k, v in extra.items() if k != "BM"})
    args = gemm_args(rng, gemm_nt, 200, 264, 1024)
    rows = constants.get("BM", 128)
    compared(gemm_nt, (-(-200 // rows), 3), args, 2, schedule=schedule, blocks=3, **constants)


def test_a_loop_without_an_iteration(rng):
    args = gemm_args(rng, gemm_nt, 128, 128, 64)
    args[0], args[1] = args[0][:, :0], args[1][:, :0]
    made = program(gemm_nt, *args)
    run(gemm_nt, made, (1, 1), *args)
    assert not np.asarray(args[2], np.float32).any()


@pytest.mark.parametrize("extra", [{}, dict(IN_FLIGHT=1), dict(stages=2)])
@pytest.mark.parametrize("depths", [(328, 136), (64, 520), (0, 72)], ids=str)
def test_loops_one_after_another_share_a_ring(depths, extra, rng):
    """What the second multiplies goes where the first left off, in slots and phases."""
    M, N, (K, S) = 200, 264, depths
    args = [random(rng, M, K), random(rng, N, K), random(rng, S, M), random(rng, S, N),
            poisoned(M, N)]
    made = compared(two_gemms, (2, 3), args, 4, schedule=Schedule(**extra), blocks=2)
    (ring,) = made.rings
    assert [[x.tensor for x in loads] for loads in ring.fills] == [["A", "B"], ["X", "W"]]
    assert ring.slots == extra.get("stages", 6) and ring.slot_bytes == 2 * 128 * 64 * 2


@pytest.mark.parametrize("extra", [{}, dict(IN_FLIGHT=1)])
def test_two_matmuls_of_one_load(extra, rng):
    """x is read by two matmuls: released once. The bias comes as a row, the residual as a tile, in
    a ring of their own."""
    M, N, K = 200, 136, 328
    args = [random(rng, M, K), random(rng, N, K), random(rng, N, K),
            rng.standard_normal(N).astype(np.float32), random(rng, M, N), poisoned(M, N)]
    made = compared(swiglu, (2, 3), args, 5, schedule=Schedule(**extra))
    assert sorted(len(r.loads) for r in made.rings) == [1, 2, 2]
    assert not ops_in(made.function.body, "load_tile")


def kept_args(rng, M, N, K):
    return [random(rng, M, K), random(rng, K, N), random(rng, M, N),
            rng.standard_normal((M, N)).astype(np.float32), rng.random((M, N)) < 0.5,
            poisoned(M, N)]


@pytest.mark.parametrize("extra", [{}, dict(stages=2), dict(warps=4, BM=64), dict(BM=192)], ids=str)
@pytest.mark.parametrize("shape", [(200, 272, 136), (128, 128, 512)], ids=str)
def test_tiles_that_meet_results_come_by_tma(shape, extra, rng):
    """While a tile is multiplied, or the one before is stored. They are read where sums lie."""
    M, N, K = shape
    args = kept_args(rng, M, N, K)
    constants = {k: v for k, v in extra.items() if k == "BM"}
    schedule = Schedule(**{k: v for k, v in extra.items() if k != "BM"})
    axes = -(-M // constants.get("BM", 128)), -(-N // 64)
    made = compared(kept_sums, axes, args, 5, schedule=schedule, **constants)
    brought = {load.tensor for ring in made.rings for load in ring.loads}
    assert brought == set("ABCRV") and not ops_in(made.function.body, "load_tile")


def test_several_blocks_of_rows_load_what_meets_them(rng):
    """A consumer reads tiles of shared memory where one block of its rows lies."""
    made = compared(kept_sums, (1, 2), kept_args(rng, 256, 128, 64), 5, BM=256)
    assert len(ops_in(made.function.body, "load_tile")) == 3


@pytest.mark.parametrize("BK, left", [(64, 0), (128, 1), (192, 2)])
def test_tiles_without_room_beside_operands_are_loaded(BK, left, rng):
    """In the order in which they are loaded, beside two slots of operands."""
    made = compared(kept_sums, (2, 2), kept_args(rng, 200, 136, 72), 5, BN=128, BK=BK)
    assert len(ops_in(made.function.body, "load_tile")) == left


@pytest.mark.parametrize("extra", [{}, dict(IN_FLIGHT=0), dict(stages=2), dict(warps=4, BM=64)],
                         ids=str)
@pytest.mark.parametrize("shape, dtype", [((200, 136, 328), bf16), ((128, 256, 64), f32)], ids=str)
def test_what_a_first_operand_is_computed_of_comes_by_tma(shape, dtype, extra, rng):
    """Its rows' statistics too: nothing is loaded by consumers. One consumer or two, its registers
    are not made anew while a matmul reads them, which the machine would not let pass."""
    M, N, K = shape
    rows = extra.get("BM", 128)
    schedule = Schedule(**{n: x for n, x in extra.items() if n != "BM"})
    args = [rng.standard_normal((M, K)).astype(dtype.numpy), random(rng, K), random(rng, K, N),
            poisoned(M, N)]
    made = program(normalised, *args, schedule=schedule, BM=rows)
    assert not ops_in(made.function.body, "load_tile") and len(made.rings) == 1
    assert made.pipeline.in_flight == extra.get("IN_FLIGHT", 1)
    run(normalised, made, (-(-M // rows), -(-N // 256)), *args, BM=rows)
    x, gain, w = (np.asarray(a, np.float64) for a in args[:3])
    x = np.asarray(x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * gain, bf16.numpy)
    assert distance(args[3], np.asarray(x, np.float64) @ w) < 4e-3


def test_sums_of_rows_that_consumers_load_are_those_of_four_lanes(rng):
    """What may not come by TMA is loaded as an operand lies, for the sums of its rows stay summands
    of the lanes that share a row there."""
    M, N, K = 200, 136, 328
    args = [random(rng, M, K), random(rng, K), random(rng, K, N), poisoned(M, N)]
    made = program(normalised, *args, facts=Known(aligned=frozenset("VWY")))
    assert ops_in(made.function.body, "load_tile") and ops_in(made.function.body, "lane_sum")
    run(normalised, made, (2, 1), *args)  # stops at a lane_sum of what lies otherwise


@ts.kernel
def scaled_in_place(X: Tensor["M", "K", bf16], V: Tensor["K", bf16], W: Tensor["K", "N", bf16],
                    Y: Tensor["M", "N", bf16], BM=128, BK=64):
    m, acc = ts.tile.group_id(0) * BM, ts.tile.zeros((BM, 256))
    for k in range(0, K, BK):
        x = ts.tile.load(X[m:m + BM, k:k + BK]) * ts.tile.load(V[k:k + BK])[None, :]
        X[m:m + BM, k:k + BK] = x
        acc += ts.tile.cast(x, bf16) @ ts.tile.load(W[k:k + BK, 0:256])
    Y[m:m + BM, 0:256] = acc


def test_what_the_kernel_writes_too_is_loaded_by_consumers(rng):
    """Nothing of it is read ahead, and matmuls are those of warpgroups."""
    x, gain, w = random(rng, 256, 136), random(rng, 136), random(rng, 136, 256)
    args = [x.copy(), gain, w, poisoned(256, 256)]
    made = program(scaled_in_place, *args)
    assert len(ops_in(made.function.body, "load_tile")) == 1
    run(scaled_in_place, made, (2,), *args)
    want = np.asarray(x * gain, np.float64)
    assert np.array_equal(args[0], want)
    assert distance(args[3], want @ np.asarray(w, np.float64)) < 4e-3


@ts.kernel
def where_a_tile_says(X: Tensor["M", "K", bf16], V: Tensor["P", ts.int32],
                      W: Tensor["K", "N", bf16], Y: Tensor["R", "N", bf16]):
    acc, sums, last = ts.tile.zeros((128, 256)), ts.tile.zeros((128,)), ts.tile.reduce_max(
        ts.tile.load(V[0:4]))
    for k in range(0, last, 64):
        sums += ts.tile.row_sum(ts.tile.cast(ts.tile.load(X[0:128, k:k + 64]), f32))
    for k in range(0, K, 64):
        x = ts.tile.load(X[0:128, k:k + 64]) + ts.tile.load(X[last:last + 128, k:k + 64])
        acc += ts.tile.cast(x, bf16) @ ts.tile.load(W[k:k + 64, 0:256])
    Y[0:128, 0:256] = acc + sums[:, None]


def test_what_lies_or_ends_where_a_tile_says_is_loaded_by_consumers(rng):
    """The producer has no tiles. What else the operand is computed of is brought all the same."""
    x, w = random(rng, 256, 136), random(rng, 136, 256)
    args = [x, np.array([3, 100, 7, 0], np.int32), w, poisoned(128, 256)]
    made = program(where_a_tile_says, *args)
    found = {n.name for n in ops_in(made.function.body, "load_tile", "read_tile")
             if n.outs[0].type.shape == (128, 64)}
    assert found == {"load_tile", "read_tile"} and [len(r.loads) for r in made.rings] == [2]
    run(where_a_tile_says, made, (1,), *args)
    wide = np.asarray(x, np.float64)
    want = np.asarray(x[:128] + x[100:228], np.float64) @ np.asarray(w, np.float64)
    assert distance(args[3], want + wide[:128, :128].sum(1, keepdims=True)) < 4e-3


@pytest.mark.parametrize("shape, blocks, statistics", [
    ((256, 1000), 2, 2), ((256, 1000), 3, 4), ((128, 100), 2, 1), ((0, 100), 2, 0),
    ((384, 1152), 3, 6)], ids=str)
def test_tiles_of_the_same_rows_share_their_statistics(shape, blocks, statistics, rng, monkeypatch):
    """Several are done one after another: as many as a block has, eight at most, but none where
    that would let other blocks wait."""
    (M, N), K = shape, 136
    args = [random(rng, M, K), random(rng, K), random(rng, K, N), poisoned(M, N)]
    made, fills = program(normalised, *args, BN=128), []
    plain = Rings.fill
    monkeypatch.setattr(Rings, "fill", lambda self, ring, views, m: (
        fills.append(len(views)), plain(self, ring, views, m)))
    tiles = -(-M // 128), -(-N // 128)
    run(normalised, made, tiles, *args, blocks=blocks, BN=128)
    assert fills.count(3) == 3 * tiles[0] * tiles[1] and fills.count(1) == 3 * statistics
    x, gain, w = (np.asarray(a, np.float64) for a in args[:3])
    x = np.asarray(x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * gain, bf16.numpy)
    assert not M or distance(args[3], np.asarray(x, np.float64) @ w) < 4e-3


@ts.kernel
def biased(A: Tensor["M", "K", bf16], B: Tensor["N", "K", bf16], bias: Tensor["N"],
           scale: Tensor["M", f32], C: Tensor["M", "N", bf16], BM=128, BN=64, BK=64):
    """The bias is loaded before the loop, the scale behind it."""
    b = ts.tile.cast(ts.tile.load(bias[tile_n:tile_n + BN])[None, :], f32)  # noqa: F821
    acc = ts.tile.zeros((BM, BN))
    for k in range(0, K, BK):  # noqa: F821
        a = ts.tile.load(A[tile_m:tile_m + BM, k:k + BK])  # noqa: F821
        acc = ts.tile.dot(a, ts.tile.load(B[tile_n:tile_n + BN, k:k + BK]).T, acc)  # noqa: F821
    s = ts.tile.load(scale[tile_m:tile_m + BM])  # noqa: F821
    C[tile_m:tile_m + BM, tile_n:tile_n + BN] = acc * s[:, None] + b  # noqa: F821


@pytest.mark.parametrize("dtype", [bf16, f32], ids=str)
@pytest.mark.parametrize("shape", [(200, 136, 328), (300, 200, 64)], ids=str)
def test_rows_behind_a_matmul_come_by_tma(dtype, shape, rng):
    """They are read where they are needed; the producer brings them behind the tile's operands, so
    that these need not wait until the tile before has read its row."""
    M, N, K = shape
    args = [random(rng, M, K), random(rng, N, K), rng.standard_normal(N).astype(dtype.numpy),
            rng.standard_normal(M).astype(np.float32), poisoned(M, N)]
    facts = Known(aligned=frozenset("ABC") | {"bias", "scale"})
    made = program(biased, *args, facts=facts)
    assert not ops_in(made.function.body, "load_tile")
    fills = [n.attr["ring"] for n in ops_in(made.function.body, "ring_fill")]
    rows = {r.name for r in made.rings if all(len(x.shape) == 1 for x in r.loads)}
    assert len(fills) == 2 and fills[-1] in rows, fills
    want = (np.asarray(args[0], "f8") @ np.asarray(args[1], "f8").T * args[3][:, None]
            + np.asarray(args[2], "f8"))
    run(biased, made, (-(-M // 128), -(-N // 64)), *args, blocks=2)
    assert distance(args[4], want) < 4e-3


def test_a_row_that_is_written_too_is_loaded_where_it_stands(rng):
    @ts.kernel
    def shifted(A: Tensor["M", "K", bf16], B: Tensor["N", "K", bf16], bias: Tensor["N", f32],
                C: Tensor["M", "N", bf16]):
        acc = ts.tile.zeros((128, 64))
        for k in range(0, K, 64):  # noqa: F821
            acc = ts.tile.dot(ts.tile.load(A[tile_m:tile_m + 128, k:k + 64]),  # noqa: F821
                              ts.tile.load(B[0:64, k:k + 64]).T, acc)
        b = ts.tile.load(bias[0:64])
        C[tile_m:tile_m + 128, 0:64] = acc + b[None, :]  # noqa: F821
        bias[0:64] = b + 1.0

    made = program(shifted, random(rng, 128, 64), random(rng, 64, 64), np.zeros(64, np.float32),
                   poisoned(128, 64))
    assert len(ops_in(made.function.body, "load_tile")) == 1


def attention_args(rng, S, D=128, heads=2, shared=1):
    q, k, v = (random(rng, n, S, D) for n in (heads, heads // shared, heads // shared))
    return [q * bf16.numpy.type(2), k, v, poisoned(heads, S, D)]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("S", [100, 300, 512, 640])
def test_attention(S, causal, rng):
    scalars = (LOG2E / 128 ** 0.5,)
    made = compared(attention, (-(-S // 128), 2), attention_args(rng, S), 3, scalars=scalars,
                    causal=causal)
    loops = [n for n in walk(made.function.body) if isinstance(n, For | While) and ops_in(
        n.body, "async_matmul")]
    assert len(loops) == 3  # tiles, then the iterations without masks and those with
    assert isinstance(loops[0], While) == causal  # uneven tiles are taken as blocks come free
    plain, masked = loops[1:]
    assert not ops_in(plain.body, "edge_mask", "causal_mask")
    assert len(ops_in(masked.body, "edge_mask", "causal_mask")) == 2 + causal
    assert ops_in(made.function.body, "hold_operand")
    assert [r.slots for r in made.rings] == [1, 2, 2]


@pytest.mark.parametrize("extra", [
    dict(OVERLAP=False), dict(SPLIT=False), dict(A_IN_REGISTERS=False), dict(GUARD_RESCALE=False),
    dict(TILES="static"), dict(TILES="dynamic"), dict(PIN=16), dict(stages=1), dict(RASTER=1),
    dict(REVERSED=1)],
    ids=lambda e: next(iter(e)))
def test_attention_under_other_schedules(extra, rng):
    compared(attention, (3, 4), attention_args(rng, 333, heads=4, shared=2), 3,
             scalars=(LOG2E / 128 ** 0.5,), schedule=Schedule(**extra), causal=True, shared=2)


def test_warps_of_a_schedule(rng):
    """Four for a consumer; the compiler's own proposal is for the other form, as is a number that
    does not divide the rows."""
    args = gemm_args(rng, gemm_nt, 192, 128, 64)

    def consumers(**schedule):
        return program(gemm_nt, *args, BM=192, schedule=Schedule(**schedule)).warpgroups

    assert consumers() == 3 and consumers(warps=4) == 1 and consumers(warps=12) == 3
    assert consumers(warps=8) == 3 and consumers(warps=4, source="auto") == 3
    assert program(gemm_nt, *args, schedule=Schedule(stages=2)).rings[0].slots == 2
    assert program(gemm_nt, *args, schedule=Schedule(
        stages=2, source="auto")).rings[0].slots == 6


def test_two_blocks_of_one_consumer_share_a_multiprocessor(rng):
    """Where the schedule says so; of more consumers a block has it alone, and is refused."""
    args = gemm_args(rng, gemm_nt, 192, 128, 64)
    beside = Schedule(BESIDE=2)
    small = program(gemm_nt, *args, BM=64, schedule=beside).pipeline
    assert (small.beside, small.resident, small.registers) == (2, 2, (40, 216))
    assert program(gemm_nt, *args, BM=64).pipeline.beside == 1
    assert "2 consumers whose tiles take" in refusal(gemm_nt, *args, BM=128, schedule=beside)
    compared(gemm_nt, (3, 1), args, 2, BM=64, blocks=4, schedule=beside)


def test_three_consumers(rng):
    made = compared(attention, (2, 2), attention_args(rng, 300, D=64), 3, BM=192,
                    scalars=(LOG2E / 8,))
    assert made.warpgroups == 3 and made.pipeline.registers == (32, 160)


@pytest.mark.parametrize("D", [48, 96, 160])
def test_heads_that_are_no_whole_panels(D, rng):
    made = compared(attention, (2, 2), attention_args(rng, 200, D), 3, BN=64,
                    scalars=(LOG2E / D ** 0.5,))
    panels = -(-D // 64)
    assert [(x.shape, x.panels, x.panel_box, x.bytes) for x in made.ring("k").loads] == [
        ((64, D), panels, (1, 64, 64), panels * 64 * 128)]


def test_a_negative_scale_keeps_the_mask_of_the_weights(rng):
    compared(attention, (2, 2), attention_args(rng, 200), 3, scalars=(-0.1,))


@pytest.mark.parametrize("first, last", [(0, 192), (64, 128), (64, 64), (128, 0)])
def test_a_rotated_loop_may_be_empty(first, last, rng):
    args = [random(rng, 192, 128) for _ in range(3)] + [poisoned(192, 128)]
    want, got = [a.copy() for a in args], [a.copy() for a in args]
    window[(3,), 32](*want, first, last)
    made = program(window, *got, first, last)
    assert made.warpgroups == 1 and made.pipeline.overlap
    run(window, made, (3,), *got, first, last)
    np.testing.assert_allclose(np.asarray(got[3], np.float32), np.asarray(want[3], np.float32),
                               rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("first, last", [(-40, 24), (152, 200), (-40, 200)])
def test_keys_below_0_stay_out(first, last, rng):
    """The first or the last block of keys reaches beyond the tensor."""
    Q, K, V, Y = [random(rng, 192, 128) for _ in range(3)] + [poisoned(192, 128)]
    made = program(window, Q, K, V, Y, first, last)
    masks = [op for op in walk(made.function.body) if isinstance(op, Op) and op.name == "edge_mask"]
    assert masks and all(op.attr["low"] for op in masks)
    run(window, made, (3,), Q, K, V, Y, first, last)
    q, k, v = (np.asarray(x, np.float64) for x in (Q, K, V))
    total, o = np.zeros((192, 1)), np.zeros((192, 128))
    for k0 in range(first, last, 64):
        keys = slice(max(k0, 0), min(k0 + 64, 192))
        p = np.exp2(q @ k[keys].T * 0.1)
        total, o = total * 0.5 + p.sum(1, keepdims=True), o * 0.5 + p @ v[keys]
    rows = np.arange(192) // 64 * 64 < last
    np.testing.assert_allclose(np.asarray(Y, np.float64)[rows], (o / total)[rows], rtol=2e-2,
                               atol=1e-2)


@pytest.mark.parametrize("S", [64, 200])
def test_a_rotated_loop_may_carry_what_is_made_of_a_matmul(S, rng):
    args = [random(rng, S, 64) for _ in range(3)] + [poisoned(S, 64)]
    made = compared(accumulated, (-(-S // 64),), args, 3)
    assert made.pipeline.overlap


def test_three_axes_and_two_blocks_of_rows(rng):
    args = [random(rng, 2, 300, 72), random(rng, 136, 72), poisoned(2, 300, 136)]
    made = compared(batched, (2, 2, 3), args, 2, blocks=3)
    assert made.rank == 3 and made.rows == 256 and made.warpgroups == 2


@pytest.mark.parametrize("fast", [False, True])
def test_fp8_blocks_are_summed_outside_unless_told_otherwise(fast, rng):
    args = [rng.standard_normal((128, 512)).astype(fp8_e4m3.numpy) for _ in range(2)]
    made = compared(matmul, (1, 1), [*args, poisoned(128, 128)], 2, BK=128,
                    schedule=Schedule(FAST_SUMS=fast))
    chained = [len(n.args) == 3 for n in ops_in(made.function.body, "async_matmul")]
    assert chained == [False, fast]


# --- the order of tiles -----------------------------------------------------------------------
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_the_order_of_tiles_visits_each_once(extents, data):
    rank = len(extents)
    order = tuple(data.draw(st.permutations(range(rank))))
    outer = data.draw(st.integers(0, rank - 1))
    turned = data.draw(st.sampled_from([None, *range(rank)]))
    raster = data.draw(st.integers(1, 6))
    many = int(np.prod(extents))
    tile = np.arange(many, dtype=np.int32).reshape(-1, 1)
    sizes = [np.array([[n]], np.int32) for n in extents]
    found = OPS["tile_order"].numpy(tile, np.array([[raster]], np.int32), *sizes, order=order,
                                    outer=outer, reversed=turned)
    at = found if rank > 1 else [found]
    seen = {tuple(int(a[i, 0]) for a in at) for i in range(many)}
    assert seen == set(np.ndindex(*extents))


# --- what is refused --------------------------------------------------------------------------
def refusal(kernel, *args, **kwargs) -> str:
    made = lowered(kernel, *args, **kwargs)
    assert isinstance(made, Refusal), "it was lowered"
    return made.reason


@ts.kernel
def in_place(A: Tensor["M", "K", bf16], B: Tensor["N", "K", bf16]):
    acc = ts.tile.dot(ts.tile.load(A[0:64, 0:64]), ts.tile.load(B[0:64, 0:64]).T)
    A[0:64, 0:64] = acc


@ts.kernel
def computed_right(A: Tensor["M", "K", bf16], B: Tensor["N", "K", bf16],
                   C: Tensor["M", "N", f32]):
    b = ts.tile.cast(ts.tile.load(B[0:64, 0:64]) * 2.0, ts.bf16)
    C[0:64, 0:64] = ts.tile.dot(ts.tile.load(A[0:64, 0:64]), b.T)


@ts.kernel
def by_lanes(A: Tensor["M", "K", bf16], B: Tensor["N", "K", bf16], C: Tensor["M", "N", f32]):
    acc = ts.tile.dot(ts.tile.load(A[0:64, 0:64]), ts.tile.load(B[0:64, 0:64]).T)
    C[0:64, 0:64] = acc
    if ts.tile.local_id() < 4:
        C[1, ts.tile.local_id()] = 1.0


@ts.kernel
def from_a_number(A: Tensor["M", "K", bf16], B: Tensor["N", "K", bf16], R: Tensor[1, int64],
                  C: Tensor["M", "N", bf16]):
    first = R[0]
    a = ts.tile.load(A[0:64, first:first+64])
    C[0:64, 0:64] = ts.tile.dot(a, ts.tile.load(B[0:64, 0:64]).T)


def ones(*shape):
    return ts.ones(shape, bf16)


@pytest.mark.parametrize("words, make", [
    ("32 rows", lambda: refusal(gemm_nt, ones(256, 64), ones(256, 64), ones(256, 256), BM=32)),
    ("512 columns", lambda: refusal(gemm_nt, ones(256, 64), ones(512, 64), ones(256, 512),
                                    BN=512)),
    ("sums over 8", lambda: refusal(gemm_nt, ones(256, 64), ones(256, 64), ones(256, 256),
                                    BK=8)),
    ("A may not start", lambda: refusal(
        gemm_nt, ones(256, 64), ones(256, 64), ones(256, 256), facts=Known(
            aligned=frozenset("BC")))),
    ("rows of B may not be multiples", lambda: refusal(
        gemm_nn, ones(256, 64), ones(64, 256), ones(256, 256), facts=Known(
            divisible=frozenset("MK")))),
    ("A is read ahead and written", lambda: refusal(in_place, ones(64, 64), ones(64, 64))),
    ("second operand of a matmul is computed", lambda: refusal(
        computed_right, ones(64, 64), ones(64, 64), ts.ones((64, 64), f32))),
    ("differs between lanes", lambda: refusal(
        by_lanes, ones(64, 64), ones(64, 64), ts.ones((64, 64), f32))),
    ("integer of 64 bits", lambda: refusal(from_a_number, ones(64, 64), ones(64, 64),
                                           np.zeros(1, np.int64), ones(64, 64))),
    ("no matmul", lambda: refusal(copying, ones(64, 64), ones(64, 64))),
    ("bytes of shared memory", lambda: refusal(
        gemm_nt, ones(256, 512), ones(256, 512), ones(256, 256), BN=256, BK=512)),
    ("asks for mma", lambda: refusal(gemm_nt, ones(256, 64), ones(256, 64), ones(256, 256),
                                     schedule=Schedule(unit="mma"))),
    ("given twice", lambda: refusal(gemm_nt, ones(256, 64), ones(256, 64), ones(256, 256),
                                    facts=Known(shared=frozenset("AB")))),
    ("registers of a thread", lambda: refusal(
        gemm_nt, ones(256, 64), ones(256, 64), ones(256, 256), BM=256, BN=256)),
    ("a tile of A has 320 rows", lambda: refusal(
        gemm_nt, ones(640, 64), ones(256, 64), ones(640, 256), BM=320)),
    ("room for 212", lambda: refusal(attention, *(ones(2, 512, 256),) * 4, 0.1, BN=256)),
])
def test_what_does_not_fit_says_why(words, make):
    assert re.search(words, make())


@ts.kernel
def copying(A: Tensor["M", "K", bf16], B: Tensor["M", "K", bf16]):
    B[0:64, 0:64] = ts.tile.load(A[0:64, 0:64])


# --- the checks see what they are for -----------------------------------------------------------
def edited(made: WarpSpecialisedProgram, edit) -> WarpSpecialisedProgram:
    """The program with each op replaced by edit(op), or dropped."""
    def block(nodes):
        return [x for n in nodes for x in ([edit(n)] if isinstance(n, Op) else [n])
                if x is not None]

    return replace(made, function=replace(made.function, body=map_blocks(
        made.function.body, block)))


def consumer(made: WarpSpecialisedProgram):
    (role,) = [n for n in made.function.body if isinstance(n, If)]
    return role.orelse


def test_a_first_matmul_without_an_accumulator(rng):
    """Its result is what the loop begins with: complete before the loop."""
    args = [random(rng, 128, 256), random(rng, 128, 256), poisoned(128, 128)]
    compared(peeled, (1,), args, 2)


@ts.kernel
def peeled(A: Tensor["M", "K", bf16], B: Tensor["N", "K", bf16], C: Tensor["M", "N", bf16]):
    m = ts.tile.group_id(0) * 128
    acc = ts.tile.dot(ts.tile.load(A[m:m + 128, 0:64]), ts.tile.load(B[0:128, 0:64]).T)
    for k in range(64, K, 64):
        acc = ts.tile.dot(ts.tile.load(A[m:m + 128, k:k + 64]),
                          ts.tile.load(B[0:128, k:k + 64]).T, acc)
    C[m:m + 128, 0:128] = acc


def test_slots_are_linear(rng):
    for kernel, args, extra in ((gemm_nt, gemm_args(rng, gemm_nt, 128, 128, 128), {}),
                                (attention, attention_args(rng, 256), dict(causal=True))):
        scalars = (0.1,) if kernel is attention else ()
        made = program(kernel, *args, *scalars, **extra)
        check_slots(consumer(made))
        releases = ops_in(consumer(made), "ring_release")
        for one in releases:
            lost = edited(made, lambda n, one=one: None if n is one else n)
            with pytest.raises(TileIRError, match="held"):
                check_slots(consumer(lost))
        with pytest.raises(TileIRError, match="not held"):
            check_slots((*consumer(made), releases[0]))


def test_a_wait_that_waits_too_little_is_seen(rng):
    args = gemm_args(rng, gemm_nt, 128, 128, 256)
    made = program(gemm_nt, *args)
    loose = edited(made, lambda n: with_attrs(n, pending=1) if n.name == "matmul_wait" else n)
    with pytest.raises(PipelineError, match="released while a matmul reads it"):
        run(gemm_nt, loose, (1, 1), *args)
    none = edited(made, lambda n: with_attrs(n, pending=9) if n.name == "matmul_wait" else
                  None if n.name == "ring_release" else n)
    with pytest.raises(PipelineError, match="before its matmul is complete|deadlock"):
        run(gemm_nt, none, (1, 1), *args)


def test_a_slot_too_few_is_a_deadlock(rng):
    args = gemm_args(rng, gemm_nt, 128, 128, 512)
    made = program(gemm_nt, *args, schedule=Schedule(IN_FLIGHT=1))
    one = replace(made, rings=tuple(replace(r, slots=1) for r in made.rings))
    with pytest.raises(PipelineError, match="deadlock"):
        run(gemm_nt, one, (1, 1), *args)


def test_a_program_is_text(rng):
    made = program(attention, *attention_args(rng, 256), 0.1, causal=True)
    text = print_ir(made.function, lines=False)
    assert print_ir(parse_ir(text), lines=False) == text
    assert re.search(r"async_matmul\(.*\) {a_major=\"K\", b_major=\"M\"", text)
