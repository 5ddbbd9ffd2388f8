"""PTX records as data: how operands are written, what is refused, what is rendered. No compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tessera.errors import ArgumentError
from tessera.tile.cuda import instruction as records
from tessera.tile.cuda.instruction import Instruction, mnemonics, samples
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics import shared_memory
from tessera.tile.cuda.ptx import atomics, memory, mma, tma, wgmma
from tessera.tile.cuda.ptx_text import entry_name, normalised_ptx, opcode_counts, relocate


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """What a test declares is forgotten after it."""
    monkeypatch.setattr(records, "INSTRUCTIONS", dict(records.INSTRUCTIONS))
    monkeypatch.setattr(records, "FAMILIES", dict(records.FAMILIES))


def made(operands: str, text: str, **options) -> Instruction:
    return Instruction("test_only", operands, text, isa="none", **options)


@pytest.mark.parametrize("operands, text, constraints, assembly", [
    ("d:f32 <- x:f32", "ex2 $d, $x;", "=f,f,~{memory}", "ex2 $0, $1;"),
    ("at:i64, x:i32*4", "st.v4 [$at], $x;", "l,r,r,r,r,~{memory}", "st.v4 [$0], {$1, $2, $3, $4};"),
    ("d:f32*2 <- d, a:i64", "mma $d, $a;", "=f,=f,0,1,l,~{memory}", "mma {$0, $1}, $4;"),
    ("d:i32 <- x:f64*2", "two $d, $x.1, $x.0;", "=r,d,d,~{memory}", "two $0, $2, $1;"),
    ("d:i32 <- x:i16", "a $d, $x; b $d;", "=&r,h,~{memory}", "a $0, $1; b $0;"),
])
def test_operands_become_constraints_and_places(operands, text, constraints, assembly):
    record = made(operands, text)
    assert record.constraints() == constraints and record.assembly() == assembly


def test_predicates_are_ints_outside():
    record = made("done:pred <- p:pred, at:i32", "@$p try $done, [$at];")
    assert record.constraints() == "=&r,r,r,~{memory}"
    assert record.assembly().splitlines() == [
        "{", ".reg .pred pred_done;", ".reg .pred pred_p;", "setp.ne.b32 pred_p, $1, 0;",
        "@pred_p try pred_done, [$2];", "selp.b32 $0, 1, 0, pred_done;", "}"]


@pytest.mark.parametrize("effect, clobber", [("pure", False), ("volatile", False),
                                             ("memory", True), ("converge", True)])
def test_effects(effect, clobber):
    assert ("memory" in made("d:i32 <- ", "x $d;", effect=effect).constraints()) is clobber


@pytest.mark.parametrize("operands, text", [
    ("d:f32 <- x:f32", "ex2 $d;"), ("x:i32", "st $x, $y;"), ("x:i33", "st $x;"), ("x", "st $x;"),
    ("x:i32*a", "st $x;")])
def test_a_record_whose_text_and_operands_differ_is_refused(operands, text):
    with pytest.raises(ArgumentError):
        made(operands, text)


def test_a_name_is_declared_once():
    made("x:i32", "st $x;")
    with pytest.raises(ArgumentError, match="'test_only' is declared twice"):
        made("x:i32", "st $x;")


def test_a_family_gives_one_record_for_the_same_parameters():
    first = memory.ld("global", "b32", 4)
    assert memory.ld(space="global", vector=4, element="b32") is first
    assert memory.ld("global", "b32", 4, cache="cg") is not first
    assert find_instruction(first.name) is first


@pytest.mark.parametrize("make, says", [
    (lambda: memory.ld("local", "b32"), "space='local' is not one of global, shared"),
    (lambda: memory.ld("global", "b64", 4), "bits of one access=256"),
    (lambda: memory.st("global", "b32", cache="nc"), "cache='nc'"),
    (lambda: tma.load(6), "rank=6 is not one of 1, 2, 3, 4, 5"),
    (lambda: mma.mma("bf16", "f16"), "d='f16' is not one of f32"),
    (lambda: mma.mma("bf16", b="f16"), "b='f16'"),
    (lambda: wgmma.wgmma(260, "bf16"), "n=260"), (lambda: wgmma.wgmma(40, "s8", "s32"), "n=40"),
    (lambda: wgmma.wgmma(64, "e4m3", majors="KM"), "majors='KM' is not one of KK"),
    (lambda: wgmma.matmul(64, "bf16", a_offsets=(0,), b_offsets=(0, 2)), r"len\(a_offsets\)=1"),
    (lambda: atomics.atom("add", "b32"), "op='add' is not one of exch"),
    (lambda: atomics.red("add", "u32", order="acquire"), "order='acquire'"),
])
def test_what_does_not_exist_is_refused(make, says):
    with pytest.raises(ArgumentError, match=says):
        make()


@pytest.mark.parametrize("make, again", [
    (lambda: mma.mma("bf16"), lambda: mma.mma("bf16", "f32", b="bf16", k=16)),
    (lambda: mma.mma("e5m2", b="e5m2"), lambda: mma.mma("e5m2", k=32)),
    (lambda: wgmma.wgmma(48, "f16"), lambda: wgmma.wgmma(48, "f16", b="f16")),
    (lambda: wgmma.matmul(48, "bf16", a_offsets=(0,), b_offsets=(0,)),
     lambda: wgmma.matmul(48, "bf16", b="bf16", a_offsets=(0,), b_offsets=(0,))),
])
def test_a_default_spelled_out_gives_the_same_record(make, again):
    first = make()
    assert again() is first and again() is first and find_instruction(first.name) is first


def test_a_family_with_two_texts_for_a_name_is_refused():
    @records.family()
    def ambiguous(step: int) -> Instruction:
        return Instruction("ambiguous", "x:i32", f"st $x, {step};", isa="none")

    ambiguous(1)
    with pytest.raises(ArgumentError, match="'ambiguous' is declared twice"):
        ambiguous(2)


@pytest.mark.parametrize("name", ["to_f16_rn", "pack_e4m3", "e5m2_to_f16x2", "sync_threads",
                                  "mma_m16n8k16_f32_bf16_bf16_f32"])
def test_a_fresh_process_finds_every_name(name):
    """Whatever has been imported or made before; the record itself needs no compiler."""
    program = ("import sys\nfrom tessera.tile.cuda import find_instruction\n"
               "print(find_instruction(sys.argv[1]).name, 'numba' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", program, name], capture_output=True, text=True)
    assert done.stdout.split() == [name, "False"], done.stderr


def test_an_unknown_name_has_a_suggestion():
    with pytest.raises(ArgumentError) as caught:
        find_instruction("sync_thread")
    assert "sync_threads" in caught.value.hint


def test_every_record_cites_the_isa_and_has_an_opcode():
    for record in samples():
        assert record.isa.split()[0][0] in "159", record
        directive = record.text.startswith((".reg", ".pragma"))
        assert record.mnemonics or directive, record
        assert record.target.cc >= (7, 5)


@pytest.mark.parametrize("text, found", [
    ("ld.global.v4.b32 {%r1, %r2}, [%rd1];", ["ld.global.v4.b32"]),
    ("@%p1 bra $L1;", ["bra"]), ("@!p st.shared::cta.b32 [a], b;", ["st.shared::cta.b32"]),
    ("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.b64 p, [x];\n}", ["mbarrier.try_wait.b64"]),
    ("bar.sync 0;", ["bar.sync"]), ("ret;", [])])
def test_opcodes_of_a_text(text, found):
    assert [m for m in mnemonics(text) if m != "ret"] == found


PTX = """//
.version 9.5
.target sm_90a

