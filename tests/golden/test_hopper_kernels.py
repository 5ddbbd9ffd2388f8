"""Warp-specialised kernels as compiled for sm_90a: no spills, no serialised wgmma, and how much of
the softmax runs beside a matmul. No GPU is needed."""

from __future__ import annotations

import re

import pytest

import hopper_programs as kernels
import tessera as ts
from ptx_harness import require_compiler
from tessera import bf16, f16, f32, fp8_e4m3, i8, i32, tf32
from tessera.kernels.attention_backward import (
    attention_keys,
    attention_queries,
    keys_block,
    queries_block,
)
from tessera.kernels.conv import (
    Geometry,
    conv_backward,
    conv_backward_strided,
    conv_forward,
    conv_weights,
)
from tessera.kernels.gemm import gemm_whole
from tessera.kernels.gemm_block_scaled import BLOCKS, block_scaled_nt
from tessera.runtime.ptxas import find_tool, sass_counts
from tessera.runtime.target import parse_target
from tessera.tile.cuda.build import Built, build
from tessera.tile.cuda.emit.emitter import ArgumentFacts, Emitted
from tessera.tile.cuda.emit.warp_specialised import emit_warp_specialised
from tessera.tile.cuda.lower.warp_specialised import WarpSpecialisedProgram
from tessera.tile.ir.schedule import Schedule

require_compiler()
TARGET = parse_target("sm_90a")
FACTS = ArgumentFacts(
    divisible=frozenset([*"MNKSDBHTEC", "ME", "A0", "A1", "B0", "B1"]), aligned=frozenset([
        *"ABCDQKVXWYRG", "SA", "bias", "lse", "delta", "dQ", "dK", "dV", "sums_q", "sums_k",
        "sums_v"]))


pytestmark = pytest.mark.usefixtures("own_cache")


def compiled(kernel, *args, schedule=None, **kwargs) -> tuple[WarpSpecialisedProgram, Emitted,
                                                              Built]:
    made = emit_warp_specialised(kernel.lower(*args, **kwargs), schedule, TARGET, FACTS)
    assert isinstance(made, tuple), made
    program, emitted = made
    built = build(emitted.source, emitted.name, tuple(p.abi for p in emitted.parameters), TARGET,
                  threads=program.threads, shared_bytes=emitted.shared_bytes,
                  lines=emitted.lines)
    return program, emitted, built


def require_fast(built: Built) -> None:
    """Nothing in local memory, and no matmul waits for another (C7510 to C7514)."""
    assert not built.resources.spills and built.resources.stack_bytes == 0
    assert not [w for w in built.warnings if re.search(r"C751[0-4]", w)], built.warnings


