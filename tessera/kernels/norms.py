"""Layer normalisation of rows, with scale and shift."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..dims import show_shape
from ..errors import DTypeError, ShapeError
from ..numerics import f32
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.ir.schedule import Schedule
from ..tile.kernel.decorator import kernel
from .record import Benchmark, CompiledCall, KernelSample
from .routine import empty_like, reshaped, routine, type_of
from .softmax import LONGEST


@kernel
def layernorm(x: Tensor["M", "N"], gamma: Tensor["N"], beta: Tensor["N"], y: Tensor["M", "N"],
              eps: f32, BM=1):
    row = tile.load(x[tile_m:tile_m+BM, 0:N])
    centred = row - tile.row_mean(row)
    scale = tile.rsqrt(tile.row_mean(centred * centred) + eps)
    y[tile_m:tile_m+BM, 0:N] = (centred * scale * tile.load(gamma[0:N])[None, :]
                                + tile.load(beta[0:N])[None, :])


@kernel
def long_layernorm(x: Tensor["M", "N"], gamma: Tensor["N"], beta: Tensor["N"],
                   y: Tensor["M", "N"], eps: f32, BM=4, BN=1024):
    total, spread = tile.zeros((BM,)), tile.zeros((BM,))
    for k in range(0, N, BN):
        total = total + tile.row_sum(tile.load(x[tile_m:tile_m+BM, k:k+BN]))
    mean = total / N
    for k in range(0, N, BN):                  # centred first: no difference of large numbers
        centred = tile.load(x[tile_m:tile_m+BM, k:k+BN]) - mean
        spread = spread + tile.row_sum(centred * centred)
    scale = tile.rsqrt(spread / N + eps)
    for k in range(0, N, BN):
        centred = tile.load(x[tile_m:tile_m+BM, k:k+BN]) - mean
        y[tile_m:tile_m+BM, k:k+BN] = (centred * scale * tile.load(gamma[k:k+BN])[None, :]
                                       + tile.load(beta[k:k+BN])[None, :])


def reference(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    c = x - x.mean(-1, keepdims=True)
    return c / np.sqrt((c * c).mean(-1, keepdims=True) + eps) * gamma + beta


@routine(
    layernorm, long_layernorm, arrays="`[..., N]`, `[N]`, `[N]`", reference=reference,
    ops=lambda F, x, gamma, beta, eps=1e-5: F.layernorm(x, gamma, beta, eps=eps),
    samples=(
        KernelSample("", ((3, 7, 300), (300,), (300,)), terms=300),
        KernelSample("f16", ((7, 129), (129,), (129,)), "f16", terms=4),
        KernelSample("of long rows", ((3, 17000), (17000,), (17000,)), terms=17000),
    ),
    variant=Schedule(m=2, warps=8),
    compiled=(
        CompiledCall("bf16", ((64, 4096), (4096,), (4096,)), "bf16"),
        CompiledCall("of long rows", ((64, 32768), (32768,), (32768,)), "bf16"),
    ),
    benchmarks=(Benchmark(
        "bf16[16384, 4096]", ((16384, 4096), (4096,), (4096,)), "bf16", bytes=4 * 16384 * 4096,
        beside=("PyTorch", lambda torch, x, gamma, beta: lambda: torch.nn.functional.layer_norm(
            x, x.shape[-1:], gamma, beta))),),
)
def efficient_layernorm(run: Any, x: Any, gamma: Any, beta: Any, *, eps: float = 1e-5) -> Any:
    """y = (x - mean x) / sqrt(var x + eps) * gamma + beta, along the last axis.

    x: [..., N] any float of up to 32 bits   gamma, beta: [N], any such float   y: as x
    Mean and variance are kept in f32; the variance is that of the centred row. Rounded once. Rows
    of up to 16384 elements are read once, longer ones three times. Raises ShapeError, DTypeError.
    Ba, Kiros and Hinton 2016, arXiv:1607.06450, eq. 4.
    """
    shape = tuple(x.shape)
    for name, w in (("gamma", gamma), ("beta", beta)):
        if not shape or tuple(w.shape) != shape[-1:]:
            run.fail(f"{name} is {show_shape(tuple(w.shape))}, x is {show_shape(shape)}",
                     f"{name} has x's last extent", ShapeError)
    for name, t in (("x", x), ("gamma", gamma), ("beta", beta)):
        dtype = type_of(t, name).dtype
        if dtype.kind != "float" or dtype.bits > 32:
            run.fail(f"{name} is {dtype}", "a float of up to 32 bits", DTypeError)
    out = empty_like(x)
    if 0 in shape:
        return out
    flat = math.prod(shape[:-1]), shape[-1]
    arrays = reshaped(x, flat), gamma, beta, reshaped(out, flat), float(eps)
    if shape[-1] > LONGEST:
        run.run("long_layernorm", *arrays, BM=run.size("m", 4), BN=run.size("n", 1024))
    else:
        run.run("layernorm", *arrays, BM=run.size("m", 1))
    return out
