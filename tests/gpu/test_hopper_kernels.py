"""Warp-specialised kernels on a Hopper GPU against the interpreter, ragged extents first."""

from __future__ import annotations

import numpy as np
import pytest

import hopper_programs as kernels
import tile_gpu
from tessera import bf16, f32, fp8_e4m3
from tessera.runtime.device import device
from tessera.tile.ir.schedule import Schedule

LOG2E = 1.4426950408889634
CLOSE = {"rtol": 2e-2, "atol": 2e-2}


@pytest.fixture(autouse=True)
def hopper():
    if device().cc != (9, 0):
        pytest.skip("the form is that of sm_90a")


def random(rng, *shape, dtype=bf16):
    return rng.standard_normal(shape).astype(dtype.numpy)


def poisoned(*shape):
    return np.full(shape, np.nan, bf16.numpy)


def compare(kernel, args, groups, schedule=None, **kwargs):
    """On the GPU as on the interpreter; twice, for a counter and barriers start anew."""
    if schedule is not None:
        kernel = kernel.with_schedule(schedule)
    made = tile_gpu.compiled(kernel, *args, groups=groups, target="sm_90a", **kwargs)
    assert made.grid.startswith("persistent"), made.notes
    return tile_gpu.compare(kernel, *args, groups=groups, target="sm_90a", **CLOSE, **kwargs)


@pytest.mark.parametrize("shape", [(128, 256, 64), (336, 528, 208), (144, 16, 16),
                                   (1024, 768, 512)], ids=str)
@pytest.mark.parametrize("kernel", [kernels.gemm_nt, kernels.gemm_nn, kernels.gemm_tn],
                         ids=lambda k: k.__name__)
@pytest.mark.parametrize("block", [(128, 256), (64, 64), (192, 128), (256, 64), (128, 96),
                                   (64, 80)], ids=str)
def test_matmuls(rng, kernel, shape, block):
    M, N, K = shape
    BM, BN = block
    a = random(rng, K, M) if kernel is kernels.gemm_tn else random(rng, M, K)
    b = random(rng, N, K) if kernel is kernels.gemm_nt else random(rng, K, N)
    groups = (-(-M // BM), -(-N // BN))
    compare(kernel, (a, b / bf16.numpy.type(K ** 0.5), poisoned(M, N)), groups, BM=BM, BN=BN)


@pytest.mark.parametrize("shape", [(128, 256, 64), (336, 528, 204), (1024, 768, 512)], ids=str)
@pytest.mark.parametrize("BM, BK, dtype", [
    (128, 64, bf16), (64, 64, bf16), (128, 16, bf16), (192, 32, bf16), (128, 64, f32),
    (64, 16, f32), (192, 32, f32)], ids=str)
def test_a_first_operand_that_is_computed(rng, shape, BM, BK, dtype):
    M, N, K = shape
    x, gain, w = random(rng, M, K, dtype=dtype), random(rng, K), random(rng, K, N)
    args = x, gain, w / bf16.numpy.type(K ** 0.5), poisoned(M, N)
    compare(kernels.normalised, args, (-(-M // BM), -(-N // 128)), BM=BM, BN=128, BK=BK)


@pytest.mark.parametrize("depth", [16, 32, 48, 64, 80, 128])
def test_narrow_rows(rng, depth):
    """Rows of 32 and 64 bytes have swizzles of their own; of others the last panel is not full."""
    a, b = random(rng, 200, 272), random(rng, 144, 272)
    compare(kernels.gemm_nt, (a, b, poisoned(200, 144)), (2, 2), BK=depth)


@pytest.mark.parametrize("kernel", [kernels.matmul], ids=["e4m3"])
@pytest.mark.parametrize("depth", [64, 128])
def test_fp8(rng, kernel, depth):
    a, b = (random(rng, n, 1024, dtype=fp8_e4m3) for n in (256, 128))
    compare(kernel, (a, b, poisoned(256, 128)), (2, 1), BK=depth)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("S", [128, 333, 1000, 2176])
@pytest.mark.parametrize("D, BM", [(128, 128), (64, 192), (64, 128), (96, 128), (96, 192),
                                   (48, 128)], ids=str)
def test_attention(rng, S, D, BM, causal):
    q, k, v = (random(rng, 4 // n, S, D) for n in (1, 2, 2))
    compare(kernels.attention, (q, k, v, poisoned(4, S, D), LOG2E / D ** 0.5),
            (-(-S // BM), 4), BM=BM, BN=96 if D == 96 and BM == 192 else 128, causal=causal,
            shared=2)


def test_two_accumulators_bias_and_residual(rng):
    M, N, K = 264, 208, 336
    args = (random(rng, M, K), random(rng, N, K) / bf16.numpy.type(18), random(rng, N, K),
            rng.standard_normal(N).astype(np.float32), random(rng, M, N), poisoned(M, N))
    compare(kernels.swiglu, args, (3, 4))


@pytest.mark.parametrize("first, last", [(0, 192), (64, 64), (128, 0)])
def test_a_rotated_loop_may_be_empty(rng, first, last):
    args = [random(rng, 192, 128) for _ in range(3)]
    compare(kernels.window, (*args, poisoned(192, 128), first, last), (3,))


@pytest.mark.parametrize("extra", [dict(IN_FLIGHT=1), dict(stages=2), dict(RASTER=1)],
                         ids=lambda e: next(iter(e)))
def test_schedules(rng, extra):
    a, b = random(rng, 512, 1024), random(rng, 512, 1024) / bf16.numpy.type(32)
    compare(kernels.gemm_nt, (a, b, poisoned(512, 512)), (4, 4), schedule=Schedule(**extra))
