"""Every PTX record compiles, is in the PTX as often as it is written, and assembles. No GPU."""

from __future__ import annotations

import functools
from collections import Counter

import pytest

from ptx_harness import compile_sample, kernel_source, require_compiler
from tessera.errors import CompileError, UnsupportedTargetError
from tessera.runtime.ptxas import Resources, assemble, sass, sass_counts
from tessera.runtime.target import Target, parse_target
from tessera.tile.cuda import ptx  # noqa: F401  registers the records
from tessera.tile.cuda.instruction import Instruction, samples
from tessera.tile.cuda.ptx_text import opcode_counts

require_compiler()
HOPPER = parse_target("sm_90a")
SAMPLES = list(samples())
# Written by LLVM too.
_COMMON = ("mov", "cvt", "setp", "add.s", "shl", "and")
# Stand in every generated kernel beside the instruction: its stores, fence, commit and wait.
_SCAFFOLD = ("st.global.wb", "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group")


@functools.cache
def compiled(record: Instruction) -> str:
    return compile_sample(record, record.target).text


def text_for(record: Instruction, target: Target) -> str:
    """The PTX of a sample, stamped for a target that has it, too."""
    text = compiled(record)
    return text.replace(f"{record.target}\n", f"{target}\n", 1)


@functools.cache
def assembled_together(target: Target) -> dict[str, Resources]:
    """What samples take on a target that has them: ptxas is started once for all of them. Nothing
    where it refuses or warns of one: then each is assembled by itself."""
    head, kernels = "", []
    for record in SAMPLES:
        if target.runs(record.target):
            before, entry, kernel = text_for(record, target).partition(".visible .entry kernel(")
            if ".extern" not in before and ".global " not in before:
                head = head or before
                name = f"kernel_{record.name}"
                kernels += [entry.replace("kernel", name), kernel.replace("kernel_", f"{name}_")]
    try:
        made = assemble("".join([head, *kernels]), target)
    except CompileError:
        return {}
    return {} if made.warnings else {k.removeprefix("kernel_"): v for k, v in made.kernels.items()}


def resources_of(record: Instruction, target: Target) -> Resources:
    if record.name in assembled_together(target):
        return assembled_together(target)[record.name]
    alone = assemble(text_for(record, target), target)
    assert not alone.warnings
    return alone.resources


@pytest.mark.parametrize("record", SAMPLES, ids=lambda r: r.name)
def test_it_compiles_and_assembles(record: Instruction):
    text = compiled(record)
    have, want = opcode_counts(text), Counter(record.mnemonics)
    for opcode, count in want.items():
        if "." in opcode and not opcode.startswith(_SCAFFOLD):
            # Common opcodes also come from LLVM, so those may be more often there.
            exact = record.effect != "pure" and not opcode.startswith(_COMMON)
            assert have[opcode] == count if exact else have[opcode] >= count, text
    for target in {record.target, HOPPER}:
        if target.runs(record.target):
            took = resources_of(record, target)
            assert not took.spills and took.stack_bytes == 0


def test_most_are_assembled_together():
    assert len(assembled_together(HOPPER)) > 400


def test_there_are_many_and_all_families_have_samples():
    assert len(SAMPLES) > 400
    assert len({r.name for r in SAMPLES}) == len(SAMPLES)


def test_an_older_target_is_refused():
    (record,) = [r for r in SAMPLES if r.name == "pack4_e4m3"]
    says = r"cvt\.rn\.satfinite\.e4m3x2\.f32 needs sm_89, the kernel is compiled for sm_80"
    with pytest.raises(UnsupportedTargetError, match=says):
        compile_sample(record, parse_target("sm_80"))


def test_the_assembler_refuses_with_the_line():
    (record,) = [r for r in SAMPLES if r.name == "pack4_e4m3"]
    text = compile_sample(record, parse_target("sm_89")).text
    with pytest.raises(CompileError, match=r"refuses the code for sm_80"):
        assemble(text, parse_target("sm_80"))


@pytest.mark.parametrize("name, opcode", [
    ("ld_global_b32_x4", "LDG.E.128"), ("ld_shared_b32_x4_512", "LDS.128"),
    ("st_global_b32_x4_if_16", "STG.E.128"), ("mma_m16n8k16_f32_bf16_bf16_f32", "HMMA.16816.F32"),
    ("ldmatrix_x4_trans", "LDSM.16.MT88.4"), ("cp_async_cg_16", "LDGSTS.E.BYPASS.128"),
    ("tma_load_3d", "UTMALDG.3D"), ("tma_store_2d", "UTMASTG.2D"),
    ("wgmma_m64n256k16_f32_bf16_bf16_SS_KK", "HGMMA.64x256x16.F32.BF16"),
    ("wgmma_m64n64k32_f32_e4m3_e4m3_SS_KK", "QGMMA.64x64x32.F32.E4M3.E4M3"),
    ("wgmma_m64n64k32_s32_s8_s8_SS_KK", "IGMMA.64x64x32.S8.S8"),
    ("set_registers_inc_232", "USETMAXREG"), ("mbarrier_wait", "SYNCS.PHASECHK.TRANS64.TRYWAIT"),
])
def test_the_machine_instruction_is_the_one_meant(name: str, opcode: str):
    (record,) = [r for r in SAMPLES if r.name == name]
    from tessera.runtime.ptxas import find_tool
    if find_tool("nvdisasm") is None:
        pytest.skip("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    listing = sass(assemble(compile_sample(record, HOPPER).text, HOPPER).cubin)
    assert any(found.startswith(opcode) for found in sass_counts(listing)), sass_counts(listing)


def test_the_generated_kernel_reads_as_one_call():
    (record,) = [r for r in SAMPLES if r.name == "ex2_approx"]
    assert "r0 = called(y + 0)" in kernel_source(record)
