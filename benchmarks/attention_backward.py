"""Attention with its gradient beside PyTorch's, which is done by cuDNN, on one GPU.

    python benchmarks/attention_backward.py [D ...] [--lengths 1024 4096 16384] [--parts]

Both compute the result and the cotangents of queries, keys and values from bf16 operands [B, H, S,
D] with 262144 rows of heads in all; ours through ts.vjp under ts.jit. Times are medians over rounds
of calls one behind the other, interleaved; errors are those of our cotangents against cuDNN's.
--parts: what the kernels of the gradient take, one by one. Flops: 4 S^2 D of a head for the result,
10 for the gradient, half of that when causal. Needs torch and a GPU. Writes
benchmarks/results/attention_backward.json, or $OUT/attention_backward.json when OUT is set.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import record
import torch
import torch.nn.functional as F
from gpu_timing import as_torch, clocked_in_turn, distance
from torch.nn.attention import SDPBackend, sdpa_kernel

import tessera as ts

ROWS = 1 << 18  # of all heads together


def ours(D: int, causal: bool) -> Callable:
    @ts.jit
    def both(q: Any, k: Any, v: Any, g: Any) -> Any:
        y, pull = ts.vjp(lambda q, k, v: ts.cast(ts.attention(q, k, v, causal=causal), "bf16"),
                         q, k, v)
        return y, tuple(ts.cast(x, "bf16") for x in pull(g))

    return both


def vendor(q: Any, k: Any, v: Any, g: Any, causal: bool) -> Any:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return y, torch.autograd.grad(y, (q, k, v), g)


def measured(D: int, S: int, causal: bool, both: Callable) -> dict[str, Any]:
    heads = max(1, ROWS // S)
    q, k, v, g = (torch.randn(1, heads, S, D, device="cuda", dtype=torch.bfloat16)
                  for _ in "qkvg")
    for x in (q, k, v):
        x.requires_grad_()
    given = [ts.from_dlpack(x.detach()) for x in (q, k, v, g)]
    y, found = both(*given)
    again = both(*given)[1]
    wanted = vendor(q, k, v, g, causal)[1]
    errors, same = [], True
    for x, z, w in zip(found, again, wanted, strict=True):
        errors.append(distance(x, w))
        same = same and bool((as_torch(x) == as_torch(z)).all())
    times = clocked_in_turn({"tessera": lambda: both(*given),
                             "cuDNN": lambda: vendor(q, k, v, g, causal)})
    flops = 14 * heads * S * S * D / (2 if causal else 1)
    return {"ms": {n: round(t, 4) for n, t in times.items()},
            "TFLOP/s": {n: round(flops / t / 1e9) for n, t in times.items()},
            "of cuDNN": round(times["cuDNN"] / times["tessera"], 3),
            "errors": [float(f"{e:.1e}") for e in errors], "two runs equal": same}


def parts(both: Callable, S: int, D: int) -> dict[str, Any]:
    """Microseconds and TFLOP/s of each launch."""
    x = [ts.from_dlpack(torch.randn(1, ROWS // S, S, D, device="cuda", dtype=torch.bfloat16))
         for _ in range(4)]
    both(*x)
    with ts.debug.profile() as p:
        both(*x)
    return {x["name"]: [x["us"], x["tflops"]] for x in p.launches.figures()["launches"]}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("sizes", type=int, nargs="*", default=[64, 128])
    flags.add_argument("--lengths", type=int, nargs="*", default=[1024, 4096, 16384])
    flags.add_argument("--parts", action="store_true")
    a = flags.parse_args()
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    for D in a.sizes:
        for causal in (True, False):
            both = ours(D, causal)
            for S in a.lengths:
                name = f"D {D}, S {S}, {'causal' if causal else 'full'}"
                figures[name] = measured(D, S, causal, both)
                if a.parts:
                    figures[name]["parts"] = parts(both, S, D)
                print(name, json.dumps(figures[name]), flush=True)
    ratios = [f["of cuDNN"] for f in figures.values() if isinstance(f, dict)]
    figures["geometric mean of cuDNN"] = round(statistics.geometric_mean(ratios), 3)
    print(figures["geometric mean of cuDNN"])
    record.write("attention_backward", figures, shown=False)


if __name__ == "__main__":
    main()
