"""The compiler and the assembler of CUDA 12, where their wheels are installed:

    python -m venv e && e/bin/pip install -e '.[cuda12]' pytest hypothesis scipy
    e/bin/python -m pytest tests/golden/test_cuda12.py
"""

from __future__ import annotations

import re

import numpy as np
import pytest

import tessera as ts
import tile_gpu
from ptx_harness import require_compiler
from tessera import bf16
from tessera.kernels import ROUTINES
from tessera.runtime.ptxas import assembler

require_compiler()

pytestmark = [pytest.mark.row("SYS-06"), pytest.mark.skipif(
    not assembler().release.startswith("12."),
    reason="needs the wheels of CUDA 12: pip install -e '.[cuda12]' in an environment of its own")]


@pytest.mark.parametrize("target, matmul", [("sm_80", "mma.sync"), ("sm_90a", "wgmma")])
@pytest.mark.parametrize("name", ["gemm", "flash_attention_2", "stable_softmax"])
def test_library_kernels_compile(name: str, target: str, matmul: str) -> None:
    case = ROUTINES[name].record.compiled[0]
    arguments, options = case.zeros()
    for kernel, args, constants in ROUTINES[name].launches(*arguments, **options):
        made = tile_gpu.compiled(ROUTINES[name].kernels[kernel], *args, target=target, **constants)
        version = re.match(r"\.version (\d+)\.(\d+)", made.built.ptx)
        assert version and (int(version[1]), int(version[2])) <= assembler().isa < (9, 0)
        assert made.built.kernel.cubin[:4] == b"\x7fELF"
        assert not made.built.resources.spill_store_bytes
        assert name == "stable_softmax" or matmul in made.built.ptx


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_functions_compile(target: str) -> None:
    f = ts.jit(lambda x, w: ts.gelu(x @ w))
    x = ts.tensor(np.zeros((128, 128), bf16.numpy), "bf16")
    f.graph(x, x)
    assert f".target {target}" in f.inspect_ir("ptx", target=target)
