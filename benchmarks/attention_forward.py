"""Attention beside PyTorch's, by cuDNN and by FlashAttention, on one GPU.

    python benchmarks/attention_forward.py [D ...] [--lengths 512 16384] [--processes 10]

Of bf16 operands [1, H, S, D] with 262144 rows of heads in all, causal and full; ours is
stdlib.flash_attention_2 under ts.jit with nothing set, theirs scaled_dot_product_attention by the
backend of each. Times are medians over rounds of calls one behind the other, interleaved; the ratio
is that of the quicker of the two. Errors are distances from f64 of one head, relative to its
length. Needs torch and a GPU. Writes benchmarks/results/attention_forward.json, or to $OUT when
that is set, anew with each result. Processes compile side by side; when all have, they measure one
by one.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from typing import Any

import record
import side_processes
import torch
import torch.nn.functional as F
from attention_backward import ROWS
from gpu_timing import clocked_in_turn, distance
from torch.nn.attention import SDPBackend, sdpa_kernel

import tessera as ts
from tessera import stdlib

BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention": SDPBackend.FLASH_ATTENTION}
SIZES, LENGTHS = (64, 96, 128, 192, 256), (512, 1024, 2048, 4096, 8192, 16384)


def operands(D: int, S: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, ROWS // S, S, D, device="cuda", dtype=torch.bfloat16) for _ in "qkv"]


def of_torch(backend: SDPBackend, causal: bool, x: list[torch.Tensor]) -> torch.Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*x, is_causal=causal)


def prepared(D: int, S: int, causal: bool) -> tuple[int, int, bool, Any, dict[str, float]]:
    """Compiled and run once, and how far each is from f32."""
    x = operands(D, S)
    one = ts.jit(lambda q, k, v: stdlib.flash_attention_2(q, k, v, causal=causal))
    q, k, v = (t[0, -1].double() for t in x)
    s = q @ k.T * D ** -0.5
    if causal:
        s = s.masked_fill(~torch.ones(S, S, dtype=torch.bool, device="cuda").tril(), -math.inf)
    want = torch.softmax(s, -1) @ v
    del s
    made = {"tessera": torch.from_dlpack(one(*map(ts.from_dlpack, x)))}
    for name, backend in BACKENDS.items():
        try:
            made[name] = of_torch(backend, causal, x)
        except RuntimeError as e:  # a backend refuses sizes that it does not have
            print(f"{name}, D {D}: {e}", file=sys.stderr)
    errors = {name: float(f"{distance(y[0, -1], want):.2e}") for name, y in made.items()}
    del made, want, x
    torch.cuda.empty_cache()
    return D, S, causal, one, errors


def measured(D: int, S: int, causal: bool, one: Any, errors: dict[str, float]) -> dict[str, Any]:
    x = operands(D, S)
    given = [ts.from_dlpack(t) for t in x]
    ms = clocked_in_turn({"tessera": lambda: one(*given)} | {
        name: lambda backend=backend: of_torch(backend, causal, x)
        for name, backend in BACKENDS.items() if name in errors}, rounds=5, seconds=0.02)
    best = min(t for name, t in ms.items() if name != "tessera")
    flops = 4 * ROWS * S * D / (2 if causal else 1)
    return {"ms": {n: round(t, 4) for n, t in ms.items()}, "errors": errors,
            "TFLOP/s": {n: round(flops / t / 1e9) for n, t in ms.items()},
            "ratio": round(best / ms["tessera"], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("D", type=int, nargs="*", default=SIZES)
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--processes", type=int, default=10)
    side_processes.flag(parser)
    given = parser.parse_args()
    if given.work is not None:
        return side_processes.work(given.work, prepared, measured)
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    cases = [[D, S, causal] for D in given.D for causal in (True, False) for S in given.lengths]
    ratios: list[float] = []
    for (D, S, causal), found in side_processes.results(__file__, cases, given.processes):
        case = f"D {D}, S {S}, {'causal' if causal else 'full'}"
        figures[case] = found
        ratios.append(found["ratio"])
        figures["geometric mean"] = round(statistics.geometric_mean(ratios), 3)
        print(f"{case}:", json.dumps(found), flush=True)
        record.write("attention_forward", figures, shown=False)
    print("geometric mean", figures["geometric mean"], "least", min(ratios))
    return None


if __name__ == "__main__":
    main()
