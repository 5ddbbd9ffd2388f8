"""Object code of loops linked into this process, without LLVM."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import subprocess
import sys

import pytest

import tessera as ts
from tessera.graph.cpu import kernel, link_code, load
from tessera.graph.cpu.link_code import LinkedCode
from tessera.graph.cpu.machine_code import obtain

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="code of x86-64")


@pytest.fixture(scope="module")
def compiled() -> tuple[bytes, str]:
    """Object code with constants and calls of libm in it, and its symbol."""
    from tessera.graph.cpu.compile import compile_source

    with pytest.MonkeyPatch.context() as patch, ts.config.scope(loop_min_elements=1):
        seen: list[str] = []
        patch.setattr(kernel, "obtain", lambda source: (seen.append(source), obtain(source))[1])
        ts.jit(lambda x: ts.sum(ts.atan2(x, x + 2.125) * 0.6 + ts.erf(x) / 3.0, 1))(
            ts.ones((7, 9), "f64"))
    symbol, code = compile_source(seen[-1], "placed")
    return code, symbol


def test_the_words_are_those_that_llvm_s_linker_writes(compiled: tuple[bytes, str]) -> None:
    """Each by link_code.py, and by LLVM at its own addresses: constants are told by what they
    hold, functions by where they lie."""
    code, name = compiled
    ours = LinkedCode(code)
    theirs = load._linked_by_llvm(code, name)
    begin = ours.address(name)
    text = next(s for s in ours.symbols if ours._text(ours._strings, s.name) == name)
    checked = 0
    for s in ours.sections:
        if s.kind != link_code.RELA or s.info != text.section:
            continue
        for at in range(s.offset, s.offset + s.size, 24):
            offset, info, _ = struct.unpack_from("<QQq", code, at)
            delta = offset - text.value
            if not 0 <= delta < text.size:
                continue
            a, b = (ctypes.c_uint64.from_address(x + delta).value for x in (begin, theirs))
            outside = ours.symbols[info >> 32].section == link_code.UNDEFINED
            assert a == b if outside else ctypes.string_at(a, 4) == ctypes.string_at(b, 4)
            checked += 1
    assert checked > 5
    assert ctypes.string_at(begin, 16) == ctypes.string_at(theirs, 16)


def test_code_is_executed_and_not_written(compiled: tuple[bytes, str]) -> None:
    code, name = compiled
    placed = LinkedCode(code)
    at = placed.address(name)
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(x, 16) for x in line.split()[0].split("-"))
            if begin <= at < end:
                assert line.split()[1].startswith("r-x")
                return
    raise AssertionError("it lies nowhere")


def changed(code: bytes, what: str) -> bytes:
    """Of the first relocation in the code: another kind; or its function has another name."""
    placed = LinkedCode(code)
    made = bytearray(code)
    for s in placed.sections:
        if s.kind != link_code.RELA or s.info not in placed.bases:
            continue
        for at in range(s.offset, s.offset + s.size, 24):
            symbol = placed.symbols[struct.unpack_from("<Q", code, at + 8)[0] >> 32]
            if what == "kind":
                struct.pack_into("<I", made, at + 8, 2)  # R_X86_64_PC32
                return bytes(made)
            if symbol.section == link_code.UNDEFINED:
                made[placed._strings.offset + symbol.name] = ord("Q")
                return bytes(made)
    raise AssertionError("nothing to change")


@pytest.mark.parametrize(("what", "said"), [
    ("kind", "have a relocation 2 of x86-64; those of the large code model are 1"),
    ("name", "compiled loops call Q.*, which this process does not have")])
def test_what_cannot_be_linked_is_said(compiled: tuple[bytes, str], what: str, said: str) -> None:
    with pytest.raises(ts.CompileError, match=said):
        LinkedCode(changed(compiled[0], what))


def test_what_is_no_object_code_is_said(compiled: tuple[bytes, str]) -> None:
    arm = bytearray(compiled[0])
    struct.pack_into("<H", arm, 18, 183)  # EM_AARCH64
    for code in (b"", b"\x7fELF", bytes(arm)):
        with pytest.raises(ts.CompileError, match=r"no object code of x86-64"):
            LinkedCode(code)
    with pytest.raises(ts.CompileError, match="have no symbol nothing"):
        LinkedCode(compiled[0]).address("nothing")


PROGRAM = """
import sys, numpy as np, tessera as ts
x = ts.tensor(np.linspace(-2, 2, 5000, dtype=np.float32))
w = ts.tensor(np.linspace(-1, 1, 3 * 2 * 9, dtype=np.float32).reshape(3, 2, 3, 3))
f = ts.jit(lambda x, w: (ts.sum(ts.exp(x) * ts.tanh(x)), ts.conv2d(x.reshape(1, 2, 50, 50), w)))
a, b = f(x, w)
print(a.item().hex(), b.numpy().astype("f8").sum().hex(),
      *(m for m in ("numba", "llvmlite") if m in sys.modules))
"""


def test_a_process_that_finds_its_loops_on_disk_imports_no_compiler(tmp_path) -> None:
    env = {**os.environ, "TESSERA_CACHE_DIR": str(tmp_path)}
    first, second = (subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True,
                                    text=True, check=True).stdout.split() for _ in range(2))
    assert first[2:] == ["numba", "llvmlite"] and second == first[:2]


def test_the_cpu_is_described_as_linux_does() -> None:
    said = load.cpu_description()
    assert "flags" in said and "MHz" not in said and said.count("model name") == 1
    assert load.cpu_has("sse2") and not load.cpu_has("sse9")
