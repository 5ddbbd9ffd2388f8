"""bf16 products by mma.sync, beside cuBLAS: C[M, N] = A[M, K] B[N, K]^T.

    python benchmarks/gemm_mma.py

One JSON line for each size and block: TFLOP/s (median of launches timed with events), the same of
torch, their ratio, and the largest difference relative to torch's result. Compiled for the plain
target of the device, without what its own generation adds (wgmma): what every GPU since sm_80 runs.
Needs a GPU and PyTorch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import tessera as ts  # noqa: E402  found through the line above
from tessera import Tensor, bf16  # noqa: E402

LAUNCHES = 30
# BM, BN, BK, lanes, stages
BLOCKS = ((128, 256, 64, 256, 4), (128, 256, 64, 256, 3), (256, 128, 64, 256, 4),
          (128, 256, 32, 256, 4), (128, 128, 64, 128, 3), (128, 128, 32, 128, 4),
          (128, 128, 64, 256, 3))
SIZES = (4096, 8192)


@ts.kernel
def gemm(A: Tensor["M", "K", bf16], B: Tensor["N", "K", bf16], C: Tensor["M", "N", bf16],
         BM=128, BN=256, BK=64):
    m, n = ts.tile.group_id(0) * BM, ts.tile.group_id(1) * BN
    acc = ts.tile.zeros((BM, BN))
    for k in range(0, K, BK):
        a = ts.tile.load(A[m:m+BM, k:k+BK])
        b = ts.tile.load(B[n:n+BN, k:k+BK])
        acc = ts.tile.dot(a, b.T, acc)
    C[m:m+BM, n:n+BN] = acc


def median_ms(run: Callable[[], object]) -> float:
    import torch

    for _ in range(3):
        run()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
             for _ in range(LAUNCHES)]
    for first, last in marks:
        first.record()
        run()
        last.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in marks)[LAUNCHES // 2]


def compiled(size: int, block: tuple[int, ...]):
    """The kernel for square matrices, and its grid."""
    from tessera.runtime.device import device
    from tessera.tile.cuda.compile import Facts, compile_function

    BM, BN, BK, lanes, stages = block
    shape = ts.zeros((size, size), bf16)
    bound = gemm.bind((shape, shape, shape), {"BM": BM, "BN": BN, "BK": BK})
    function = gemm.specialise(bound, gemm.choose(bound), False)
    major, minor = device().cc
    made = compile_function(function, lanes, schedule=ts.Schedule(stages=stages),
                            target=f"sm_{major}{minor}",
                            facts=Facts(frozenset("MNK"), frozenset("ABC")))
    return made, (size // BM, size // BN)


def measure(size: int, block: tuple[int, ...]) -> dict:
    import torch

    made, (down, across) = compiled(size, block)
    a, b = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    c, wanted = torch.empty_like(a), torch.empty_like(a)
    given = {"A": a.data_ptr(), "B": b.data_ptr(), "C": c.data_ptr()}
    values = [given[p.name] if p.kind == "tensor" else (down, across)[p.axis]
              if p.kind == "axis" else size for p in made.parameters]
    start = made.built.kernel.prepare((down * across,), dict(enumerate(values)), ())
    stream = torch.cuda.current_stream().cuda_stream
    ours, torchs = (median_ms(f) for f in (
        lambda: start(stream), lambda: torch.mm(a, b.t(), out=wanted)))
    error = ((c.float() - wanted.float()).abs().max() / wanted.float().abs().max()).item()
    flops = 2 * size ** 3
    found = made.built.resources
    return {"size": size, "block": block, "tflops": round(flops / ours / 1e9, 1),
            "cublas_tflops": round(flops / torchs / 1e9, 1), "ratio": round(torchs / ours, 3),
            "error": error, "registers": found.registers, "spills": found.spill_store_bytes,
            "shared_bytes": made.emitted.shared_bytes}


def main() -> None:
    for size in SIZES:
        for block in BLOCKS:
            print(json.dumps(measure(size, block)), flush=True)


if __name__ == "__main__":
    main()
