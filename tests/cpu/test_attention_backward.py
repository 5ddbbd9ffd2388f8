"""The kernels of attention's gradient: interpreted, and as warp-specialised programs, against f64;
and what their lowering needs besides that of the result."""

from __future__ import annotations

from copy import copy

import numpy as np
import pytest

import tessera as ts
from attention_cases import numbers, truth
from hopper_lowering import Known, distance, lowered, program, run
from tessera import Tensor, bf16, f16, f32
from tessera.kernels.attention_backward import (
    attention_keys,
    attention_queries,
    keys_block,
    queries_block,
)
from tessera.runtime.generations import GENERATIONS
from tessera.tile.cuda.lower.warp_specialised.rewrite import ops_in
from tessera.tile.ir.errors import KernelError
from tessera.tile.ir.ir import For, Op, walk
from tessera.tile.ir.op_record import OPS
from tessera.tile.passes.single_iterations import inline_single_iterations
from tolerance import assert_close

CHIP = GENERATIONS["sm_90a"]
FACTS = Known(divisible=frozenset("STDEBC"),
              aligned=frozenset({*"QKVGY", "dK", "dV", "dQ", "lse", "delta"}))


def calls(rng, dtype, S, T, group, D, causal):
    """(kernel, grid, arguments, outputs with what they should be, constants) of both."""
    H = 2
    q, g = numbers(rng, dtype, H, S, D), numbers(rng, dtype, H, S, D)
    k, v = numbers(rng, dtype, H // group, T, D), numbers(rng, dtype, H // group, T, D)
    lse, delta, *want = truth(q, k, v, g, causal)
    dq, dk, dv = (np.full(x.shape, np.nan, dtype.numpy) for x in want)
    given, common = (q, k, v, g, lse, delta), {"group": group, "causal": causal}
    own = keys_block(dtype, D, CHIP)
    yield (attention_keys, (-(-T // own["BM"]), H // group), (*given, dk, dv, D ** -0.5),
           ((dk, want[1]), (dv, want[2])), common | own)
    own = queries_block(dtype, D, CHIP)
    yield (attention_queries, (-(-S // own["BM"]), H), (*given, dq, D ** -0.5), ((dq, want[0]),),
           common | own)


CASES = [(200, 200, 1), (72, 328, 2), (128, 256, 1), (4, 4, 2)]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("S, T, group", CASES)
@pytest.mark.parametrize("D", [64, 128])
def test_warp_specialised(D, S, T, group, causal, rng):
    for kernel, axes, args, results, constants in calls(rng, bf16, S, T, group, D, causal):
        made = program(kernel, *args, facts=FACTS, **constants)
        run(kernel, made, axes, *args, **constants)
        for got, want in results:
            assert distance(got, want) < 6e-3


@pytest.mark.parametrize("dtype, D, S, T, group, causal", [
    (bf16, 64, 70, 70, 1, True), (f16, 64, 33, 50, 2, False), (bf16, 128, 65, 130, 1, True),
    (f16, 80, 40, 40, 2, True), (bf16, 192, 40, 70, 1, True), (bf16, 256, 70, 40, 1, False),
    (f32, 32, 50, 61, 1, True)], ids=str)
def test_interpreted(dtype, D, S, T, group, causal, rng):
    for kernel, axes, args, results, constants in calls(rng, dtype, S, T, group, D, causal):
        kernel[axes, 128](*args, **constants)
        for got, want in results:
            assert distance(got, want) < (1e-5 if dtype is f32 else 6e-3)


@pytest.mark.parametrize("warp_specialised", [True, False], ids=["specialised", "interpreted"])
@pytest.mark.parametrize("D, S, T, group, causal", [
    (64, 200, 200, 1, True), (64, 72, 328, 2, False), (128, 130, 260, 1, False)], ids=str)
def test_columns_of_blocks(D, S, T, group, causal, warp_specialised, rng):
    """Sums over rows of each block, of what is stored: the rows beyond the last add nothing."""
    for kernel, axes, args, results, constants in calls(rng, bf16, S, T, group, D, causal):
        outs = [got for got, _ in results]
        sums = [np.full((-(-x.shape[1] // 16), axes[1], D), np.nan, np.float32) for x in outs]
        args = (*args, *sums)
        if warp_specialised:
            made = program(kernel, *args, facts=FACTS, **constants)
            run(kernel, made, axes, *args, **constants)
        else:
            kernel[axes, 128](*args, **constants)
        for out, got in zip(outs, sums, strict=True):
            wide = out.astype(np.float64)
            blocks = [wide[:, i:i + 16] for i in range(0, wide.shape[1], 16)]
            assert_close(got, np.stack([b.sum(1) for b in blocks]), "f32", n=16,
                         scale=np.sqrt(np.stack([(b**2).sum(1) for b in blocks])))


@pytest.mark.parametrize("warp_specialised", [True, False], ids=["specialised", "interpreted"])
@pytest.mark.parametrize("S, T, group", CASES)
@pytest.mark.parametrize("D", [64, 128])
def test_delta_is_made_where_queries_are(D, S, T, group, warp_specialised, rng):
    """Of the result as it is stored, and it is written for the kernel of keys."""
    *_, (kernel, axes, args, results, constants) = calls(rng, bf16, S, T, group, D, True)
    q, k, v, g, lse, delta, dq, scale = args
    y = numbers(rng, bf16, *q.shape)  # of another result, by as much as which dQ is off
    own = (np.float64(y) * np.float64(g)).sum(-1)
    made_delta, constants = np.full_like(delta, np.nan), constants | {"BM": 128}
    args = (q, k, v, g, lse, made_delta, dq, scale)
    axes = (-(-S // 128), axes[1])
    if warp_specialised:
        made = program(kernel, *args, facts=FACTS, Y=y, **constants)
        run(kernel, made, axes, *args, Y=y, **constants)
    else:
        kernel[axes, 128](*args, Y=y, **constants)
    assert_close(made_delta, own, "f32", n=D, scale=np.sqrt((np.float64(y * g)**2).sum(-1)))
    kernel[axes, 128](q, k, v, g, lse, own.astype(np.float32), want := np.empty_like(dq), scale,
                      **constants)
    assert distance(dq, want) < 6e-3


@pytest.mark.parametrize("op", ["own_rows", "own_start"])
@pytest.mark.parametrize("D", [64, 128])
def test_what_is_left_out_gives_its_slots_back(D, op, monkeypatch, rng):
    """Of a tile in which no row counts, and of iterations before a warpgroup's first: a slot that
    is not waited for, or not given back, is an error of the machine. On it all warpgroups are one,
    which leaves nothing out: here it does."""
    def first(m, op, lo, hi, start, less):
        step = op.attr["step"]
        return np.array([[lo.item() + -(-max(0, hi.item() - lo.item()) // step) * step]], np.int32)

    run_as = {"own_rows": lambda m, op, start, stop: np.array([[False]]), "own_start": first}[op]
    record = copy(OPS[op])
    object.__setattr__(record, "run", run_as)
    monkeypatch.setitem(OPS, op, record)
    seen = 0
    for kernel, axes, args, results, constants in calls(rng, bf16, 328, 328, 1, D, True):
        made = program(kernel, *args, facts=FACTS, **constants)
        seen += bool(ops_in(made.function.body, op))
        run(kernel, made, axes, *args, **constants)
        for got, _ in results:
            assert np.isnan(np.float64(got)).all() == (op == "own_rows")
    assert seen == (2 if op == "own_rows" else D == 64)  # rotated loops leave slots to the next


def arguments(S, D, dtype=bf16):
    x, r = ts.ones((2, S, D), dtype), ts.ones((2, S), f32)
    return (*(x,) * 4, *(r,) * 2, x, x, 0.1)


@pytest.mark.parametrize("D, overlap, registers", [(64, 2, (40, 232)), (128, 1, (24, 240))])
def test_as_many_last_matmuls_run_beside_the_next_iteration_as_registers_allow(
        D, overlap, registers):
    made = program(attention_keys, *arguments(512, D), facts=FACTS)
    assert made.pipeline.overlap == overlap and made.pipeline.registers == registers
    # of each iteration's slots one more is held into the next: of cotangents only where the
    # matmul that reads them is among the last
    slots = {r.name: r.slots for r in made.rings}
    stages = made.pipeline.stages
    assert slots["q_lse"] == stages + 1 and slots["g_delta"] == stages + (overlap == 2)


def test_rows_come_with_the_operands_whose_result_they_meet():
    made = program(attention_keys, *arguments(512, 64), facts=FACTS)
    assert {r.name: [x.shape for x in r.loads] for r in made.rings} == {
        "k": [(128, 64)], "v": [(128, 64)], "q_lse": [(64, 64), (64,)],
        "g_delta": [(64, 64), (64,)]}
    assert not ops_in(made.function.body, "load_tile")
    odd = Known(divisible=FACTS.divisible - {"S"}, aligned=FACTS.aligned)
    made = program(attention_keys, *arguments(510, 64), facts=odd)
    assert [r.name for r in made.rings] == ["k", "v", "q", "g"]
    assert ops_in(made.function.body, "load_tile")  # rows of 510 numbers begin anywhere


@pytest.mark.parametrize("BN", [32, 48, 64, 80])
@pytest.mark.parametrize("D", [64, 96, 128])
def test_each_copy_lies_at_a_multiple_of_128_bytes(D, BN):
    """TMA writes nowhere else; a row of 48 numbers is no multiple of that."""
    made = program(attention_keys, *arguments(480, D), facts=FACTS, BN=BN)
    for ring in made.rings:
        for x in ring.loads:
            places = [ring.offset_bytes + slot * ring.slot_bytes + x.offset_bytes
                      + panel * x.panel_bytes
                      for slot in range(ring.slots) for panel in range(x.panels)]
            assert not any(at % 128 for at in places), (x.name, places)


def test_the_diagonal_and_the_edge_are_parts_of_their_own():
    """Of a causal loop: blocks that the diagonal crosses, those that all see, the last one, which
    the diagonal may cross too."""
    made = program(attention_keys, *arguments(512, 64), facts=FACTS, causal=True)
    consumer = [n for n in walk(made.function.body) if isinstance(n, For)
                and ops_in(n.body, "async_matmul")]
    masks = [sorted({m.name for m in ops_in(n.body, "causal_mask", "edge_mask")})
             for n in consumer]
    assert masks == [["causal_mask"], [], ["causal_mask", "edge_mask"]]


def test_what_begins_at_its_own_tile_walks_heads_in_strips():
    """Of a causal loop over queries, as of one over keys: heads slowest, so that the tiles of some
    of them read the same at a time; wider where a head has few tiles."""
    made = program(attention_keys, *arguments(512, 64), facts=FACTS, causal=True)
    (order,) = ops_in(made.function.body, "tile_order")
    assert (order.attr["order"], order.attr["outer"]) == ((1, 0), 0)
    scalars = {d.value: n for n in walk(made.function.body) if isinstance(n, Op) for d in n.outs}
    strip = scalars[order.args[1]]
    assert strip.name == "mul" and scalars[strip.args[0]].name == "maximum"


@pytest.mark.parametrize("D", [64, 128])
def test_operands_are_rounded_once(D):
    """Where a mask stands between the rounding and the matmul too: packing rounds."""
    for kernel in (attention_keys, attention_queries):
        args = arguments(512, D)
        made = program(kernel, *(args if kernel is attention_keys else (*args[:7], 0.1)),
                       facts=FACTS, causal=True)
        assert ops_in(made.function.body, "pack_operand")
        assert not ops_in(made.function.body, "convert")


def test_operands_of_the_next_tile_arrive_where_there_is_room():
    slots = {}
    for D in (64, 128):
        made = program(attention_keys, *arguments(512, D), facts=FACTS)
        slots[D] = [r.slots for r in made.rings if r.name in "kv"]
    assert slots == {64: [1, 1], 128: [2, 2]}  # of 64 they are held in registers


@pytest.mark.parametrize("target", GENERATIONS)
@pytest.mark.parametrize("D", [16, 64, 80, 128, 192, 256])
def test_blocks_fit_every_chip(D, target):
    chip = GENERATIONS[target]
    for block in (keys_block, queries_block):
        rows = sum(block(f16, D, chip).values())
        assert 4 * D * rows <= chip.group_shared_bytes


def test_masks_of_scores_with_keys_down_the_rows(rng):
    @ts.kernel
    def masked(X: Tensor["M", "N", f32], Y: Tensor["M", "N", f32], keys=0):
        Y[0:8, 0:8] = ts.tile.causal_mask(ts.tile.load(X[0:8, 0:8]), 3, 5, keys=keys)

    x, y = rng.standard_normal((8, 8)).astype(np.float32), np.zeros((8, 8), np.float32)
    masked[(1,), 32](x, y)
    rows, columns = np.arange(8)[:, None], np.arange(8)
    assert np.array_equal(y, np.where(rows + 5 > columns + 3, -np.inf, x))
    with pytest.raises(KernelError, match="keys=2, and scores have axes 0 and 1"):
        masked[(1,), 32](x, y, keys=2)


def test_a_loop_of_one_iteration_is_none():
    function = attention_keys.lower(*arguments(512, 64))
    assert len([n for n in walk(function.body) if isinstance(n, For)]) == 2
    assert len([n for n in walk(inline_single_iterations(function).body)
                if isinstance(n, For)]) == 1
    grouped = attention_keys.lower(*arguments(512, 64), group=2)
    assert len([n for n in walk(inline_single_iterations(grouped).body)
                if isinstance(n, For)]) == 2


def test_tiles_that_no_thread_can_hold_are_refused():
    refused = lowered(attention_keys, *arguments(512, 256), facts=FACTS, BM=128)
    assert "its tiles take 320 registers of a thread, there is room for 212" in refused.reason


@pytest.mark.parametrize("S, T, group", [(200, 200, 1), (72, 328, 2), (390, 256, 1)])
@pytest.mark.parametrize("D", [64, 128])
def test_pairs_of_blocks_bring_what_both_read(D, S, T, group, rng):
    """Neighbours of a head; of an odd number of blocks the last has one that writes nothing."""
    *_, (kernel, axes, args, results, constants) = calls(rng, bf16, S, T, group, D, False)
    constants |= {"CLUSTER": 2}
    made = program(kernel, *args, facts=FACTS, **constants)
    assert made.pipeline.cluster == 2 and sum(r.blocks == 2 for r in made.rings) == 2
    run(kernel, made, axes, *args, blocks=4, **constants)
    for got, want in results:
        assert distance(got, want) < 6e-3
    assert queries_block(bf16, 64, CHIP, 16384)["CLUSTER"] == 2
    assert queries_block(bf16, 64, CHIP, 16384, causal=True)["CLUSTER"] == 1
