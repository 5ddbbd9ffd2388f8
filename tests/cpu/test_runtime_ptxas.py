"""Targets, finding and reading the assembler; a shell script stands for it."""

from __future__ import annotations

import stat
import sys

import pytest

from tessera.errors import CompileError, UnsupportedTargetError
from tessera.runtime import ptxas
from tessera.runtime.ptxas import assemble, assembler, lower_version, sass_counts
from tessera.runtime.target import Target, parse_target, target_for, target_of_device

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands for ptxas")
REPORT = """\
ptxas info    : 16 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 8 bytes cumulative stack size, 1024 bytes smem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : (C7519) warpgroup.arrive is injected in around line 59 by compiler
ptxas info    : Compiling entry function 'second' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers
"""


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """tool(script) puts a ptxas of this shell text first on PATH."""
    def make(script: str) -> None:
        file = tmp_path / "ptxas"
        file.write_text(f"#!/bin/sh\nif [ \"$1\" = --version ]; then\n"
                        f"echo 'Cuda tools, release 12.8, V12.8.93'; exit; fi\n{script}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        ptxas._describe.cache_clear()

    yield make
    ptxas._describe.cache_clear()


OUT = 'while [ "$1" != -o ]; do src="$1"; shift; done\n'


def test_the_report_is_read(tool, tmp_path):
    (tmp_path / "report").write_text(REPORT)
    tool(f'{OUT}cp "$src" "$2"\ncat {tmp_path}/report >&2')
    made = assemble(".version 9.4\n.target sm_90a\n", parse_target("sm_90a"))
    assert made.cubin.decode().startswith(".version 8.7")  # what release 12.8 reads
    first, second = made.kernels["first"], made.kernels["second"]
    assert (first.registers, first.spill_store_bytes, first.spill_load_bytes, first.stack_bytes,
            first.shared_bytes, first.barriers) == (168, 12, 16, 8, 1024, 3)
    assert first.spills and not second.spills and second.registers == 8
    assert len(made.warnings) == 1 and "C7510" in made.warnings[0]
    assert len(made.notes) == 1 and "C7519" in made.notes[0]


def test_a_refusal_quotes_the_line(tool):
    tool("echo \"ptxas kernel.ptx, line 2; error : Unknown symbol 'foo'\" >&2; exit 255")
    with pytest.raises(CompileError) as caught:
        assemble(".version 8.0\n  foo.bar r1;\n", parse_target("80"))
    text = str(caught.value)
    assert "ptxas 12.8.93 refuses the code for sm_80" in text and "'foo.bar r1;'" in text


def test_the_assembler_is_described(tool):
    tool("")
    assert assembler().release == "12.8.93" and assembler().isa == (8, 7)


def test_without_one_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(ptxas, "find_tool", lambda name: None)
    with pytest.raises(UnsupportedTargetError) as caught:
        assembler()
    assert "pip install" in caught.value.hint
    with pytest.raises(UnsupportedTargetError) as caught:
        ptxas.sass(b"")
    assert "nvidia-cuda-nvdisasm" in caught.value.hint


@pytest.mark.parametrize("have, isa, want", [
    ("9.5", (9, 0), "9.0"), ("8.0", (9, 0), "8.0"), ("9.0", (9, 0), "9.0"), ("9.1", (8, 8), "8.8")])
def test_the_version_is_only_lowered(have, isa, want):
    text = f"// x\n.version {have}\n.target sm_90a\n// .version 1.0"
    assert lower_version(text, isa) == text.replace(f".version {have}", f".version {want}", 1)


def test_machine_code_is_counted():
    listing = ("        /*0000*/                   LDC R1, c[0x0][0x28] ;\n"
               "        /*0010*/              @!P0 EXIT ;\n"
               "        /*0020*/               @P0 LDC R1, c[0x0][0x28] ;\n"
               "        /*0030*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4] ;\n"
               ".L_x_0:\n")
    assert sass_counts(listing) == {"LDC": 2, "EXIT": 1, "HGMMA.64x256x16.F32.BF16": 1}


@pytest.mark.parametrize("text, target", [
    ("sm_90a", Target(9, 0, "a")), ("80", Target(8, 0)), ("compute_89", Target(8, 9)),
    ("sm_100a", Target(10, 0, "a")), (Target(7, 5), Target(7, 5))])
def test_targets(text, target):
    assert parse_target(text) == target
    assert parse_target(str(target)) == target


@pytest.mark.parametrize("text", ["sm_60", "gfx90a", "", "sm_90b", "9.0"])
def test_unknown_targets_name_those_there_are(text):
    with pytest.raises(UnsupportedTargetError) as caught:
        parse_target(text)
    assert "sm_90a" in caught.value.hint


@pytest.mark.parametrize("target, needed, runs", [
    ("90a", "80", True), ("80", "89", False), ("100a", "90a", False), ("90", "90a", False),
    ("90a", "90a", True), ("120", "75", True)])
def test_where_an_instruction_exists(target, needed, runs):
    assert parse_target(target).runs(parse_target(needed)) is runs


@pytest.mark.parametrize("target, cc, loads", [
    ("75", (9, 0), False), ("80", (9, 0), False), ("90", (9, 0), True), ("90a", (9, 0), True),
    ("90a", (10, 0), False), ("80", (8, 6), True), ("86", (8, 0), False), ("80", (8, 7), False),
    ("87", (8, 7), True), ("87", (8, 9), False), ("100", (10, 3), True), ("100a", (10, 3), False)])
def test_where_machine_code_loads(target, cc, loads):
    assert parse_target(target).loads_on(cc) is loads


@pytest.mark.parametrize("cc", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_what_is_built_for_a_device_loads_on_it(cc):
    plain = target_for(cc)
    assert plain.cc == cc and not plain.suffix and plain.loads_on(cc)
    assert target_of_device(cc).loads_on(cc) and target_of_device(cc).runs(plain)


def test_a_device_that_lacks_what_is_needed():
    with pytest.raises(UnsupportedTargetError, match="needs sm_89, the device has .* 8.0"):
        target_for((8, 0), Target(8, 9))


def test_devices():
    with pytest.raises(UnsupportedTargetError, match="7.0"):
        target_for((7, 0), Target(7, 0))
    assert str(target_of_device((9, 0))) == "sm_90a" and str(target_of_device((8, 6))) == "sm_86"
    with pytest.raises(UnsupportedTargetError, match="7.0"):
        target_of_device((7, 0))
