"""Matmuls of a GPT-2 step with what is fused into them, beside PyTorch's, in turn on one GPU.

    python benchmarks/matmul_epilogues.py

Written as a user would, through ts.jit on bf16 tensors: milliseconds and TFLOP/s of both, torch's
time over ours, and how far our result lies from that of f64. Ragged edges, NaN and biases of both
types are compared before any time is taken. Needs torch and a GPU; most of it is compiling.
"""

from __future__ import annotations

from typing import Any

import record
import torch
from gpu_timing import AHEAD_CYCLES, Runs, as_torch, distance, in_turn, require

import tessera as ts
from tessera import stdlib

HALF = "bf16 @accum(f32)"
M, D, HIDDEN = 32768, 768, 3072
PART = 1024  # rows that are compared with f64
gelu = torch.nn.functional.gelu


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(torch.bfloat16)


def half(x: Any) -> Any:
    return ts.cast(x, HALF)


def flipped(x: Any) -> Any:
    return ts.transpose(half(x))


def right_at_edges() -> None:
    for m, n, k in ((1000, 1096, 136), (129, 72, 64), (4096, HIDDEN, D)):
        x, w = normal(m, k), normal(k, n, scale=k**-0.5)
        x[3, 1] = float("nan")
        for b in (normal(n), normal(n).float()):
            y = ts.jit(lambda x, w, b: half(x) @ half(w) + half(b))(
                *(ts.from_dlpack(t) for t in (x, w, b)))
            got, want = as_torch(y), x.double() @ w.double() + b.double()
            assert got.isnan().equal(want.isnan()), (m, n, k)
            require(f"{m} x {n} x {k}", got.nan_to_num(), want.nan_to_num(), 4e-3)


def cases() -> Any:
    """(name, ours, arrays, torch's, flops, f64's)"""
    for K, N in ((D, D), (D, 3 * D), (D, HIDDEN), (HIDDEN, D)):
        x, w, b = normal(M, K), normal(K, N, scale=K**-0.5), normal(N)
        wt, flops = w.T.contiguous(), 2 * M * N * K
        want = x[:PART].double() @ w.double()
        yield (f"NN {K} to {N}", lambda x, w: half(x) @ half(w), (x, w),
               lambda x=x, w=w: x @ w, flops, want)
        yield (f"NN with bias {K} to {N}", lambda x, w, b: half(x) @ half(w) + half(b), (x, w, b),
               lambda x=x, w=w, b=b: torch.addmm(b, x, w), flops, want + b.double())
        yield (f"NT {K} to {N}", lambda x, w: half(x) @ flipped(w), (x, wt),
               lambda x=x, wt=wt: x @ wt.T, flops, want)
    x, w, b = normal(M, D), normal(D, HIDDEN, scale=D**-0.5), normal(HIDDEN)
    dy, w2, h = normal(M, D), normal(HIDDEN, D), normal(M, HIDDEN)
    flops = 2 * M * D * HIDDEN

    def kept(x: Any, w: Any, b: Any) -> Any:
        h = half(x) @ half(w) + half(b)
        return ts.gelu(h), h

    yield ("gelu, pre-activation kept", kept, (x, w, b),
           lambda: gelu(torch.addmm(b, x, w), approximate="tanh"), flops,
           gelu(x[:PART].double() @ w.double() + b.double(), approximate="tanh"))

    def back(dy: Any, w2: Any, h: Any) -> Any:
        return ts.vjp(ts.gelu, h)[1](half(dy) @ flipped(w2))

    h64 = h[:PART].double().requires_grad_()
    gelu(h64, approximate="tanh").backward(dy[:PART].double() @ w2.double().T)
    yield ("input gradient times gelu'", back, (dy, w2, h),
           lambda: torch.ops.aten.gelu_backward(dy @ w2.T, h, approximate="tanh"), flops, h64.grad)
    yield ("TN, 32768 deep", lambda x, g: flipped(x) @ half(g), (x, h), lambda: x.T @ h, flops,
           x.double().T @ h.double())


def main() -> None:
    torch.manual_seed(0)
    right_at_edges()
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name()}

    def note(name: str, runs: Runs, flops: float, error: float) -> None:
        us = in_turn(runs, calls=3, rounds=12, ahead_cycles=AHEAD_CYCLES)
        ms = {n: t / 1e3 for n, t in us.items()}
        figures[name] = {"ms": {n: round(t, 4) for n, t in ms.items()},
                         "TFLOP/s": {n: round(flops / t / 1e9) for n, t in ms.items()},
                         "of torch": round(ms["torch"] / ms["tessera"], 3),
                         "error": float(f"{error:.1e}")}
        print(name, figures[name], flush=True)

    for name, fn, arrays, theirs, flops, want in cases():
        f, given = ts.jit(fn), [ts.from_dlpack(a) for a in arrays]
        y = f(*given)
        error = distance(as_torch(y[0] if isinstance(y, tuple) else y)[:PART], want[:PART])
        note(name, {"tessera": lambda f=f, given=given: f(*given), "torch": theirs}, flops, error)
    for n in (2048, 4096, 8192):
        a, b = normal(n, n), normal(n, n, scale=n**-0.5)
        A, B = ts.from_dlpack(a), ts.from_dlpack(b)
        error = distance(as_torch(stdlib.gemm(A, B, transpose_b=True))[:PART],
                         a[:PART].double() @ b.double().T)
        note(f"library gemm NT {n}^3",
             {"tessera": lambda A=A, B=B: stdlib.gemm(A, B, transpose_b=True),
              "torch": lambda a=a, b=b: a @ b.T}, 2 * n**3, error)
    record.write("matmul_epilogues", figures, shown=False)


if __name__ == "__main__":
    main()
