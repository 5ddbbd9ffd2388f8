"""Kernels of tile ops compiled for several targets: nothing spills, and the right instructions."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kernels.build import build
from ptx_harness import require_compiler
from tile_cases import CASES

require_compiler()
TARGETS = ("sm_80", "sm_89", "sm_90a")
ENDS = ("sm_80", "sm_90a")


def compile_case(name: str, target: str):
    from tile_gpu import compiled

    c = CASES[name]
    return compiled(build(c.source)["k"], *c.args(np.random.default_rng(0)), lanes=c.lanes,
                    target=target, **c.options)


@pytest.mark.parametrize("name", [
    "unary_f32", "binary_f32", "integer_u32", "compare_bf16", "reduce_f32_8x512",
    "argmax_f32_48x100", "scan_f32_8x512", "sort_f32_5x100", "sort_f64_9x32",
    "smallest_f32_5x100", "smallest_i64_2x700", "smallest_i32_32x128",
    "shapes_96", "blocks_50x100", "packed_fp4_e2m1_16x128_0", "packed_fp6_e3m2_20x100_5",
    "store_fp8_e5m2_saturate_13x77"])
def test_nothing_spills(name):
    # For these ops sm_89 is sm_80 with conversions of fp8.
    for target in TARGETS if "_fp" in name else ENDS:
        made = compile_case(name, target).built
        assert made.resources.spill_store_bytes == 0, f"{name} for {target}: {made.resources}"
        assert not made.warnings


def test_nothing_of_a_long_sort_spills():
    """One sort of two: the cases' four of each kernel take 17 s to compile for these targets."""
    from tile_gpu import compiled

    kernel = build("""@kernel
def k(A: Tensor["M", "N", f32], P: Tensor["M", "N", i32]):
    tile.store(P[0:2, 0:1024], tile.argsort(tile.load(A[0:2, 0:1024])))
""")["k"]
    for target in ENDS:
        made = compiled(kernel, np.zeros((2, 1024), np.float32), np.zeros((2, 1024), np.int32),
                        lanes=128, target=target).built
        assert made.resources.spill_store_bytes == 0 and not made.warnings


CAST = """@kernel
def k(x: Tensor["n", ts.{source}], y: Tensor["n", ts.{to}]):
    tile.store(y[0:1024], tile.cast(tile.load(x[0:1024]), ts.{to}))
"""


def ptx_of(source: str, to: str, target: str) -> str:
    from tessera.tile.cuda.compile import ArgumentFacts, compile_function

    function = build(CAST.format(source=source, to=to))["k"]._from_types({})
    facts = ArgumentFacts(frozenset("n"), frozenset("xy"))
    return compile_function(function, 128, target=target, facts=facts).built.ptx


@pytest.mark.parametrize("to", ["e4m3", "e5m2"])
def test_fp8_by_instructions_where_they_are(to):
    opcode = f"cvt.rn.satfinite.{to}x2.f32"
    assert opcode not in ptx_of("f32", f"fp8_{to}", "sm_80")
    assert ptx_of("f32", f"fp8_{to}", "sm_90").count(opcode) == 4  # 8 elements a thread


def test_a_cast_before_a_store_rounds_once():
    """The store rounds what was cast: one conversion for two elements."""
    assert ptx_of("f32", "bf16", "sm_80").count("cvt.rn.bf16x2.f32") == 4


def test_packed_tensors_move_in_words():
    ptx = ptx_of("fp4_e2m1", "f32", "sm_90")
    assert "ld.global" in ptx and ".u8" not in ptx


def test_a_transposed_tile_is_stored_along_rows():
    """Through shared memory, in accesses of 16 bytes on both sides of global memory."""
    from tessera.tile.cuda.compile import ArgumentFacts, compile_function

    source = """@kernel
def k(A: Tensor["M", "N", f32], O: Tensor["N", "M", f32]):
    tile.store(O[0:64, 0:64], tile.load(A[0:64, 0:64]).T)
"""
    function = build(source)["k"]._from_types({})
    made = compile_function(function, 128, target="sm_90",
                            facts=ArgumentFacts(frozenset("MN"), frozenset("AO"))).built
    assert len(re.findall(r"ld\.global[\w.:]*\.v4\.b32", made.ptx)) == 8
    assert made.ptx.count("st.global.v4.b32") == 8
    assert made.resources.spill_store_bytes == 0
