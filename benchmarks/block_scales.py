"""Matmuls of fp8 codes with scales of blocks on one GPU: 1 x 128 for a, 128 x 128 for weights.

    python benchmarks/block_scales.py
    python benchmarks/block_scales.py --shapes 4096x7168x2048 64x7168x2048

By `tessera.stdlib.gemm_block_scaled`, beside `gemm` of the same codes without scales, cuBLAS
without scales (torch._scaled_mm, exact sums), and cuBLAS with these scales where it has them. Some
rows of each result with scales are compared with f64. Times are medians of replays of CUDA graphs,
all in turn. Writes benchmarks/results/block_scales.json, or $OUT/block_scales.json when OUT is set.
"""

from __future__ import annotations

import argparse
from typing import Any

import gpu_timing
import record
import torch
from gpu_timing import Runs
from matmuls import FP8, Shape, measured, operands

from tessera.stdlib import gemm, gemm_block_scaled

# Cubes, and products of DeepSeek-V3's layers.
SHAPES: tuple[Shape, ...] = ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 7168, 2048),
                             (4096, 4096, 7168), (4096, 24576, 1536), (128, 7168, 2048),
                             (64, 4096, 7168), (16, 7168, 16384))
BLOCK, CHECKED = 128, 16  # codes of a scale, rows of a result


def scaled(shape: Shape) -> tuple[torch.Tensor, ...]:
    """Codes and scales of both operands."""
    M, N, K = shape
    a, b = operands(shape, "nt", torch.float8_e4m3fn)
    many = -(-K // BLOCK)
    s, t = (torch.rand(*of, device="cuda") + 0.5 for of in ((many, M), (-(-N // BLOCK), many)))
    return a, s, b, t


def sides(a: torch.Tensor, s: torch.Tensor, b: torch.Tensor, t: torch.Tensor) -> tuple[Runs, str]:
    """What runs, and why cuBLAS does not with these scales, if so."""
    one = torch.ones((), device="cuda")

    def cublas(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(a, b.T, x, y, out_dtype=torch.bfloat16)

    runs = {"tessera": lambda: gemm_block_scaled(a, s, b, t),
                  "tessera without": lambda: gemm(a, b, transpose_b=True, **FP8),
                  "cuBLAS without": lambda: cublas(one, one)}
    try:
        cublas(s.T, t.T)
    except (RuntimeError, ValueError) as why:
        return runs, str(why).partition("\n")[0]
    return runs | {"cuBLAS": lambda: cublas(s.T, t.T)}, ""


def require(title: str, given: tuple[torch.Tensor, ...], runs: Runs) -> None:
    a, s, b, t = given
    def along(x: torch.Tensor) -> torch.Tensor:
        return x.double().repeat_interleave(BLOCK, 1)[:, :a.shape[1]]

    rows = torch.linspace(0, a.shape[0] - 1, min(a.shape[0], CHECKED), device="cuda").long()
    x = a[rows].float().double() * along(s.T[rows])
    y = b.float().double() * along(t.repeat_interleave(BLOCK, 0)[:b.shape[0]])
    want = x @ y.T
    for name in {"tessera", "cuBLAS"} & set(runs):
        gpu_timing.require(f"{title}, {name}", runs[name]()[rows], want, 2**-8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", nargs="*", default=["x".join(map(str, s)) for s in SHAPES])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    shapes: list[Shape] = [tuple(map(int, s.split("x"))) for s in args.shapes]  # type: ignore[misc]
    operands_of = {shape: scaled(shape) for shape in shapes}
    gpu_timing.compile_calls(
        call for a, s, b, t in operands_of.values() for call in (
            (gemm_block_scaled, (a, s, b, t), {}),
            (gemm, (a, b), {"transpose_b": True, **FP8})))
    found: dict[str, Any] = {}
    for shape in shapes:
        title, given = " x ".join(map(str, shape)), operands_of[shape]
        runs, why = sides(*given)
        require(title, given, runs)
        how = gemm_block_scaled.notes[0].partition(":")[0]
        times = measured(runs, shape, args.rounds)
        found[title] = {n: round(t, 2) for n, t in times.items()} | {"how": how}
        print(f"{title:22}", "  ".join(f"{n} {t:.1f} us" for n, t in times.items()), "|", how,
              f"| cuBLAS: {why}" if why else "", flush=True)
    record.write("block_scales", {"device": torch.cuda.get_device_name(), "products": found},
                 shown=False)


if __name__ == "__main__":
    main()
