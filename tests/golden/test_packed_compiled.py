"""Packed weights in registers beside running matmuls, as compiled for sm_90a."""

from __future__ import annotations

import re

import pytest

from library_cases import compiled_of
from tessera.kernels import ROUTINES
from tessera.runtime.ptxas import find_tool

CODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;")
LABEL = re.compile(r"\.(\w+):")
BACK = re.compile(r"BRA.*\(\.(\w+)\)")
NO_RESULT = ("ST", "BRA", "WARPGROUP", "SYNCS", "ISETP", "BAR", "R2UR")


def matmul_loop(sass: str) -> list[str]:
    """The innermost loop around all matmuls of warpgroups."""
    labels, code, loops = {}, [], []
    for line in sass.splitlines():
        if found := LABEL.match(line.strip()):
            labels[found[1]] = len(code)
        elif found := CODE.search(line):
            code.append(found[1])
            back = BACK.match(found[1])
            if back and back[1] in labels:
                loops.append(code[labels[back[1]]:])
    most = max(sum("GMMA" in c for c in loop) for loop in loops)
    return min((x for x in loops if sum("GMMA" in c for c in x) == most), key=len)


def results(code: str) -> set[int]:
    found = re.match(r"(\S+)\s+R(\d+)", code)
    if not found or found[1].startswith(NO_RESULT):
        return set()
    count = 4 if ".128" in found[1] else 2 if ".64" in found[1] or "WIDE" in found[1] else 1
    return set(range(int(found[2]), int(found[2]) + count))


def written_too_early(loop: list[str]) -> list[str]:
    """What writes a register from which a matmul that may still run reads its first operand, in
    this iteration or in the next: the assembler does not see over a loop's end."""
    running: list[set[int]] = []
    found, issued = [], set()
    for code in [*loop, *loop]:
        if "GMMA" in code:
            first = int(re.search(r"GMMA\S*\s+R\d+, R(\d+)", code)[1])
            issued |= set(range(first, first + 4))
            if "gsb0" in code:
                running, issued = [*running, issued], set()
        elif wait := re.search(r"DEPBAR.LE gsb0, 0x(\w+)", code):
            running = running[len(running) - min(int(wait[1], 16), len(running)):]
        elif results(code) & issued.union(*running):
            found.append(code)
    return found


PICKED = (("bf16", 64, "fp4_e2m1"), ("fp8_e4m3", 64, "fp4_e2m1"),
          ("bf16", 32, "fp4_e2m1 @packed_for(bf16)"))
SHARED = [("bf16", 64, "fp4_e2m1 @packed_for(bf16)"), ("bf16", 32, "fp6_e2m3 @packed_for(bf16)")]
FOUND = {(str(c[2][0].type), c[2][0].shape[0], str(c[2][1].type)): c
         for c in compiled_of(ROUTINES["gemm_packed"])}
CASES = [FOUND[key] for key in PICKED]


@pytest.mark.parametrize("case", CASES, ids=[c[4].name for c in CASES])
def test_registers_of_running_matmuls_are_left_alone(case):
    """Codes of the next matmul instructions are unpacked while others run, in other registers."""
    if find_tool("nvdisasm") is None:
        pytest.skip("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    routine, name, arguments, constants, _ = case
    kernel = ROUTINES[routine].kernels[name]
    kernel.lower(*arguments, **constants)
    sass = kernel.inspect_ir("sass", target="sm_90a")
    loop = matmul_loop(sass)
    if laid := arguments[1].type.policy.packed_for is not None:
        # Of an iteration's x one copy brings all panels, and one of its codes.
        iterations = arguments[0].shape[1] // constants["BK"]
        assert sass.count("UTMALDG.3D") == sass.count("UTMALDG") == 2 * iterations
    assert not written_too_early(loop)
    matmuls = [i for i, code in enumerate(loop) if "GMMA" in code]
    steps = constants["BK"] // 2 * arguments[0].type.dtype.bits // 256
    between = 7 if laid else 10  # codes in order take fewer
    assert len(matmuls) == steps and matmuls[-1] - matmuls[0] > between * steps
    assert written_too_early([code.replace("gsb0, 0x1", "gsb0, 0x4") for code in loop])


@pytest.mark.parametrize("shared", SHARED, ids=[c[2] for c in SHARED])
def test_descriptors_of_a_shared_tile_are_made_beside_lanes(shared):
    """The assembler sees that all lanes of a warp take the loop of two blocks that share a tile
    together: it knows by what both begin, leave and wait. Else each matmul has five instructions
    more, of 270 for 16 of fp4."""
    if find_tool("nvdisasm") is None:
        pytest.skip("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    routine, name, arguments, constants, _ = FOUND[shared]
    assert constants["DIVIDED"] == 2
    kernel = ROUTINES[routine].kernels[name]
    kernel.lower(*arguments, **constants)
    loop = matmul_loop(kernel.inspect_ir("sass", target="sm_90a"))
    assert sum("GMMA" in code for code in loop) == constants["BK"] // 16
    assert not any("R2UR" in code for code in loop) and not written_too_early(loop)
