"""Matrix products of many shapes beside cuBLAS, as `tessera.stdlib.gemm` gives them, on one GPU.

    python benchmarks/matmuls.py                       40 shapes in four layouts, bf16
    python benchmarks/matmuls.py --layouts nt --shapes rows "deep K"
    python benchmarks/matmuls.py --types fp8 "fp8 fast" tf32 f32 f16 int8     two cubes

Nothing is set. Each product is compared with one in f64 on some of its rows. Times are medians of
replays of CUDA graphs that hold many launches, so that they are of the GPU alone; ours and
cuBLAS's (torch.mm, of bytes torch._scaled_mm and torch._int_mm) run in turn. `--calls` adds those
of plain calls, where small products wait for the host. Writes products.json for bf16 alone and
matmuls.json for other types, in benchmarks/results or in $OUT when that is set. Shapes that were
the slowest beside cuBLAS in such a file come first, and those below 0.97 are said again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import record
import torch
from gpu_timing import Runs, captured, compile_calls, distance, in_turn

import tessera as ts
from tessera.stdlib import gemm
from tessera.tune.routines import PRODUCTS as SHAPES

Shape = tuple[int, int, int]  # M, N, K
GRAPH_US = 1200  # of the launches in one graph
LAYOUTS = ("nt", "nn", "tn", "tt")


def operands(shape: Shape, layout: str, dtype: Any, make: Any = torch.randn) -> tuple[Any, Any]:
    """As they lie: [M, K] or, 't', [K, M]; [K, N] or, 't', [N, K]."""
    M, N, K = shape
    shapes = (M, K) if layout[0] == "n" else (K, M), (K, N) if layout[1] == "n" else (N, K)
    wide = torch.float32 if dtype == torch.float32 else torch.bfloat16
    a, b = (make(*s, device="cuda", dtype=wide).to(dtype) for s in shapes)
    return a, b


@dataclass(frozen=True)
class Kind:
    """A type of operands. routine, options: how ours multiplies it.  layouts: that cuBLAS has."""

    dtype: Any
    routine: Any = gemm
    options: dict[str, Any] = field(default_factory=dict)
    layouts: tuple[str, ...] = LAYOUTS
    fast: bool = False

    def given(self, layout: str) -> dict[str, Any]:
        return {f"transpose_{x}": way == "t" for x, way in zip("ab", layout, strict=True)
                } | self.options


FP8 = {"dtype": "bf16"}
KINDS = {
    "bf16": Kind(torch.bfloat16), "f16": Kind(torch.float16), "f32": Kind(torch.float32),
    "tf32": Kind(torch.float32, options={"precision": "tf32"}, fast=True),
    "fp8": Kind(torch.float8_e4m3fn, options=FP8, layouts=("nt",)),
    "int8": Kind(torch.int8, layouts=("nt",)),
    "fp8 fast": Kind(torch.float8_e4m3fn, gemm.with_schedule(ts.Schedule(FAST_SUMS=True)), FP8,
                     ("nt",), True)}


def sides(a: Any, b: Any, layout: str, kind: Kind) -> Runs:
    """Both products of the same operands."""
    x, y = a.T if layout[0] == "t" else a, b.T if layout[1] == "t" else b
    how, run = kind.given(layout), kind.routine
    if a.dtype == torch.float8_e4m3fn:
        one = torch.ones((), device="cuda")
        return {"tessera": lambda: run(a, b, **how), "cuBLAS": lambda: torch._scaled_mm(
            x, y, one, one, out_dtype=torch.bfloat16, use_fast_accum=kind.fast)}
    theirs = torch._int_mm if a.dtype == torch.int8 else torch.mm
    return {"tessera": lambda: run(a, b, **how), "cuBLAS": lambda: theirs(x, y)}


def require(title: str, a: Any, b: Any, layout: str, runs: Runs) -> None:
    """Some rows of each result against f64; ours may err as cuBLAS does and half an ulp."""
    if a.dtype == torch.float8_e4m3fn:
        a, b = a.float(), b.float()
    a, b = a.T if layout[0] == "t" else a, b.T if layout[1] == "t" else b
    rows = torch.linspace(0, a.shape[0] - 1, min(a.shape[0], 16), device="cuda").long()
    want = a[rows].double() @ b.double()
    errors = {n: distance(run()[rows], want) for n, run in runs.items()}
    if not errors["tessera"] <= 1.1 * errors["cuBLAS"] + 1e-4:
        raise SystemExit(f"{title}: relative errors {errors}")


def measured(runs: Runs, shape: Shape, rounds: int) -> dict[str, float]:
    """Microseconds on the GPU."""
    estimate = max(2.5, 2 * prod(shape) / 6e8)
    launches = max(1, min(100, round(GRAPH_US / estimate)))
    graphs = {name: captured([run] * launches) for name, run in runs.items()}
    us = in_turn(graphs, rounds=rounds)
    return {name: of_all / launches for name, of_all in us.items()}


def called(runs: Runs, calls: int = 200) -> dict[str, float]:
    """Microseconds of plain calls in a row."""
    return in_turn(runs, calls, 3)


def product(shape: Shape, layout: str, kind: Kind, args: argparse.Namespace) -> dict[str, Any]:
    """Of one product: microseconds of both sides, their ratio, and why ours ran as it did."""
    a, b = operands(shape, layout, kind.dtype)
    runs = sides(a, b, layout, kind)
    require(f"{layout} {shape}", a, b, layout, runs)
    why, _, chosen = kind.routine.notes[0].partition(": ")
    why += ", from the table" * chosen.startswith("from the table")
    times = measured(runs, shape, args.rounds)
    found: dict[str, Any] = {**{n: round(t, 2) for n, t in times.items()},
                             "ratio": round(times["cuBLAS"] / times["tessera"], 3), "how": why}
    if args.calls:
        plain = called(runs, max(5, min(200, round(2e4 / times["cuBLAS"]))))
        found["calls"] = round(plain["cuBLAS"] / plain["tessera"], 3)
        found["us of a call"] = round(plain["tessera"], 1)
    return found


def of_type(name: str, kind: Kind, shapes: list[Shape], args: argparse.Namespace
            ) -> Iterator[dict[str, Any]]:
    """The products of one type and what they come to, with those of each shape."""
    torch.backends.cuda.matmul.allow_tf32 = kind.fast
    layouts = [w for w in args.layouts if w in kind.layouts]
    start = time.perf_counter()
    kernels = compile_calls((kind.routine, operands(s, w, kind.dtype, torch.empty), kind.given(w))
                            for s in shapes for w in layouts)
    torch.cuda.empty_cache()
    print(f"{name}: {kernels} kernels compiled in {time.perf_counter() - start:.0f} s", flush=True)
    found: dict[str, Any] = {}
    for shape in shapes:
        title = titled(shape)
        found[title] = {w: product(shape, w, kind, args) for w in layouts}
        print(f"{title:24}", "  ".join(
            f"{w} {f['tessera']:.1f} us {f['ratio']:.2f}" + (
                f" ({f['calls']:.2f}, {f['us of a call']:.0f} us)" if args.calls else "")
            for w, f in found[title].items()), "|", found[title][layouts[0]]["how"],
            flush=True)
        yield {"total": total_of(found, layouts), "products": found}
    weak = sorted((f["ratio"], title, w, f) for title, by in found.items() for w, f in by.items()
                  if f["ratio"] < SAID_BELOW)
    for ratio, title, w, f in weak:
        print(f"below {SAID_BELOW}: {ratio} {w} {title}: {f['tessera']} us, cuBLAS {f['cuBLAS']}; "
              f"{f['how']}")
    print(name, json.dumps(total_of(found, layouts)), flush=True)


def titled(shape: Shape) -> str:
    return " x ".join(map(str, shape))


def total_of(found: dict[str, Any], layouts: list[str]) -> dict[str, Any]:
    ratios = {w: [f[w]["ratio"] for f in found.values()] for w in layouts}
    everything = [r for rs in ratios.values() for r in rs]
    means = {w: round(statistics.geometric_mean(rs), 3) for w, rs in ratios.items()}
    return {"geometric mean": round(statistics.geometric_mean(everything), 3),
            "least": min(everything), "below 0.92": sum(r < 0.92 for r in everything), **means}


def weakest_first(shapes: list[Shape], known: dict[str, Any]) -> list[Shape]:
    """known: a file of results."""
    def least(shape: Shape) -> float:
        by = known.get("bf16", {}).get("products", {}).get(titled(shape), {})
        return min((f["ratio"] for f in by.values()), default=0.0)

    return sorted(shapes, key=least)


SAID_BELOW = 0.97
LARGE = [(n, n, n) for n in (4096, 8192)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--types", nargs="*", choices=KINDS, default=["bf16"])
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", action="store_true")
    args = parser.parse_args()
    began = time.perf_counter()
    file = "products" if args.types == ["bf16"] else "matmuls"
    last = record.RESULTS / f"{file}.json"
    known = json.loads(last.read_text()) if last.exists() else {}
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    for name in args.types:
        shapes = weakest_first([s for group in args.shapes for s in SHAPES[group]], known)
        for found in of_type(name, KINDS[name], shapes if name == "bf16" else LARGE, args):
            figures[name] = found
            figures["seconds"] = round(time.perf_counter() - began)
            record.write(file, figures, shown=False, indent=1)


if __name__ == "__main__":
    main()
