"""A first operand of tf32 that lies across the contracted axis: warpgroups read its columns."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from cpu.test_stacked_codes import swizzled
from emulator import Block, Builder
from emulator import register as as_register
from hopper_lowering import Known, distance, lowered, run
from tessera import f32, tf32
from tessera.kernels.gemm import gemm_whole
from tessera.tile.cuda.intrinsics import operand_columns
from tessera.tile.cuda.lower.warp_specialised import Refusal, WarpSpecialisedProgram, operands
from tessera.tile.cuda.lower.warp_specialised.machine import PipelineError
from tessera.tile.ir.ir import Op, walk
from tessera.tile.ir.register_layout import warpgroup_columns
from tolerance import assert_close

FACTS = Known(frozenset(["A0", "A1", "B0", "B1", "M", "N"]), frozenset("ABD"))


@pytest.mark.parametrize("depth", [16, 32, 64])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_lanes_read_their_rows_of_the_layout(groups, depth, rng):
    """Lane and register as PTX says (9.7.15), rows as the layout says, and no bank twice."""
    tile = rng.standard_normal((depth, 64 * groups)).astype("f4")  # [K, M]
    threads, slot_bytes, offset = 128 * groups, 1 << 15, 2048
    block, data = Block(threads), swizzled(tile.view(np.uint8), 128)
    first = offset + 2 * slot_bytes
    block.shared.bytes[first:first + data.size] = data
    thread, got = np.arange(threads, dtype=np.int32), []
    for piece in (0, 1):
        make = operand_columns.read(offset, slot_bytes, 128 * depth, depth, piece, 2)
        got += make.rule(None, None).body(Builder(block), as_register(np.int32(2)),
                                          as_register(thread))
    assert len(got) == depth // 2 and not [n for n in block.counts if n.startswith("passes")]
    layout = warpgroup_columns((64 * groups, 8), groups)
    for i, word in enumerate(got):
        step, right, down = i // 4, i >> 1 & 1, i & 1
        row = layout.bases[2 * down][0] + sum(
            (thread >> at & (1 << n) - 1) << bit for at, bit, n in layout.terms(0))
        want = tile[8 * step + 4 * right + (thread & 3), row]
        np.testing.assert_array_equal(np.asarray(word).view("f4"), want)


@pytest.mark.parametrize("swapped", [False, True], ids=["tt", "nn"])
@pytest.mark.parametrize("block", [(128, 256), (64, 128), (192, 128)], ids=str)
def test_a_product_and_that_of_its_transpose(block, swapped, rng):
    """Rows and columns that end within a block, and K within a step."""
    M, N, K = 200, 328, 104
    a, b, d = (ts.tensor(x, t) for x, t in (
        (rng.standard_normal((M, K) if swapped else (K, M)).astype("f4"), tf32),
        (rng.standard_normal((K, N) if swapped else (N, K)).astype("f4"), tf32),
        (np.full((M, N), np.nan, "f4"), f32)))
    BM, BN = block[::-1] if swapped else block
    how = {"layout": "tt", "swapped": swapped, "result": f32, "BM": BM, "BN": BN, "BK": 32}
    made = lowered(gemm_whole, a, b, d, f32, facts=FACTS, **how)
    assert isinstance(made, WarpSpecialisedProgram), made
    waits = [n.attr["pending"] for n in walk(made.function.body)
             if isinstance(n, Op) and n.name == "matmul_wait"]
    assert waits == [1, 1, 0], "both of an iteration run on while the next columns are read"
    run(gemm_whole, made, (-(-M // BM), -(-N // BN)), a, b, d, f32, **how)
    x, y = a.numpy().astype("f8"), b.numpy().astype("f8")
    assert distance(d.numpy(), x @ y if swapped else x.T @ y.T) < 1e-6


@pytest.mark.parametrize("layout, depth, why", [
    ("tt", 8, "which is no two steps"), ("nn", 32, "only along the contracted axis")])
def test_what_is_not_read_so(layout, depth, why, rng):
    """A second operand has to lie along K; steps of one instruction would be read while it runs."""
    x = ts.zeros((256, 256), tf32)
    made = lowered(gemm_whole, x, x, ts.zeros((256, 256)), f32, facts=FACTS, layout=layout,
                   result=f32, BM=128, BN=128, BK=depth)
    assert isinstance(made, Refusal) and why in made.reason, made


def test_registers_that_a_matmul_reads_are_not_written(monkeypatch, rng):
    """With one piece an iteration's registers are those of the iteration before, whose matmul runs
    on: such a kernel was wrong on a GPU."""
    monkeypatch.setattr(operands, "PIECES", 1)
    x = ts.tensor(rng.standard_normal((128, 128)).astype("f4"), tf32)
    args, how = (x, x, ts.zeros((128, 128)), f32), {"layout": "tt", "result": f32, "BK": 32}
    made = lowered(gemm_whole, *args, facts=FACTS, BM=128, BN=128, **how)
    with pytest.raises(PipelineError, match="read_columns writes registers that a running"):
        run(gemm_whole, made, (1, 1), *args, BM=128, BN=128, **how)


def test_the_interpreter_says_the_same(rng):
    a, b = (ts.tensor(rng.standard_normal(s).astype("f4"), tf32) for s in ((96, 64), (40, 96)))
    d = ts.zeros((64, 40))
    gemm_whole(a, b, d, f32, layout="tt", result=f32, BM=64, BN=64, BK=32)
    assert_close(d.numpy(), a.numpy().astype("f8").T @ b.numpy().astype("f8").T, "f32", n=96)
