"""Compiled matmuls: registers, spills, and the mix of machine instructions. No GPU is needed."""

from __future__ import annotations

import re

import numpy as np
import pytest

import tessera as ts
import tile_gpu
from matmul_kernels import ATTENTION, Gemm, array, make
from ptx_harness import require_compiler
from tessera.kernels.gemm_packed import blocks, packed_nt
from tessera.numerics import as_type
from tessera.runtime.ptxas import find_tool, sass_counts
from tessera.tile.cuda.compile import compile_function

require_compiler()
TARGETS = ("sm_80", "sm_89", "sm_90")


pytestmark = pytest.mark.usefixtures("own_cache")


def compiled(kernel, args, groups, lanes, target, stages=None, **kwargs):
    bound, function, _, lanes, _, _ = tile_gpu.prepare(kernel, args, kwargs, groups, lanes)
    schedule = ts.Schedule(stages=stages) if stages else None
    return compile_function(function, lanes, schedule=schedule, target=target,
                            facts=tile_gpu.facts_of(function, bound))


def gemm(block, lanes, target, size=256, stages=None, **options):
    kernel = Gemm(block=block, **options)
    args = kernel.arguments(np.random.default_rng(0), size, size, size)
    return compiled(kernel.kernel, args, kernel.groups(size, size), lanes, target, stages)


def sound(made) -> None:
    found = made.built.resources
    assert found.spill_store_bytes == found.stack_bytes == 0 and not made.built.warnings


def attention(target, lanes, **blocks):
    rng = np.random.default_rng(0)
    args = [array(rng, "bf16", (2, 256, 128)) for _ in range(3)]
    return compiled(make(ATTENTION, "attention"), (*args, array(rng, "f32", (2, 256, 128)), 0.1),
                    (2, 2), lanes, target, **blocks)


@pytest.mark.parametrize("target", TARGETS)
def test_a_large_gemm_does_not_spill(target):
    made = gemm((128, 256, 64) if target != "sm_89" else (128, 128, 64), 256, target)
    sound(made)
    assert made.built.resources.registers <= 240  # 128 sums, two steps' fragments, addresses


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("target, block", [("sm_80", (128, 128)), ("sm_89", (128, 64)),
                                           ("sm_90", (128, 128))])
def test_attention_does_not_spill(target, block, causal):
    sound(attention(target, 256, BM=block[0], BN=block[1], causal=causal))


TYPES = [
    dict(dtype="f16"), dict(dtype="f32"), dict(dtype="f32", precision="tf32"), dict(dtype="f64",
    sums="f64", result="f64"), dict(dtype="int8", sums="int32", result="int32"),
    dict(dtype="int32", sums="int64", result="int64"), dict(dtype="fp8_e4m3"),
    dict(dtype="fp4_e2m1"), dict(dtype="int4", sums="int32", result="int32")]


@pytest.mark.parametrize("target, gemm_type", [
    *(("sm_80", t) for t in TYPES),
    *(("sm_89", t) for t in TYPES if t["dtype"] in ("f16", "int8", "fp8_e4m3")),  # instructions
    *(("sm_90", t) for t in TYPES if t["dtype"] in ("f16", "f64", "fp8_e4m3"))],  # that are new
    ids=lambda x: x if isinstance(x, str) else "-".join(x.values()))
def test_types_on_every_target(target, gemm_type):
    sound(gemm((64, 64, 32), 128, target, size=64, **gemm_type))


@pytest.mark.parametrize("gemm_type", [dict(dtype="f16"), dict(dtype="f32"),
                                       dict(dtype="int8", sums="int32", result="int32")],
                         ids=lambda d: d["dtype"])
def test_types_on_the_oldest_target(gemm_type):
    sound(gemm((64, 64, 32), 128, "sm_75", size=64, **gemm_type))


@pytest.mark.parametrize("style", ["explicit", "stored", "ring"])
def test_styles(style):
    sound(gemm((64, 64, 32), 128, "sm_80", size=128, style=style))


