"""Matmuls of few rows with weights of 4 and 6 bits beside cuBLAS with bf16 weights, on one GPU.

    python benchmarks/packed_weights.py
    python benchmarks/packed_weights.py --codes fp4_e2m1 --rows 16 64

y = x w' with w [8192, 8192], by `tessera.stdlib.gemm_packed`: codes in rows and, with @packed_for,
in the order in which products with rows of that type read them. Some columns of each result are
compared with f64. Each call reads other weights, so that L2 does not hold them. Times are medians
of replays of CUDA graphs; both sides run in turn. Writes benchmarks/results/packed_weights.json, or
$OUT/packed_weights.json when OUT is set.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import record
import torch
from gpu_timing import captured, compile_calls, in_turn, require

import tessera as ts
from tessera.numerics import decode, find_dtype, unpack
from tessera.stdlib import gemm_packed

N = K = 8192
COPIES, CHECKED, REPEATS = 6, 64, 4  # weights, columns of a result, of all weights in a graph
CODES = ("fp4_e2m1", "fp6_e2m3", "int4")
X = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
TYPES = {"bf16": "bf16", "fp8": "fp8_e4m3"}
ROWS = (1, 4, 16, 32, 64)
ORDER = "@packed_for"


def weights(codes: str) -> tuple[list[ts.Tensor], torch.Tensor]:
    """Random codes, and the numbers of the first rows of the first ones."""
    kind = find_dtype(codes)
    raw = [torch.randint(0, 256, (N, K * kind.bits // 8), dtype=torch.uint8, device="cuda")
           for _ in range(COPIES)]
    numbers = decode(unpack(raw[0][:CHECKED].cpu().numpy(), kind, K), kind)
    return [ts.from_bytes(r, codes, (N, K)) for r in raw], torch.tensor(
        np.asarray(numbers, np.float64), device="cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--codes", nargs="*", choices=CODES, default=CODES)
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    given = {rows: torch.randn(rows, K, device="cuda") for rows in args.rows}
    drawn = {codes: weights(codes) for codes in args.codes}
    wide = [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    laid = {(codes, name): [ts.cast(w, f"{codes} {ORDER}({TYPES[name]})") for w in ws]
            for codes, (ws, _) in drawn.items() for name in X if codes != "int4"}
    compile_calls((gemm_packed, (x.to(kind), ws[0]), {}) for x in given.values()
                  for name, kind in X.items() for codes in drawn
                  for ws in (drawn[codes][0], laid.get((codes, name))) if ws)
    found: dict[str, Any] = {}
    for rows, numbers in given.items():
        plain = numbers.to(torch.bfloat16)
        runs: dict[str, Any] = {"cuBLAS": lambda p=plain: [
            torch.mm(p, w.T) for w in wide * (COPIES // len(wide))]}
        for codes, (ws, exact) in drawn.items():
            for name, kind in X.items():
                x = numbers.to(kind)
                for order, them in (("", ws), (ORDER, laid.get((codes, name)))):
                    if them is not None:
                        require(f"{codes}{order}, {name}, {rows} rows",
                                gemm_packed(x, them[0])[:, :CHECKED],
                                x.float().double() @ exact.T, 2**-8)
                        runs[f"{codes}{order} {name}"] = lambda x=x, ws=them: [
                            gemm_packed(x, w) for w in ws]
        graphs = {n: captured([run] * REPEATS) for n, run in runs.items()}
        us = in_turn(graphs, rounds=args.rounds)
        times = {n: t / (COPIES * REPEATS) for n, t in us.items()}
        found[str(rows)] = {n: {"us": round(t, 2), "ratio": round(times["cuBLAS"] / t, 2)}
                            for n, t in times.items()}
        print(f"{rows:3} rows", "  ".join(f"{n} {f['us']} us {f['ratio']:.2f}"
                                          for n, f in found[str(rows)].items()), flush=True)
    record.write("packed_weights", {"device": torch.cuda.get_device_name(), "rows": found},
                 shown=False)


if __name__ == "__main__":
    main()
