"""Attention in plain ops, in attention's kernels and with scores in memory, beside PyTorch.

    python benchmarks/plain_attention.py

Of [B, H, S, D] queries and T keys, the result and the cotangents of queries, keys and values: ours
through ts.jit and ts.vjp, the same without the pass that finds attention, and PyTorch's
scaled_dot_product_attention, which is told what to do; it takes a bias in the operands' type alone.
Times are medians over rounds of calls one behind the other, interleaved, in ms; the error is the
result's distance from f32 of the last sequence, relative to its length. Writes
benchmarks/results/plain_attention.json. Needs torch and a GPU.
"""

from __future__ import annotations

import json
import math
from typing import Any

import record
import torch
from gpu_timing import clocked_in_turn, distance
from torch.nn.functional import scaled_dot_product_attention

import tessera as ts
from tessera.graph.cuda import prepare

CASES = [("none", 4, 16, 4096, 4096, 64, "bf16"), ("none", 4, 16, 4096, 4096, 128, "bf16"),
         ("causal", 4, 16, 4096, 4096, 64, "bf16"), ("lengths", 4, 16, 4096, 4096, 64, "bf16"),
         ("keys", 4, 16, 4096, 4096, 64, "bf16"), ("keys", 8, 16, 512, 512, 64, "bf16"),
         ("none", 64, 12, 197, 197, 64, "bf16"), ("none", 8, 8, 4096, 77, 64, "bf16"),
         ("keys", 4, 16, 4096, 4096, 128, "bf16"), ("bias", 4, 16, 2048, 2048, 64, "bf16"),
         ("bias f32", 4, 16, 2048, 2048, 64, "bf16"), ("bias", 4, 16, 1024, 1024, 128, "bf16"),
         ("bias, its gradient too", 4, 16, 2048, 2048, 64, "bf16"),
         ("bias of all", 4, 16, 2048, 2048, 64, "bf16"),
         ("bools", 4, 16, 2048, 2048, 64, "bf16"), ("dropout", 8, 16, 512, 512, 64, "bf16"),
         ("dropout", 4, 16, 2048, 2048, 64, "bf16"), ("none", 4, 16, 1024, 1024, 64, "f32")]
RATE = 0.1


def ours(mask: str) -> Any:
    def attend(q: Any, k: Any, v: Any, n: Any = None) -> Any:
        S, T = q.shape[-2], k.shape[-2]
        s = ts.cast(q @ k.mT, "f32") * q.shape[-1] ** -0.5
        if mask == "causal":
            s = ts.where(ts.tril(ts.ones((S, T), "bool_")), s, -math.inf)
        if mask == "lengths":
            s = ts.where(ts.arange(T) < n[:, None, None, None], s, -math.inf)
        if mask == "keys":
            s = ts.where((n > 0)[:, None, None, :], s, -math.inf)
        if mask == "bools":
            s = ts.where(n > 0, s, -math.inf)
        if mask.startswith("bias"):
            s = s + n
        w = ts.cast(ts.softmax(s, axis=-1), v.type)
        return (ts.dropout(w, RATE) if mask == "dropout" else w) @ v

    return attend


def compiled(attend: Any, fused: bool, wanted: int) -> tuple[Any, Any]:
    """The result, and the result with the cotangents of as many operands, traced anew."""
    def both(g: Any, *a: Any) -> Any:
        y, pull = ts.vjp(lambda *x: attend(*x, *a[wanted:]), *a[:wanted])
        return y, pull(g)

    passes = list(prepare.PIPELINE)
    result, gradient = ts.jit(lambda *a: attend(*a)), ts.jit(lambda *a: both(*a))

    def first(*a: Any) -> tuple[Any, Any]:
        if not fused:
            prepare.PIPELINE[:] = [p for p in passes if p is not prepare.fused_attention]
        try:
            return result(*a[1:]), gradient(*a)
        finally:
            prepare.PIPELINE[:] = passes

    return first, (result, gradient)


def case(mask: str, B: int, H: int, S: int, T: int, D: int, dtype: str) -> dict[str, Any]:
    of = {"bf16": torch.bfloat16, "f32": torch.float32}[dtype]
    q, g = (torch.randn(B, H, S, D, device="cuda", dtype=of) for _ in "qg")
    k, v = (torch.randn(B, H, T, D, device="cuda", dtype=of) for _ in "kv")
    most = torch.randint(T // 2, T + 1, (B,), device="cuda", dtype=torch.int32)
    seen = torch.arange(T, device="cuda") < most[:, None]
    n = {"lengths": [most], "keys": [seen.to(torch.int32)],
         "bools": [(torch.rand(S, T, device="cuda") < 0.9).to(torch.int32)]}.get(mask, [])
    if mask.startswith("bias"):
        lead = (B, H) if "all" in mask else (H,)
        n = [torch.randn(*lead, S, T, device="cuda").to(torch.float32 if "f32" in mask else of)]
    wanted = 4 if "gradient" in mask else 3
    given = [ts.from_dlpack(x) for x in (g, q, k, v, *n)]
    runs: dict[str, Any] = {}
    for name, fused in (("ours", True), ("with scores", False)):
        first, (result, gradient) = compiled(ours(mask), fused, wanted)
        y = first(*given)[0]
        mine = torch.from_dlpack(y).float() if fused else mine
        runs[name] = lambda f=result: f(*given[1:])
        runs[f"{name}, gradient"] = lambda f=gradient: f(*given)
    hidden = seen[:, None, None, :] if n else None
    if mask == "bools" or mask.startswith("bias"):
        hidden = n[0] > 0 if mask == "bools" else n[0].to(of)
        hidden = hidden if hidden.ndim == 4 else hidden.expand(1, H, S, T)
    rule: dict[str, Any] = {"attn_mask": hidden, "is_causal": mask == "causal"}
    dropped = RATE if mask == "dropout" else 0.0
    leaves = [x.detach().requires_grad_() for x in (q, k, v, hidden)[:wanted]]
    runs["SDPA"] = lambda: scaled_dot_product_attention(q, k, v, dropout_p=dropped, **rule)
    runs["SDPA, gradient"] = lambda: torch.autograd.grad(
        scaled_dot_product_attention(*leaves[:3], dropout_p=dropped, **rule | (
            {"attn_mask": leaves[3]} if wanted > 3 else {})), leaves, g)
    wide = None if hidden is None else hidden[-1:]
    wide = wide if wide is None or wide.dtype == torch.bool else wide.float()
    want = scaled_dot_product_attention(*(x[-1:].float() for x in (q, k, v)), attn_mask=wide,
                                        is_causal=mask == "causal")
    error = distance(mine[-1:], want)
    ms = clocked_in_turn(runs, rounds=3, seconds=0.02)
    return {**{name: round(t, 3) for name, t in ms.items()},
            **({} if dropped else {"error": round(error, 5)})}


def main() -> None:
    torch.manual_seed(0)
    cases: dict[str, dict[str, float]] = {}
    for mask, B, H, S, T, D, dtype in CASES:
        name = f"{mask}: {B} x {H} of {S} x {T}, D {D}, {dtype}"
        found = cases[name] = case(mask, B, H, S, T, D, dtype)
        print(name, json.dumps(found), flush=True)
        torch.cuda.empty_cache()
        record.write("plain_attention", {"device": torch.cuda.get_device_name(), "cases": cases},
                     shown=False)


if __name__ == "__main__":
    main()
