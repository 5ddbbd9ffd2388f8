"""Attention's gradient by pairs of blocks as compiled for sm_90a: nothing spilled, no matmul waits
for another. No GPU is needed."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
import tile_gpu
from ptx_harness import require_compiler
from tessera import bf16, f16
from tessera.kernels.attention_fused_backward import attention_fused_backward
from tessera.runtime.ptxas import find_tool, sass_counts
from tessera.runtime.target import parse_target
from tessera.tile.cuda.emit.attention_backward import emit_backward
from tessera.tile.kernel.kernel import Kernel

require_compiler()


def arguments(dtype, S, slots):
    x, row = np.zeros((8, S, 128), dtype.numpy), np.zeros((8, S), np.float32)
    sums, turns = np.zeros((slots, S, 128), np.float32), np.zeros(slots * S // 32 + 1, np.int32)
    return x, x, x, x, row, row, sums, turns, x.copy(), x.copy(), x.copy(), 0.1


@pytest.mark.parametrize("dtype, S, heads, slots", [(bf16, 4096, 4, 8), (f16, 2048, 8, 8),
                                                    (bf16, 16384, 1, 2)], ids=str)
def test_pairs_of_blocks(dtype, S, heads, slots):
    made = tile_gpu.compiled(attention_fused_backward, *arguments(dtype, S, slots), heads=heads,
                             slots=slots, target="sm_90a")
    assert made.grid == "clusters" and made.emitted.cluster == 2 and made.threads == 384
    built = made.built
    assert not [w for w in built.warnings if "C751" in w], built.warnings
    assert not built.resources.spills and built.resources.registers == 168
    if find_tool("nvdisasm") is None:
        pytest.skip("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    found = sass_counts(built.sass())
    products = {"64x64x16": 3 * 8 + 2 * 8 + 2 * 16, "64x128x16": 3 * 4 + 2 * 4}  # S, dP, dQ; dV, dK
    for shape, count in products.items():
        name = f"HGMMA.{shape}.F32" + ".BF16" * (dtype is bf16)
        assert sum(n for x, n in found.items() if x.startswith(name)) == count
    assert sum(n for x, n in found.items() if x.startswith("RED")) >= 16


def test_it_is_the_kernel_that_is_known_and_not_its_name():
    """A user's kernel of this name and these parameters, whose body may be another, is compiled as
    it is written; the library's with a schedule is still the library's."""
    users = Kernel(attention_fused_backward.fn, grid=attention_fused_backward.grid)
    again = attention_fused_backward.with_schedule(ts.Schedule(warps=8))
    for kernel, taken in ((attention_fused_backward, True), (again, True), (users, False)):
        given, known = arguments(bf16, 1024, 2), {"heads": 2, "slots": 2}
        bound, function, *_ = tile_gpu.prepare(kernel, given, known, None, None)
        facts = tile_gpu.facts_of(function, bound)
        assert function.name == "attention_fused_backward"
        assert (emit_backward(function, parse_target("sm_90a"), facts) is not None) == taken


@pytest.mark.parametrize("target, heads, S, known", [
    ("sm_90a", 4, 4096, {}), ("sm_90a", 2, 4096, {"BN": 32}), ("sm_90a", 2, 4128, {}),
    ("sm_90", 2, 4096, {}), ("sm_100a", 2, 4096, {})], ids=str)
def test_what_pairs_do_not_take(target, heads, S, known):
    """Among it fewer sums than heads beside each other: one would wait for one that begins after
    it."""
    args, fits = arguments(bf16, 4096, 2), {"heads": 2, "slots": 2}
    args = args if S == 4096 else arguments(bf16, S, 2)
    for changed, taken in ((fits | {"heads": heads} | known, False), (fits, True)):
        bound, function, *_ = tile_gpu.prepare(attention_fused_backward, args, changed, None, None)
        made = emit_backward(function, parse_target(target), tile_gpu.facts_of(function, bound))
        assert (made is not None) == (taken and target == "sm_90a" and S == 4096)
