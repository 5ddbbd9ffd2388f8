"""The kernels of the numbered examples compile for three generations of GPUs without spills."""

from __future__ import annotations

import importlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from ptx_harness import require_compiler

require_compiler()

TYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "fp8": ml_dtypes.float8_e4m3fn}
# module, kernel, arguments: a type and extents for an array, else a number
CASES: list[tuple[str, str, list[Any]]] = [
    ("01_copy", "copy", ["f32 8192", "f32 8192"]),
    ("01_copy", "add", ["f32 8192"] * 3),
    ("01_copy", "saxpy", ["f32 8192", "f32 8192", 2.0]),
    ("02_reduction", "total", ["f32 8192", "f32 1"]),
    ("02_reduction", "total_by_lanes", ["f32 8192", "f32 1"]),
    ("02_reduction", "row_sums", ["f32 128 4096", "f32 128"]),
    ("03_softmax", "softmax", ["bf16 64 4096"] * 2),
    ("03_softmax", "rms_norm", ["bf16 64 4096", "bf16 4096", "bf16 64 4096"]),
    ("03_softmax", "long_softmax", ["bf16 64 8192"] * 2),
    ("04_gemm", "gemm_nt", ["bf16 512 512"] * 3),
    ("04_gemm", "gemm_nn", ["bf16 512 512"] * 3),
    ("05_attention", "attention", ["bf16 2 512 128"] * 4 + [1.0]),
    ("07_low_precision", "quantize", ["bf16 64 512", "fp8 64 512", "f32 64"]),
    ("08_debugging_a_race", "gram", ["bf16 64 512", "f32 64 64"]),
    ("09_patterns", "pipelined", ["bf16 512 512", "bf16 512 512", "f32 512 512"]),
    ("09_patterns", "persistent", ["bf16 512 512", "bf16 512 512", "f32 512 512"]),
]


def argument(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    kind, *extents = text.split()
    return np.zeros(tuple(map(int, extents)), TYPES[kind])


ADA = {"gemm_nt", "attention", "quantize"}  # less shared memory, matmuls of fp8; else as Ampere


@pytest.mark.parametrize("module, name, given, target", [
    pytest.param(*case, target, id=f"{case[1]}-{target}")
    for target in ("sm_80", "sm_89", "sm_90a") for case in CASES
    if target != "sm_89" or case[1] in ADA])
def test_no_spills(module, name, given, target):
    kernel = getattr(importlib.import_module(f"examples.{module}"), name)
    # an Ada multiprocessor has 100 KB of shared memory: keys come in smaller blocks
    chosen = {"BN": 64} if (name, target) == ("attention", "sm_89") else {}
    pressure = ts.debug.register_pressure(kernel, *map(argument, given), target=target, **chosen)
    assert not pressure.spills and not pressure.stack_bytes, str(pressure)
    assert pressure.occupancy.groups >= 1, str(pressure)
