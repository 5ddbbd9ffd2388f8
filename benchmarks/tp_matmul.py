"""Matmuls of tensor parallelism with their collective, in parts beside it and one after the other.

    mpirun -n 4 python benchmarks/tp_matmul.py                # [8192, 8192] x [8192, 28672], bf16
    torchrun --nproc-per-node 2 benchmarks/tp_matmul.py --rows 4096 --parts 1:1:1:1 1:3:4

Of all_gather(x) @ w, reduce_scatter(x @ w) and all_reduce(x @ w): milliseconds of a call in a row
of them, all ways in turn. Results are compared with f64 in some places. --parts: also in such.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import record

import tessera as ts
from tessera.mesh.sharding import cut_products, sharded_graph
from tessera.runtime.device import device

KIND = "bf16 @accum(f32)"
ROWS, COLUMNS = ts.ShardSpec(("row",), ("tp",)), ts.ShardSpec(("col",), ("tp",))
WHOLE = ts.ShardSpec(replicate=True)
CASES = {"all_gather": (ROWS, COLUMNS, COLUMNS), "reduce_scatter": (COLUMNS, ROWS, ROWS),
         "all_reduce": (COLUMNS, ROWS, WHOLE)}
CALLS, WHOLE_PRODUCT = 10, "1"


def function(out: Any, parts: str | None) -> Any:
    """x @ w in a layout, compiled with the matmul in parts "1:3:4"; None: in those that pay."""
    plain, usual = sharded_graph.cut_products, (cut_products.PARTS, cut_products.LEAST_GAIN)

    def called(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
        if parts == WHOLE_PRODUCT:
            sharded_graph.cut_products = lambda steps, mesh: list(steps)
        elif parts is not None:
            shares = tuple(map(int, parts.split(":")))
            cut_products.PARTS, cut_products.LEAST_GAIN = (shares,), 1e-6
        try:
            return made(x, w)
        finally:
            sharded_graph.cut_products = plain
            cut_products.PARTS, cut_products.LEAST_GAIN = usual

    made = ts.jit(lambda x, w: ts.shard(x @ w, out))
    called.plan = lambda: str(made.plan).partition(", ")[0]  # type: ignore[attr-defined]
    return called


def ms_of(f: Any, x: ts.Tensor, w: ts.Tensor, mesh: ts.dist.Mesh) -> float:
    stream = device(x.local.place)
    f(x, w)
    stream.synchronize()
    ts.dist.barrier(mesh=mesh)
    begin = time.perf_counter()
    for _ in range(CALLS):
        f(x, w)
    stream.synchronize()
    return 1e3 * (time.perf_counter() - begin) / CALLS


def error(y: ts.Tensor, X: np.ndarray, W: np.ndarray, out: Any) -> float:
    """The largest difference from f64 in some places of this rank's part, by the scale."""
    mine = y.local.numpy().astype(np.float64)
    n, r = ts.dist.world_size(), ts.dist.rank()
    i0 = r * len(mine) if out is ROWS else 0
    j0 = r * mine.shape[1] if out is COLUMNS else 0
    rng = np.random.default_rng(r + n)
    i, j = (rng.integers(0, extent, 200) for extent in mine.shape)
    want = np.einsum("ik,ki->i", X[i0 + i].astype(np.float64), W[:, j0 + j].astype(np.float64))
    return float(np.abs(mine[i, j] - want).max() / np.sqrt(X.shape[1]))


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    for name, usual in (("rows", 8192), ("inner", 8192), ("columns", 28672), ("rounds", 5)):
        flags.add_argument(f"--{name}", type=int, default=usual)
    flags.add_argument("--parts", nargs="*", default=[])
    a = flags.parse_args()
    rank, ranks = ts.dist.rank(), ts.dist.world_size()
    mesh = ts.dist.mesh([f"cuda:{r}" for r in range(ranks)], axes="tp")
    rng = np.random.default_rng(0)
    X, W = (ts.tensor(rng.standard_normal(s, np.float32), KIND)
            for s in ((a.rows, a.inner), (a.inner, a.columns)))
    found: dict[str, Any] = {}
    for name, (left, right, out) in CASES.items():
        x, w = ts.dist.distribute(X, left, mesh=mesh), ts.dist.distribute(W, right, mesh=mesh)
        ways = {"beside": function(out, None), "after": function(out, WHOLE_PRODUCT)}
        if name != "all_gather":
            ways |= {f"in {parts}": function(out, parts) for parts in a.parts}
        wrong = {way: error(f(x, w), X.numpy(), W.numpy(), out) for way, f in ways.items()}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(a.rounds):
            for way, f in ways.items():
                times[way].append(ms_of(f, x, w, mesh))
        ms = {way: float(np.median(t)) for way, t in times.items()}
        found[name] = {"ms": ms, "gain": ms["after"] / ms["beside"], "error": wrong,
                       "plan": ways["beside"].plan()}
        if rank == 0:
            print(name, found[name], flush=True)
    if rank == 0:
        record.write("tp_matmul", {"device": f"{ranks} x {device().name}", "extents": vars(a),
                                   "cases": found}, shown=False, ranks=ranks)


if __name__ == "__main__":
    main()
