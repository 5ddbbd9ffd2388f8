"""Rows of the table of requirements about speed. Each test prints what it measures, and asks for
what the row says, else only that nothing is far off."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable

import pytest

import tessera as ts
from gpu_harness import require_gpu
from tessera import stdlib

require_gpu()
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.alone


def microseconds(calls: int = 5, rounds: int = 7, **runs: Callable) -> dict[str, float]:
    """The median of each, in turn; the host runs ahead meanwhile."""
    times = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(6_000_000)
            begin.record()
            for _ in range(calls):
                run()
            end.record()
            torch.cuda.synchronize()
            times[name].append(1e3 * begin.elapsed_time(end) / calls)
    return {name: statistics.median(t[1:]) for name, t in times.items()}


def drawn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(
        dtype)


@pytest.mark.row("PERF-01", "PERF-05")
def test_matmul_beside_cublas(note):
    a, b = drawn(8192, 8192), drawn(8192, 8192)
    ours = lambda: stdlib.gemm(a, b)  # noqa: E731
    assert torch.equal(torch.isfinite(ours()), torch.ones_like(a, dtype=torch.bool))
    t = microseconds(ours=ours, cublas=lambda: a @ b)
    note(dtype="bf16", tflops=round(2 * 8192**3 / t["ours"] / 1e6),
         of_cublas=round(t["cublas"] / t["ours"], 3))
    assert t["cublas"] / t["ours"] > 0.8


@pytest.mark.row("PERF-02", "PERF-05")
def test_attention_beside_cudnn(note):
    q, k, v = (drawn(4, 16, 4096, 128) for _ in range(3))
    backend = torch.nn.attention.SDPBackend.CUDNN_ATTENTION

    def peer():
        with torch.nn.attention.sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    t = microseconds(ours=lambda: stdlib.flash_attention_2(q, k, v), cudnn=peer)
    note(dtype="bf16", tflops=round(4 * 4 * 16 * 4096**2 * 128 / t["ours"] / 1e6),
         of_cudnn=round(t["cudnn"] / t["ours"], 3))
    assert t["cudnn"] / t["ours"] > 0.8


@pytest.mark.row("PERF-03", "PERF-05")
@pytest.mark.parametrize("n", [256, 4096, 65536])
def test_fourier_transform_beside_cufft(n, note):
    """Ours on two arrays, cuFFT's on one of pairs: the same bytes."""
    re, im = (drawn(1 << 23, dtype=torch.float32).view(-1, n) for _ in range(2))
    z, fft = torch.complex(re, im), ts.jit(lambda re, im: ts.fft((re, im)))
    there = ts.from_dlpack(re), ts.from_dlpack(im)
    t = microseconds(ours=lambda: fft(*there), cufft=lambda: torch.fft.fft(z))
    flops = 5 * (1 << 23) * (n.bit_length() - 1)
    note(dtype="f32", n=n, gflops=round(flops / t["ours"] / 1e3),
         of_cufft=round(t["cufft"] / t["ours"], 3))
    assert t["cufft"] / t["ours"] > 0.5


@pytest.mark.row("PERF-06")
def test_tensor_cores_beside_threads(note):
    """The same function of 16 and of 32 bits: threads multiply the wide one."""
    a, b = drawn(4096, 4096), drawn(4096, 4096)
    product = ts.jit(lambda a, b: a @ b)
    narrow = [ts.from_dlpack(x) for x in (a, b)]
    wide = [ts.from_dlpack(x.float()) for x in (a, b)]
    forms = [product.schedule(*xs).matmuls[0].form for xs in (narrow, wide)]
    t = microseconds(matrix=lambda: product(*narrow), threads=lambda: product(*wide))
    note(forms=forms, ratio=round(t["threads"] / t["matrix"], 1))
    assert forms == ["wgmma", "threads"] and t["threads"] / t["matrix"] >= 5


@pytest.mark.row("PERF-07")
def test_copy_beside_the_drivers(note):
    copy = importlib.import_module("examples.01_copy").copy
    x = drawn(1 << 28, dtype=torch.float32)
    y = torch.empty_like(x)
    t = microseconds(ours=lambda: copy(x, y), memcpy=lambda: y.copy_(x))
    assert torch.equal(x, y)
    note(gbps=round(8 * (1 << 28) / t["ours"] / 1e3), of_memcpy=round(t["memcpy"] / t["ours"], 3))
    assert t["memcpy"] / t["ours"] >= 0.8
