"""Matmuls with weights of 4 and 6 bits on a GPU, against f64."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
import tile_gpu
from cpu.test_packed_weights import CODES, arguments, begun, numbers, product, weights
from gpu_harness import require_gpu
from tessera.kernels.gemm_packed import packed_nt
from tessera.stdlib import gemm_packed
from tolerance import assert_close

require_gpu()


@pytest.mark.parametrize("x", ["bf16", "f16", "fp8_e4m3"])
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("M, N, K", [(1, 8192, 512), (16, 200, 4096), (70, 130, 1000),
                                     (4, 33, 71), (40, 200, 1024), (64, 8192, 512)])
def test_results(rng, codes, x, M, N, K):
    w, rows, _ = arguments(rng, codes, M, N, K, x)
    s = rng.uniform(0.5, 2, N).astype(np.float32)
    y = gemm_packed(rows.to("cuda"), w.to("cuda"), scale=ts.tensor(s).to("cuda"))
    assert y.device == "cuda:0"
    terms = np.abs(numbers(rows)) @ np.abs(numbers(w)).T * s
    got, want = numbers(y.to("cpu")), numbers(rows) @ numbers(w).T * s
    eps = 2.0 ** -(11 if x == "f16" else 8)
    # Of sums of fp8 tensor cores keep 14 bits: of fp6, 512 products and 16,384 sums 4e-5 of the
    # terms, by a model of them that aligns 32 products and their sum, and cuts off.
    kept = 2.0**-13 if x == "fp8_e4m3" and codes != "int4" else 2e-6
    assert (np.abs(got - want) <= eps * np.abs(want) + kept * terms).all()


@pytest.mark.parametrize("lanes, BN, BM, BK", [(32, 16, 8, 64), (256, 64, 64, 256),
                                               (512, 64, 16, 512), (128, 64, 32, 128)])
@pytest.mark.parametrize("codes", CODES)
def test_blocks_and_warps(rng, codes, lanes, BN, BM, BK):
    tile_gpu.compare(product, *arguments(rng, codes, BM + 1, BN + 3, 3 * BK), lanes=lanes,
                     rtol=1e-4, atol=2e-3, BN=BN, BM=BM, BK=BK)


@pytest.mark.parametrize("kind", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("codes", ["fp4_e2m1", "fp6_e3m2"])
@pytest.mark.parametrize("M, N, K", [(61, 17000, 640), (61, 17000, 1024), (5, 130, 256)])
def test_two_blocks_share_the_steps_of_a_group(rng, codes, kind, M, N, K):
    """Three tiles for some pairs, whose buffers take turns; steps of which one block has more."""
    w, x, _ = arguments(rng, codes, M, N, K, kind)
    want, terms = numbers(x) @ numbers(w).T, np.abs(numbers(x)) @ np.abs(numbers(w)).T
    bound = 2.0**-8 * np.abs(want) + (2.0**-13 if kind == "fp8_e4m3" else 2e-6) * terms
    given = x.to("cuda"), w.to("cuda"), None
    for _ in range(3):
        out = ts.tensor(np.full((M, N), np.nan, np.float32), "bf16").to("cuda")
        packed_nt(*given, out, BM=8 if M < 8 else 64, BN=128, BK=256, DIVIDED=2, AHEAD=2)
        assert (np.abs(numbers(out.to("cpu")) - want) <= bound).all()


def test_two_blocks_share_steps_of_results_that_are_packed(rng):
    """Warpgroups bring these together before they store, so the first block has all sums."""
    w, x, _ = arguments(rng, "fp4_e2m1", 61, 9000, 640)
    x = ts.cast(ts.tensor(numbers(x).astype(np.float32) / 64), "bf16")
    want = numbers(x) @ numbers(w).T
    assert np.abs(want).max() < 6
    out = ts.tensor(np.full((61, 9000), 6, np.float32), "fp4_e2m1").to("cuda")
    packed_nt(x.to("cuda"), w.to("cuda"), None, out, BM=64, BN=128, BK=256, DIVIDED=2)
    spacing = np.where(np.abs(want) < 2, 0.5, np.where(np.abs(want) < 4, 1, 2))
    assert (np.abs(numbers(out.to("cpu")) - want) <= spacing / 2 + 1e-3).all()


def test_sums_may_begin_with_something(rng):
    w, x, d = arguments(rng, "fp4_e2m1", 17, 40, 256, "f16")
    b = rng.standard_normal(40).astype(np.float32)
    tile_gpu.compare(begun, w, x, b, d, lanes=64, rtol=1e-4, atol=2e-3)


def test_bytes_of_torch_are_weights(rng):
    torch = pytest.importorskip("torch")
    w = weights(rng, "fp6_e3m2", (128, 256))
    raw = torch.from_numpy(np.array(ts.as_bytes(w).array)).cuda()
    x = torch.randn(4, 256, device="cuda", dtype=torch.bfloat16)
    y = gemm_packed(x, ts.from_bytes(raw, "fp6_e3m2", (128, 256)))
    assert isinstance(y, torch.Tensor) and y.dtype == torch.bfloat16
    want = x.double().cpu().numpy() @ numbers(w).T
    assert_close(y.float().cpu().numpy(), want, "bf16", 16)


@pytest.mark.parametrize("codes", CODES)
def test_in_a_function(rng, codes):
    w, x, _ = arguments(rng, codes, 8, 96, 512)
    f = ts.jit(lambda x, w: ts.relu(x @ ts.cast(w, "bf16").T))
    y = f(x.to("cuda"), w.to("cuda"))
    terms = np.abs(numbers(x)) @ np.abs(numbers(w)).T
    want = np.maximum(numbers(x) @ numbers(w).T, 0)
    assert (np.abs(numbers(y.to("cpu")) - want) <= 2.0**-8 * want + 2e-6 * terms).all()
    assert "as they lie" in f.inspect_ir("target")


@pytest.mark.parametrize("kind", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("codes", ["fp4_e2m1", "fp6_e2m3"])
@pytest.mark.parametrize("M, N, K", [(1, 8192, 512), (64, 200, 1280), (17, 130, 320)])
def test_codes_in_the_order_of_products(rng, codes, kind, M, N, K):
    """Rows and steps that end within a group; made on the GPU, and of the host's rows."""
    w, x, _ = arguments(rng, codes, M, N, K, kind)
    laid = f"{codes} @packed_for({kind})"
    want, terms = numbers(x) @ numbers(w).T, np.abs(numbers(x)) @ np.abs(numbers(w)).T
    bound = 2.0**-8 * np.abs(want) + (2.0**-13 if kind == "fp8_e4m3" else 2e-6) * terms
    f = ts.jit(lambda x, w: ts.cast(ts.cast(x, "f32") @ ts.cast(w, "f32").T, "bf16"))
    for there in (ts.cast(w.to("cuda"), laid), ts.cast(w, laid).to("cuda")):
        np.testing.assert_array_equal(numbers(there.to("cpu")), numbers(w))
        for y in (gemm_packed(x.to("cuda"), there), f(x.to("cuda"), there)):
            assert (np.abs(numbers(y.to("cpu")) - want) <= bound).all()
        assert f"{codes} as they lie" in f.inspect_ir("target")


def test_scaled_weights_in_a_function(rng):
    w = ts.tensor(rng.standard_normal((96, 512)).astype(np.float32),
                  'int4 @scaled("amax") @per_channel(0)')
    x = ts.tensor(rng.standard_normal((8, 512)).astype(np.float32), "bf16")
    f = ts.jit(lambda x, w: x @ w.T)
    y = f(x.to("cuda"), w.to("cuda"))
    want = numbers(x) @ w.numpy().astype(np.float64).T
    np.testing.assert_allclose(numbers(y.to("cpu")), want, rtol=1e-4, atol=1e-3)
    assert "as they lie" in f.inspect_ir("target")
