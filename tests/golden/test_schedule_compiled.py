"""What a schedule's parameters become in compiled kernels; no GPU needed."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from kernels.build import build
from ptx_harness import require_compiler
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.levels import compiled_of
from tessera.tile.launch.levels import compiled_for
from tessera.tile.passes.operation_counts import ring_bytes

require_compiler()

GEMM = """@kernel
def gemm(A: Tensor["M", "K", bf16], B: Tensor["K", "N", bf16], C: Tensor["M", "N", f32]):
    T = tile.context()
    acc = tile.zeros((T.m, T.n), f32)
    for k in tile.range(0, K, T.k):
        a = tile.load(A[tile_m:tile_m+T.m, k:k+T.k])
        acc = tile.dot(a, tile.load(B[k:k+T.k, tile_n:tile_n+T.n]), acc)
    C[tile_m:tile_m+T.m, tile_n:tile_n+T.n] = acc
"""


pytestmark = pytest.mark.usefixtures("own_cache")


def compiled(schedule):
    kernel = build(GEMM)["gemm"].with_schedule(schedule)
    halves = np.zeros((256, 256), ml_dtypes.bfloat16)
    function = kernel.lower(halves, halves, np.zeros((256, 256), np.float32))
    return function, compiled_for(kernel, function, "sm_80")


@pytest.mark.row("SCHED-04")
def test_stages_scale_the_shared_memory_of_the_pipeline():
    base = ts.Schedule(m=64, n=96, k=32, warps=4)
    sizes = {}
    for stages in (2, 4):
        function, made = compiled(base.stages(stages))
        sizes[stages] = made.built.kernel.shared_bytes
        # The cost model knows what the compiler will allocate.
        assert ring_bytes(function, stages) == stages * (64 * 32 + 32 * 96) * 2
        assert not made.built.resources.spills
    assert sizes[4] == 2 * sizes[2] == ring_bytes(function, 4)


def test_warps_are_the_threads_of_the_block():
    for warps in (4, 8):
        _, made = compiled(ts.Schedule(m=64, n=64, k=32, warps=warps))
        assert re.search(rf"\.(maxntid|reqntid) {32 * warps}\b", made.built.ptx)
        assert made.built.kernel.threads == 32 * warps


def test_convolutions_spill_nothing():
    """Forward and both adjoints: 128 x 128 sums and a gathered operand in registers."""
    def products(x, w, g):
        y, back = ts.vjp(lambda x, w: ts.conv2d(x, w, padding=1), x, w)
        return (y, *back(g))

    types = [ts.Tensor[8, 128, 32, 32, ts.bf16], ts.Tensor[128, 128, 3, 3, ts.bf16],
             ts.Tensor[8, 128, 32, 32, ts.bf16]]
    made = CudaProgram(ts.jit(products).graph(*types), "sm_90a")
    launches = [n for n in made.launches if n.group.kind == "launch"]
    assert len(launches) == 3
    for launch in launches:
        assert compiled_of(launch, made.target).built.resources.spill_store_bytes == 0