def loop_counts(made, matmul="HMMA") -> dict[str, int]:
    """Opcodes of the loop with the most matmuls, the innermost of those."""
    if find_tool("nvdisasm") is None:
        pytest.skip("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    labels, lines, loops = {}, [], []
    for line in made.built.sass().splitlines():
        if label := re.match(r"\.(L_x_\d+):", line.strip()):
            labels[label[1]] = len(lines)
        elif re.search(r"/\*[0-9a-f]{4,}\*/\s+\S", line):
            lines.append(line)
            back = re.search(r"BRA.*?\(\.(L_x_\d+)\)", line)
            if back and back[1] in labels:
                loops.append("\n".join(lines[labels[back[1]]:]))
    found = [sass_counts(text) for text in loops]
    return max(found, key=lambda c: (total(c, matmul), -sum(c.values())))


def total(counts: dict[str, int], start: str) -> int:
    return sum(n for name, n in counts.items() if name.startswith(start))


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("orders", ["NT", "NN", "TN"])
def test_an_iteration_is_mostly_matmuls(target, orders):
    """128 matmuls of 64 x 64 x 64 per warp, 32 ldmatrix, 12 copies, and little else."""
    made = gemm((128, 256, 64), 256, target, stages=3, orders=orders)
    counts = loop_counts(made)
    assert total(counts, "HMMA") == 128 and total(counts, "LDSM") == 32
    assert total(counts, "LDGSTS") == 12 and total(counts, "BAR") == 1
    assert total(counts, "LDS.") == total(counts, "STS") == total(counts, "LDG.") == 0
    xors = 12 * {"NT": 0, "NN": 1, "TN": 2}[orders]  # columns of rows that lie along u, each step
    assert sum(counts.values()) < 128 + 32 + 12 + xors + 95


@pytest.mark.parametrize("orders, step", [("TN", 32), ("NT", 8)])
def test_threads_do_little_but_multiply_and_add(orders, step):
    """16 x 8 sums of a thread: six reads of 16 bytes for each k. Where rows lie across k an address
    is a register and a constant, and copies stand between two halves of an iteration. Of rows along
    k a thread holds four k of all its rows and columns, and takes fewer at once."""
    made = gemm((128, 256, 32), 256, "sm_90", dtype="f32", orders=orders, stages=3)
    counts = loop_counts(made, "FFMA")
    assert counts["FFMA"] == step * 128 and counts["LDS.128"] == step * 6
    whole = orders == "TN"  # the loop is an iteration, not a step of one
    assert (total(counts, "LDGSTS"), total(counts, "BAR")) == ((12, 1) if whole else (0, 0))
    assert sum(counts.values()) < counts["FFMA"] + counts["LDS.128"] + (100 if whole else 60)


@pytest.mark.parametrize("codes, most, copies", [
    ("fp4_e2m1", 4, 6), ("int4", 4.5, 6), ("fp6_e2m3", 5, 8)])
def test_a_register_of_unpacked_codes_takes_few_instructions(codes, most, copies):
    """64 registers of two numbers in an iteration of 512 codes of 64 rows: of floats a mask, a
    product that shifts twice, a mask, and the product of the exponent. Each thread has a part of
    all copies, of rows of 384 bytes, too, and none is a branch."""
    x, w = ts.zeros((8, 1024), "bf16"), ts.zeros((64, 1024), codes)
    made = compiled(packed_nt, (x, w, None, ts.zeros((8, 64), "bf16")), None, 256, "sm_90a",
                    BM=8, BN=64, BK=512)
    sound(made)
    counts = loop_counts(made)
    assert total(counts, "HMMA") == 16 and total(counts, "LDGSTS") == copies
    assert sum(counts.values()) < 64 * most + 120 and total(counts, "BRA") <= 2


@pytest.mark.parametrize("codes", ["fp4_e2m1", "fp6_e2m3"])
@pytest.mark.parametrize("rows", [1, 16])
def test_two_groups_of_few_rows_of_fp8_share_a_multiprocessor(codes, rows):
    """Registers, and shared memory with what the driver keeps for each group."""
    x, w = ts.zeros((rows, 8192), "fp8_e4m3"), ts.zeros((64, 8192), codes)
    use = blocks(rows, 8192, 8192, as_type("fp8_e4m3"), as_type(codes))
    assert use.resident == 2
    made = compiled(packed_nt, (x, w, None, ts.zeros((rows, 64), "bf16")), None, 256, "sm_90a",
                    BM=use.rows, BN=64, BK=use.depth, RESIDENT=2)
    sound(made)
    assert made.grid == "persistent" and made.threads == 384
    assert 2 * 384 * made.built.resources.registers <= 1 << 16
    assert 2 * (made.emitted.shared_bytes + 1024) <= 228 << 10


@pytest.mark.parametrize("codes, most", [("fp4_e2m1", 2), ("fp6_e2m3", 3.2)])
def test_codes_beside_many_rows_of_fp8_come_in_the_order_of_memory(codes, most):
    """64 registers of four numbers in an iteration of a warpgroup: two masks and permutations each,
    three of fp6. Nothing is written to shared memory."""
    x, w = ts.zeros((64, 1024), "fp8_e4m3"), ts.zeros((64, 1024), codes)
    made = compiled(packed_nt, (x, w, None, ts.zeros((64, 64), "bf16")), None, 256, "sm_90a",
                    BM=64, BN=64, BK=512)
    sound(made)
    counts = loop_counts(made, "QGMMA")
    assert total(counts, "QGMMA") == 8 and total(counts, "STS") == 0
    assert counts["PRMT"] + total(counts, "LOP3") <= 64 * most
    assert total(counts, "LDS") == (32 if codes == "fp4_e2m1" else 24)


@pytest.mark.parametrize("x, codes, most", [
    ("bf16", "fp6_e2m3", 450), ("fp8_e4m3", "fp4_e2m1", 180)])
def test_few_rows_are_dealt_by_the_producer(x, codes, most):
    """What multiplies writes nothing to shared memory and waits for no threads beside: of 16 bits
    64 registers of an iteration by four instructions each, of 8 bits 32."""
    rows, w = ts.zeros((16, 8192), x), ts.zeros((64, 8192), codes)
    made = compiled(packed_nt, (rows, w, None, ts.zeros((16, 64), "bf16")), None, 256, "sm_90a",
                    BM=16, BN=64, BK=512)
    sound(made)
    counts = loop_counts(made, "GMMA")
    assert total(counts, "STS") == total(counts, "BAR") == 0 and sum(counts.values()) < most
    assert made.built.sass().count(" MEMBAR") == 1  # of those that deal


def test_attention_keeps_p_in_registers():
    counts = loop_counts(attention("sm_80", 256, BM=128, BN=128))
    assert total(counts, "HMMA") == 256 and total(counts, "STS") == 0
    assert total(counts, "LDSM") == 8 + 2 * 64
