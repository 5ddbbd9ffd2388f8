"""Packed weights of many rows of x: warpgroups unpack them in registers, a part of k each."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from cpu.test_packed_weights import arguments, product
from emulator import Block, Builder
from emulator import register as as_register
from hopper_lowering import Known, distance, run
from tessera.kernels.gemm_packed import packed_nt
from tessera.numerics import as_type, decode, find_dtype, unpack
from tessera.numerics.packed_order import from_rows
from tessera.runtime.generations import GENERATIONS
from tessera.runtime.target import parse_target
from tessera.tile.cuda.emit.emitter import ArgumentFacts
from tessera.tile.cuda.emit.warp_specialised import emit_program
from tessera.tile.cuda.intrinsics import unpacked_codes
from tessera.tile.cuda.intrinsics.matmul_codes import factor_of
from tessera.tile.cuda.lower.multiply_codes import stack_codes
from tessera.tile.cuda.lower.warp_specialised import WarpSpecialisedProgram, lower_warp_specialised
from tessera.tile.cuda.lower.warp_specialised.machine import PipelineMachine
from tessera.tile.cuda.lower.warp_specialised.rewrite import is_op, ops_in
from tessera.tile.ir.ir import For, If, Op, walk
from tessera.tile.ir.register_layout import warpgroup_codes
from tessera.tile.ir.schedule import Schedule
from tolerance import assert_close

LAID = " @packed_for(bf16)"
CODES = ("fp4_e2m1", "fp4_e3m0", "fp6_e2m3", "fp6_e3m2", "int4")
HOPPER = GENERATIONS["sm_90a"]
FACTS = Known(frozenset({"M", "N", "K"}), frozenset("XWDS"))


def swizzled(raw: np.ndarray, width: int) -> np.ndarray:
    """Rows as TMA leaves them: panels of `width` bytes, chunks of 16 permuted by the row."""
    rows, panels = raw.shape[0], raw.shape[1] // width
    chunks = raw.reshape(rows, panels, width // 16, 16)
    out = np.zeros((panels, rows, width // 16, 16), np.uint8)
    for r in range(rows):
        for c in range(width // 16):
            out[:, r, c ^ r * width // 128 % (width // 16)] = chunks[r, :, c]
    return out.reshape(-1)


@pytest.mark.parametrize("codes, dtype, order", [
    *((codes, dtype, "memory") for codes in CODES for dtype in ("bf16", "f16")),
    ("fp4_e2m1", "bf16", "laid"), ("fp6_e2m3", "bf16", "laid")])
@pytest.mark.parametrize("depth, parts, rows", [
    (256, 2, 64), (512, 2, 64), (256, 1, 128)])
def test_lanes_take_their_numbers_out_of_rows(codes, dtype, order, depth, parts, rows, rng):
    """Every code at every place that a warpgroup reads; lane and register as PTX says (9.7.15)."""
    kind, slot_bytes, offset = find_dtype(codes), 1 << 15, 2048
    raw = rng.integers(0, 256, (rows, depth * kind.bits // 8), dtype=np.uint8)
    width = 128 if raw.shape[1] % 128 == 0 else 64
    block = Block(threads := 2 * rows * parts)
    numeric = as_type(f"{codes} @packed_for(bf16)" if order == "laid" else codes)
    stored = from_rows(raw, numeric, (rows, depth))
    data, first = swizzled(stored, width), offset + slot_bytes
    block.shared.bytes[first:first + data.size] = data
    factor = 1 / factor_of(kind, dtype)
    thread, got = np.arange(threads, dtype=np.int32), []
    part = unpacked_codes.Part(raw.shape[1] // parts, codes, dtype, order)
    how = part.part_bytes, codes, dtype, order
    for step in range(part.steps):
        batch, at = divmod(step, part.steps // part.batches)
        with np.errstate(all="ignore"):
            if at == 0:
                read = unpacked_codes.read(offset, slot_bytes, rows * width, width, *how, batch,
                                           width, parts)
                words = read.rule(None, None).body(Builder(block), as_register(np.int32(1)),
                                                   as_register(thread))
            make = unpacked_codes.unpack(*how, step, part.steps)
            got += make.rule(None, None).body(Builder(block), words, as_register(thread))
    numbers = np.asarray(decode(unpack(raw, kind, depth), kind), np.float64) * factor
    group, lane = thread >> 7, thread & 31
    row = sum((thread >> at & (1 << n) - 1) << bit
              for at, bit, n in warpgroup_codes((64, 8), 1, width).terms(0))
    row, at = (row + 64 * group, 0 * group) if parts == 1 else (row, group * depth // parts)
    for i, word in enumerate(got):
        step, down, right = i // 4, i & 1, i >> 1 & 1
        words = np.broadcast_to(np.asarray(word), thread.shape).astype(np.int32).view(np.uint16)
        halves = np.asarray(decode(words.reshape(-1, 2), find_dtype(dtype)), np.float64)
        column = at + 16 * step + 8 * right + 2 * (lane & 3)
        want = np.stack([numbers[row + 8 * down, column + j] for j in (0, 1)], 1)
        np.testing.assert_array_equal(halves, want)


def program(x: str, codes: str, M: int, N: int, K: int, rng, **how
            ) -> tuple[WarpSpecialisedProgram | None, tuple]:
    drawn = rng.integers(-8, 8, (N, K)).astype(np.int8) if codes == "int4" else \
        rng.standard_normal((N, K)).astype("f4")
    args = (ts.tensor(rng.standard_normal((M, K)).astype("f4"), x), ts.tensor(drawn, codes),
            ts.tensor(rng.standard_normal(N).astype("f4")),
            ts.tensor(np.full((M, N), np.nan, "f4"), x))
    function = packed_nt.lower(*args, **how)
    made = stack_codes(function, HOPPER, FACTS.divisible)
    if made is function:
        return None, args
    lowered = lower_warp_specialised(made, Schedule(cluster=2), FACTS, HOPPER)
    assert isinstance(lowered, WarpSpecialisedProgram), lowered
    return lowered, args


@pytest.mark.parametrize("x", ["bf16", "f16"])
@pytest.mark.parametrize("codes", CODES)
def test_two_warpgroups_sum_a_part_of_k_each(codes, x, rng):
    """Rows and columns that end within a block; x is brought half by each block of a cluster."""
    how = {"BM": 64, "BN": 64, "BK": 256}
    made, args = program(x, codes, 40, 200, 1024, rng, **how)
    assert made is not None and made.warpgroups == 2 and made.pipeline.cluster == 2
    assert {load.dtype.name: load.blocks for r in made.rings for load in r.loads} == {
        "f32": 1, "uint8": 1, x: 2}
    waits = [n.attr["pending"] for n in walk(made.function.body)
             if isinstance(n, Op) and n.name == "matmul_wait"]
    assert waits == [1, 1, 0], "both of an iteration run on while the next codes are unpacked"
    run(packed_nt, made, (1, 4), *args, blocks=4, **how)
    rows, weights, scale, out = args
    want = numbers(rows) @ numbers(weights).T * numbers(scale)
    assert_close(numbers(out), want, x, n=1024, scale=float(np.abs(want).max()))


@pytest.mark.parametrize("x, M, codes, BK", [
    ("bf16", 16, "fp4_e2m1", 256), ("bf16", 64, "fp6_e2m3", 128), ("fp8_e4m3", 64, "fp4_e2m1", 256),
    ("fp8_e4m3", 16, "fp6_e3m2", 512)])
@pytest.mark.parametrize("steps", [5, 6])
def test_two_blocks_share_the_steps_of_a_group(x, M, codes, BK, steps, rng, monkeypatch):
    """Each warpgroup has rows of its own, and the blocks every second step."""
    how, K = {"BM": M, "BN": 128, "BK": BK, "DIVIDED": 2}, steps * BK
    drawn = rng.standard_normal((300, K)).astype("f4")
    args = (ts.tensor(rng.standard_normal((M - 3, K)).astype("f4"), x), ts.tensor(drawn, codes),
            None, ts.tensor(np.full((M - 3, 300), np.nan, "f4"), "bf16"))
    made = stack_codes(packed_nt.lower(*args, **how), HOPPER, FACTS.divisible)
    made = lower_warp_specialised(made, None, FACTS, HOPPER)
    assert isinstance(made, WarpSpecialisedProgram), made
    assert made.pipeline.together == made.pipeline.divided == 2 and made.warpgroups == 2
    assert {n.attr["parts"] for n in ops_in(made.function.body, "unpack_codes")} == {1}
    run(packed_nt, made, (1, 3), *args, blocks=3, **how)
    want = numbers(args[0]) @ numbers(args[1]).T
    assert_close(numbers(args[3]), want, "bf16", n=K, scale=float(np.abs(want).max()))
    monkeypatch.setattr(PipelineMachine, "parts", 2)
    run(packed_nt, made, (1, 3), *args, blocks=4, **how)  # the sums of the other do not come here
    mine = np.concatenate([np.arange(k, k + BK) for k in range(0, K, 2 * BK)])
    want = numbers(args[0])[:, mine] @ numbers(args[1])[:, mine].T
    assert_close(numbers(args[3]), want, "bf16", n=K, scale=float(np.abs(want).max()))
    monkeypatch.setattr(PipelineMachine, "part", 1)
    fill = ts.tensor(np.full((M - 3, 300), np.nan, "f4"), "bf16")
    run(packed_nt, made, (1, 3), *args[:3], fill, blocks=4, **how)
    assert np.isnan(numbers(fill)).all(), "one of the two stores"


def numbers(t: ts.Tensor) -> np.ndarray:
    return np.asarray(ts.cast(t, "f32").array, np.float64)


@pytest.mark.parametrize("codes, how", [
    ("fp4_e2m1", {"BM": 16}), ("fp6_e2m3", {"BM": 8}), ("fp4_e2m1", {"BN": 32}),
    ("fp4_e2m1", {"BK": 64}), ("fp6_e2m3", {"BK": 128})], ids=str)
def test_few_columns_and_other_blocks_are_left_to_warps(codes, how, rng):
    """The last: half of a warpgroup's codes is no multiple of the 16 bytes that a lane reads."""
    assert program("bf16", codes, 64, 128, 512, rng,
                   **{"BM": 64, "BN": 64, "BK": 256} | how)[0] is None


