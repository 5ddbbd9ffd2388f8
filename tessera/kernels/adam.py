"""Adam with decoupled weight decay: parameter and moments updated in one pass over memory."""

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
from .record import Benchmark, CompiledCall, Draw, KernelSample
from .routine import reshaped, routine, type_of


@kernel
def adam(p: Tensor["n"], g: Tensor["n"], m: Tensor["n"], v: Tensor["n"], lr: f32, decay: f32,
         b1: f32, b2: f32, eps: f32, unbias1: f32, unbias2: f32, BN=1024):
    w, grad = tile.load(p[tile_n:tile_n+BN]), tile.load(g[tile_n:tile_n+BN])
    first = tile.load(m[tile_n:tile_n+BN]) * b1 + grad * (1.0 - b1)
    second = tile.load(v[tile_n:tile_n+BN]) * b2 + grad * grad * (1.0 - b2)
    change = first * unbias1 / (tile.sqrt(second * unbias2) + eps)
    p[tile_n:tile_n+BN] = w - lr * (change + w * decay)
    m[tile_n:tile_n+BN] = first
    v[tile_n:tile_n+BN] = second


def reference(p: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, step: int,
              lr: float = 1e-3, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8,
              weight_decay: float = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
    change = m / (1 - b1**step) / (np.sqrt(v / (1 - b2**step)) + eps)
    return p - lr * (change + weight_decay * p), m, v


def _moments(*shape: int) -> tuple[Draw, Draw]:
    """m and v; v is a mean of squares, so not negative."""
    return (Draw(shape, "f32", lambda rng, s: rng.standard_normal(s).astype(np.float32)),
            Draw(shape, "f32", lambda rng, s: rng.standard_normal(s).astype(np.float32)**2))


def _in_torch(torch: Any, p: Any, g: Any, m: Any, v: Any, step: int, lr: float,
              weight_decay: float) -> Any:
    """torch.optim.AdamW(fused=True) from the same moments."""
    w = torch.nn.Parameter(p)
    optimizer = torch.optim.AdamW([w], lr=lr, weight_decay=weight_decay, fused=True)
    w.grad = g
    optimizer.state[w] = {"step": torch.tensor(float(step - 1), device=p.device), "exp_avg": m,
                          "exp_avg_sq": v}

    def run() -> Any:
        optimizer.step()
        return w.detach(), m, v

    return run


@routine(
    adam, arrays="one shape", reference=reference,
    samples=(
        KernelSample("", ((13, 77), (13, 77), *_moments(13, 77), 3),
                     options=dict(lr=0.02, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.1), terms=4),
        KernelSample("of a bf16 parameter", ((130, 77), (130, 77), *_moments(130, 77), 1), "bf16",
                     options=dict(lr=0.5), terms=4),
    ),
    variant=Schedule(n=512, warps=2),
    compiled=(CompiledCall("f32", ((4096,), (4096,), *_moments(4096), 1)),),
    benchmarks=(Benchmark(
        "f32[2²⁶]", ((1 << 26,), (1 << 26,), *_moments(1 << 26), 10),
        options=dict(lr=1e-3, weight_decay=0.1), bytes=7 * 4 * (1 << 26),
        beside=("torch.optim.AdamW, fused", _in_torch)),),
)
def fused_adam(run: Any, p: Any, g: Any, m: Any, v: Any, step: int, *, lr: float = 1e-3,
               b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8,
               weight_decay: float = 0.0) -> tuple[Any, Any, Any]:
    """m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,
    p <- p - lr (m / (1 - b1^step) / (sqrt(v / (1 - b2^step)) + eps) + weight_decay p)

    p, g, m, v: one shape, floats of up to 32 bits. p, m and v are written in place, and returned.
    step: the number of this update, from 1. Computed in f32, each array rounded once as its type
    says; reads four arrays, writes three, one launch. Raises ShapeError, DTypeError, ArgumentError.
    Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2.
    """
    arrays = {"p": p, "g": g, "m": m, "v": v}
    for name, x in arrays.items():
        if tuple(x.shape) != tuple(p.shape):
            run.fail(f"{name} is {show_shape(tuple(x.shape))}, p is {show_shape(tuple(p.shape))}",
                     "one shape for all", ShapeError)
        dtype = type_of(x, name).dtype
        if dtype.kind != "float" or dtype.bits > 32 or dtype.packed:
            run.fail(f"{name} is {dtype}", "floats of 8 to 32 bits", DTypeError)
    if not isinstance(step, int) or step < 1:
        run.fail(f"step={step!r}", "the first update is step 1")
    if 0 not in tuple(p.shape):
        run.run("adam", *(reshaped(x, (math.prod(p.shape),)) for x in arrays.values()), float(lr),
                float(weight_decay), float(b1), float(b2), float(eps),
                1.0 / (1.0 - b1**step), 1.0 / (1.0 - b2**step), BN=run.size("n", 1024))
    return p, m, v