def counts(built: Built) -> dict[str, int]:
    if find_tool("nvdisasm") is None:
        pytest.skip("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    return sass_counts(built.sass())


def total(found: dict[str, int], start: str) -> int:
    return sum(n for opcode, n in found.items() if opcode.startswith(start))


def ones(dtype, *shape):
    return ts.ones(shape, dtype)


@pytest.mark.parametrize("kernel, a, b", [
    (kernels.gemm_nt, (512, 320), (768, 320)), (kernels.gemm_nn, (512, 320), (320, 768)),
    (kernels.gemm_tn, (320, 512), (320, 768))], ids=["nt", "nn", "tn"])
def test_a_matmul_is_one_chain_of_wgmma(kernel, a, b):
    program, emitted, built = compiled(kernel, ones(bf16, *a), ones(bf16, *b),
                                       ones(bf16, 512, 768), BN=256)
    require_fast(built)
    assert built.resources.registers == 168 and program.threads == 384
    assert emitted.shared_bytes == 4 * 49152 + 1024 + 8 * 2 * 2048, "a ring, barriers, panels"
    found = counts(built)
    assert found["HGMMA.64x256x16.F32.BF16"] == 4 and total(found, "UTMALDG") in (2, 5, 6)
    assert total(found, "USETMAXREG") == 2 and total(found, "R2UR") < 15
    # 16 x 256 of each warp: four panels of 64 columns, a store of 16 bytes a thread for 16 of them
    assert total(found, "STSM.16.M88.4") == 16 and total(found, "UTMASTG") == 4
    assert total(found, "F2FP") == 64 and not total(found, "STG")
    maps = [(p.name, p.box) for p in emitted.parameters if p.kind == "map"]
    assert [name for name, _ in maps] == ["A", "B", "C"] and all(box[-1] == 64 for _, box in maps)


@pytest.mark.parametrize("kernel, a, b, copies", [
    (kernels.gemm_nt, (512, 320), (768, 320), 1), (kernels.gemm_nn, (512, 320), (320, 768), 4)],
    ids=["nt", "nn"])
def test_blocks_of_a_cluster_bring_half_of_what_they_share(kernel, a, b, copies):
    """In as many registers as alone. They meet once, before the first copy."""
    _, emitted, built = compiled(kernel, ones(bf16, *a), ones(bf16, *b), ones(bf16, 512, 768),
                                 BN=256, schedule=ts.Schedule(cluster=2))
    require_fast(built)
    assert built.resources.registers == 168 and emitted.cluster == 2
    found = counts(built)
    assert found["HGMMA.64x256x16.F32.BF16"] == 4
    assert found["UTMALDG.2D.MULTICAST"] == copies and total(found, "UTMALDG") == copies + 1
    assert total(found, "UCGABAR") == 2, "arrives, waits"


@pytest.mark.parametrize("layout, b", [("nt", (512, 320)), ("tt", (320, 512))])
def test_a_transposed_result_leaves_in_panels(layout, b):
    """Each warp has 16 columns of it, of which TMA writes 32 rows at a time."""
    _, emitted, built = compiled(gemm_whole, ones(bf16, 3136, 320), ones(bf16, *b),
                                 ones(bf16, 3136, 512), f32, layout=layout, swapped=True, BM=96,
                                 BN=128)
    require_fast(built)
    found = counts(built)
    assert found["HGMMA.64x96x16.F32.BF16"] == 4 and not total(found, "STG")
    assert found["STSM.16.MT88.4"] == 6 and total(found, "UTMASTG") == 3
    assert ("D", (32, 16)) in [(p.name, p.box) for p in emitted.parameters if p.kind == "map"]


def test_a_second_loop_into_the_same_sums_costs_its_instructions_alone():
    """Beside one loop: as many registers, as much shared memory, and no move of a sum."""
    one = compiled(kernels.gemm_nt, ones(bf16, 512, 320), ones(bf16, 768, 320),
                   ones(bf16, 512, 768), BN=256)
    two = compiled(kernels.two_gemms, ones(bf16, 512, 320), ones(bf16, 768, 320),
                   ones(bf16, 128, 512), ones(bf16, 128, 768), ones(bf16, 512, 768), BN=256)
    for _, _, built in (one, two):
        require_fast(built)
        assert built.resources.registers == 168
    assert one[1].shared_bytes == two[1].shared_bytes
    first, both = counts(one[2]), counts(two[2])
    assert both["HGMMA.64x256x16.F32.BF16"] == 2 * first["HGMMA.64x256x16.F32.BF16"] == 8
    for same in ("STSM", "UTMASTG", "F2FP", "USETMAXREG", "MOV"):
        assert total(both, same) == total(first, same)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_scales_of_blocks_come_with_the_codes(block):
    """A copy more for each slot, and beside the matmuls a product for two rows of a lane and a
    multiply-add for each sum."""
    codes, scales = ts.zeros((512, 512), fp8_e4m3), ones(f32, 4, 512)
    program, emitted, built = compiled(block_scaled_nt, codes, scales, codes, ones(f32, 4, 4),
                                       ones(bf16, 512, 512), BM=block[0], BN=block[1])
    require_fast(built)
    found = counts(built)
    assert found[f"QGMMA.64x{block[1]}x32.F32.E4M3.E4M3"] == 4 and total(found, "UTMALDG") == 3
    assert total(found, "FFMA") == block[1] // 2 and total(found, "FMUL") <= 4
    (ring,) = program.rings
    assert [x.tensor for x in ring.loads] == ["A", "B", "SA"] and ring.slots >= 4


def test_one_consumer_keeps_a_matmul_in_flight():
    program, _, built = compiled(kernels.gemm_nt, ones(bf16, 512, 320), ones(bf16, 768, 320),
                                 ones(bf16, 512, 768), BM=64)
    require_fast(built)
    assert program.threads == 256 and program.pipeline.in_flight == 1
    assert total(counts(built), "USETMAXREG") == 0  # 255 registers as launched


@pytest.mark.parametrize("rows, registers", [(128, 168), (64, 255)])
def test_a_first_operand_is_computed_while_the_matmul_before_runs(rows, registers):
    """Its tiles come by TMA and are read from shared memory in front of the wait, behind which only
    the operand is packed."""
    program, _, built = compiled(kernels.normalised, ones(bf16, 512, 320), ones(bf16, 320),
                                 ones(bf16, 320, 768), ones(bf16, 512, 768), BM=rows)
    require_fast(built)
    assert built.resources.registers <= registers and program.threads == 2 * rows + 128
    found = counts(built)
    assert total(found, "LDSM") == 16 and total(found, "LDG") == 0  # two loops, with masks and not
    order = re.findall("LDSM|HGMMA|gsb0, 0x0", built.sass())
    assert "LDSM LDSM LDSM LDSM gsb0, 0x0 HGMMA HGMMA HGMMA HGMMA" in " ".join(order)


EX2_BETWEEN_WAITS = range(20, 50)  # of 64, beside the running matmul


def exponentials_beside_the_matmul(sass: str) -> list[int]:
    """EX2 between the wait for the scores and that for the matmul of the iteration before."""
    found, inside = [], None
    for line in sass.splitlines():
        if "DEPBAR.LE gsb0, 0x1" in line:
            inside = 0
        elif "DEPBAR.LE gsb0, 0x0" in line and inside is not None:
            found.append(inside)
            inside = None
        elif inside is not None:
            inside += "MUFU.EX2" in line
    return found


@pytest.mark.parametrize("D, causal, sums", [(64, False, True), (64, True, False),
                                             (128, False, False), (128, True, True)])
@pytest.mark.parametrize("kernel, results, matmuls", [(attention_keys, 2, 4),
                                                      (attention_queries, 1, 3)],
                         ids=["keys", "queries"])
def test_the_gradient_of_attention_is_one_chain(kernel, results, matmuls, D, causal, sums):
    x, r = ones(bf16, 4, 512, D), ones(f32, 4, 512)
    block = keys_block(bf16, D, TARGET.generation) if results == 2 else queries_block(
        bf16, D, TARGET.generation, 512, causal)
    columns = (ones(f32, 512 // 16, 4, D),) * (results * sums)
    program, emitted, built = compiled(kernel, x, x, x, x, r, r, *(x,) * results, 0.1, *columns,
                                       causal=causal, **block)
    assert not [w for w in built.warnings if re.search(r"C751[0-4]", w)], built.warnings
    # of the largest ptxas keeps a word in local memory, once an iteration, in one order of its
    # stores and in others not; of three warpgroups two, which hide more than two that keep none
    three = results == 2 and D == 64
    words = 8 if three else 4 * (results == 2 and D == 128 and causal)
    assert built.resources.spill_store_bytes <= words and built.resources.spill_load_bytes <= words
    assert bool(program.pipeline.overlap) != three and "load_tile" not in emitted.source
    found = counts(built)
    loops = 2 + (causal and results == 2)  # on the diagonal, where all see all, at the edge
    # and of one that is rotated a head and a tail
    assert total(found, "HGMMA") % (loops + (not three)) == 0
    assert "bar_sync(1," not in emitted.source  # no warp waits for the sums of others


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_attention_overlaps(causal):
    x = ones(bf16, 4, 512, 128)
    program, emitted, built = compiled(kernels.attention, x, x, x, x, 0.1, causal=causal)
    require_fast(built)
    assert built.resources.registers == 168
    found = counts(built)
    assert total(found, "HGMMA") == 48  # scores 8 steps, weights 8: first, two loops, last
    assert total(found, "LDSM") == 8  # Q is read once into registers
    plain, masked = exponentials_beside_the_matmul(built.sass())
    assert plain in EX2_BETWEEN_WAITS and masked in range(20, 66)
    assert total(found, "MUFU.EX2") == 3 * 66
    assert any(p.kind == "counter" for p in emitted.parameters) == causal


@pytest.mark.parametrize("D", [48, 96, 112, 224])
def test_no_matmul_reads_the_rest_of_a_panel(D):
    x = ones(bf16, 4, 512, D)
    _, _, built = compiled(kernels.attention, x, x, x, x, 0.1, BN=64)
    require_fast(built)
    found = counts(built)
    assert total(found, "HGMMA.64x64x16") == 3 * D // 16  # scores: steps of 16 along D
    assert total(found, f"HGMMA.64x{D}x16") == 3 * 4  # weights times values: D columns


def test_three_consumers_of_half_the_depth():
    x = ones(bf16, 4, 512, 64)
    program, _, built = compiled(kernels.attention, x, x, x, x, 0.1, BM=192)
    require_fast(built)
    assert program.threads == 512 and built.resources.registers == 128
    plain, _ = exponentials_beside_the_matmul(built.sass())
    assert plain in EX2_BETWEEN_WAITS


@pytest.mark.parametrize("extra", [{}, dict(IN_FLIGHT=1)])
def test_two_accumulators_bias_and_residual(extra):
    x, w = ones(bf16, 512, 320), ones(bf16, 768, 320)
    y = ones(bf16, 512, 768)
    _, _, built = compiled(kernels.swiglu, x, w, w, ones(f32, 768), y, y, BN=128,
                           schedule=Schedule(**extra))
    require_fast(built)
    found = counts(built)  # the residual comes by TMA, a bias of 128 columns: two a lane at once
    assert total(found, "LDG") == 0 and total(found, "LDS") == 24


@pytest.mark.parametrize("dtype, out, depth, name", [
    (f16, f16, 64, "HGMMA.64x128x16.F32"), (tf32, f32, 32, "HGMMA.64x128x8.F32.TF32"),
    (fp8_e4m3, bf16, 128, "QGMMA.64x128x32.F32.E4M3.E4M3"),
    (fp8_e4m3, bf16, 64, "QGMMA.64x128x32.F32.E4M3.E4M3"),
    (i8, i32, 128, "IGMMA.64x128x32.S8.S8"), (bf16, f32, 32, "HGMMA.64x128x16.F32.BF16"),
    (bf16, f32, 16, "HGMMA.64x128x16.F32.BF16")], ids=str)
def test_types_and_depths(dtype, out, depth, name):
    _, _, built = compiled(kernels.matmul, ones(dtype, 256, 512), ones(dtype, 256, 512),
                           ones(out, 256, 256), BK=depth)
    require_fast(built)
    steps = depth * dtype.bits // 256
    assert total(counts(built), name) == 2 * steps  # before the loop and in it


@pytest.mark.parametrize("swapped", [False, True], ids=["tt", "nn"])
@pytest.mark.parametrize("rows, columns, registers", [(128, 256, 168), (192, 128, 128)])
def test_an_operand_of_tf32_that_lies_across_k(rows, columns, registers, swapped):
    """Two reads of eight bytes for each instruction, and the result in stores of eight bytes."""
    BM, BN = (columns, rows) if swapped else (rows, columns)
    _, _, built = compiled(gemm_whole, ones(tf32, 512, 768), ones(tf32, 768, 512),
                           ones(f32, 768, 768), f32, layout="tt", swapped=swapped, result=f32,
                           BM=BM, BN=BN, BK=32)
    require_fast(built)
    assert built.resources.registers == registers
    found = counts(built)
    assert found[f"HGMMA.64x{columns}x8.F32.TF32"] == 4 and found["LDS.64"] == 8
    assert total(found, "LDS") == 8 and found["STG.E.64"] == columns // 4 == total(found, "STG")


@pytest.mark.parametrize("kernel, sizes, chain", [
    (conv_forward, {"BM": 128, "BN": 256}, 4), (conv_forward, {"BM": 128, "BN": 64}, 4),
    (conv_backward, {"BM": 128, "BN": 128}, 4), (conv_weights, {"BM": 128, "BN": 256}, 4),
    (conv_backward_strided, {"BM": 128, "BN": 128, "classes": 4, "places": 256}, 4)], ids=str)
def test_convolutions_by_wgmma_spill_nothing(kernel, sizes, chain):
    """Images come by copies that unfold them; each step of 64 is one chain of matmuls."""
    stride = 2 if "classes" in sizes else 1
    g = Geometry((3, 3), (stride, stride), (1, 1), (1, 1), (16, 16), (16 // stride,) * 2)
    x, w, y = (ones(bf16, *s) for s in ((1024, 256), (256, 2304), (1024 // stride**2, 256)))
    args = {conv_forward: (x, w, y, g), conv_backward: (y, w, x, g.backwards),
            conv_weights: (x, y, ones(f32, 2, 256, 2304), g, 512),
            conv_backward_strided: (y, w, x, g, g.readers, g.patches)}[kernel]
    program, emitted, built = compiled(kernel, *args, **sizes)
    require_fast(built)
    assert "im2col" in built.ptx
    found = counts(built)
    assert total(found, "HGMMA") % chain == 0 and total(found, "HGMMA") <= 4 * chain
    assert any("IM2COL" in opcode for opcode in found), sorted(found)