def test_codes_need_two_slots(rng):
    """An iteration waits for its codes before the one in front has given its slot back."""
    args = (ts.zeros((64, 4096), "fp8_e4m3"), ts.zeros((64, 4096), "fp6_e2m3"), None,
            ts.zeros((64, 64), "bf16"))
    for BK, taken in ((512, True), (2048, False)):
        made = stack_codes(packed_nt.lower(*args, BM=64, BN=64, BK=BK), HOPPER, FACTS.divisible)
        lowered = lower_warp_specialised(made, None, FACTS, HOPPER)
        assert isinstance(lowered, WarpSpecialisedProgram) == taken
        assert taken or "shared memory" in lowered.reason


# --- beside fp8 -------------------------------------------------------------------------------
def stacked(args, **how):
    function = product.lower(*args, **how)
    made = stack_codes(function, HOPPER, Known().divisible)
    return None if made is function else made


@pytest.mark.parametrize("kind", ["fp8_e4m3", "bf16"])
@pytest.mark.parametrize("codes", ["fp4_e2m1", "fp6_e3m2"])
@pytest.mark.parametrize("M", [16, 32, 64])
def test_what_warpgroups_make_of_it_is_the_product(rng, codes, M, kind):
    """Sums of fp8, of which tensor cores keep few bits, are added outside of them, in the iteration
    behind. Few rows of it are brought into the order of the codes."""
    args, how = arguments(rng, codes, M, 128, 1536, kind), {"BN": 64, "BM": M, "BK": 512}
    if (kind, codes, M) == ("bf16", "fp4_e2m1", 16):
        assert stacked(args, **how) is None  # left to warps
        return
    made = lower_warp_specialised(stacked(args, **how), None, Known(), HOPPER)
    assert isinstance(made, WarpSpecialisedProgram), made
    loop = next(n for n in walk(made.function.body) if isinstance(n, For)
                and any(is_op(m, "async_matmul") for m in n.body))
    names = [n.name for n in loop.body if isinstance(n, Op) and n.name in (
        "unpack_codes", "async_matmul", "matmul_wait", "add")]
    each = ["unpack_codes", "async_matmul"]
    assert names == (
        ["unpack_codes", "matmul_wait", "add", "async_matmul", *each, "matmul_wait"]
        if kind == "fp8_e4m3" else [*each, "matmul_wait"] * 4)
    unpacks = ops_in(loop.body, "unpack_codes")
    dealt = M < (16 if (kind, codes) == ("fp8_e4m3", "fp6_e3m2") else 32)
    assert {len(n.args) == 2 for n in unpacks} == {dealt}
    assert len(ops_in(made.function.body, "ring_deal")) == dealt
    run(product, made, (1, 2), *args, **how)
    assert distance(args[2], numbers(args[1]) @ numbers(args[0]).T) < 1e-5


