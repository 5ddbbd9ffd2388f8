"""Products of a GPT-2 layer with their derivatives, of fp8 beside bf16, on one GPU: ours alone.

    python benchmarks/fp8_products.py                 350M: B 16, T 1024, d 1024
    python benchmarks/fp8_products.py --tokens 4096 --d 2048

For each product of a layer: the matmuls' times, those of everything that fp8 adds to them (scales,
casts, copies along the contracted axis), by the profiler, and the rate of the matmuls. The error
is that of y against f32, relative.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

import tessera as ts

RECIPES = {"bf16": None, "fp8 delayed": ts.DelayedScaling(), "fp8 current": ts.CurrentScaling()}


def product(recipe: Any) -> Callable:
    """(x, w, g, history) -> (y, dx, dw, what the history learns)"""
    def multiply(x: Any, w: Any, history: Any) -> Any:
        if recipe is None:
            return x @ ts.cast(w, "bf16")
        known = history if isinstance(recipe, ts.DelayedScaling) else None
        return ts.cast(recipe.matmul(x, w, known), "bf16")

    def step(x: Any, w: Any, g: Any, history: Any) -> Any:
        y, pull = ts.vjp(multiply, x, w, history)
        return y, *pull(g)

    return ts.jit(step)


def profiled(step: Callable, *args: Any) -> tuple[float, float, Any]:
    """(microseconds of matmuls, of all else, the results): medians of five calls."""
    out, times = step(*args), []
    for _ in range(5):
        with ts.debug.profile() as p:
            out = step(*args)
        records = p.launches.records
        matmuls = sum(r.us for r in records if r.work.matmuls)
        times.append((matmuls, p.launches.us - matmuls))
    return (*(statistics.median(t) for t in zip(*times, strict=True)), out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--d", type=int, default=1024)
    args = parser.parse_args()
    M, d = args.tokens, args.d
    rng = np.random.default_rng(0)
    print(f"{'product':24} {'recipe':12} {'matmuls us':>10} {'TFLOP/s':>8} {'else us':>8} "
          f"{'of bf16':>8} {'error':>8}")
    for name, K, N in (("qkv", d, 3 * d), ("out", d, d), ("up", d, 4 * d), ("down", 4 * d, d)):
        x, w, g = (rng.standard_normal(s, np.float32) * k for s, k in (
            ((M, K), 1.0), ((K, N), 0.02), ((M, N), 1.0 / M)))
        given = [ts.to(ts.tensor(t, kind), "cuda")
                 for t, kind in ((x, "bf16"), (w, "f32"), (g, "bf16"))]
        history = ts.to(ts.DelayedScaling().init(x=8.0, w=0.2, cotangent=8.0 / M), "cuda")
        base = 0.0
        for recipe, how in RECIPES.items():
            matmuls, other, out = profiled(product(how), *given, history)
            exact = x[:64] @ w
            error = np.linalg.norm(out[0].numpy()[:64].astype(np.float32) - exact)
            base = base or matmuls + other
            print(f"{name + f' {M}x{K}x{N}':24} {recipe:12} {matmuls:10.1f} "
                  f"{6e-6 * M * K * N / matmuls:8.0f} {other:8.1f} "
                  f"{(matmuls + other) / base:8.3f} {error / np.linalg.norm(exact):8.4f}",
                  flush=True)


if __name__ == "__main__":
    main()
