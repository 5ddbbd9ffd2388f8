"""The kernels of attention's gradient over sizes of blocks, and attention with dropout, on one GPU.

    python benchmarks/attention_blocks.py

Microseconds of each kernel, and how many products of queries and keys it computes for each that is
needed: with a causal mask large blocks compute more. Then a layer's attention with dropout, result
and gradient, beside none and beside PyTorch's. Needs torch and a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import record
import torch
import torch.nn.functional as F
from attention_backward import ROWS
from gpu_timing import clocked_in_turn

import tessera as ts
from tessera.kernels.attention_backward import attention_keys, attention_queries

BLOCKS = {64: {attention_queries: ((192, 80), (192, 64), (128, 64), (128, 80), (128, 128)),
               attention_keys: ((128, 64), (128, 80), (192, 64), (192, 32))},
          128: {attention_queries: ((128, 64), (128, 80), (192, 32)),
                attention_keys: ((128, 64), (128, 48), (128, 32))}}


def computed(BM: int, BN: int, S: int, causal: bool) -> float:
    """Products for each that is needed."""
    blocks = (math.ceil((min(S, q + BM) if causal else S) / BN) for q in range(0, S, BM))
    return BM * BN * sum(blocks) / (S * (S + 1) / 2 if causal else S * S)


def over_blocks(kernel: Any, blocks: Any, D: int, S: int, causal: bool) -> dict[str, Any]:
    heads = ROWS // S
    q, k, v, g, a, b = (ts.from_dlpack(torch.randn(heads, S, D, device="cuda",
                                                   dtype=torch.bfloat16)) for _ in range(6))
    lse, delta = (ts.from_dlpack(torch.full((heads, S), 5.0, device="cuda")) for _ in range(2))
    outs = (a, b) if kernel is attention_keys else (a,)

    def run(BM: int, BN: int) -> None:
        kernel(q, k, v, g, lse, delta, *outs, D**-0.5, group=1, BM=BM, BN=BN, causal=causal)

    ms = clocked_in_turn({f"{m}x{n}": lambda m=m, n=n: run(m, n) for m, n in blocks}, rounds=3,
                         seconds=0.01)
    return {f"{m}x{n}": [round(1e3 * ms[f"{m}x{n}"], 1), round(computed(m, n, S, causal), 2)]
            for m, n in blocks}


def with_dropout(B: int, H: int, S: int, D: int) -> dict[str, float]:
    q, k, v, g = (torch.randn(B, H, S, D, device="cuda", dtype=torch.bfloat16) for _ in "qkvg")
    for x in (q, k, v):
        x.requires_grad_()
    given = [ts.from_dlpack(x.detach()) for x in (q, k, v, g)]

    def ours(rate: float) -> Any:
        @ts.jit
        def both(q: Any, k: Any, v: Any, g: Any) -> Any:
            y, pull = ts.vjp(lambda *x: ts.cast(ts.attention(*x, causal=True, dropout=rate),
                                                "bf16"), q, k, v)
            return y, tuple(ts.cast(z, "bf16") for z in pull(g))

        return lambda: both(*given)

    def theirs() -> Any:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        return torch.autograd.grad(y, (q, k, v), g)

    runs = {"dropout": ours(0.1), "none": ours(0.0), "torch with dropout": theirs}
    return {name: round(t, 4) for name, t in clocked_in_turn(runs, rounds=3).items()}


def main() -> None:
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    for D, kernels in BLOCKS.items():
        for S in (1024, 2048, 4096):
            for causal in (True, False):
                for kernel, blocks in kernels.items():
                    name = f"{kernel.__name__}, D {D}, S {S}, {'causal' if causal else 'full'}"
                    figures[name] = over_blocks(kernel, blocks, D, S, causal)
                    print(name, figures[name], flush=True)
    for B, H, S, D in ((8, 12, 1024, 64), (4, 8, 2048, 128)):
        name = f"dropout, ms, B {B}, H {H}, S {S}, D {D}"
        figures[name] = with_dropout(B, H, S, D)
        print(name, figures[name], flush=True)
    record.write("attention_blocks", figures, shown=False)


if __name__ == "__main__":
    main()