@pytest.mark.parametrize("codes, kind, BK, taken", [
    ("fp4_e2m1", "fp8_e4m3", 256, True), ("fp4_e2m1", "fp8_e4m3", 128, False),
    ("int4", "fp8_e4m3", 512, False), ("fp4_e2m1", "fp8_e5m2", 512, False),
    ("int4", "bf16", 512, True)])
def test_what_becomes_the_first_operand_in_registers(rng, codes, kind, BK, taken):
    args = arguments(rng, codes, 16, 64, 1024, kind)
    assert (stacked(args, BN=64, BM=16, BK=BK) is not None) == taken


def test_first_weights_are_asked_for_in_front_of_the_wait(rng):
    """Those of two iterations of this block's first tile: x may not be there yet."""
    how = {"BM": 16, "BN": 64, "BK": 512, "AHEAD": 2}
    made, args = program("fp8_e4m3", "fp4_e2m1", 16, 192, 2048, rng, **how)
    assert made is not None
    asks = [n for n in walk(made.function.body) if is_op(n, "ring_ahead")]
    assert [len(n.args) for n in asks] == [1]
    ring, (name,) = made.ring(asks[0].attr["ring"]), asks[0].attr["loads"]
    assert ring.load(name).dtype.name == "uint8"
    role = next(n for n in walk(made.function.body) if isinstance(n, If) and any(
        is_op(m, "ring_ahead") for m in walk(n.then)) and not any(
        is_op(m, "ring_fill") for m in walk(n.then)))
    assert sum(isinstance(n, For) for n in walk(role.then)) == 2
    text = emit_program(made, parse_target("sm_90a"), ArgumentFacts()).source
    asked, synced, waited = map(text.index, (
        "_ahead(map_W", "    cluster_arrive_relaxed()", "    dependents_wait()"))
    assert asked < synced < waited, "and in front of the block's first barrier"