.common .global .align 8 .u64 _ZN08NumbaEnv8emitted1kB2v1B10_3dExx;

.visible .entry _ZN8emitted1kB2v1B10_3dExx(
	.param .u64 _ZN8emitted1kB2v1B10_3dExx_param_0
)
{
	.loc	1 7 0
	.loc	1 9 3
	ret;
}
	.file	1 "/cache/k.py"
"""


def test_kernels_get_plain_names():
    text = normalised_ptx(PTX, "softmax")
    assert entry_name(text) == "softmax" and "softmax_param_0" in text
    assert "_ZN" not in text and "NumbaEnv" not in text


def test_lines_are_those_of_the_user():
    text = relocate(PTX, "/cache/k.py", {7: ("/home/me/attention.py", 42)})
    assert ".loc\t2 42 0" in text and ".loc\t1 9 3" in text
    assert '.file\t2 "/home/me/attention.py"' in text and '.file\t1 "/cache/k.py"' in text
    assert relocate(PTX, "/other.py", {7: ("x", 1)}) == PTX


def test_opcodes_are_counted():
    assert opcode_counts("\tbar.sync \t0;\n\tbar.sync \t0;\n\t@%p bra $x;") == \
        {"bar.sync": 2, "bra": 1}


def test_descriptors():
    """Fields of PTX ISA 9.7.15.5.1, read back."""
    bits = shared_memory.descriptor_bits(8192, 1024, 64)
    assert bits >> 62 == 2 and bits >> 32 & 0x3FFF == 64 and bits >> 16 & 0x3FFF == 512
    with pytest.raises(ArgumentError, match="lead_bytes=8 is not a multiple of 16"):
        shared_memory.descriptor_bits(8, 1024)
    assert shared_memory.steps(64, 16) == (0, 2, 4, 6)
    assert shared_memory.steps(128, 16, panel_bytes=16384) == (0, 2, 4, 6, 1024, 1026, 1028, 1030)
    assert shared_memory.steps(64, 16, major="M") == (0, 128, 256, 384)
    assert shared_memory.steps(128, 8) == (0, 2, 4, 6)


@pytest.mark.parametrize("width", [32, 64, 128])
def test_the_swizzle_is_a_bijection_that_spreads_a_column(width):
    places = {shared_memory.swizzle(r, c, width) for r in range(32) for c in range(0, width, 16)}
    assert places == set(range(0, 32 * width, 16))
    rows = [shared_memory.swizzle(r, 0, width) % 128 // 16 for r in range(8)]
    assert len(set(rows)) == 8  # eight rows of a column: eight groups of four banks


def test_without_the_compiler_the_error_names_the_command():
    program = ("import sys; sys.modules['numba.cuda'] = None; import tessera\n"
               "try:\n    from tessera.tile.cuda import numba_gate\n"
               "except tessera.UnsupportedTargetError as e:\n    print(e.hint)")
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                         check=True)
    assert "pip install" in out.stdout and "cuda12" in out.stdout


def test_importing_the_records_imports_no_compiler():
    program = "import sys, tessera.tile.cuda.ptx; print('numba' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                         check=True)
    assert out.stdout.strip() == "False"
