"""Kernels of the examples and of the library beside others, in one process on one GPU.

    python benchmarks/kernels.py [memory] [gemm] [attention] [library] [compile]

Times are medians of device events; kernels that are compared run interleaved, each in every
position, so that clocks and temperature meet all of them alike. Every result is checked first.
Needs torch and a GPU. Writes benchmarks/results/kernels.json, or $OUT/kernels.json when OUT is set,
anew with each part.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_timing
import library
import record
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tessera as ts

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))
copies, rows = importlib.import_module("01_copy"), importlib.import_module("03_softmax")
products, flash = importlib.import_module("04_gemm"), importlib.import_module("05_attention")
MMA = ts.Schedule(block=(128, 256), k=64, warps=8, stages=3, unit="mma")


def interleaved(runs: gpu_timing.Runs, rounds: int = 15, warm_s: float = 0.5) -> dict[str, float]:
    """Milliseconds of each: the median over rounds.

    A round runs each kernel once in every position of the order (a Latin square of a random order),
    and takes its mean there: what ran before, and how hot that left the GPU, decides 5 to 15 % of a
    time, and a median over random orders falls on either side. The GPU is first kept busy for
    warm_s, and then never idle: its clocks are those of lasting work.
    """
    start = time.perf_counter()
    while time.perf_counter() - start < warm_s:
        for run in runs.values():
            run()
        torch.cuda.synchronize()
    rows = []
    for _ in range(rounds):
        order = random.sample(list(runs), len(runs))
        square = [order[i:] + order[:i] for i in range(len(order))]
        rows.append([_timed(name, runs[name]) for line in square for name in line])
    torch.cuda.synchronize()
    means = [{name: statistics.fmean(start.elapsed_time(stop) for n, start, stop in row
                                     if n == name) for name in runs} for row in rows]
    return {name: statistics.median(mean[name] for mean in means) for name in runs}


def _timed(name: str, run: Callable[[], Any]) -> tuple[str, Any, Any]:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    return name, start, stop


def show(title: str, figures: dict[str, Any]) -> dict[str, Any]:
    print(title, json.dumps(figures), flush=True)
    return figures


def memory() -> dict[str, Any]:
    """GB/s, read and written, of copy, add, softmax and rms norm."""
    n = 1 << 26
    x, y = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
    out = torch.empty_like(x)
    copies.copy(x, out)
    gpu_timing.require("copy", out, x, 0.0)
    copies.add(x, y, out)
    gpu_timing.require("add", out, x + y, 0.0)
    t = interleaved({"memcpy": lambda: out.copy_(x), "copy": lambda: copies.copy(x, out),
                     "add": lambda: copies.add(x, y, out)})
    rate = {k: (12 if k == "add" else 8) * n / 1e6 / v for k, v in t.items()}
    done = {"vectors": show("f32[2^26], GB/s", _rates(rate, rate["memcpy"]))}
    M, N = 16384, 4096
    a, b = (torch.randn(M, N, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    w = torch.randn(N, device="cuda", dtype=torch.bfloat16)

    def rms(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(a, (N,), w, 1e-6)

    rows.softmax(a, b)
    gpu_timing.require("softmax", b, torch.softmax(a.double(), -1), 4e-3)
    rows.rms_norm(a, w, b)
    gpu_timing.require("rms_norm", b, rms(a.float(), w.float()), 4e-3)
    soft, norm = torch.compile(lambda a: torch.softmax(a, -1)), torch.compile(rms)
    t = interleaved({"memcpy": lambda: b.copy_(a), "softmax": lambda: rows.softmax(a, b),
                     "torch.compile softmax": lambda: soft(a),
                     "rms_norm": lambda: rows.rms_norm(a, w, b),
                     "torch.compile rms_norm": lambda: norm(a, w)})
    rate = {k: 4 * M * N / 1e6 / v for k, v in t.items()}
    done["rows"] = show("bf16[16384, 4096], GB/s", _rates(rate, rate["memcpy"]))
    return done


def _rates(rate: dict[str, float], base: float) -> dict[str, Any]:
    return {k: {"GB/s": round(v), "of memcpy": round(v / base, 3)} for k, v in rate.items()}


def _flops(flops: float, times: dict[str, float], base: str) -> dict[str, Any]:
    return {k: {"TFLOP/s": round(flops / t / 1e9), f"of {base}": round(times[base] / t, 3)}
            for k, t in times.items()}


def gemm() -> dict[str, Any]:
    """TFLOP/s of bf16 products beside cuBLAS: through wgmma, and with the schedule on mma.sync."""
    return {str(n): _gemm(n, products.gemm_nt.with_schedule(MMA)) for n in (4096, 8192)}


def _gemm(n: int, mma: Any) -> dict[str, Any]:
    A, B = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    Bt, want = B.T.contiguous(), A @ B.T
    C = torch.empty_like(A)
    ours: gpu_timing.Runs = {"NT": lambda: products.gemm_nt(A, B, C),
                             "NN": lambda: products.gemm_nn(A, Bt, C),
                             "NT mma.sync": lambda: mma(A, B, C, BM=128, BN=256, BK=64)}
    for name, run in ours.items():
        C.fill_(math.nan)
        run()
        gpu_timing.require(f"gemm {name} {n}", C, want, 2e-3)
    vendor: gpu_timing.Runs = {"cuBLAS": lambda: torch.mm(A, B.T, out=C),
                               "cuBLAS NN": lambda: torch.mm(A, Bt, out=C)}
    times = interleaved({**vendor, **ours})
    return show(f"GEMM {n}^3", _flops(2 * n**3, times, "cuBLAS"))


def attention() -> dict[str, Any]:
    """TFLOP/s of the forward pass beside cuDNN, head size 128."""
    done, D = {}, 128
    for B, S in ((64, 4096), (32, 8192), (16, 16384)):
        for causal in (False, True):
            q, k, v = (torch.randn(B, S, D, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
            out, scale = torch.full_like(q, math.nan), math.log2(math.e) / math.sqrt(D)

            def vendor(q=q, k=k, v=v, causal=causal) -> torch.Tensor:
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    return F.scaled_dot_product_attention(q[None], k[None], v[None],
                                                          is_causal=causal)[0]

            def ours(q=q, k=k, v=v, out=out, causal=causal, scale=scale) -> None:
                flash.attention(q, k, v, out, scale, causal=causal)

            ours()
            gpu_timing.require(f"attention {S} {causal}", out, vendor(), 6e-3)
            times = interleaved({"cuDNN": vendor, "tessera": ours})
            flops = 4 * B * S * S * D / (2 if causal else 1)
            name = f"{B}x{S} {'causal' if causal else 'full'}"
            done[name] = show(f"attention {name}", _flops(flops, times, "cuDNN"))
    return done


def routines() -> dict[str, Any]:
    """Every benchmark that a record of the standard library has; see library.py."""
    done = {}
    for entry in library.entries():
        runs = entry.runs(torch)
        got, want = (r if isinstance(r, tuple) else (r,) for r in (f() for f in runs.values()))
        for y, z in zip(got, want, strict=True):
            gpu_timing.require(entry.title, y, z, entry.limit)
        done[entry.title] = show(entry.title, entry.figures(interleaved(runs)))
    return done


FIRST = """
import time, sys
sys.path[:0] = {path!r}
import torch, tessera as ts, importlib
x, y = torch.zeros(4096, device="cuda"), torch.zeros(4096, device="cuda")
copies = importlib.import_module("01_copy")
for call in (lambda: copies.saxpy(x, y, 2.0), lambda: copies.copy(x, y)):
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    print(time.perf_counter() - start)
"""


def compile_time() -> dict[str, Any]:
    """Milliseconds of the first calls of two small kernels in a new process, compiled and then from
    the disk cache. Before the first, the process has imported tessera and torch."""
    import tempfile

    path = [str(ROOT), str(ROOT / "examples")]
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TESSERA_CACHE_DIR": folder}
        took = [subprocess.run([sys.executable, "-c", FIRST.format(path=path)], env=env,
                               capture_output=True, text=True, check=True).stdout.split()
                for _ in range(4)]
    first, *again = [[1e3 * float(t) for t in run] for run in took]
    middle = sorted(again)[1]
    return show("compile, ms", {"first call": round(first[0]),
                                "from the disk cache": round(middle[0], 1),
                                "from the disk cache, second kernel": round(middle[1], 1)})


PARTS = {"memory": memory, "gemm": gemm, "attention": attention, "library": routines,
         "compile": compile_time}


def main() -> None:
    asked = [a for a in sys.argv[1:] if a in PARTS] or list(PARTS)
    began = time.perf_counter()
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    for name in asked:
        try:
            figures[name] = PARTS[name]()
        except Exception as failed:  # the other parts are still worth their figures
            figures[name] = {"failed": f"{type(failed).__name__}: {str(failed)[:300]}"}
            print(name, figures[name], flush=True)
        figures["seconds"] = round(time.perf_counter() - began)
        record.write("kernels", figures, shown=False)
    print("seconds", figures["seconds"])


if __name__ == "__main__":
    main()