@pytest.mark.parametrize("K, order, joined", [
    (2048, LAID, [(2, 64, 128), (8, 32, 64)]), (2048 + 64, LAID, [(8, 32, 64)]),
    (2048 + 32, LAID, []), (2048, "", [])])
def test_one_copy_brings_all_panels(rng, K, order, joined):
    """Of codes that lie as registers have them and of x, where rows are of whole panels, 256 codes
    or 64 numbers: behind those of others the next row's would come, and not zeros."""
    _, *rest = arguments(rng, "fp4_e2m1", 32, 64, K, "bf16")
    args = ts.tensor(rng.standard_normal((64, K)).astype("f4"), f"fp4_e2m1{order}"), *rest
    made = lower_warp_specialised(stacked(args, BM=32, BN=64, BK=512), None, Known(), HOPPER)
    emitted = emit_program(made, parse_target("sm_90a"), ArgumentFacts())
    boxes = [p.box for p in emitted.parameters if p.kind == "map" and p.name in "XW"]
    assert len(boxes) == 2 and sorted(b for b in boxes if len(b) == 3) == joined


@pytest.mark.parametrize("dtype, alone", [("bf16", True), ("fp4_e2m1", False)])
def test_warpgroups_store_what_they_have_the_sums_of(dtype, alone):
    """Of two blocks that share a tile; where a store brings rows of all of them together, the
    first block has all sums."""
    args = (ts.zeros((64, 4096), "bf16"), ts.zeros((256, 4096), "fp4_e2m1"), ts.zeros((256,)),
            ts.zeros((64, 256), dtype))
    packed_nt.lower(*args, BM=64, BN=128, BK=256, DIVIDED=2)
    text = packed_nt.inspect_ir("target", target="sm_90a")
    assert text.count("= sum_across(") == (1 if alone else 2)
    stored = text[text.index("= sum_across("):]
    assert ("bar_sync(" in stored) != alone == ("has_sums = i32(which == 0)" not in stored)
