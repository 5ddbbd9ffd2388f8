"""The figures of the fabric "cpu": what the simulated ranks of this machine exchange, and compute.

    python benchmarks/fabric.py

Prints what the record in tessera/planning/fabric.py holds: the rate of a copy and of
products, and step and bus bandwidth fitted to all_reduce, all_gather and reduce_scatter of 4 and 8
ranks.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import numpy as np

import tessera as ts
from tessera.mesh.collectives.cost import COSTS
from tessera.planning.fabric import fabric

SIZES = (1 << 12, 1 << 20, 1 << 23, 1 << 25)  # bytes
REPEATS = 3


def best_of(run: Callable[[], object]) -> float:
    """Seconds of the quickest of a few runs."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def exchange_us(op: str, ranks: int, size: int) -> float:
    """Microseconds of one collective of `size` bytes, as fabric.py counts them, on all ranks."""
    mesh = ts.dist.mesh(axes="x", shape=ranks)
    rows = 1 if op == "all_gather" else ranks
    options = {} if op == "all_reduce" else {"dim": 0}

    def program() -> float:
        x = ts.zeros((rows, size // (4 * ranks)))
        return best_of(lambda: (getattr(ts.dist, op)(x, axis="x", **options), ts.dist.barrier()))

    return 1e6 * max(ts.dist.simulate(program, mesh))


def main() -> None:
    a = np.ones(1 << 24, np.float32)
    b = np.empty_like(a)
    print(f"copy: {a.nbytes / best_of(lambda: np.copyto(b, a)) / 1e9:.1f} GB/s one way")
    for m in (np.ones((1536, 1536), np.float32), np.ones((1536, 1536), np.float64)):
        rate = 2e-12 * 1536**3 / best_of(functools.partial(np.matmul, m, m))
        print(f"products of {m.dtype}: {rate:.3f} TFLOP/s")
    rows, measured = [], []
    print(f"{'op':16}{'ranks':>6}{'bytes':>10}{'measured':>12}{'model':>12}  us")
    for op in ("all_reduce", "all_gather", "reduce_scatter"):
        for ranks in (4, 8):
            for size in SIZES:
                us = exchange_us(op, ranks, size)
                model = fabric("cpu").time(op, size, ts.dist.mesh(axes="x", shape=ranks)).us
                print(f"{op:16}{ranks:6}{size:10}{us:12.0f}{model:12.0f}")
                rows.append([COSTS[op].steps(ranks), COSTS[op].sent(ranks) * size * ranks / 1e3])
                measured.append(us)
    x, y = np.array(rows), np.array(measured)
    # The fit of least relative errors.
    step, per_kb = np.linalg.lstsq(x / y[:, None], np.ones(len(y)), rcond=None)[0]
    print(f"fit: {step:.0f} us a step, {1 / per_kb:.2f} GB/s for all ranks together")


if __name__ == "__main__":
    main()
