"""Machine code of gather and scatter: accesses of 16 bytes, guarded, and atomics without result."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kernels.build import build
from kernels.gathers import CASES
from ptx_harness import require_compiler
from tile_gpu import compiled

require_compiler()
TARGETS = ["sm_80", "sm_90a"]
SMALL = ("rows_bf16_16", "rows_int4_13", "rows_f64_13", "elements_33x3", "columns", "no_columns",
         "add_f16", "add_fp8_e4m3", "histogram", "shared_xor")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SMALL)
def test_every_kind_compiles(name, target, rng):
    case = CASES[name]
    made = compiled(build(case.source)["k"], *case.args(rng), lanes=case.lanes, target=target)
    assert not made.built.resources.spills


def embedding(dtype: str, D: int, target: str) -> str:
    k = build(f"""@kernel
def k(t: Tensor["V", "D", {dtype}], ids: Tensor["n", i64], y: Tensor["n", "D", {dtype}]):
    y[tile_n:tile_n+16, 0:256] = tile.gather(t[:, 0:256], tile.load(ids[tile_n:tile_n+16]))
""")["k"]
    made = np.zeros if dtype == "f32" else __import__("tessera").zeros
    kind = np.float32 if dtype == "f32" else dtype
    return compiled(k, made((40, D), kind), np.zeros(33, np.int64), made((33, D), kind), lanes=128,
                    target=target).built.ptx


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype, D, access", [("bf16", 256, "v4.b32"), ("f32", 256, "v4.b32"),
                                              ("bf16", 255, "u16"), ("f32", 255, "b32")])
def test_rows_are_read_as_wide_as_is_proved(dtype, D, access, target):
    ptx = embedding(dtype, D, target)
    rows = [line for line in ptx.splitlines() if "ld.global" in line and "b64" not in line]
    assert rows and all(re.search(rf"@\S+ ld\.global\S*\.{access}\s", r) for r in rows)
    assert "ld.shared" not in ptx  # each thread has the positions that it needs


def test_sums_have_no_result():
    k = build(CASES["add_f32"].source)["k"]
    args = CASES["add_f32"].args(np.random.default_rng(0))
    for target, what in (("sm_80", r"red\.\S*add\.f32"), ("sm_90a", r"red\.\S*add\.v4\.f32")):
        ptx = compiled(k, *args, lanes=2, target=target).built.ptx
        assert re.search(what, ptx) and "atom." not in ptx
